"""ALC: allocation and release: all or nothing, and nothing left."""

from __future__ import annotations

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import CheckFailed, NotApplicable, check
from kvcore.conformance.surroundings import descriptors
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import AllocationRequest, Device, TensorView
from kvcore.errors import BufferMisuse, OutOfMemory

ALLOCATE, RAW, READ = Capability.ALLOCATE, Capability.RAW_ACCESS, Capability.READ_MEMORY
CYCLES = 1000
#: A leak of so many bytes a cycle is found; what the process's own heap does in a thousand cycles is less.
LEAK = 128


@check("ALC-001", Capability.ALLOCATION_LIMITS)
def limits_are_positive_and_reasoned(bench: Bench) -> None:
    """Granularity and alignment are positive, bounds are positive or None, and a bound has a reason.

    Why: the layout is laid out by them; a bound of 0 refuses everything, one without a reason is a magic number.
    Fix: AllocationLimits(granularity, alignment, max_bytes or None, max_elements or None, reason).
    """
    for device in bench.devices():
        limits = bench.limits(device)
        whole = [limits.granularity, limits.alignment]
        bounds = [bound for bound in (limits.max_bytes, limits.max_elements) if bound is not None]
        right = all(type(n) is int and n > 0 for n in (*whole, *bounds)) and bool(limits.reason or not bounds)
        bench.expect(right, "kvcore_allocation_limits(device)", got=limits, expected="as described", device=device)


