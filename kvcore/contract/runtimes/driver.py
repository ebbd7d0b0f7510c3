"""Memory through the CUDA driver API (package cuda-bindings): no allocator between the cache and the device.

CoreX offers the same API in a libcuda.so.1 of its own. Contexts are the devices' primary ones, which frameworks share;
one is retained while a buffer on its device is alive, and none is left current.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.contract.facts import MemoryStats, TensorView
from kvcore.contract.runtimes.interface import (
    Allocation,
    Runtime,
    RuntimeDevice,
    RuntimeUnavailable,
    import_framework,
    view_bytes,
)
from kvcore.contract.runtimes.sharing import CUDA, SharedBytes
from kvcore.errors import DeviceError, OutOfMemory
from kvcore.units import format_bytes

__all__ = ["DriverRuntime"]

OUT_OF_MEMORY = 2
NO_DEVICE = 100
INTEGRATED = 18  #: CU_DEVICE_ATTRIBUTE_INTEGRATED


class DriverRuntime(Runtime):
    """cuMemAlloc, cuMemsetD8, cuMemcpy and cuMemGetInfo."""

    name = "driver"

    def __init__(self) -> None:
        self._loaded: Any = None
        self._held: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        self._counting = threading.Lock()

    def installed(self) -> bool:
        """cuda-bindings is a part of the namespace package cuda."""
        return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None

    def imported(self) -> bool:
        """Whether the bindings are loaded; that says nothing of contexts."""
        return "cuda.bindings.driver" in sys.modules

    def start(self) -> None:
        """cuInit, which makes no context but fixes the devices that this process sees."""
        if self._loaded is not None:
            self.check_process()
            return
        try:
            module: Any = importlib.import_module("cuda.bindings.driver")
            status = int(module.cuInit(0)[0])
        except Exception as error:  # the bindings raise types of their own for a library or function that is missing
            raise RuntimeUnavailable(f"{type(error).__name__}: {error}") from error
        if status not in (0, NO_DEVICE):
            raise RuntimeUnavailable(f"cuInit failed: {_error_name(module, status)}")
        self._loaded = module
        self.mark_started()

    def devices(self) -> list[RuntimeDevice]:
        """Every ordinal with its UUID and PCI address; none of these calls makes a context."""
        self.start()
        status, count = self._loaded.cuDeviceGetCount()
        if int(status) == NO_DEVICE or (int(status) == 3 and int(self._loaded.cuInit(0)[0]) == NO_DEVICE):
            return []
        self._check("cuDeviceGetCount", status)
        return [self._device(index) for index in range(count)]

    def active(self, index: int) -> bool | None:
        """Whether the primary context of the device is alive in this process."""
        self.start()
        _, active = self._call("cuDevicePrimaryCtxGetState", self._handle(index))
        return bool(active)

    def memory(self, index: int) -> tuple[int | None, int | None]:
        """cuMemGetInfo, in the primary context."""
        with self._context(index):
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def stats(self, index: int) -> MemoryStats:
        """The buffers that were allocated here."""
        held = self._held.get(index, 0)
        return MemoryStats("driver", current=held, peak=self._peak.get(index, held), reserved=held)

    def reset_peak(self, index: int) -> None:
        """The peak starts again at what is held."""
        self._peak[index] = self._held.get(index, 0)

    def allocate(self, index: int, name: str, nbytes: int, itemsize: int) -> Allocation:
        """cuMemAlloc, then zeros."""
        allocation = _DriverAllocation(self, index, name, nbytes)
        with self._counting:
            held = self._held.get(index, 0) + nbytes
            self._held[index], self._peak[index] = held, max(held, self._peak.get(index, 0))
        return allocation

    def retain(self, index: int) -> None:
        """Keep the device's primary context alive."""
        self.start()
        self._call("cuDevicePrimaryCtxRetain", self._handle(index))

    def release(self, index: int, nbytes: int = 0) -> None:
        """Undo one :meth:`retain`, and count ``nbytes`` as given back."""
        self._call("cuDevicePrimaryCtxRelease", self._handle(index))
        with self._counting:
            self._held[index] = self._held.get(index, 0) - nbytes

    @contextmanager
    def _context(self, index: int) -> Iterator[None]:
        """The primary context of the device, current within."""
        self.start()
        handle = self._handle(index)
        context = self._call("cuDevicePrimaryCtxRetain", handle)
        try:
            self._call("cuCtxPushCurrent", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent")
        finally:
            self._call("cuDevicePrimaryCtxRelease", handle)

    def in_context(self, index: int, function: str, *arguments: object) -> Any:
        """One call in the device's primary context, finished when this returns."""
        with self._context(index):
            result = self._call(function, *arguments)
            self._call("cuCtxSynchronize")
        return result

    def _handle(self, index: int) -> Any:
        return self._call("cuDeviceGet", index)

    def _device(self, index: int) -> RuntimeDevice:
        handle = self._handle(index)
        name = self._call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(errors="replace")
        integrated = bool(self._call("cuDeviceGetAttribute", _attribute(self._loaded), handle))
        address = self._call("cuDeviceGetPCIBusId", 32, handle).split(b"\0")[0].decode(errors="replace")
        return RuntimeDevice(index, name, bytes(self._uuid(handle).bytes).hex(), normal_pci(address), integrated)

    def _uuid(self, handle: Any) -> Any:
        # The second version answers with a slice's own UUID; later bindings call it by the plain name.
        name = "cuDeviceGetUuid_v2" if hasattr(self._loaded, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return self._call(name, handle)

    def _call(self, function: str, *arguments: object) -> Any:
        status, *results = getattr(self._loaded, function)(*arguments)
        self._check(function, status)
        return results[0] if len(results) == 1 else results

    def _check(self, function: str, status: Any) -> None:
        number = int(status)
        if number == 0:
            return
        kind: type[DeviceError] = OutOfMemory if number == OUT_OF_MEMORY else DeviceError
        raise kind(
            "the driver refused a call",
            code="KV-OOM-001" if number == OUT_OF_MEMORY else "KV-DEV-028",
            where=function,
            got=_error_name(self._loaded, number),
            expected="success",
        )


class _DriverAllocation(Allocation):
    """One cuMemAlloc."""

    def __init__(self, runtime: DriverRuntime, index: int, name: str, nbytes: int) -> None:
        super().__init__(name, nbytes)
        self._runtime = runtime
        self._index = index
        runtime.retain(index)
        try:
            self._address = int(runtime.in_context(index, "cuMemAlloc", nbytes))
        except OutOfMemory as error:
            runtime.release(index)
            error.where, error.expected = name, f"{nbytes:,} bytes ({format_bytes(nbytes)})"
            raise
        except BaseException:
            runtime.release(index)
            raise
        try:
            self.fill(0, nbytes, 0)
        except BaseException:
            runtime.in_context(index, "cuMemFree", self._address)
            runtime.release(index)
            raise

    def _give_back(self) -> None:
        self._runtime.in_context(self._index, "cuMemFree", self._address)
        self._runtime.release(self._index, self.nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """cuMemcpyHtoD."""
        self.span(offset, len(data))
        if data:
            self._runtime.in_context(self._index, "cuMemcpyHtoD", self._address + offset, data, len(data))

    def read(self, offset: int, nbytes: int) -> bytes:
        """cuMemcpyDtoH."""
        self.span(offset, nbytes)
        target = ctypes.create_string_buffer(nbytes)
        if nbytes:
            self._runtime.in_context(
                self._index, "cuMemcpyDtoH", ctypes.addressof(target), self._address + offset, nbytes
            )
        return target.raw

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """cuMemsetD8."""
        self.span(offset, nbytes)
        if nbytes:
            self._runtime.in_context(self._index, "cuMemsetD8", self._address + offset, value, nbytes)

    def tensor(self, view: TensorView, framework: str) -> object:
        """torch reads the CUDA array interface, Paddle DLPack; all tensors are deleted before the buffer is released.

        A Paddle of a custom device takes no memory but its own: DLPack has no name for its devices.
        """
        nbytes = view_bytes(self, view)
        shared = self.keep(SharedBytes(self._address + view.offset, nbytes, (CUDA, self._index)))
        if framework == "torch":
            torch = import_framework("torch")
            if not torch.cuda.is_available():
                raise self.no_tensor(framework, "the driver, which this torch cannot use")
            return (
                torch.as_tensor(shared, device=f"cuda:{self._index}")
                .view(getattr(torch, view.dtype))
                .reshape(view.shape)
            )
        if framework == "paddle":
            paddle = import_framework("paddle")
            if not paddle.is_compiled_with_cuda():
                raise self.no_tensor(framework, "the driver, which this Paddle cannot use")
            return paddle.utils.dlpack.from_dlpack(shared).view(view.dtype).reshape(list(view.shape))
        raise self.no_tensor(framework, "the driver")


def normal_pci(address: str) -> str:
    """``"00000000:3B:00.0"`` or ``"0000:3b:00.0"`` as ``"0000:3b:00"``."""
    domain, bus, device = address.split(".")[0].split(":")
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}"


def _attribute(module: Any) -> Any:
    return module.CUdevice_attribute(INTEGRATED)


def _error_name(module: Any, number: int) -> str:
    try:
        return f"{module.CUresult(number).name} ({number})"
    except ValueError:
        return f"undocumented error ({number})"
