"""Measure a run: what this process took, what its allocator peaked at, and what moved without it.

Only figures of this process are charged to it. A neighbour that starts or leaves during the run shows as memory that
moved, and changes neither the growth nor the peak (vllm#14419, vllm#55827).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import Basis, Device, Phase, Reading, Reserve, ReserveKind
from kvcore.contract.validate import reading_faults
from kvcore.handle import PlatformHandle
from kvcore.sizing.budget import Baseline

__all__ = ["Profile", "free_and_own", "profile_run"]


@dataclass(frozen=True, slots=True)
class Profile:
    """What a run did to the device's memory, in bytes; None where the platform cannot say.

    ``grown_bytes`` is what this process holds more than before. ``transient_bytes`` is how far the allocator's peak
    rose above what it holds now: memory that the next run will need again. ``moved_bytes`` is how much less is free
    beyond this process's own growth (negative: a neighbour gave memory back). ``baseline`` is from before the run.
    ``reserves`` hold the transient part, ``grown`` what the run left allocated.
    """

    baseline: Baseline | None
    grown_bytes: int | None
    transient_bytes: int | None
    moved_bytes: int | None
    reserves: tuple[Reserve, ...]
    grown: Reserve | None = None


def profile_run(
    platform: PlatformHandle,
    device: Device,
    run: Callable[[], object],
    *,
    name: str = "activations",
    phase: Phase = Phase.PROFILE,
) -> Profile:
    """Run ``run`` and measure it; the transient part becomes a measured reserve called ``name``.

    What the run left allocated needs no reserve if the plan is made afterwards: it is part of what the process then
    holds. For a phase that comes after the plan (communicators, graphs), ``grown`` is its reserve for the next start.
    """
    free_before, own_before = free_and_own(platform, device)
    with_peak = platform.supports(Capability.MEMORY_STATS) and platform.supports(Capability.RESET_PEAK)
    if with_peak:
        platform.reset_peak(device)
    run()
    # The peak is read before anything else can release memory or reset it.
    stats = platform.memory_stats(device) if with_peak else None
    free_after, own_after = free_and_own(platform, device)
    grown = None if own_before is None or own_after is None else own_after - own_before
    transient = None
    if stats is not None and stats.peak is not None and stats.current is not None:
        transient = max(0, stats.peak - stats.current)
    moved = None
    if free_before is not None and free_after is not None and grown is not None:
        moved = free_before - free_after - grown
    reserves: tuple[Reserve, ...] = ()
    if transient is not None and stats is not None:
        reason = "peak of the allocator above what it held after the profile run"
        reserves = (Reserve(name, transient, ReserveKind.TRANSIENT, Basis.MEASURED, stats.source, reason, phase),)
    baseline = None if free_before is None else Baseline(free_before, own_before)
    left = None
    if grown is not None:
        reason = f"what this process held more after {phase.value} than before"
        left = Reserve(name, max(0, grown), ReserveKind.PERSISTENT, Basis.MEASURED, "own memory", reason, phase)
    return Profile(baseline, grown, transient, moved, reserves, left)


def free_and_own(platform: PlatformHandle, device: Device) -> tuple[int | None, int | None]:
    """The least free figure of the device, and what this process itself holds; None where no source says."""
    readings: list[Reading] = [r for r in platform.read_memory(device) if r.skipped is None and not reading_faults(r)]
    free = min((r.free for r in readings if r.free is not None), default=None)
    return free, next((r.own for r in readings if r.own is not None), None)
