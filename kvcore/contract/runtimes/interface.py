"""The small interface behind which every runtime allocates: its devices, their memory, allocations."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcore.contract.buffers import BufferMemory, check_span
from kvcore.contract.facts import MemoryStats, TensorView
from kvcore.errors import BufferMisuse, CapabilityMissing, DeviceError

__all__ = [
    "ITEM_SIZES",
    "Allocation",
    "Runtime",
    "RuntimeDevice",
    "RuntimeUnavailable",
    "import_framework",
    "view_bytes",
]

T = TypeVar("T")

#: Bytes of one element of each dtype that a view can have.
ITEM_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class RuntimeUnavailable(Exception):
    """A runtime cannot be used in this process; the text says why."""


@dataclass(frozen=True, slots=True)
class RuntimeDevice:
    """A device under its ordinal. ``uuid`` is 32 hexadecimal digits, without the vendor's prefix."""

    index: int
    name: str
    uuid: str | None = None
    pci: str | None = None
    integrated: bool | None = None


class Allocation(BufferMemory):
    """Device memory of one buffer, zeroed and committed."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._released = False
        self._views: list[weakref.ref[Any]] = []
        self._process = os.getpid()
        self._giving_back = threading.Lock()

    def keep(self, tensor: T) -> T:
        """Remember a tensor over the memory, so that it is not given back while the tensor is alive."""
        self._views = [view for view in self._views if view() is not None]
        self._views.append(weakref.ref(tensor))
        return tensor

    def release(self) -> int:
        """Give the memory back; returns the bytes freed. Refused while a tensor over it is alive."""
        self._check_process()
        with self._giving_back:
            if self._released:
                raise BufferMisuse("a buffer released twice", code="KV-BUF-001", where=self.name)
            if any(view() is not None for view in self._views):
                raise BufferMisuse(
                    "a buffer released while a tensor over it is alive",
                    code="KV-BUF-004",
                    where=self.name,
                    expected="every tensor over it deleted first",
                )
            self._give_back()
            self._released = True
        return self.nbytes

    def _check_process(self) -> None:
        """A forked child has the handle, but not the memory: a driver's context does not survive a fork."""
        if self._process != os.getpid():
            raise forked(self.name, self._process)

    def span(self, offset: int, nbytes: int) -> None:
        """Raises :class:`BufferMisuse` after release and outside the buffer, :class:`DeviceError` after a fork."""
        self._check_process()
        if self._released:
            raise BufferMisuse("a buffer used after its release", code="KV-BUF-002", where=self.name)
        check_span(self.name, self.nbytes, offset, nbytes)

    @abstractmethod
    def _give_back(self) -> None:
        """Release the memory; on an error it is still held."""

    def no_tensor(self, framework: str, runtime: str) -> CapabilityMissing:
        """The error for a framework that cannot see this runtime's memory."""
        return CapabilityMissing(
            "a tensor of a framework that cannot see this memory",
            code="KV-CAP-011",
            where=self.name,
            got=f"a {framework} tensor over memory of {runtime}",
            hint=f"allocate with KVCORE_RUNTIME={framework}",
        )


class Runtime(ABC):
    """One way to a device's memory. Nothing is imported or started before the first call that needs it.

    Threads may share it. A process that was forked after it was started may not: every call is then refused.
    """

    #: The name by which it is chosen.
    name: str
    #: Elements that one tensor may have, with the reason, where the runtime's kernels bound them.
    max_elements: int | None = None
    limit_reason: str | None = None

    _process: int | None = None

    def mark_started(self) -> None:
        """It was started by this process."""
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raises :class:`DeviceError` in a child that was forked after the runtime was started."""
        if self._process not in (None, os.getpid()):
            raise forked(self.name, self._process)

    @abstractmethod
    def installed(self) -> bool:
        """Whether its packages are here; imports none of them."""

    @abstractmethod
    def imported(self) -> bool:
        """Whether this process already uses it."""

    @abstractmethod
    def start(self) -> None:
        """Make it usable, without a context on any device. Raises :class:`RuntimeUnavailable`."""

    @abstractmethod
    def devices(self) -> list[RuntimeDevice] | None:
        """Its devices by ordinal, or None if it does not name their identities."""

    @abstractmethod
    def memory(self, index: int) -> tuple[int | None, int | None]:
        """Free and total bytes of a device; may create a context."""

    @abstractmethod
    def stats(self, index: int) -> MemoryStats:
        """What this process has allocated through it."""

    @abstractmethod
    def reset_peak(self, index: int) -> None:
        """Start a new peak."""

    @abstractmethod
    def allocate(self, index: int, name: str, nbytes: int, itemsize: int) -> Allocation:
        """``nbytes`` zeroed bytes, for elements of ``itemsize``; raises :class:`~kvcore.errors.OutOfMemory`."""

    @property
    def shares(self) -> bool:
        """Whether other frameworks can see its memory, and it theirs, without a copy."""
        return True

    def active(self, index: int) -> bool | None:
        """Whether this process has a context on the device; None if the runtime does not say."""
        return None


def forked(where: str, process: int | None) -> DeviceError:
    """The error for a runtime or a buffer of the process that this one was forked from."""
    return DeviceError(
        "a device's runtime does not survive a fork",
        code="KV-DEV-030",
        where=where,
        got=f"process {os.getpid()}, forked after process {process} had started it",
        expected="the process that started it",
        hint="start workers with spawn, or before the devices are listed",
    )


def import_framework(name: str) -> Any:
    """The package of a tensor's framework, imported with its warnings set aside; raises :class:`CapabilityMissing`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # an import of native code fails in many ways
        raise CapabilityMissing(
            "the framework cannot be imported",
            code="KV-CAP-003",
            where=name,
            got=f"{type(error).__name__}: {error}",
            expected=f"an installed {name}",
        ) from error


def view_bytes(allocation: Allocation, view: TensorView) -> int:
    """Bytes that ``view`` spans; raises :class:`BufferMisuse` if they are not all in the allocation."""
    count = ITEM_SIZES[view.dtype]
    for extent in view.shape:
        count *= extent
    allocation.span(view.offset, count)
    return count
