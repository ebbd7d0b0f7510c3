"""Memory through MetaX's own runtime, libmcruntime.so, by ctypes: no framework between the cache and the device.

The API is CUDA's runtime API under names of its own (mcMalloc, mcMemcpy, mcMemset, mcSetDevice...), with CUDA's numbers
for the errors and copies that are used here: seen in public sources that call it, such as FlagCX's adaptor for MACA and
tilelang-metax's maca_driver.py, and in bindings of mcr/maca.h.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.contract import MemoryStats, TensorView
from kvcore.contract.runtimes.driver import normal_pci
from kvcore.contract.runtimes.interface import Allocation, Runtime, RuntimeDevice, RuntimeUnavailable
from kvcore.errors import DeviceError, OutOfMemory
from kvcore.units import format_bytes
from kvcore_metax.mxsml import runtime_is_loaded

__all__ = ["LIBRARY", "MacaRuntime"]

LIBRARY = "libmcruntime.so"
OUT_OF_MEMORY, NO_DEVICE = 2, 100
TO_DEVICE, TO_HOST = 1, 2


def _found() -> str | None:
    """Where the library is: on LD_LIBRARY_PATH, as MACA's installation asks for, or in MACA's own folder.

    The loader's cache is not asked, because that starts a process, and a platform says what it can do at each start.
    """
    search = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    home = os.environ.get("MACA_PATH") or "/opt/maca"
    paths = (os.path.join(folder, LIBRARY) for folder in (*search, os.path.join(home, "lib")))
    return next((path for path in paths if os.path.isfile(path)), None)


class MacaRuntime(Runtime):
    """Named ``driver`` as other vendors' lowest way to memory is, so that KVCORE_RUNTIME means the same everywhere."""

    name = "driver"

    def __init__(self) -> None:
        self._library: Any = None
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._peak: dict[int, int] = {}

    def installed(self) -> bool:
        """Whether the library is here; it is not loaded."""
        return _found() is not None

    def imported(self) -> bool:
        """Whether a MACA runtime is mapped into this process, by whomever."""
        return runtime_is_loaded()

    def start(self) -> None:
        """Load the library; it makes a context when memory is first touched, and no context survives a fork."""
        self.check_process()
        with self._lock:
            if self._library is not None:
                return
            path = _found()
            if path is None:
                raise RuntimeUnavailable(f"no {LIBRARY} on LD_LIBRARY_PATH, in MACA_PATH/lib or in /opt/maca/lib")
            try:
                self._library = ctypes.CDLL(path)
            except OSError as error:
                raise RuntimeUnavailable(str(error)) from error
            self.mark_started()

    def devices(self) -> list[RuntimeDevice]:
        """Every ordinal with its PCI address."""
        self.start()
        count = ctypes.c_int()
        number = self._function("mcGetDeviceCount")(ctypes.byref(count))
        if number == NO_DEVICE:
            return []
        self._check("mcGetDeviceCount", number)
        return [RuntimeDevice(index, f"MACA {index}", pci=self._pci(index)) for index in range(count.value)]

    def active(self, index: int) -> bool:
        """Whether this process has touched the device here; that another part of it has, nobody says."""
        return index in self._held and self._process == os.getpid()  # a forked child has no context

    def memory(self, index: int) -> tuple[int, int]:
        """mcMemGetInfo: bytes, where the management library counts in KiB."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.on(index, "mcMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def stats(self, index: int) -> MemoryStats:
        """The buffers that were allocated here."""
        with self._lock:
            held = self._held.get(index, 0)
            return MemoryStats("driver", current=held, peak=self._peak.get(index, held), reserved=held)

    def reset_peak(self, index: int) -> None:
        """The peak starts again at what is held."""
        with self._lock:
            self._peak[index] = self._held.get(index, 0)

    def allocate(self, index: int, name: str, nbytes: int, itemsize: int) -> Allocation:
        """mcMalloc, then zeros."""
        allocation = _MacaAllocation(self, index, name, nbytes)
        self.count(index, nbytes)
        return allocation

    def count(self, index: int, nbytes: int) -> None:
        """``nbytes`` more are held on a device, or fewer."""
        with self._lock:
            held = self._held[index] = self._held.get(index, 0) + nbytes
            self._peak[index] = max(held, self._peak.get(index, 0))

    def on(self, index: int, name: str, *arguments: object) -> None:
        """One call on a device, finished when this returns."""
        self.start()
        with self._current(index):
            self._check(name, self._function(name)(*arguments))
            self._check("mcDeviceSynchronize", self._function("mcDeviceSynchronize")())

    @contextmanager
    def _current(self, index: int) -> Iterator[None]:
        """The device is this thread's current one within, and the one before is again afterwards."""
        before = ctypes.c_int()
        self._check("mcGetDevice", self._function("mcGetDevice")(ctypes.byref(before)))
        self._check("mcSetDevice", self._function("mcSetDevice")(ctypes.c_int(index)))
        try:
            yield
        finally:
            self._check("mcSetDevice", self._function("mcSetDevice")(before))

    def _pci(self, index: int) -> str:
        text = ctypes.create_string_buffer(64)
        number = self._function("mcDeviceGetPCIBusId")(text, ctypes.c_int(len(text)), ctypes.c_int(index))
        self._check("mcDeviceGetPCIBusId", number)
        return normal_pci(text.value.decode(errors="replace"))

    def _function(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] | None = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(
                "the runtime lacks a function", code="KV-DEV-028", where=LIBRARY, got=f"no {name}", expected=name
            )
        return function

    def _check(self, name: str, number: int) -> None:
        if number == 0:
            return
        kind: type[DeviceError] = OutOfMemory if number == OUT_OF_MEMORY else DeviceError
        raise kind(
            "the runtime refused a call",
            code="KV-OOM-001" if number == OUT_OF_MEMORY else "KV-DEV-028",
            where=name,
            got=f"error {number}",
            expected="success",
        )


