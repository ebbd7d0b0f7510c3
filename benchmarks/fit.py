"""Blocks planned over blocks physically possible, under a memory limit, in random trials; never above 1.

Possible is what a process that does nothing but map and write can hold, found by bisection: each step is a process of
its own in the same limit, which the kernel may kill. As root on a host with cgroup v1 the limit is a control group,
else RLIMIT_AS.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TRIALS = int(os.environ.get("KVCORE_BENCHMARK_TRIALS", "100"))
V1 = Path("/sys/fs/cgroup/memory")
MIB = 1024**2
TARGET = 0.99


def child() -> None:
    """``child plan|raw address_space layers block_bytes blocks``: prints the blocks that were held."""
    how, address_space, layers, block_bytes, blocks = sys.argv[2], *map(int, sys.argv[3:7])
    import kvcore
    from kvcore.contract import CacheLayout, Group, Growth, Layer, Store
    from kvcore.registry import default_registry

    stores = tuple(Store(name, 1, block_bytes // 32, "bfloat16", 2) for name in ("k", "v"))
    group = Group("full", "full", Growth.TOKEN, tuple(Layer(i, stores) for i in range(layers)))
    layout = CacheLayout("fit", 16, (group,))
    device = default_registry().platform("cpu").device()
    if address_space:
        with open("/proc/self/statm", encoding="ascii") as stream:
            mapped = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space,) * 2)
    if how == "plan":
        plan = kvcore.plan(layout, device, utilization=1)
        with kvcore.allocate(plan) as cache:
            print(cache.num_blocks)
        return
    held = []
    for tensor in layout.tensors(blocks):
        memory = mmap.mmap(-1, -(-tensor.nbytes // 4096) * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, tensor.nbytes, 4096):
            memory[offset] = 0
        held.append(memory)
    print(blocks)


def run(group: Path | None, *arguments: object) -> int | None:
    """The child's answer, or None if it failed or was killed."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    ran = subprocess.run(
        [sys.executable, __file__, "child", *map(str, arguments)], capture_output=True, text=True, preexec_fn=enter
    )
    return int(ran.stdout) if ran.returncode == 0 else None


def largest(low: int, high: int, possible: Callable[[int], bool]) -> int:
    """The largest number in ``low .. high`` that is possible; ``low`` is, ``high`` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def main() -> None:
    """The least, the median and the largest ratio."""
    generator = random.Random(0)
    in_group = os.access(V1, os.W_OK) and (V1 / "memory.limit_in_bytes").exists()
    group = V1 / f"kvcore-fit-{os.getpid()}" if in_group else None
    if group is not None:
        group.mkdir()
    ratios, failures = [], 0
    try:
        for _ in range(TRIALS):
            limit = generator.randrange(512, 1536) * MIB
            # Blocks small beside the limit, or the ratio would be about whole blocks and not about memory.
            layers, block_bytes = generator.randrange(1, 40), generator.choice((1024, 2048, 4096))
            if group is not None:
                (group / "memory.limit_in_bytes").write_text(str(limit))
            fixed = (0 if group is not None else limit, layers, block_bytes)
            planned = run(group, "plan", *fixed, 0)
            if planned is None:
                failures += 1
                continue
            most = limit // (layers * 2 * block_bytes) + 2
            possible = largest(planned, most, lambda n, f=fixed: run(group, "raw", *f, n) is not None)  # type: ignore[misc]
            ratios.append((planned / possible, possible - planned))
    finally:
        if group is not None:
            group.rmdir()
    ratios.sort()
    where = "a control group" if group is not None else "RLIMIT_AS"
    print(f"{len(ratios)} trials in {where}, {failures} plans that could not be allocated (target 0)")
    least, median = ratios[0], ratios[len(ratios) // 2]
    print(f"planned / possible: least {least[0]:.4f} ({least[1]} blocks), median {median[0]:.4f}, target {TARGET}")


if __name__ == "__main__":
    child()
