"""One platform as the core sees it: every hook a typed method that calls exactly that platform.

pluggy gives results of type Any, calls every plugin, and lets one failure hide the others. Those three costs are
paid here once: a :class:`PlatformHandle` calls one platform's hooks (wrappers of other plugins still run around
them), checks the capability first and the answer afterwards, and names platform and hook in every error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import pluggy

from kvcore.contract.buffers import check_span
from kvcore.contract.capabilities import CONTRACT_VERSION, Capability, PlatformInfo, Support
from kvcore.contract.facts import (
    AllocationLimits,
    AllocationRequest,
    Buffer,
    Detection,
    Device,
    DeviceFacts,
    MemoryStats,
    Reading,
    TensorView,
)
from kvcore.errors import CapabilityMissing, DeviceError, KvcoreError, PluginError

__all__ = ["PlatformHandle"]

T = TypeVar("T")

_FRAMEWORKS = {
    "numpy": Capability.TENSOR_NUMPY,
    "paddle": Capability.TENSOR_PADDLE,
    "torch": Capability.TENSOR_TORCH,
}


class PlatformHandle:
    """The hooks of one platform, typed and checked.

    Every method raises :class:`CapabilityMissing` if the platform declares that it cannot, lets a
    :class:`KvcoreError` of the plugin pass, and turns any other failure into a :class:`PluginError` that names the
    hook, with the cause chained.
    """

    def __init__(
        self, manager: pluggy.PluginManager, name: str, info: PlatformInfo, others: Collection[object], version: str
    ) -> None:
        self.name = name
        self.info = info
        self.version = version
        self._manager = manager
        self._others = tuple(others)
        self._callers: dict[str, Callable[..., list[Any]]] = {}

    def __repr__(self) -> str:
        return f"<PlatformHandle {self.name}>"

    def supports(self, capability: Capability) -> bool:
        """Whether the platform declares ``capability`` FULL."""
        return self.info.capabilities[capability].support is Support.FULL

    def detect(self) -> Detection:
        """Whether the platform's hardware can be used by this process."""
        return self._one("kvcore_detect", Detection)

    def devices(self) -> list[Device]:
        """The visible devices; their keys are unique."""
        self._need(Capability.DEVICES)
        devices = self._list("kvcore_devices", Device)
        keys = [device.key for device in devices]
        if len(set(keys)) != len(keys):
            raise self._broken("kvcore_devices", f"keys {keys}", "every device once, under a key of its own")
        return devices

    def device(self, wanted: str | int | None = None) -> Device:
        """The device with logical index or key ``wanted``; the only or first one if None.

        Raises :class:`DeviceError` if there is none.
        """
        devices = self.devices()
        for device in devices:
            if wanted is None or wanted == device.key or str(wanted) == str(device.index):
                return device
        raise DeviceError(
            "no such device" if devices else "no device is visible to this process",
            code="KV-DEV-002",
            where=f"platform {self.name}",
            got=wanted,
            expected=", ".join(f"{d.index} ({d.key})" for d in devices) or "a visible device",
        )

    def read_memory(self, device: Device) -> list[Reading]:
        """One reading a source. Readings with impossible figures are returned too: the sum refuses them by name."""
        self._need(Capability.READ_MEMORY)
        return self._list("kvcore_read_memory", Reading, device=device)

    def memory_stats(self, device: Device) -> MemoryStats:
        """The framework allocator's figures for this process."""
        self._need(Capability.MEMORY_STATS)
        return self._one("kvcore_memory_stats", MemoryStats, device=device)

    def reset_peak(self, device: Device) -> None:
        """Start a new peak in :meth:`memory_stats`."""
        self._need(Capability.RESET_PEAK)
        self._call("kvcore_reset_peak", device=device)

    def allocation_limits(self, device: Device) -> AllocationLimits:
        """What one allocation on the device can be."""
        self._need(Capability.ALLOCATION_LIMITS)
        limits = self._one("kvcore_allocation_limits", AllocationLimits, device=device)
        whole = (limits.granularity, limits.alignment)
        bounds = (limits.max_bytes, limits.max_elements)
        if not all(type(n) is int and n > 0 for n in (*whole, *(b for b in bounds if b is not None))):
            raise self._broken(
                "kvcore_allocation_limits", limits, "positive ints, or None for a bound that is not known"
            )
        return limits

    def allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """All of ``request.nbytes``, or :class:`~kvcore.errors.OutOfMemory`."""
        self._need(Capability.ALLOCATE)
        buffer = self._one("kvcore_allocate", Buffer, device=device, request=request)
        if type(buffer.nbytes) is not int or buffer.nbytes < request.nbytes:
            raise self._broken("kvcore_allocate", f"{buffer.nbytes} bytes", f"{request.nbytes} bytes, never fewer")
        return buffer

    def release(self, buffer: Buffer) -> int:
        """Bytes freed."""
        self._need(Capability.ALLOCATE)
        return self._one("kvcore_release", int, buffer=buffer)

    def write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        """Copy ``data`` to ``offset`` of the buffer."""
        self._need(Capability.RAW_ACCESS)
        check_span(buffer.name, buffer.nbytes, offset, len(data))
        self._call("kvcore_write", buffer=buffer, offset=offset, data=data)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset`` of the buffer."""
        self._need(Capability.RAW_ACCESS)
        check_span(buffer.name, buffer.nbytes, offset, nbytes)
        data = self._one("kvcore_read", bytes, buffer=buffer, offset=offset, nbytes=nbytes)
        if len(data) != nbytes:
            raise self._broken("kvcore_read", f"{len(data)} bytes", f"{nbytes} bytes")
        return data

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes from ``offset`` to ``value``."""
        self._need(Capability.RAW_ACCESS)
        check_span(buffer.name, buffer.nbytes, offset, nbytes)
        self._call("kvcore_fill", buffer=buffer, offset=offset, nbytes=nbytes, value=value)

    def tensor(self, buffer: Buffer, view: TensorView, framework: str) -> object:
        """A tensor of ``framework`` over the buffer's memory."""
        capability = _FRAMEWORKS.get(framework)
        if capability is None:
            raise CapabilityMissing(
                "no such framework", code="KV-CAP-002", got=framework, expected=", ".join(sorted(_FRAMEWORKS))
            )
        self._need(capability)
        return self._one("kvcore_tensor", object, buffer=buffer, view=view, framework=framework)

    def facts(self, device: Device) -> DeviceFacts:
        """All that the platform says of the device now: readings, allocation limits, versions."""
        from kvcore import __version__

        return DeviceFacts(
            device=device,
            readings=tuple(self.read_memory(device)),
            allocation=self.allocation_limits(device),
            versions=(("kvcore", __version__), ("contract", str(CONTRACT_VERSION)), (self.name, self.version)),
        )

    def _need(self, capability: Capability) -> None:
        declared = self.info.capabilities[capability]
        if declared.support is not Support.FULL:
            raise CapabilityMissing(
                f"platform {self.name} does not offer {capability.value}",
                where=f"platform {self.name}",
                got=f"{declared.support.value}: {declared.reason}",
                expected="full",
            )

    def _call(self, hook: str, **arguments: object) -> list[Any]:
        caller = self._callers.get(hook)
        if caller is None:
            caller = self._callers[hook] = self._manager.subset_hook_caller(hook, remove_plugins=self._others)
        try:
            return caller(**arguments)
        except KvcoreError:
            raise
        except Exception as error:
            raise PluginError(
                f"platform {self.name} failed in {hook}",
                code="KV-PLG-002",
                where=f"platform {self.name}, {hook}",
                got=f"{type(error).__name__}: {error}",
                hint="this is a fault of the plugin; the cause is chained (--debug shows it)",
            ) from error

    def _one(self, hook: str, kind: type[T], **arguments: object) -> T:
        answers = self._call(hook, **arguments)
        if len(answers) != 1:
            raise self._broken(hook, f"{len(answers)} answers", "one")
        answer = answers[0]
        # A bool is an int to isinstance, and a numpy integer is not one: both are refused as sizes.
        if not isinstance(answer, kind) or (kind is int and type(answer) is not int):
            raise self._broken(hook, f"{type(answer).__name__} {answer!r}"[:200], kind.__name__)
        return answer

    def _list(self, hook: str, kind: type[T], **arguments: object) -> list[T]:
        answer = self._one(hook, list, **arguments)
        for item in answer:
            if not isinstance(item, kind):
                raise self._broken(hook, f"a list with {type(item).__name__}", f"a list of {kind.__name__}")
        return answer

    def _broken(self, hook: str, got: object, expected: str) -> PluginError:
        return PluginError(
            f"platform {self.name} broke the contract in {hook}",
            code="KV-PLG-003",
            where=f"platform {self.name}, {hook}",
            got=got,
            expected=expected,
            hint="this is a fault of the plugin",
        )
