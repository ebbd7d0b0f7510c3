"""MEM: what a platform says of a device's memory."""

from __future__ import annotations

import itertools

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import NotApplicable, check
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import Basis, Buffer, Device, Reading, Scope
from kvcore.contract.validate import LARGEST_BYTES

FIGURES = ("total", "free", "used", "reserved", "own")
#: No card that serves models has less; 80 GiB in KiB or MiB, taken for bytes, has.
LEAST_TOTAL = 1024**3
READ, ALLOCATE = Capability.READ_MEMORY, Capability.ALLOCATE


def _every_reading(bench: Bench) -> list[tuple[Device, Reading]]:
    return [(device, reading) for device in bench.devices() for reading in bench.readings(device)]


def _call(reading: Reading) -> str:
    return f"kvcore_read_memory(device), source {reading.source}"


@check("MEM-001", READ)
def figures_are_whole_bytes(bench: Bench) -> None:
    """Every figure is a plain int of bytes, or None.

    Why: floats lose bytes above 2**53 and numpy integers wrap; both compare well until the day they do not.
    Fix: int(...) what a library gives; GiB as a float must not come near.
    """
    for device, reading in _every_reading(bench):
        for name in FIGURES:
            value = getattr(reading, name)
            right = value is None or type(value) is int
            got = f"{name}={value!r} ({type(value).__name__})"
            bench.expect(right, _call(reading), got=got, expected="int or None", unit="bytes", device=device)
        words: tuple[tuple[object, type], ...] = ((reading.scope, Scope), (reading.basis, Basis))
        right = all(isinstance(word, kind) for word, kind in words)
        bench.expect(
            right, _call(reading), got=f"scope={reading.scope!r}, basis={reading.basis!r}", expected="Scope, Basis"
        )


@check("MEM-002", READ)
def figures_have_not_wrapped(bench: Bench) -> None:
    """No figure is negative, nor near 2**64, where an unsigned counter lands below zero.

    Why: slicers and drivers are known to report used above total, and the difference as 1.8e19 bytes.
    Fix: compare before subtracting; a figure that cannot be is None, with the reason in `note`.
    """
    for device, reading in _every_reading(bench):
        for name in FIGURES:
            value = getattr(reading, name)
            right = value is None or 0 <= value <= LARGEST_BYTES
            bench.expect(
                right, _call(reading), got=f"{name}={value}", expected="0 to 2**62", unit="bytes", device=device
            )


@check("MEM-003", READ)
def parts_are_within_the_total(bench: Bench) -> None:
    """free, used and own are at most total.

    Why: such a reading mixes two pools, and its free memory is not this device's.
    Fix: take all figures of a reading from one call of one source.
    """
    for device, reading in _every_reading(bench):
        if reading.total is None:
            continue
        for name in ("free", "used", "own"):
            value = getattr(reading, name)
            right = value is None or value <= reading.total
            got = f"{name}={value}, total={reading.total}"
            bench.expect(right, _call(reading), got=got, expected=f"{name} <= total", unit="bytes", device=device)


@check("MEM-004", READ)
def unknown_is_none(bench: Bench) -> None:
    """What is not known is None: no total of 0; a source that gave nothing says why, and has no figures.

    Why: 0 total is how runtimes say that they do not know, and 0 free is an empty device: both end as wrong sums.
    Fix: translate the source's "unknown" to None, and a source that failed to Reading(..., skipped="why").
    """
    for device, reading in _every_reading(bench):
        figures = {name: getattr(reading, name) for name in FIGURES}
        known = {name: value for name, value in figures.items() if value is not None}
        bench.expect(reading.total != 0, _call(reading), got="total=0", expected=None, unit="bytes", device=device)
        if reading.skipped is not None:
            bench.expect(not known, _call(reading), got=f"skipped, with {known}", expected="no figure", device=device)
        else:
            expected = "a figure, or skipped with the reason"
            bench.expect(bool(known), _call(reading), got="no figure", expected=expected, device=device)


