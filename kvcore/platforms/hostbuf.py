"""Host memory as buffers: anonymous mappings, committed in parallel before anyone gets them, or address space alone.

A mapping is only a promise until its pages are written, and beyond a control group's limit the kernel kills instead of
refusing. So room is checked before each part is committed, from readings and not by trying.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.contract.buffers import BufferMemory, check_span
from kvcore.contract.facts import TensorView
from kvcore.errors import BufferMisuse, CapabilityMissing, OutOfMemory
from kvcore.units import format_bytes

__all__ = ["HostBlock", "Room", "host_tensor"]

MADV_HUGEPAGE = 14
#: Linux 5.14: fault in writable pages without touching their contents.
MADV_POPULATE_WRITE = 23
MAP_NORESERVE = 0x4000
HUGE_PAGE = 2 * 1024**2
#: Committed between two looks at the readings, and by one thread at a time.
LARGEST_CHUNK = 32 * HUGE_PAGE

#: numpy has no bfloat16 and no fp8: their bits are shown as unsigned integers of the same size.
NUMPY_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "int8": "int8",
    "uint8": "uint8",
}


class HostBlock(BufferMemory):
    """One mapping of ``nbytes`` zeroed bytes; ``room`` is asked before each part of it is committed."""

    def __init__(self, name: str, nbytes: int, *, commit: bool, room: Room) -> None:
        self.name = name
        self.nbytes = nbytes
        if commit:
            room.check_mapping(name, nbytes)
        self._memory: mmap.mmap | None = _map(name, nbytes, reserve=commit)
        self.committed = 0
        if not commit:
            return
        try:
            _commit(name, self._memory, nbytes, room)
        except BaseException:
            self._memory.close()
            raise
        self.committed = nbytes

    def memory(self) -> mmap.mmap:
        """The mapping; raises :class:`BufferMisuse` after release."""
        if self._memory is None:
            raise BufferMisuse("a buffer used after its release", code="KV-BUF-002", where=self.name)
        return self._memory

    def release(self) -> int:
        """Unmap; returns the bytes freed. Refused while a tensor over the buffer is alive, and the second time."""
        if self._memory is None:
            raise BufferMisuse("a buffer released twice", code="KV-BUF-001", where=self.name)
        try:
            self._memory.close()
        except BufferError:
            raise BufferMisuse(
                "a buffer released while a tensor over it is alive",
                code="KV-BUF-004",
                where=self.name,
                expected="every tensor over it deleted first",
            ) from None
        self._memory = None
        return self.nbytes

    def write(self, offset: int, data: bytes) -> None:
        """Copy ``data`` to ``offset``."""
        self._span(offset, len(data))
        self.memory()[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` bytes from ``offset``."""
        self._span(offset, nbytes)
        return self.memory()[offset : offset + nbytes]

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes from ``offset`` to ``value``."""
        self._span(offset, nbytes)
        if nbytes:
            ctypes.memset(_address(self.memory()) + offset, value, nbytes)

    def tensor(self, view: TensorView, framework: str) -> object:
        """numpy over the mapping; paddle and torch over that array."""
        return host_tensor(self, view, framework)

    def _span(self, offset: int, nbytes: int) -> None:
        self.memory()
        check_span(self.name, self.nbytes, offset, nbytes)


def host_tensor(block: HostBlock, view: TensorView, framework: str) -> object:
    """A tensor over the block's memory, without a copy. The block cannot be released while it is alive."""
    import numpy as np

    itemsize = np.dtype(NUMPY_DTYPES[view.dtype]).itemsize
    count = 1
    for extent in view.shape:
        count *= extent
    if view.offset < 0 or view.offset + count * itemsize > block.nbytes:
        raise BufferMisuse(
            "a tensor outside the buffer",
            code="KV-BUF-003",
            where=block.name,
            got=f"shape {view.shape} of {view.dtype} at offset {view.offset}",
            expected=f"within {block.nbytes} bytes",
        )
    raw = np.frombuffer(block.memory(), dtype=np.uint8, count=count * itemsize, offset=view.offset)
    if framework == "numpy":
        return raw.view(NUMPY_DTYPES[view.dtype]).reshape(view.shape)
    if framework == "torch":
        torch = _framework("torch")
        return torch.from_numpy(raw).view(getattr(torch, view.dtype)).reshape(view.shape)
    if framework == "paddle":
        paddle = _framework("paddle")
        # to_tensor would copy; from_dlpack shares, and keeps the array alive (PaddlePaddle 3.x).
        return paddle.utils.dlpack.from_dlpack(raw).view(view.dtype).reshape(list(view.shape))
    raise CapabilityMissing("no such framework", code="KV-CAP-002", got=framework, expected="numpy, paddle or torch")


