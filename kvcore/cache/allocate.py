"""Allocate what was planned: every tensor of the layout, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import AllocationRequest, Buffer, Device, TensorView
from kvcore.contract.layout import CacheLayout, TensorSpec
from kvcore.errors import BufferMisuse, KvcoreError, OutOfMemory, VerificationFailed
from kvcore.handle import PlatformHandle

__all__ = ["Cache", "Progress", "Released", "allocate_cache"]

#: Called after each tensor with the bytes allocated so far and the bytes in all.
Progress = Callable[[int, int], None]
#: Called after a release, with the cache and the bytes freed.
Released = Callable[["Cache", int], None]


class Cache:
    """An allocated plan: one buffer a tensor, in the layout's order. Also a context manager that releases it."""

    def __init__(
        self,
        platform: PlatformHandle,
        device: Device,
        layout: CacheLayout,
        num_blocks: int,
        buffers: list[Buffer],
        released: Released | None = None,
    ) -> None:
        self.platform = platform
        self.device = device
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensors = {spec.name: spec for spec in layout.tensors(num_blocks)}
        self._buffers = dict(zip(self.tensors, buffers, strict=True))
        self._released = False
        self._on_release = released

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._released:
            self.release()

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def committed_bytes(self) -> int:
        """Bytes of them that are backed by real memory; fewer only where the platform says so."""
        return sum(buffer.committed_bytes for buffer in self._buffers.values())

    def tensor(self, name: str, framework: str = "numpy") -> object:
        """Tensor ``name`` of shape (blocks, heads, block_size, width) in ``framework``, sharing the buffer's memory.

        numpy has no bfloat16 and no fp8: their bits come as uint16 and uint8. Delete tensors before
        :meth:`release`. Raises :class:`CapabilityMissing` for a framework that is not there.
        """
        spec = self._spec(name)
        view = TensorView(shape=spec.shape, dtype=spec.dtype)
        return self.platform.tensor(self._buffers[name], view, framework)

    def write_block(self, name: str, block: int, data: bytes, offset: int = 0) -> None:
        """Write ``data`` into block ``block`` of tensor ``name``, from byte ``offset`` of the block."""
        start = self._start(name, block, offset, len(data))
        self.platform.write(self._buffers[name], start, data)

    def read_block(self, name: str, block: int, nbytes: int | None = None, offset: int = 0) -> bytes:
        """``nbytes`` bytes (the rest, if None) of block ``block`` of tensor ``name``, from ``offset``."""
        size = self._spec(name).block_bytes - offset if nbytes is None else nbytes
        start = self._start(name, block, offset, size)
        return self.platform.read(self._buffers[name], start, size)

    def release(self) -> int:
        """Give everything back, last allocated first; returns the bytes freed.

        Raises :class:`BufferMisuse` the second time, and :class:`VerificationFailed` if the platform freed other
        than it gave.
        """
        if self._released:
            raise BufferMisuse("a cache released twice", code="KV-BUF-001", where=self.layout.model)
        held = self.nbytes
        freed = 0
        for name in reversed(list(self._buffers)):
            # A buffer that cannot be released stays in the cache, so that release can be tried again.
            freed += self.platform.release(self._buffers[name])
            del self._buffers[name]
        self._released = True
        if freed != held:
            raise VerificationFailed(
                "release freed other than was allocated",
                code="KV-VER-003",
                where=f"{self.platform.name} device {self.device.key}",
                got=f"{freed:,} bytes",
                expected=f"{held:,} bytes",
            )
        if self._on_release is not None:
            self._on_release(self, freed)
        return freed

    def _spec(self, name: str) -> TensorSpec:
        spec = self.tensors.get(name)
        if spec is None or name not in self._buffers:
            raise BufferMisuse(
                "the cache has no such tensor" if spec is None else "a cache used after its release",
                code="KV-BUF-005" if spec is None else "KV-BUF-002",
                got=name,
                expected=f"{next(iter(self.tensors))} and {len(self.tensors) - 1} more",
            )
        return spec

    def _start(self, name: str, block: int, offset: int, nbytes: int) -> int:
        spec = self._spec(name)
        if not 0 <= block < spec.shape[0] or offset < 0 or nbytes < 0 or offset + nbytes > spec.block_bytes:
            raise BufferMisuse(
                "an access outside the cache",
                code="KV-BUF-003",
                where=name,
                got=f"block {block}, {nbytes} bytes at offset {offset}",
                expected=f"blocks 0 to {spec.shape[0] - 1} of {spec.block_bytes} bytes",
            )
        return block * spec.block_bytes + offset


def allocate_cache(
    platform: PlatformHandle,
    device: Device,
    layout: CacheLayout,
    num_blocks: int,
    *,
    progress: Progress | None = None,
    released: Released | None = None,
) -> Cache:
    """``num_blocks`` blocks of ``layout`` on ``device``, zeroed and committed; all or nothing.

    Whatever fails, what was allocated before it is released in reverse order. Raises
    :class:`~kvcore.errors.OutOfMemory` if there is no room, and :class:`VerificationFailed` if the platform gave
    other than was planned.
    """
    limits = platform.allocation_limits(device)
    total = layout.bytes(num_blocks)
    buffers: list[Buffer] = []
    done = 0
    try:
        for spec in layout.tensors(num_blocks):
            request = AllocationRequest(spec.name, spec.nbytes, limits.alignment, spec.elements)
            buffers.append(platform.allocate(device, request))
            done += buffers[-1].nbytes
            if progress is not None:
                progress(done, total)
        _check_outcome(platform, device, layout, num_blocks, buffers)
    except BaseException as error:
        _roll_back(platform, buffers, error)
        if isinstance(error, OutOfMemory):
            error.obtained_bytes = done
        raise
    return Cache(platform, device, layout, num_blocks, buffers, released)


def _roll_back(platform: PlatformHandle, buffers: list[Buffer], cause: BaseException) -> None:
    """Release what was allocated, last first; one that cannot be released does not keep the others."""
    kept = []
    for buffer in reversed(buffers):
        try:
            platform.release(buffer)
        except KvcoreError as error:
            kept.append(f"{buffer.name}: {error.what}")
    if kept:
        raise VerificationFailed(
            "an allocation failed, and not everything could be given back",
            code="KV-VER-005",
            where=platform.name,
            got="; ".join(kept),
            expected="nothing left allocated",
        ) from cause


def _check_outcome(
    platform: PlatformHandle, device: Device, layout: CacheLayout, num_blocks: int, buffers: list[Buffer]
) -> None:
    """What was allocated is what was planned, and is really there."""
    actual, planned = sum(buffer.nbytes for buffer in buffers), layout.bytes(num_blocks)
    if actual != planned:
        raise VerificationFailed(
            "the device took other than was planned",
            code="KV-VER-002",
            where=f"{platform.name} device {device.key}",
            got=f"{actual:,} bytes",
            expected=f"{planned:,} bytes, each tensor rounded up to {layout.alignment}",
        )
    committed = sum(buffer.committed_bytes for buffer in buffers)
    if platform.supports(Capability.COMMIT) and committed != actual:
        raise VerificationFailed(
            "the platform declares that allocations are committed, and they are not",
            code="KV-VER-004",
            where=f"{platform.name} device {device.key}",
            got=f"{committed:,} bytes committed",
            expected=f"{actual:,} bytes",
        )
