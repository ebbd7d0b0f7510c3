"""What this host says of its memory: /proc/meminfo, control groups, NUMA nodes and process limits.

Every source is one reading; the sum takes the least, so that no path can miss a container's limit. All functions
read below ``root``, which tests point at captured trees. ``kB`` in these files is KiB.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvcore.contract.facts import Reading, Scope
from kvcore.contract.validate import LARGEST_BYTES

__all__ = [
    "host_readings",
    "host_room",
    "own_memory",
    "peak_memory",
    "read_cgroups",
    "read_meminfo",
    "read_numa",
    "read_rlimits",
]

KIB = 1024


def host_readings(root: Path = Path("/")) -> list[Reading]:
    """Every source of this host, the widest first; ``own`` is in the first."""
    return [read_meminfo(root), *read_cgroups(root), *read_numa(root), *read_rlimits(root)]


def host_room() -> int | None:
    """What the host can still give this process: the least of all readings, None if none says."""
    return _least_free(host_readings())


def committable_room() -> int | None:
    """The same for memory alone, without the limits on address space, which a mapping has already met."""
    return _least_free([reading for reading in host_readings() if reading.scope is not Scope.PROCESS])


def _least_free(readings: list[Reading]) -> int | None:
    return min((reading.free for reading in readings if reading.free is not None), default=None)


def read_meminfo(root: Path = Path("/")) -> Reading:
    """The whole host: MemTotal, and MemAvailable as what is free, since page cache can be had back.

    ``own`` is the process's private resident memory: shared pages and page cache are not its own.
    """
    figures = _table(root / "proc/meminfo")
    if figures is None or "MemTotal" not in figures:
        return Reading("meminfo", Scope.DEVICE, skipped="/proc/meminfo cannot be read")
    return Reading(
        "meminfo", Scope.DEVICE, total=figures["MemTotal"], free=figures.get("MemAvailable"), own=own_memory(root)
    )


def own_memory(root: Path = Path("/")) -> int | None:
    """Private resident bytes of this process."""
    pages = _statm(root)
    return None if pages is None else (pages[1] - pages[2]) * _page()


def peak_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Resident bytes of this process now, and their peak since the last reset."""
    figures = _table(root / "proc/self/status") or {}
    return figures.get("VmRSS"), figures.get("VmHWM")


def read_cgroups(root: Path = Path("/")) -> list[Reading]:
    """One reading for each control group with a limit, from this process's own up to the mount's root.

    An ancestor may be tighter than the group itself. ``free`` is limit - usage + inactive file pages, which the
    kernel drops before it refuses. v1 says "no limit" by a number near 2**63, v2 by ``max``.
    """
    mounts = _cgroup_mounts(root)
    readings = []
    for version, path in _cgroup_paths(root):
        if version not in mounts:
            continue
        mount_root, mount_point = mounts[version]
        for level in _levels(mount_root, mount_point, path):
            reading = _cgroup_reading(root, version, level)
            if reading is not None:
                readings.append(reading)
    return readings


def _cgroup_paths(root: Path) -> Iterator[tuple[str, str]]:
    """("v1" or "v2", path) of the memory controller's group of this process, from /proc/self/cgroup."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield "v2", path
        elif "memory" in controllers.split(","):
            yield "v1", path


def _cgroup_mounts(root: Path) -> dict[str, tuple[str, str]]:
    """Where each version's memory controller is mounted: (root within the hierarchy, mount point)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        if types[0] == "cgroup2":
            mounts.setdefault("v2", (fields[3], fields[4]))
        elif types[0] == "cgroup" and "memory" in types[2].split(","):
            mounts.setdefault("v1", (fields[3], fields[4]))
    return mounts


def _levels(mount_root: str, mount_point: str, path: str) -> list[str]:
    """The directories of the group and its ancestors, as far as the mount shows them."""
    # In a container the mount shows only the container's own part; a path outside it means the mount's root.
    within = path.removeprefix(mount_root.rstrip("/")) if path.startswith(mount_root) else "/"
    parts = [part for part in within.split("/") if part and part != ".."]
    return ["/".join([mount_point, *parts[:count]]) for count in range(len(parts), -1, -1)]


