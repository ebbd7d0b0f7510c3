"""The platform under test, as checks see it: its hooks as they are, without the core's own guards in between.

kvcore's :class:`~kvcore.handle.PlatformHandle` refuses a bad answer before anyone sees it. A check wants to see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvcore.conformance.check import CheckFailed, NoDevice, NotApplicable
from kvcore.conformance.setting import Setting
from kvcore.conformance.surroundings import Surroundings
from kvcore.contract.capabilities import Capability, PlatformInfo, Support
from kvcore.contract.facts import (
    AllocationLimits,
    AllocationRequest,
    Buffer,
    Detection,
    DetectionState,
    Device,
    MemoryStats,
    Reading,
    TensorView,
)
from kvcore.contract.hookspecs import plugin_manager
from kvcore.errors import KvcoreError, OutOfMemory

__all__ = ["Bench"]

T = TypeVar("T")


class Bench:
    """One platform's plugin in this process."""

    def __init__(self, setting: Setting, plugin: object, before: Surroundings) -> None:
        self.setting = setting
        self.before = before
        self.name = setting.platform
        self.plugin = plugin
        self.manager = plugin_manager()
        self.manager.register(plugin, self.name)
        self._held: list[Buffer] = []

    # The hooks, one call each.

    def call(self, hook: str, **arguments: object) -> Any:
        """What the platform alone answers to ``hook``; its errors pass."""
        answers = getattr(self.manager.hook, hook)(**arguments)
        if len(answers) != 1:
            raise CheckFailed(f"{hook}()", got=f"{len(answers)} answers", expected="one answer, and not None")
        return answers[0]

    def info(self) -> PlatformInfo:
        """The platform's declaration."""
        return self._kind("kvcore_platform", PlatformInfo)

    def detection(self) -> Detection:
        """What it finds on this machine."""
        return self._kind("kvcore_detect", Detection)

    def supports(self, capability: Capability) -> bool:
        """Whether it is declared FULL. What is not declared at all is CAP-001's finding."""
        declared = self.info().capabilities.get(capability)
        return declared is not None and declared.support is Support.FULL

    def devices(self) -> list[Device]:
        """At least one device; raises :class:`NoDevice` where the platform says that there is none."""
        if self.supports(Capability.DETECT):
            found = self.detection()
            if found.state is not DetectionState.AVAILABLE:
                raise NoDevice(f"{found.state.value}: {found.reason}")
        devices = self.call("kvcore_devices")
        if not isinstance(devices, list) or not devices or not all(isinstance(d, Device) for d in devices):
            raise CheckFailed("kvcore_devices()", got=devices, expected="a list of at least one Device")
        return devices

    def device(self) -> Device:
        """The first device."""
        return self.devices()[0]

    def two_devices(self) -> tuple[Device, Device]:
        """The first two; raises :class:`NotApplicable` where there is one."""
        devices = self.devices()
        if len(devices) < 2:
            raise NotApplicable(f"it takes two devices, and platform {self.name} has {len(devices)} here")
        return devices[0], devices[1]

    def readings(self, device: Device) -> list[Reading]:
        """What its sources say."""
        readings = self.call("kvcore_read_memory", device=device)
        if not isinstance(readings, list) or not all(isinstance(r, Reading) for r in readings):
            raise CheckFailed(
                "kvcore_read_memory(device)", got=readings, expected="a list of Reading", device=device.key
            )
        return readings

    def stats(self, device: Device) -> MemoryStats:
        """The allocator's figures."""
        return self._kind("kvcore_memory_stats", MemoryStats, device=device)

    def limits(self, device: Device) -> AllocationLimits:
        """What one allocation can be."""
        return self._kind("kvcore_allocation_limits", AllocationLimits, device=device)

    def allocate(self, nbytes: int, device: Device | None = None, name: str = "conformance") -> Buffer:
        """A buffer of ``nbytes`` bytes, which is given back when the check ends."""
        where = self.device() if device is None else device
        request = AllocationRequest(name, nbytes, self.limits(where).alignment, nbytes)
        buffer = self._kind("kvcore_allocate", Buffer, device=where, request=request)
        self._held.append(buffer)
        return buffer

    def release(self, buffer: Buffer) -> int:
        """Give it back."""
        freed = self._kind("kvcore_release", int, buffer=buffer)
        self._held = [held for held in self._held if held is not buffer]
        return freed

    def write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        """Copy into it."""
        self.perform("kvcore_write", buffer=buffer, offset=offset, data=data)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """Copy out of it."""
        return self._kind("kvcore_read", bytes, buffer=buffer, offset=offset, nbytes=nbytes)

    def fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set its bytes."""
        self.perform("kvcore_fill", buffer=buffer, offset=offset, nbytes=nbytes, value=value)

    def tensor(self, buffer: Buffer, view: TensorView, framework: str) -> Any:
        """A tensor over it."""
        return self.call("kvcore_tensor", buffer=buffer, view=view, framework=framework)

    def perform(self, hook: str, **arguments: object) -> None:
        """Call a hook that answers nothing."""
        getattr(self.manager.hook, hook)(**arguments)

    # What checks measure with.

    def free(self, device: Device) -> int:
        """What the tightest source says is free: what a plan goes by."""
        figures = [reading.free for reading in self.readings(device) if reading.free is not None]
        if not figures:
            raise CheckFailed(
                "kvcore_read_memory(device)", got="no reading with free", expected="one", device=device.key
            )
        return min(figures)

    def chunk(self, device: Device) -> int:
        """A size that is large beside noise and granules, and small beside the device."""
        granule = self.limits(device).granularity
        wanted = min(self.setting.largest_bytes, self.free(device) // 8)
        return max(4 * granule, wanted // granule * granule)

    def filled(self, device: Device) -> list[Buffer]:
        """Buffers until the device refuses, in halving sizes; a sixty-fourth of what is free may stay."""
        granule = self.limits(device).granularity
        free = self.free(device)
        size, least = max(granule, free // 4), max(granule, free // 64)
        held: list[Buffer] = []
        while size >= least:
            try:
                # A platform that never refuses is found out by the sum, and must not fill the machine meanwhile.
                if sum(buffer.nbytes for buffer in held) > 2 * free:
                    return held
                held.append(self.allocate(size // granule * granule, device))
            except OutOfMemory:
                size //= 2
        return held

    # What checks say.

    def expect(
        self,
        holds: bool,
        call: str,
        *,
        got: object,
        expected: object,
        unit: str | None = None,
        device: Device | None = None,
    ) -> None:
        """Fail the check unless ``holds``."""
        if not holds:
            raise CheckFailed(
                call, got=got, expected=expected, unit=unit, device=None if device is None else device.key
            )

    def refuses(self, call: str, action: Callable[[], object], *errors: type[KvcoreError]) -> None:
        """Fail the check unless ``action`` raises one of ``errors``."""
        names = " or ".join(error.__name__ for error in errors)
        try:
            answer = action()
        except errors:
            return
        except Exception as error:
            raise CheckFailed(call, got=f"{type(error).__name__}: {error}", expected=names) from error
        raise CheckFailed(call, got=f"{answer!r}"[:200], expected=names)

    def tidy(self) -> bool:
        """Give back what a check left; False if that failed, and this process had better end."""
        held, self._held = self._held, []
        for buffer in reversed(held):
            try:
                self.perform("kvcore_release", buffer=buffer)
            except Exception:  # noqa: BLE001 - release has checks of its own; here it only ends the process
                return False
        return True

    def _kind(self, hook: str, kind: type[T], **arguments: object) -> T:
        answer = self.call(hook, **arguments)
        if not isinstance(answer, kind) or (kind is int and type(answer) is not int):
            raise CheckFailed(f"{hook}()", got=f"{type(answer).__name__} {answer!r}"[:200], expected=kind.__name__)
        return answer
