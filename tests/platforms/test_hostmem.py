"""What the host says, read from trees like those that kernels show."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvcore.contract import Reading, Scope, hostmem
from kvcore.contract.validate import reading_faults

MIB = 1024**2
GIB = 1024**3

MEMINFO = (
    "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   40960000 kB\nHugePages_Total:       3\n"
)
MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = "33 25 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:15 - cgroup cgroup rw,memory\n"
#: In a container the mount shows the container's own part of the hierarchy as its root.
MOUNT_V1_PART = "33 25 0:29 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, levels: Mapping[str, tuple[str, str, str]], path: str = "/", high: str = "max") -> Path:
    """A v2 hierarchy: folder -> (memory.max, memory.current, inactive_file)."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": MOUNT_V2}
    for folder, (limit, usage, inactive) in levels.items():
        base = f"sys/fs/cgroup/{folder}".rstrip("/")
        files |= {
            f"{base}/memory.max": limit,
            f"{base}/memory.high": high,
            f"{base}/memory.current": usage,
            f"{base}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
        }
    return tree(root, files)


def figures(reading: Reading) -> tuple[int | None, int | None]:
    return reading.total, reading.free


def test_meminfo_counts_kib_and_takes_what_is_available(tmp_path: Path) -> None:
    """`kB` is KiB; free is MemAvailable, since a page cache is not use (B13)."""
    reading = hostmem.read_meminfo(tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/statm": "900 300 100 1 0 5 0"}))
    assert figures(reading) == (65_536_000 * 1024, 40_960_000 * 1024)
    assert reading.own == 200 * os.sysconf("SC_PAGE_SIZE")


def test_an_old_kernel_does_not_say_what_is_available(tmp_path: Path) -> None:
    reading = hostmem.read_meminfo(tree(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\n"}))
    assert figures(reading) == (1000 * 1024, None)
    assert reading.own is None


@pytest.mark.parametrize("text", [None, "", "MemTotal: lots kB\n", "garbage"])
def test_a_meminfo_that_cannot_be_read_is_skipped_and_never_zero(tmp_path: Path, text: str | None) -> None:
    reading = hostmem.read_meminfo(tree(tmp_path, {} if text is None else {"proc/meminfo": text}))
    assert reading.skipped is not None
    assert figures(reading) == (None, None)


def test_cgroup_v2(tmp_path: Path) -> None:
    (reading,) = hostmem.read_cgroups(v2(tmp_path, {"": (str(8 * GIB), str(3 * GIB), str(GIB))}))
    assert figures(reading) == (8 * GIB, 6 * GIB)
    assert reading.scope is Scope.CONTAINER


def test_cgroup_v2_high_throttles_before_max_kills(tmp_path: Path) -> None:
    (reading,) = hostmem.read_cgroups(v2(tmp_path, {"": (str(8 * GIB), "0", "0")}, high=str(6 * GIB)))
    assert reading.total == 6 * GIB


def test_no_limit_is_no_reading(tmp_path: Path) -> None:
    assert hostmem.read_cgroups(v2(tmp_path, {"": ("max", str(GIB), "0")})) == []
    none_v1 = {
        "proc/self/cgroup": "4:memory:/\n",
        "proc/self/mountinfo": MOUNT_V1,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    assert hostmem.read_cgroups(tree(tmp_path / "v1", none_v1)) == []


def test_a_tighter_ancestor_is_read_too(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        {
            "": ("max", "0", "0"),
            "pods": (str(2 * GIB), str(GIB), "0"),
            "pods/one": (str(8 * GIB), str(GIB // 2), "0"),
        },
        path="/pods/one",
    )
    readings = hostmem.read_cgroups(root)
    assert sorted(figures(r) for r in readings) == [(2 * GIB, GIB), (8 * GIB, 15 * GIB // 2)]


def test_cgroup_v1_of_a_container(tmp_path: Path) -> None:
    """The mount's root is the container's group, so its path is not repeated below the mount point."""
    files = {
        "proc/self/cgroup": "9:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        "proc/self/mountinfo": MOUNT_V1_PART,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {512 * MIB}\n",
    }
    (reading,) = hostmem.read_cgroups(tree(tmp_path, files))
    assert figures(reading) == (4 * GIB, 3 * GIB + 512 * MIB)


def test_a_group_outside_the_mount_is_read_at_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../elsewhere\n",
        "proc/self/mountinfo": MOUNT_V2,
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": "0",
    }
    assert [r.total for r in hostmem.read_cgroups(tree(tmp_path, files))] == [GIB]


def test_usage_above_the_limit_leaves_nothing_and_is_no_fault(tmp_path: Path) -> None:
    (reading,) = hostmem.read_cgroups(v2(tmp_path, {"": (str(GIB), str(2 * GIB), "0")}))
    assert figures(reading) == (GIB, 0)
    assert reading_faults(reading) == []


def test_numa_binding_counts_only_the_bound_nodes(tmp_path: Path) -> None:
    rows = {"MemTotal": 1000, "MemFree": 100, "Active(file)": 20, "Inactive(file)": 30, "SReclaimable": 7}
    node = "".join(f"Node 1 {name}:   {kib} kB\n" for name, kib in rows.items())
    files = {
        "proc/self/status": "Name:\tx\nMems_allowed_list:\t1\n",
        "sys/devices/system/node/online": "0-1\n",
        "sys/devices/system/node/node1/meminfo": node,
    }
    (reading,) = hostmem.read_numa(tree(tmp_path, files))
    assert figures(reading) == (1000 * 1024, 157 * 1024)
    unbound = {**files, "proc/self/status": "Mems_allowed_list:\t0-1\n"}
    assert hostmem.read_numa(tree(tmp_path / "unbound", unbound)) == []
    silent = {k: v for k, v in files.items() if "node1" not in k}
    (reading,) = hostmem.read_numa(tree(tmp_path / "silent", silent))
    assert reading.skipped is not None


def test_this_host_is_read_without_faults() -> None:
    readings = hostmem.host_readings()
    assert readings[0].source == "meminfo"
    assert all(reading_faults(reading) == [] for reading in readings)
    assert readings[0].own is not None
    assert 0 < readings[0].own < 4 * GIB