def _cgroup_reading(root: Path, version: str, level: str) -> Reading | None:
    folder = root / level.lstrip("/")
    if version == "v2":
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        usage, key = _number(folder / "memory.current"), "inactive_file"
    else:
        limits = [_number(folder / "memory.limit_in_bytes")]
        usage, key = _number(folder / "memory.usage_in_bytes"), "total_inactive_file"
    known = [limit for limit in limits if limit is not None and limit < LARGEST_BYTES]
    if not known:
        return None
    limit = min(known)
    source = f"cgroup_{version}"
    if usage is None:
        return Reading(source, Scope.CONTAINER, total=limit, note=level)
    inactive = (_pairs(folder / "memory.stat") or {}).get(key, 0)
    free = min(limit, max(0, limit - usage + inactive))
    return Reading(source, Scope.CONTAINER, total=limit, free=free, used=min(usage, limit), note=level)


def read_numa(root: Path = Path("/")) -> list[Reading]:
    """The nodes that this process may allocate from, if they are fewer than the host has.

    free = MemFree + Active(file) + Inactive(file) + SReclaimable, as far as the node says so.
    """
    status = _text(root / "proc/self/status") or ""
    allowed = next((line.split(":", 1)[1] for line in status.splitlines() if line.startswith("Mems_allowed_list")), "")
    nodes = _ranges(allowed)
    online = _ranges(_text(root / "sys/devices/system/node/online") or "")
    if not nodes or not online or nodes >= online:
        return []
    total = free = 0
    for node in sorted(nodes & online):
        figures = _table(root / f"sys/devices/system/node/node{node}/meminfo", skip=2)
        if figures is None or "MemTotal" not in figures or "MemFree" not in figures:
            return [Reading("numa", Scope.NODE, skipped=f"node {node} does not say how much memory it has")]
        total += figures["MemTotal"]
        names = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        free += sum(figures.get(name, 0) for name in names)
    return [Reading("numa", Scope.NODE, total=total, free=min(free, total), note=f"nodes {allowed.strip()}")]


def read_rlimits(root: Path = Path("/")) -> list[Reading]:
    """RLIMIT_AS and RLIMIT_DATA where they are set: they bound address space, whatever the host has."""
    pages = _statm(root)
    readings = []
    for source, limit_name, column in (("rlimit_as", resource.RLIMIT_AS, 0), ("rlimit_data", resource.RLIMIT_DATA, 5)):
        soft, _ = resource.getrlimit(limit_name)
        if soft == resource.RLIM_INFINITY or pages is None or not 0 < soft < LARGEST_BYTES:
            continue
        used = min(pages[column] * _page(), soft)
        readings.append(Reading(source, Scope.PROCESS, total=soft, free=soft - used, used=used))
    return readings


def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _statm(root: Path) -> list[int] | None:
    """Pages: size, resident, shared, text, lib, data, dirty (proc(5))."""
    fields = (_text(root / "proc/self/statm") or "").split()
    return [int(field) for field in fields] if len(fields) >= 6 and all(f.isdigit() for f in fields) else None


def _text(path: Path) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None  # the source is not here; the caller says what that means


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _table(path: Path, skip: int = 0) -> dict[str, int] | None:
    """``Name: 123 kB`` lines as bytes; ``skip`` words precede the name in a node's file."""
    text = _text(path)
    if text is None:
        return None
    figures = {}
    for line in text.splitlines():
        words = line.split()[skip:]
        if len(words) == 3 and words[0].endswith(":") and words[1].isdigit() and words[2] == "kB":
            figures[words[0][:-1]] = int(words[1]) * KIB
    return figures


def _pairs(path: Path) -> dict[str, int] | None:
    text = _text(path)
    if text is None:
        return None
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _ranges(text: str) -> set[int]:
    """``0-3,8`` as a set of numbers."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
