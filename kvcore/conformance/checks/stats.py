"""STA: the allocator's own figures."""

from __future__ import annotations

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import CheckFailed, check
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import Buffer, Device

STATS, ALLOCATE = Capability.MEMORY_STATS, Capability.ALLOCATE


def _figures(bench: Bench, device: Device) -> tuple[int, int]:
    stats = bench.stats(device)
    if type(stats.current) is not int or type(stats.peak) is not int:
        got = f"current={stats.current!r}, peak={stats.peak!r}"
        raise CheckFailed("kvcore_memory_stats(device)", got=got, expected="two ints", unit="bytes", device=device.key)
    return stats.current, stats.peak


def _taken(bench: Bench, device: Device, nbytes: int) -> Buffer:
    buffer = bench.allocate(nbytes, device)
    if bench.supports(Capability.RAW_ACCESS):
        bench.fill(buffer, 0, buffer.nbytes, 1)
    return buffer


@check("STA-001", STATS, ALLOCATE)
def current_follows_what_is_held(bench: Bench) -> None:
    """`current` grows by what is allocated and falls by what is released.

    Why: a profile of the model's activations is made of these figures.
    Fix: the allocator's live bytes, in bytes, of this process and device.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    bench.release(bench.allocate(nbytes, device))
    before = _figures(bench, device)[0]
    buffer = _taken(bench, device, nbytes)
    held = _figures(bench, device)[0]
    bench.release(buffer)
    after = _figures(bench, device)[0]
    slack = nbytes // 4
    right = abs(held - before - nbytes) <= slack and abs(after - before) <= slack
    got = f"{before}, then {held}, then {after}"
    expected = f"{nbytes} more while it is held"
    bench.expect(right, "kvcore_memory_stats(device).current", got=got, expected=expected, unit="bytes", device=device)


@check("STA-002", STATS, ALLOCATE)
def the_peak_remembers(bench: Bench) -> None:
    """`peak` is at least `current`, and keeps what was held and given back.

    Why: the transient peak is what must stay free beside the cache; without it the first long request fails.
    Fix: the allocator's own peak, not a sample.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    buffer = _taken(bench, device, nbytes)
    held = _figures(bench, device)[0]
    bench.release(buffer)
    current, peak = _figures(bench, device)
    right = peak >= max(current, held - nbytes // 4)
    got = f"peak={peak}, current={current}, held before {held}"
    bench.expect(
        right, "kvcore_memory_stats(device).peak", got=got, expected=f"at least {held}", unit="bytes", device=device
    )


@check("STA-003", STATS, ALLOCATE, Capability.RESET_PEAK)
def the_peak_starts_anew(bench: Bench) -> None:
    """kvcore_reset_peak starts the peak again at what is held.

    Why: without it the load of the weights is taken for a forward pass's activations.
    Fix: the allocator's reset; if there is none, declare RESET_PEAK unsupported.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    bench.release(_taken(bench, device, nbytes))
    bench.perform("kvcore_reset_peak", device=device)
    current, peak = _figures(bench, device)
    right = current <= peak <= current + nbytes // 2
    got = f"peak={peak}, current={current}"
    bench.expect(
        right, "kvcore_reset_peak(device)", got=got, expected="the peak at current", unit="bytes", device=device
    )
