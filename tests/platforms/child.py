"""Plans and allocates in a process of its own, under the limits that its parent set. Prints one JSON object."""

from __future__ import annotations

import json
import resource
import sys

import kvcore
from kvcore.contract import CacheLayout, Group, Growth, Layer, Store
from kvcore.errors import KvcoreError, OutOfMemory
from kvcore.registry import default_registry

MIB = 1024**2


def layout(layers: int, block_kib: int) -> CacheLayout:
    """K and V in each of ``layers`` layers, ``block_kib`` KiB a block and tensor."""
    stores = tuple(Store(name, 1, block_kib * 1024 // 32, "bfloat16", 2) for name in ("k", "v"))
    group = Group("full", "full", Growth.TOKEN, tuple(Layer(i, stores) for i in range(layers)))
    return CacheLayout("child", 16, (group,))


def main() -> None:
    """``layers block_kib address_space_mib (0: none) blocks_more num_blocks (0: planned)``"""
    layers, block_kib, address_space, more, asked = map(int, sys.argv[1:6])
    device = default_registry().platform("cpu").device()
    held = layout(layers, block_kib)
    if address_space:
        # On top of what is mapped now: the interpreter and its libraries.
        with open("/proc/self/statm", encoding="ascii") as stream:
            mapped = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space * MIB,) * 2)
    answer: dict[str, object] = {}
    try:
        plan = kvcore.plan(held, device, utilization=1)
        blocks = (asked or plan.num_blocks) + more
        answer["planned"] = plan.num_blocks
        fixed = kvcore.plan(held, kv_cache_memory=held.bytes(blocks))
        with kvcore.allocate(fixed, device) as cache:
            kvcore.verify(cache)
            answer["allocated"] = cache.num_blocks
            answer["committed"] = cache.committed_bytes
    except OutOfMemory as error:
        answer["out_of_memory"] = error.code
    except KvcoreError as error:
        answer["error"] = [error.code, error.what]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