@check("ALC-002", ALLOCATE)
def a_buffer_is_what_was_asked_for(bench: Bench) -> None:
    """A buffer has the size asked for, rounded up to the granularity, and names its request and device.

    Why: rounded down, the last block lies outside; rounded up further, the plan's sum no longer holds.
    Fix: round up once, to the granularity that kvcore_allocation_limits states.
    """
    device = bench.device()
    granule = bench.limits(device).granularity
    for nbytes in (1, granule - 1, granule, granule + 1, 3 * granule + 7):
        if nbytes < 1:
            continue
        buffer = bench.allocate(nbytes, device, "conformance.size")
        rounded = -(-nbytes // granule) * granule
        got = f"{buffer.nbytes} bytes, {buffer.name!r} on {buffer.device.key}"
        right = buffer.nbytes == rounded and buffer.name == "conformance.size" and buffer.device == device
        bench.expect(
            right, f"kvcore_allocate of {nbytes}", got=got, expected=f"{rounded} bytes", unit="bytes", device=device
        )
        bench.release(buffer)


@check("ALC-003", ALLOCATE, RAW)
def memory_comes_zeroed(bench: Bench) -> None:
    """A buffer is zero when it is handed out, also where another one was before.

    Why: what is left of another request, or another user, would be read as cache.
    Fix: set it to zero in kvcore_allocate.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    first = bench.allocate(nbytes, device)
    bench.fill(first, 0, first.nbytes, 0xA5)
    bench.release(first)
    second = bench.allocate(nbytes, device)
    for offset in (0, nbytes // 2, nbytes - 4096 if nbytes > 4096 else 0):
        data = bench.read(second, offset, min(4096, nbytes))
        bench.expect(
            not any(data), f"kvcore_read at {offset} of a new buffer", got=data[:16], expected="zeros", device=device
        )


@check("ALC-004", ALLOCATE, READ, Capability.COMMIT)
def memory_is_there_before_it_is_written(bench: Bench) -> None:
    """A buffer is backed by memory when kvcore_allocate returns.

    Why: pages that come into being when written make the plan come true an hour later, or not.
    Fix: touch or populate every page; if the device cannot, declare COMMIT unsupported.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    bench.release(bench.allocate(nbytes, device))
    before = bench.free(device)
    buffer = bench.allocate(nbytes, device)
    fell = before - bench.free(device)
    right = fell >= nbytes - nbytes // 4 and buffer.committed_bytes == buffer.nbytes
    got = f"{fell} less free, committed_bytes={buffer.committed_bytes}"
    bench.expect(right, "kvcore_allocate, nothing written yet", got=got, expected=nbytes, unit="bytes", device=device)


@check("ALC-005", ALLOCATE, Capability.ALLOCATION_LIMITS)
def the_largest_allocation_is_honoured(bench: Bench) -> None:
    """What is beyond the stated bounds of one allocation is refused with OutOfMemory.

    Why: frameworks with 32-bit sizes do not fail there; they return a tensor that is too small.
    Fix: compare request.nbytes and request.elements with the bounds before allocating.
    """
    device = bench.device()
    limits = bench.limits(device)
    bounds = {"nbytes": limits.max_bytes, "elements": limits.max_elements}
    if not any(bounds.values()):
        raise NotApplicable("the platform states no bound of one allocation")
    for name, bound in bounds.items():
        if bound is None:
            continue
        nbytes, elements = (bound + 1, 1) if name == "nbytes" else (limits.granularity, bound + 1)
        request = AllocationRequest("conformance", nbytes, limits.alignment, elements)
        call = f"kvcore_allocate of {name}={bound + 1}"
        bench.refuses(call, lambda r=request: bench.call("kvcore_allocate", device=device, request=r), OutOfMemory)  # type: ignore[misc]


@check("ALC-006", ALLOCATE, READ)
def what_does_not_fit_is_refused_whole(bench: Bench) -> None:
    """A request beyond what is free raises OutOfMemory and leaves nothing behind.

    Why: half an allocation is memory that nobody knows of; another error is a crash instead of a smaller plan.
    Fix: translate the runtime's out-of-memory to OutOfMemory, and free what was begun.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    bench.release(bench.allocate(nbytes, device))
    before = bench.free(device)
    beyond = 2 * before + bench.limits(device).granularity
    bench.refuses(f"kvcore_allocate of {beyond}", lambda: bench.allocate(beyond, device), OutOfMemory)
    lost = before - bench.free(device)
    bench.expect(
        lost <= nbytes // 4,
        "free memory after a refusal",
        got=f"{lost} less",
        expected="no less",
        unit="bytes",
        device=device,
    )


@check("ALC-007", ALLOCATE, READ)
def a_full_device_refuses_and_recovers(bench: Bench) -> None:
    """On a full device a request is refused without loss, and all comes back when all is released.

    Why: this is the state that a cache lives in: the device is full, and stays so for days.
    Fix: as for ALC-006; and release must reach the device, not a pool.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    bench.release(bench.allocate(nbytes, device))
    before = bench.free(device)
    held = bench.filled(device)
    full = bench.free(device)
    beyond = full + before // 8 + bench.limits(device).granularity
    bench.refuses("kvcore_allocate on a full device", lambda: bench.allocate(beyond, device), OutOfMemory)
    lost = full - bench.free(device)
    bench.expect(
        lost <= nbytes // 4,
        "free memory after a refusal on a full device",
        got=f"{lost} less",
        expected="no less",
        unit="bytes",
    )
    for buffer in reversed(held):
        bench.release(buffer)
    missing = before - bench.free(device)
    got = f"{missing} not back"
    bench.expect(
        missing <= nbytes // 2,
        "free memory after everything was released",
        got=got,
        expected="all of it",
        unit="bytes",
        device=device,
    )


@check("ALC-008", ALLOCATE, READ)
def release_gives_the_memory_back(bench: Bench) -> None:
    """kvcore_release returns the bytes freed, and the device has them again.

    Why: an engine that reloads a model plans with what was given back.
    Fix: free it on the device, past caches and pools; return buffer.nbytes.
    """
    device = bench.device()
    nbytes = bench.chunk(device)
    bench.release(bench.allocate(nbytes, device))
    buffer = bench.allocate(nbytes, device)
    held = bench.free(device)
    freed = bench.release(buffer)
    back = bench.free(device) - held
    right = freed == buffer.nbytes and back >= nbytes - nbytes // 4
    got = f"{freed} said to be freed, {back} more free"
    bench.expect(right, "kvcore_release(buffer)", got=got, expected=buffer.nbytes, unit="bytes", device=device)


@check("ALC-009", ALLOCATE)
def a_second_release_is_refused(bench: Bench) -> None:
    """Releasing twice raises BufferMisuse.

    Why: the second release would free what belongs to another by then.
    Fix: keep whether the buffer is alive in its handle.
    """
    buffer = bench.allocate(bench.chunk(bench.device()))
    bench.release(buffer)
    bench.refuses(
        "kvcore_release(a released buffer)", lambda: bench.perform("kvcore_release", buffer=buffer), BufferMisuse
    )


@check("ALC-010", ALLOCATE, RAW)
def a_released_buffer_is_refused(bench: Bench) -> None:
    """Reading, writing, filling and viewing a released buffer raise BufferMisuse.

    Why: the memory is another's by then; a write into it is damage that nobody can trace.
    Fix: check the handle in every hook.
    """
    buffer = bench.allocate(bench.chunk(bench.device()))
    bench.release(buffer)
    bench.refuses("kvcore_write(a released buffer)", lambda: bench.write(buffer, 0, b"x"), BufferMisuse)
    bench.refuses("kvcore_read(a released buffer)", lambda: bench.read(buffer, 0, 1), BufferMisuse)
    bench.refuses("kvcore_fill(a released buffer)", lambda: bench.fill(buffer, 0, 1, 0), BufferMisuse)
    if bench.supports(Capability.TENSOR_NUMPY):
        view = TensorView((1,), "uint8")
        bench.refuses("kvcore_tensor(a released buffer)", lambda: bench.tensor(buffer, view, "numpy"), BufferMisuse)


@check("ALC-011", ALLOCATE, READ)
def a_thousand_cycles_leave_nothing(bench: Bench) -> None:
    """A thousand allocations and releases leave no memory and no file open.

    Why: engines that sleep and wake allocate their cache again and again, for days.
    Fix: release what each allocation brought: the memory, its handle, its mapping, its event.
    """
    device = bench.device()
    granule = bench.limits(device).granularity
    for _ in range(CYCLES // 10):
        bench.release(bench.allocate(granule, device))
    before, files = _held(bench, device), descriptors()
    for _ in range(CYCLES):
        bench.release(bench.allocate(granule, device))
    leaked, left = _held(bench, device) - before, descriptors() - files
    got = f"{leaked} bytes more held, {left} files more open"
    bench.expect(
        leaked < CYCLES * LEAK and left < CYCLES // 100, f"{CYCLES} cycles", got=got, expected="none", device=device
    )


@check("ALC-012", ALLOCATE, RAW)
def buffers_do_not_overlap(bench: Bench) -> None:
    """What is written to one buffer is not seen in another.

    Why: two layers of the cache in one memory answer with each other's tokens.
    Fix: one allocation each, or offsets that are counted from each buffer's own start.
    """
    nbytes = bench.chunk(bench.device())
    buffers = [bench.allocate(nbytes) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        bench.fill(buffer, 0, nbytes, number + 1)
    for number, buffer in enumerate(buffers):
        seen = {bench.read(buffer, offset, 1)[0] for offset in (0, nbytes // 2, nbytes - 1)}
        bench.expect(seen == {number + 1}, f"kvcore_read of buffer {number}", got=seen, expected={number + 1})


def _held(bench: Bench, device: Device) -> int:
    """The most exact figure that there is of what this process holds, in bytes."""
    if bench.supports(Capability.MEMORY_STATS):
        current = bench.stats(device).current
        if current is not None:
            return current
    for reading in bench.readings(device):
        if reading.own is not None:
            return reading.own
    free = bench.free(device)
    totals = [reading.total for reading in bench.readings(device) if reading.total is not None]
    if not totals:
        raise CheckFailed("kvcore_read_memory(device)", got="no total", expected="one", device=device.key)
    return min(totals) - free
