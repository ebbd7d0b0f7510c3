"""Prove that the cache is there: every block has its own bytes, wherever a wrong index would fold two into one.

A pattern that depends on tensor and block is written to the first and the last block, to both sides of every
boundary where a 32-bit index would wrap, and to blocks in between; only then is all of it read back. Blocks that share
memory show, because the later write has replaced the earlier.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from kvcore.cache.allocate import Cache
from kvcore.contract.layout import TensorSpec
from kvcore.errors import VerificationFailed

__all__ = ["Verification", "blocks_to_check", "verify_cache"]

#: Bytes written at the start and at the end of each checked block: enough that no two patterns agree by chance.
PROBE = 16


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked: tensors, blocks in each, and the bytes written and read back."""

    tensors: int
    blocks: tuple[int, ...]
    probed_bytes: int


def verify_cache(cache: Cache, *, samples: int = 16, seed: int = 0) -> Verification:
    """Write, then read back, blocks of every tensor; the blocks checked are zero again afterwards.

    Raises :class:`VerificationFailed` that names the first block whose bytes are not its own, and the block whose
    bytes they are if it is one of those written.
    """
    probed: dict[str, tuple[int, ...]] = {
        spec.name: blocks_to_check(spec, spec.shape[0], samples=samples, seed=seed) for spec in cache
    }
    for spec in cache:
        for block in probed[spec.name]:
            _write(cache, spec, block, _pattern(spec, block))
    nbytes = 0
    for spec in cache:
        for block in probed[spec.name]:
            nbytes += _check(cache, spec, block, probed)
    for spec in cache:
        for block in probed[spec.name]:
            _write(cache, spec, block, bytes(2 * _probe(spec)))
    blocks = sorted({block for checked in probed.values() for block in checked})
    return Verification(len(probed), tuple(blocks), nbytes)


def blocks_to_check(spec: TensorSpec, num_blocks: int, *, samples: int, seed: int) -> tuple[int, ...]:
    """First, last, both sides of every index boundary that the tensor reaches, and ``samples`` in between."""
    chosen = {0, 1, num_blocks - 2, num_blocks - 1}
    for stride in (spec.block_elements, spec.block_bytes):
        for boundary in (2**31, 2**32):
            edge = boundary // stride
            chosen.update((edge - 1, edge, edge + 1))
    generator = random.Random(f"{seed}:{spec.name}")  # noqa: S311 - a sample, not a secret
    chosen.update(generator.randrange(num_blocks) for _ in range(samples))
    return tuple(sorted(block for block in chosen if 0 <= block < num_blocks))


def _probe(spec: TensorSpec) -> int:
    """Bytes of one probe: a block smaller than two probes is written whole."""
    return min(PROBE, spec.block_bytes // 2)


def _pattern(spec: TensorSpec, block: int) -> bytes:
    """Bytes that belong to this block of this tensor alone, for its start and its end."""
    digest = hashlib.blake2b(f"{spec.name}:{block}".encode(), digest_size=2 * PROBE).digest()
    return digest[: 2 * _probe(spec)]


def _write(cache: Cache, spec: TensorSpec, block: int, data: bytes) -> None:
    size = _probe(spec)
    cache.write_block(spec.name, block, data[:size])
    cache.write_block(spec.name, block, data[size:], offset=spec.block_bytes - size)


def _check(cache: Cache, spec: TensorSpec, block: int, probed: dict[str, tuple[int, ...]]) -> int:
    size = _probe(spec)
    found = cache.read_block(spec.name, block, size) + cache.read_block(
        spec.name, block, size, offset=spec.block_bytes - size
    )
    if found != _pattern(spec, block):
        raise VerificationFailed(
            "a block does not hold what was written to it",
            code="KV-VER-001",
            where=f"{spec.name}, block {block}",
            got=_owner(cache, found, probed),
            expected="its own pattern",
            hint=f"one block is {spec.block_elements:,} elements, {spec.block_bytes:,} bytes; "
            f"block {block} starts at element {block * spec.block_elements:,}",
        )
    return len(found)


def _owner(cache: Cache, found: bytes, probed: dict[str, tuple[int, ...]]) -> str:
    """Whose pattern was found."""
    for spec in cache:
        for block in probed[spec.name]:
            if found[: _probe(spec)] == _pattern(spec, block)[: _probe(spec)]:
                return f"the pattern of {spec.name}, block {block}: the two share memory"
    return "nothing that was written" if any(found) else "zeros: the write was lost"