@check("MEM-005", READ)
def total_and_free_are_known(bench: Bench) -> None:
    """At least one reading says both how much there is and how much of it is free.

    Why: without both, no share of the device can be planned.
    Fix: if no source knows, declare READ_MEMORY NOT_IMPLEMENTED or raise DeviceError.
    """
    for device in bench.devices():
        readings = bench.readings(device)
        known = [r for r in readings if r.total is not None and r.free is not None]
        bench.expect(bool(known), "kvcore_read_memory(device)", got=readings, expected="total and free", device=device)


@check("MEM-006", READ)
def the_parts_add_up(bench: Bench) -> None:
    """Where a reading says total, free, used and reserved, total = free + used + reserved.

    Why: NVML's v1 counts what the driver reserves as used, v2 does not; mixed, it is lost or taken twice.
    Fix: `used` is without `reserved`; if a source cannot tell them apart, leave reserved None.
    """
    for device, reading in _every_reading(bench):
        parts = (reading.free, reading.used, reading.reserved)
        if reading.total is None or any(part is None for part in parts):
            continue
        total = sum(part for part in parts if part is not None)
        right = abs(reading.total - total) <= max(bench.limits(device).granularity, reading.total >> 10)
        got = f"free + used + reserved = {total}, total = {reading.total}"
        bench.expect(right, _call(reading), got=got, expected="equal", unit="bytes", device=device)


@check("MEM-007", READ)
def sources_agree(bench: Bench) -> None:
    """Sources of one scope agree on the total within a tenth.

    Why: a factor of 1024 between two of them is a unit; another factor is another device.
    Fix: convert each source's unit where it is read (NVML and IXML: bytes; MXSML: KiB; command-line tools: MiB).
    """
    for device in bench.devices():
        totals: dict[Scope, dict[str, int]] = {}
        for reading in bench.readings(device):
            if reading.total:
                totals.setdefault(reading.scope, {})[reading.source] = reading.total
        for scope, said in totals.items():
            if scope not in (Scope.DEVICE, Scope.PARTITION):
                continue  # nested control groups are limits, each its own
            right = min(said.values()) * 10 >= max(said.values()) * 9
            expected = f"totals of scope {scope.value} within a tenth"
            bench.expect(right, "kvcore_read_memory(device)", got=said, expected=expected, unit="bytes", device=device)


@check("MEM-008", READ)
def a_total_is_a_total_in_bytes(bench: Bench) -> None:
    """A device's total is at least 1 GiB: less is a unit that was not converted.

    Why: 80 GiB in KiB is 80 Mi, in MiB 80 Ki; taken for bytes, everything is refused, or worse, fits.
    Fix: convert to bytes where the source is read.
    """
    for device, reading in _every_reading(bench):
        if reading.scope is Scope.DEVICE and reading.total is not None:
            right = reading.total >= LEAST_TOTAL
            got = f"total={reading.total}"
            bench.expect(
                right, _call(reading), got=got, expected=f"at least {LEAST_TOTAL}", unit="bytes", device=device
            )


@check("MEM-009", READ, ALLOCATE, Capability.OWN_MEMORY)
def own_is_what_this_process_holds(bench: Bench) -> None:
    """`own` grows by what this process allocates, and falls by what it releases.

    Why: own memory is added back to what is free; a neighbour's counted as own is given away twice.
    Fix: take it from a counter of this process; if there is none, declare OWN_MEMORY unsupported.
    """
    device = bench.device()
    nbytes = _warm(bench, device)
    before = _own(bench, device)
    buffer = _written(bench, nbytes, device)
    held = _own(bench, device)
    bench.release(buffer)
    after = _own(bench, device)
    slack = nbytes // 4
    right = abs(held - before - nbytes) <= slack and abs(after - before) <= slack
    got = f"{before}, then {held}, then {after}"
    expected = f"{nbytes} more while a buffer of that size is held"
    bench.expect(
        right,
        "kvcore_read_memory(device).own around allocate and release",
        got=got,
        expected=expected,
        unit="bytes",
        device=device,
    )