class _MacaAllocation(Allocation):
    """One mcMalloc."""

    def __init__(self, runtime: MacaRuntime, index: int, name: str, nbytes: int) -> None:
        super().__init__(name, nbytes)
        self._runtime = runtime
        self._index = index
        address = ctypes.c_void_p()
        try:
            runtime.on(index, "mcMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        except OutOfMemory as error:
            error.where, error.expected = name, f"{nbytes:,} bytes ({format_bytes(nbytes)})"
            raise
        self._address = int(address.value or 0)
        try:
            self.fill(0, nbytes, 0)
        except BaseException:
            runtime.on(index, "mcFree", address)
            raise

    def _give_back(self) -> None:
        self._runtime.on(self._index, "mcFree", ctypes.c_void_p(self._address))
        self._runtime.count(self._index, -self.nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """mcMemcpy to the device."""
        self.span(offset, len(data))
        if data:
            self._copy(self._at(offset), ctypes.c_char_p(data), len(data), TO_DEVICE)

    def read(self, offset: int, nbytes: int) -> bytes:
        """mcMemcpy to the host."""
        self.span(offset, nbytes)
        target = ctypes.create_string_buffer(nbytes)
        if nbytes:
            self._copy(target, self._at(offset), nbytes, TO_HOST)
        return target.raw

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """mcMemset."""
        self.span(offset, nbytes)
        if nbytes:
            self._runtime.on(self._index, "mcMemset", self._at(offset), ctypes.c_int(value), ctypes.c_size_t(nbytes))

    def tensor(self, view: TensorView, framework: str) -> object:
        """A framework for MetaX brings memory of its own."""
        raise self.no_tensor(framework, "MetaX's runtime")

    def _at(self, offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + offset)

    def _copy(self, target: object, source: object, nbytes: int, way: int) -> None:
        self._runtime.on(self._index, "mcMemcpy", target, source, ctypes.c_size_t(nbytes), ctypes.c_int(way))
