"""Memory that a device shares with the host: what the host can still give, within the container's limits.

The driver's own figure is the strictly free memory, which ignores that page cache can be had back (vllm#35313,
vllm#48140). The host's MemAvailable can err the other way (vllm#54200: 22.5 GiB "available" while the driver was out of
memory), so a part of it is kept back as a reserve.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvcore.contract.facts import Basis, Reading, Reserve, ReserveKind, Scope
from kvcore.contract.hostmem import read_cgroups, read_meminfo

__all__ = ["unified_readings", "unified_reserve"]

#: One part in so many of the host's memory is kept back.
MARGIN = 20


def unified_readings(own: int | None, root: Path = Path("/")) -> list[Reading]:
    """The host's memory and its control groups' limits; ``own`` is what the driver says that this process holds."""
    host = read_meminfo(root)
    if host.skipped is None:
        host = replace(host, own=own, note="memory shared with the host")
    # A reading of a whole process's memory is not one of the device's.
    return [host, *(replace(reading, own=None) for reading in read_cgroups(root) if reading.scope is Scope.CONTAINER)]


def unified_reserve(source: str, root: Path = Path("/")) -> list[Reserve]:
    """What is kept back because the host's figure is an estimate; nothing if the host cannot be read."""
    total = read_meminfo(root).total
    if total is None:
        return []
    reason = f"1/{MARGIN} of the host's memory: what the host calls available, the driver may not get (vllm#54200)"
    return [
        Reserve("unified_memory", -(-total // MARGIN), ReserveKind.PERSISTENT, Basis.DECLARED, source, reason),
    ]
