"""Real memory under real limits: what is planned can be allocated, and what cannot be had fails cleanly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("child.py")
MIB = 1024**2
V1 = Path("/sys/fs/cgroup/memory")


def run(
    layers: int, block_kib: int, *, address_space: int = 0, more: int = 0, blocks: int = 0, group: Path | None = None
) -> dict[str, Any]:
    """Run the child, in control group ``group`` if given; a killed child is an answer too."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    ran = subprocess.run(
        [sys.executable, str(CHILD), *map(str, (layers, block_kib, address_space, more, blocks))],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=enter,  # the group must hold the child before it allocates
    )
    if ran.returncode:
        return {"died": ran.returncode, "stderr": ran.stderr[-2000:]}
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


@pytest.mark.parametrize(("layers", "block_kib", "limit"), [(1, 64, 64), (4, 32, 200), (24, 16, 333)])
def test_within_an_address_space_limit(layers: int, block_kib: int, limit: int) -> None:
    fits = run(layers, block_kib, address_space=limit)
    assert fits.get("allocated") == fits.get("planned"), fits
    assert fits["committed"] >= fits["planned"] * layers * 2 * block_kib * 1024
    assert fits["planned"] > 0
    # What the whole limit could hold, without an interpreter in it, is certainly too much.
    most = limit * MIB // (layers * 2 * block_kib * 1024) + 1
    over = run(layers, block_kib, address_space=limit, blocks=most)
    assert "out_of_memory" in over, over


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of 256 MiB, removed afterwards."""
    if not (V1 / "memory.limit_in_bytes").exists() or not os.access(V1, os.W_OK):
        pytest.skip("no cgroup v1 memory controller that this user may write to: run as root on such a host")
    path = V1 / f"kvcore-test-{os.getpid()}"
    path.mkdir()
    try:
        (path / "memory.limit_in_bytes").write_text(str(256 * MIB))
        yield path
    finally:
        path.rmdir()


def test_within_a_control_group(group: Path) -> None:
    fits = run(8, 16, group=group)
    assert fits.get("allocated") == fits.get("planned"), fits
    assert fits["planned"] * 8 * 2 * 16 * 1024 > 200 * MIB
    over = run(8, 16, group=group, blocks=256 * MIB // (8 * 2 * 16 * 1024) + 1)
    assert "out_of_memory" in over, over


FILL = """
import resource
from kvcore.contract import AllocationRequest
from kvcore.errors import OutOfMemory
from kvcore.registry import default_registry
MIB = 1024**2
platform = default_registry().platform("cpu")
device = platform.device()
with open("/proc/self/statm", encoding="ascii") as stream:
    held = int(stream.read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (held + 160 * MIB,) * 2)
buffers, size = [], 156 * MIB
while size >= MIB // 4:
    try:
        buffers.append(platform.allocate(device, AllocationRequest("t", size, 4096, size)))
    except OutOfMemory:
        size //= 2
print(sum(buffer.nbytes for buffer in buffers) // MIB)
"""


def test_a_data_limit_is_filled_to_the_last_and_then_refused() -> None:
    """Threads' stacks count against RLIMIT_DATA too: near the limit none can be started (Linux 4.7 and later)."""
    ran = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert 120 <= int(ran.stdout) <= 160
