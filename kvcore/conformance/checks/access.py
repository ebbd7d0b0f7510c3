"""RAW: reading, writing and filling a buffer."""

from __future__ import annotations

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import check
from kvcore.contract.capabilities import Capability
from kvcore.errors import BufferMisuse

ALLOCATE, RAW = Capability.ALLOCATE, Capability.RAW_ACCESS


def _boundaries(nbytes: int) -> list[int]:
    """Offsets on both sides of every power of two within ``nbytes``, and the ends."""
    powers = [1 << power for power in range(3, nbytes.bit_length()) if 1 << power < nbytes - 8]
    return sorted({0, nbytes - 8, *(p for power in powers for p in (power - 8, power))})


@check("RAW-001", ALLOCATE, RAW)
def every_boundary_holds_its_own(bench: Bench) -> None:
    """What is written on both sides of every power of two, and at the ends, is read back, after all was written.

    Why: an offset that is cut to fewer bits reads well until another offset lands in the same place.
    Fix: 64-bit offsets all the way down.
    """
    nbytes = bench.chunk(bench.device())
    buffer = bench.allocate(nbytes)
    offsets = _boundaries(nbytes)
    for number, offset in enumerate(offsets):
        bench.write(buffer, offset, (number + 1).to_bytes(8, "little"))
    for number, offset in enumerate(offsets):
        data = bench.read(buffer, offset, 8)
        wanted = (number + 1).to_bytes(8, "little")
        bench.expect(data == wanted, f"kvcore_read(buffer, {offset}, 8)", got=data.hex(), expected=wanted.hex())


@check("RAW-002", ALLOCATE, RAW)
def odd_pieces_stay_where_they_are_put(bench: Bench) -> None:
    """A write of odd length at an odd offset changes these bytes and no other.

    Why: copies in words of four or eight bytes touch a neighbour's block.
    Fix: copy bytes, not words; pass the length that was asked for.
    """
    buffer = bench.allocate(bench.chunk(bench.device()))
    bench.fill(buffer, 0, 256, 0x11)
    bench.write(buffer, 101, b"\xee" * 7)
    data = bench.read(buffer, 96, 16)
    wanted = b"\x11" * 5 + b"\xee" * 7 + b"\x11" * 4
    bench.expect(data == wanted, "kvcore_write(buffer, 101, 7 bytes)", got=data.hex(), expected=wanted.hex())


@check("RAW-003", ALLOCATE, RAW)
def a_fill_ends_where_it_should(bench: Bench) -> None:
    """A fill sets all of its range, to the value given, and nothing beside it.

    Why: verification and poisoning go by it.
    Fix: a memset of bytes, not of words.
    """
    buffer = bench.allocate(bench.chunk(bench.device()))
    bench.fill(buffer, 33, 65, 0xC7)
    data = bench.read(buffer, 0, 128)
    wanted = bytes(33) + b"\xc7" * 65 + bytes(30)
    bench.expect(data == wanted, "kvcore_fill(buffer, 33, 65, 0xc7)", got=data.hex(), expected=wanted.hex())


@check("RAW-004", ALLOCATE, RAW)
def what_is_outside_is_refused(bench: Bench) -> None:
    """Access that begins or ends outside the buffer raises BufferMisuse.

    Why: it would be another buffer's memory, or another tenant's.
    Fix: compare offset and length with the buffer's size first (kvcore.contract.buffers.check_span).
    """
    buffer = bench.allocate(bench.chunk(bench.device()))
    n = buffer.nbytes
    bench.refuses("kvcore_read(buffer, nbytes, 1)", lambda: bench.read(buffer, n, 1), BufferMisuse)
    bench.refuses("kvcore_read(buffer, nbytes - 1, 2)", lambda: bench.read(buffer, n - 1, 2), BufferMisuse)
    bench.refuses("kvcore_read(buffer, -1, 1)", lambda: bench.read(buffer, -1, 1), BufferMisuse)
    bench.refuses("kvcore_write(buffer, nbytes - 1, 2 bytes)", lambda: bench.write(buffer, n - 1, b"xx"), BufferMisuse)
    bench.refuses("kvcore_write(buffer, -1, 1 byte)", lambda: bench.write(buffer, -1, b"x"), BufferMisuse)
    bench.refuses("kvcore_fill(buffer, 1, nbytes, 0)", lambda: bench.fill(buffer, 1, n, 0), BufferMisuse)


@check("RAW-005", ALLOCATE, RAW)
def data_goes_to_its_own_device(bench: Bench) -> None:
    """What is written to a buffer of one device is not in another device's.

    Why: a "current device" left from the call before sends it there.
    Fix: take the device from the buffer, in every hook.
    """
    first, second = bench.two_devices()
    nbytes = min(bench.chunk(first), bench.chunk(second))
    here, there = bench.allocate(nbytes, first), bench.allocate(nbytes, second)
    bench.fill(there, 0, nbytes, 0x22)
    bench.fill(here, 0, nbytes, 0x11)
    bench.write(here, 64, b"\x33" * 8)
    seen = (
        bench.read(here, 64, 8)[0],
        bench.read(here, 0, 1)[0],
        bench.read(there, 64, 1)[0],
        bench.read(there, 0, 1)[0],
    )
    bench.expect(
        seen == (0x33, 0x11, 0x22, 0x22), "kvcore_write on one device", got=seen, expected=(0x33, 0x11, 0x22, 0x22)
    )