def _framework(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityMissing(
            f"{name} is not installed", code="KV-CAP-003", got=str(error), hint=f"pip install 'kvcore[{name}]'"
        ) from error


def _map(name: str, nbytes: int, *, reserve: bool) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserve else MAP_NORESERVE)
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemory(
            "the host refused a mapping",
            code="KV-OOM-001",
            where=name,
            got=str(error),
            expected=f"{nbytes:,} bytes ({format_bytes(nbytes)})",
        ) from error


class Room:
    """What the host can still give, in bytes: ``mappable`` for a new mapping, ``committable`` for pages of one.

    A limit on address space counts a mapping when it is made, so only before; memory itself is taken while pages are
    committed. Reading every source takes a fraction of a millisecond, and a cache has hundreds of buffers; but what
    was free a moment ago may be a neighbour's now, so a reading is trusted for a tenth of a second and half of its
    bytes.
    """

    AGE = 0.1

    def __init__(self, mappable: Callable[[], int | None], committable: Callable[[], int | None]) -> None:
        self._mappable = mappable
        self._committable = committable
        self._trusted = 0
        self._until = 0.0

    def check_mapping(self, name: str, nbytes: int) -> None:
        """Raises :class:`OutOfMemory` if no mapping of ``nbytes`` can be made and committed."""
        if nbytes > self._trusted or time.monotonic() > self._until:
            self._trust(name, nbytes, self._mappable())

    def check_commit(self, name: str, nbytes: int) -> None:
        """Raises :class:`OutOfMemory` if ``nbytes`` of a mapping cannot be committed; else they count as taken."""
        if nbytes > self._trusted or time.monotonic() > self._until:
            self._trust(name, nbytes, self._committable())
        self._trusted -= nbytes

    def _trust(self, name: str, nbytes: int, free: int | None) -> None:
        if free is not None and nbytes > free:
            raise OutOfMemory(
                "the host has no room for an allocation",
                code="KV-OOM-001",
                where=name,
                got=f"{free:,} bytes ({format_bytes(free)}) can be had",
                expected=f"{nbytes:,} bytes ({format_bytes(nbytes)})",
            )
        self._trusted, self._until = (nbytes if free is None else max(nbytes, free // 2)), time.monotonic() + self.AGE


def _commit(name: str, memory: mmap.mmap, nbytes: int, room: Room) -> None:
    """Back every page with memory, on all cores, looking at the readings before each round."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    base = _address(memory)
    libc.madvise(base, nbytes, MADV_HUGEPAGE)  # a wish: kernels without huge pages refuse it, and that is fine
    threads = _threads(nbytes)
    chunk = min(LARGEST_CHUNK, -(-nbytes // (threads * HUGE_PAGE)) * HUGE_PAGE)

    def populate(offset: int) -> None:
        size = min(chunk, nbytes - offset)
        if libc.madvise(base + offset, size, MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OutOfMemory(
                "the host could not commit a mapping", code="KV-OOM-003", where=name, got=os.strerror(code)
            )
        ctypes.memset(base + offset, 0, size)  # kernels before 5.14 have no populate

    offsets = range(0, nbytes, chunk)
    for start in range(0, len(offsets), threads):
        parts = offsets[start : start + threads]
        room.check_commit(name, min(chunk * len(parts), nbytes - parts[0]))
        _in_parallel(populate, parts)


def _in_parallel(work: Callable[[int], None], parts: Sequence[int]) -> None:
    """``work`` on each part, the first on this thread; the first error is raised when all have ended."""
    errors: list[BaseException] = []

    def guarded(part: int) -> None:
        try:
            work(part)
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(part,)) for part in parts[1:]]
    for thread in others:
        thread.start()
    guarded(parts[0])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _threads(nbytes: int) -> int:
    """One a core, but not more than there are huge pages; only one where address space or data is rationed.

    A thread's stack and its allocator's arena take up to 72 MiB of address space, which RLIMIT_AS counts, and the stack
    RLIMIT_DATA too.
    """
    rationed = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in rationed):
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), nbytes // HUGE_PAGE))


def _address(memory: mmap.mmap) -> int:
    """The mapping's address. The exporting object is gone when this returns, so the mapping can be closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