@check("MEM-010", READ, ALLOCATE)
def free_falls_by_what_is_allocated(bench: Bench) -> None:
    """What is free falls by what this process allocates and writes.

    Why: readings and allocations in different units, or of different devices, agree with nothing and look right.
    Fix: bytes on both sides; one identity on both sides.
    """
    device = bench.device()
    nbytes = _warm(bench, device)
    before = bench.free(device)
    _written(bench, nbytes, device)
    fell = before - bench.free(device)
    slack = nbytes // 4 + bench.limits(device).granularity
    got = f"{fell} less free after {nbytes} were allocated"
    bench.expect(
        abs(fell - nbytes) <= slack, "kvcore_read_memory(device)", got=got, expected=nbytes, unit="bytes", device=device
    )


@check("MEM-011", READ, ALLOCATE)
def free_never_rises_while_we_allocate(bench: Bench) -> None:
    """What is free does not rise with an allocation, nor fall with a release.

    Why: a cached or averaged figure makes the second engine of a device plan with memory that the first has taken.
    Fix: read at each call; keep no figure.
    """
    device = bench.device()
    nbytes = _warm(bench, device)
    seen = [bench.free(device)]
    buffers = []
    for _ in range(3):
        buffers.append(_written(bench, nbytes, device))
        seen.append(bench.free(device))
    for buffer in buffers:
        bench.release(buffer)
        seen.append(bench.free(device))
    slack = nbytes // 4
    steps = [later - earlier for earlier, later in itertools.pairwise(seen)]
    right = all(step <= -slack for step in steps[:3]) and all(step >= slack for step in steps[3:])
    bench.expect(
        right,
        "kvcore_read_memory(device)",
        got=steps,
        expected="three falls, then three rises",
        unit="bytes",
        device=device,
    )


@check("MEM-012", READ, ALLOCATE)
def two_devices_do_not_mix(bench: Bench) -> None:
    """What is allocated on one device is not taken from another's free memory, in either order.

    Why: a runtime's "current device" left set by the last call makes every figure another device's.
    Fix: set the device in each call, from the argument; put back what was current.
    """
    for here, there in (bench.two_devices(), bench.two_devices()[::-1]):
        nbytes = _warm(bench, here)
        _warm(bench, there)
        before = bench.free(here), bench.free(there)
        buffer = _written(bench, nbytes, here)
        fell = before[0] - bench.free(here), before[1] - bench.free(there)
        bench.release(buffer)
        right = fell[0] >= nbytes // 2 and fell[1] < nbytes // 2
        got = f"{fell[0]} less on {here.key}, {fell[1]} less on {there.key}"
        bench.expect(
            right, "kvcore_read_memory of two devices", got=got, expected=f"{nbytes} and 0", unit="bytes", device=here
        )


@check("MEM-013", READ, ALLOCATE)
def what_is_free_can_be_had(bench: Bench) -> None:
    """What is said to be free can be allocated, and not more: no cap is hidden in a reading or in allocate.

    Why: a cap in a plugin is a cap that nobody sees: 40000 blocks on one platform were this.
    Fix: report and allocate what there is. A limit is data: kvcore_limits, with its reason.
    """
    device = bench.device()
    _warm(bench, device)
    free = bench.free(device)
    had = sum(buffer.nbytes for buffer in bench.filled(device))
    slack = free // 16 + bench.limits(device).granularity
    right = free - free // 10 <= had <= free + slack
    got = f"{had} could be allocated, {free} were said to be free"
    bench.expect(
        right, "kvcore_allocate until it refuses", got=got, expected="as much as was free", unit="bytes", device=device
    )


def _warm(bench: Bench, device: Device) -> int:
    """Hold a buffer to the check's end, since the first may bring a context with it; the size to measure with."""
    nbytes = bench.chunk(device)
    bench.allocate(1, device)
    return nbytes


def _written(bench: Bench, nbytes: int, device: Device) -> Buffer:
    buffer = bench.allocate(nbytes, device)
    if bench.supports(Capability.RAW_ACCESS):
        bench.fill(buffer, 0, buffer.nbytes, 1)
    return buffer


def _own(bench: Bench, device: Device) -> int:
    for reading in bench.readings(device):
        if reading.own is not None:
            return reading.own
    raise NotApplicable("no source lists this process here: drivers do not see through a container's process ids")
