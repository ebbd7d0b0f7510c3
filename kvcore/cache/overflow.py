"""A rehearsal of the overflow: kernels with narrow indexes over pools that are larger than these can reach.

The pools are address space alone, so that a machine without an accelerator and with little memory holds them. The
kernels are index arithmetic in numpy's integers, which wrap around as a device's do; a negative index is memory below
the tensor, which belongs to someone else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.cache.allocate import Cache, allocate_cache
from kvcore.cache.kernels import verify_kernels
from kvcore.contract import (
    AllocationLimits,
    CacheLayout,
    Device,
    DeviceFacts,
    Group,
    Growth,
    Layer,
    Limit,
    LimitKind,
    LimitUnit,
    Mapping,
    MemoryKind,
    Reading,
    Scope,
    Store,
    Stride,
)
from kvcore.contract.hookspecs import plugin_manager
from kvcore.errors import KernelUnsafe
from kvcore.handle import PlatformHandle
from kvcore.platforms.replay import ReplayBlockSizer
from kvcore.sizing.limits import bound_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HEADS", "INDEXES", "NumpyKernels", "Rehearsal", "rehearse"]

#: FastDeploy's geometry: blocks of 64 tokens, heads of 128 values, two bytes each.
BLOCK, WIDTH, ITEMSIZE = 64, 128, 2
#: KV heads on a rank.
HEADS = (1, 2, 4, 8)
#: Name of the index -> numpy's type, and how many elements it can tell apart.
INDEXES: dict[str, tuple[str, int]] = {
    "int32": ("int32", 1 << 31),
    "uint32": ("uint32", 1 << 32),
    "int64": ("int64", 1 << 63),
}
#: Blocks beyond the last one that an unsigned 32-bit index reaches.
BEYOND = 64


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One pool and one index: what was predicted, and the first block at which the kernels failed.

    ``predicted`` and ``first_failing`` are None if every block of the pool is within reach.
    """

    heads: int
    index: str
    stride: int
    num_blocks: int
    pool_bytes: int
    predicted: int | None
    first_failing: int | None
    found: str
    explanations: tuple[str, ...]


def rehearse(heads: int, index: str) -> Rehearsal:
    """Verify a pool of ``heads`` KV heads through kernels that index with ``index`` (a name in :data:`INDEXES`)."""
    layout = _layout(heads)
    dtype, reach = INDEXES[index]
    stride = heads * BLOCK * WIDTH
    num_blocks = (1 << 32) // stride + BEYOND
    limit = Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, reach, index, "demo", Stride.LAYER)
    safe = bound_of(limit, layout).max_blocks
    handle, device = _pool(layout.bytes(num_blocks))
    with allocate_cache(handle, device, layout, num_blocks) as cache:
        first, found, why = _first_failing(cache, dtype)
        pool_bytes = cache.nbytes
    predicted = safe if safe < num_blocks else None
    return Rehearsal(heads, index, stride, num_blocks, pool_bytes, predicted, first, found, why)


class NumpyKernels:
    """A write and a gather kernel over a cache of (blocks, heads, tokens, width), indexing in ``dtype``."""

    def __init__(self, cache: Cache, dtype: str) -> None:
        import numpy as np

        self._integers: Callable[[int], Any] = lambda value: np.array([value], dtype=dtype)
        self._flat: dict[str, NDArray[np.uint16]] = {
            spec.name: np.asarray(cache.tensor(spec.name)).reshape(-1) for spec in cache
        }
        self._shapes = {spec.name: spec.shape for spec in cache}
        self._elsewhere: dict[tuple[str, int], bytes] = {}

    def write(self, tensor: str, block: int, token: int, data: bytes) -> None:
        """Store a token's heads."""
        import numpy as np

        flat, row = self._flat[tensor], WIDTH * ITEMSIZE
        for head, start in enumerate(self._starts(tensor, block, token)):
            part = data[head * row : (head + 1) * row]
            if 0 <= start <= flat.size - WIDTH:
                flat[start : start + WIDTH] = np.frombuffer(part, dtype=flat.dtype)
            else:
                self._elsewhere[tensor, start] = part

    def gather(self, tensor: str, block: int, token: int, nbytes: int) -> bytes:
        """Fetch a token's heads."""
        flat = self._flat[tensor]
        parts = [
            flat[start : start + WIDTH].tobytes()
            if 0 <= start <= flat.size - WIDTH
            else self._elsewhere.get((tensor, start), bytes(WIDTH * ITEMSIZE))
            for start in self._starts(tensor, block, token)
        ]
        return b"".join(parts)[:nbytes]

    def close(self) -> None:
        """Let go of the tensors, so that the cache can be released."""
        self._flat.clear()

    def _starts(self, tensor: str, block: int, token: int) -> list[int]:
        """Where each head's row starts, computed as a kernel does: every product and sum in the index's own type."""
        _, heads, tokens, width = self._shapes[tensor]
        number = self._integers
        base = number(block) * number(heads * tokens * width)
        rows = [base + number(head * tokens * width) + number(token * width) for head in range(heads)]
        return [int(row[0]) for row in rows]


def _first_failing(cache: Cache, dtype: str) -> tuple[int | None, str, tuple[str, ...]]:
    kernels = NumpyKernels(cache, dtype)
    try:
        verify_kernels(cache, kernels.write, kernels.gather)
    except KernelUnsafe as error:
        return error.block, error.got or error.what, error.explanations
    finally:
        kernels.close()
    return None, "every block holds its own bytes", ()


def _layout(heads: int) -> CacheLayout:
    stores = tuple(Store(name, heads, WIDTH, "bfloat16", ITEMSIZE) for name in ("k", "v"))
    group = Group("full", "full", Growth.TOKEN, (Layer(0, stores),), block_size=BLOCK)
    return CacheLayout(f"{heads} KV heads", BLOCK, (group,))


def _pool(nbytes: int) -> tuple[PlatformHandle, Device]:
    """A replayed device with room for the pool, in address space alone."""
    device = Device("replay", 0, "demo", "Address space", MemoryKind.HOST, Mapping.SELF)
    reading = Reading("demo", Scope.DEVICE, total=nbytes, free=nbytes, own=0)
    plugin = ReplayBlockSizer([DeviceFacts(device, (reading,), AllocationLimits())], backing="address_space")
    manager = plugin_manager()
    manager.register(plugin, "replay")
    handle = PlatformHandle(manager, "replay", plugin.kvcore_platform(), (), "demo")
    return handle, device
