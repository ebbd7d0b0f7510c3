"""Verify a cache through the kernels that will use it: what catches an index that wraps around in silence.

The engine hands two callables that write and gather one token of one block. They are driven at the first and the last
block, on both sides of every boundary where a 32-bit index would wrap, and at blocks in between. All writes come before
all reads, and no two blocks get the same bytes. Where the platform gives raw access, each block's memory is looked at
as well: a signed index that wraps writes and reads the same wrong place, so what it gathers looks right. Without raw
access only blocks that take each other's place show, which the boundaries of the layout's own strides make sure of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcore.cache.allocate import Cache
from kvcore.cache.verify import Verification, blocks_to_check
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import LimitUnit, Stride
from kvcore.contract.layout import TensorSpec
from kvcore.errors import KernelUnsafe
from kvcore.sizing.limits import stride_of

__all__ = ["Gather", "Watch", "Write", "explain_block", "verify_kernels"]

#: ``write(tensor, block, token, data)``: store one token, its heads one after the other, in block ``block``. A slot of
#: a pool, whose blocks belong to layers of several kinds, is driven as blocks of one token that is the whole page.
Write = Callable[[str, int, int, bytes], None]
#: ``gather(tensor, block, token, nbytes)``: the same token back.
Gather = Callable[[str, int, int, int], bytes]
#: ``watch(doing, tensor, block)``, told before each call of the engine's: where the work stands, for a crash's report.
Watch = Callable[[str, str, int], None]

_STRIDES = {
    Stride.LAYER: "one tensor",
    Stride.LAYER_KV: "a layer, interleaved",
    Stride.ALL_LAYERS: "all layers, packed",
}


@dataclass(frozen=True, slots=True)
class _Probe:
    """One token that is written and gathered."""

    tensor: str
    block: int
    token: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Fault:
    """A block that does not hold its own bytes; ``owner`` is the probe whose bytes were found there."""

    tensor: str
    block: int
    found: str
    owner: _Probe | None = None


def verify_kernels(
    cache: Cache, write: Write, gather: Gather, *, samples: int = 16, seed: int = 0, watch: Watch | None = None
) -> Verification:
    """Drive ``write`` and ``gather`` through ``cache``; what they wrote is overwritten with zeros afterwards.

    Raises :class:`KernelUnsafe` that names the first block that is out of reach, and the index widths and strides for
    which exactly that block is the first; or the block at which a kernel raised an error of its own.
    """
    told = watch if watch is not None else _no_watch
    probes = list(_probes(cache, samples, seed))
    raw = _Raw(cache, probes)
    for probe in probes:
        with _driving("writing", probe, told):
            write(probe.tensor, probe.block, probe.token, probe.data)
    faults = [*raw.untouched(), *_misread(probes, gather, told)]
    for probe in probes:
        with _driving("clearing", probe, told):
            write(probe.tensor, probe.block, probe.token, bytes(len(probe.data)))
    if faults:
        first = _first(faults)
        if not explain_block(cache, cache.tensors[first.tensor], first.block):
            first = _narrowed(first, probes, lambda probe: _is_astray(probe, write, gather, raw, told))
        raise _unsafe(cache, first)
    blocks = sorted({probe.block for probe in probes})
    return Verification(len(cache.tensors), tuple(blocks), sum(len(probe.data) for probe in probes))


def explain_block(cache: Cache, spec: TensorSpec, block: int) -> tuple[str, ...]:
    """The 32-bit indexes for which ``block`` is the first block of the tensor that they cannot reach to its end."""
    explanations = []
    for unit in (LimitUnit.ELEMENTS, LimitUnit.BYTES):
        for kind, size in _sizes(cache, spec, unit).items():
            for bits, sign in ((31, "signed"), (32, "unsigned")):
                if (1 << bits) // size == block:
                    explanations.append(
                        f"a {sign} 32-bit index in {unit.value} over {_STRIDES[kind]}: {size:,} {unit.value} a block"
                    )
    return tuple(explanations)


@contextmanager
def _driving(doing: str, probe: _Probe, told: Watch) -> Iterator[None]:
    """One call of a kernel, whose own error is the answer that the verification asks for."""
    told(doing, probe.tensor, probe.block)
    try:
        yield
    except Exception as error:
        raise KernelUnsafe(
            "the engine's kernels raised an error",
            tensor=probe.tensor,
            block=probe.block,
            code="KV-VER-014",
            where=f"{doing} {probe.tensor}, block {probe.block:,}",
            got=f"{type(error).__name__}: {error}",
            expected="every block written and read back",
        ) from error


def _no_watch(_doing: str, _tensor: str, _block: int) -> None:
    """Nobody watches."""


def _probes(cache: Cache, samples: int, seed: int) -> Iterator[_Probe]:
    """First and last token of each block to check, tensor by tensor, blocks in order."""
    for spec in cache:
        tokens = spec.shape[2]
        nbytes = spec.block_bytes // tokens
        chosen = {*blocks_to_check(spec, cache.num_blocks, samples=samples, seed=seed), *_edges(cache, spec)}
        for block in sorted(chosen):
            for token in sorted({0, tokens - 1}):
                yield _Probe(spec.name, block, token, _pattern(spec.name, block, token, nbytes))


def _edges(cache: Cache, spec: TensorSpec) -> Iterator[int]:
    """Both sides of every multiple of 2^31 (so of 2^32 too) that the pool reaches, for each stride and unit."""
    for unit in (LimitUnit.ELEMENTS, LimitUnit.BYTES):
        for size in set(_sizes(cache, spec, unit).values()):
            for boundary in range(1 << 31, cache.num_blocks * size + 1, 1 << 31):
                edge = boundary // size
                yield from (b for b in (edge - 1, edge, edge + 1) if 0 <= b < cache.num_blocks)


def _sizes(cache: Cache, spec: TensorSpec, unit: LimitUnit) -> dict[Stride, int]:
    """What one block adds to an index, for each way in which a kernel can see the tensor."""
    own = spec.block_elements if unit is LimitUnit.ELEMENTS else spec.block_bytes
    shared = {kind: stride_of(kind, unit, cache.layout) for kind in (Stride.LAYER_KV, Stride.ALL_LAYERS)}
    return {Stride.LAYER: own, **{kind: size for kind, size in shared.items() if size != own}}


def _pattern(tensor: str, block: int, token: int, nbytes: int) -> bytes:
    """Bytes of this token alone, from 0x20 to 0x3f: normal numbers in every stored type, never zero or NaN."""
    raw = hashlib.shake_128(f"{tensor}:{block}:{token}".encode()).digest(nbytes)
    return bytes(0x20 | byte & 0x1F for byte in raw)


class _Raw:
    """The blocks' memory as the platform sees it, before and after the engine's writes."""

    def __init__(self, cache: Cache, probes: list[_Probe]) -> None:
        self._cache = cache
        self._offered = cache.platform.supports(Capability.RAW_ACCESS)
        self._before = {(p.tensor, p.block): self.now(p.tensor, p.block) for p in probes}

    def untouched(self) -> list[_Fault]:
        """Blocks whose memory did not change: what was written to them went elsewhere."""
        found = "its memory is as before the write: the write went elsewhere"
        if not self._offered:
            return []
        return [_Fault(t, b, found) for (t, b), before in self._before.items() if self.now(t, b) == before]

    def now(self, tensor: str, block: int) -> bytes | None:
        """What the block holds, as a digest; None where the platform gives no raw access."""
        if not self._offered:
            return None
        return hashlib.blake2b(self._cache.read_block(tensor, block)).digest()


def _misread(probes: list[_Probe], gather: Gather, told: Watch) -> list[_Fault]:
    owners = {probe.data: probe for probe in probes}
    faults = []
    for probe in probes:
        with _driving("reading", probe, told):
            found = bytes(gather(probe.tensor, probe.block, probe.token, len(probe.data)))
        if found == probe.data:
            continue
        owner = owners.get(found)
        if owner is not None:
            text = f"what was written to {owner.tensor}, block {owner.block}: the two share memory"
        else:
            text = "bytes that nobody wrote" if any(found) else "zeros: the write was lost"
        faults.append(_Fault(probe.tensor, probe.block, text, owner))
    return faults


def _first(faults: list[_Fault]) -> _Fault:
    """The fault of the lowest block that went astray.

    Of blocks that share memory the lowest is at home, and the others left their places; but a block that holds the
    bytes of one that is known to have gone astray may only be its victim.
    """
    astray = {(fault.tensor, fault.block): fault for fault in faults if fault.owner is None}
    known = set(astray)
    sharing: dict[tuple[str, int], set[int]] = {}
    for fault in faults:
        owner = fault.owner
        if owner is None or (fault.tensor, fault.block) in known or (owner.tensor, owner.block) in known:
            continue
        if owner.tensor == fault.tensor:
            sharing.setdefault((owner.tensor, owner.block), {owner.block}).add(fault.block)
        else:
            astray[fault.tensor, fault.block] = fault
    for (tensor, _), blocks in sharing.items():
        home, *others = sorted(blocks)
        for block in others:
            text = f"what was written to it is in {tensor}, block {home}: the two share memory"
            astray.setdefault((tensor, block), _Fault(tensor, block, text))
    first = min(astray.values(), key=lambda fault: fault.block)
    # Where its bytes were found says more than that they are not at home.
    for fault in faults:
        if fault.owner is not None and (fault.owner.tensor, fault.owner.block) == (first.tensor, first.block):
            text = f"what was written to it is in {fault.tensor}, block {fault.block}: the two share memory"
            return _Fault(first.tensor, first.block, text)
    return first


def _narrowed(fault: _Fault, probes: list[_Probe], is_astray: Callable[[_Probe], bool]) -> _Fault:
    """The first block astray after the last that was found at home: the stride is not the layout's."""
    size = next(len(probe.data) for probe in probes if probe.tensor == fault.tensor)
    low = max((p.block for p in probes if p.tensor == fault.tensor and p.block < fault.block), default=-1)
    high = fault.block
    while high - low > 1:
        middle = (low + high) // 2
        if is_astray(_Probe(fault.tensor, middle, 0, _pattern(fault.tensor, middle, 0, size))):
            high = middle
        else:
            low = middle
    return _Fault(fault.tensor, high, fault.found, fault.owner)


def _is_astray(probe: _Probe, write: Write, gather: Gather, raw: _Raw, told: Watch) -> bool:
    with _driving("narrowing", probe, told):
        before = raw.now(probe.tensor, probe.block)
        write(probe.tensor, probe.block, probe.token, probe.data)
        found = bytes(gather(probe.tensor, probe.block, probe.token, len(probe.data)))
        stayed = before is not None and raw.now(probe.tensor, probe.block) == before
        write(probe.tensor, probe.block, probe.token, bytes(len(probe.data)))
    return stayed or found != probe.data


def _unsafe(cache: Cache, fault: _Fault) -> KernelUnsafe:
    explanations = explain_block(cache, cache.tensors[fault.tensor], fault.block)
    return KernelUnsafe(
        "the engine's kernels do not reach a block",
        tensor=fault.tensor,
        block=fault.block,
        explanations=explanations,
        where=f"{fault.tensor}, block {fault.block:,}",
        got=fault.found,
        expected="its own bytes in its own memory",
        hint=_hint(fault.block, explanations),
    )


def _hint(block: int, explanations: tuple[str, ...]) -> str:
    why = " or ".join(explanations) or f"no 32-bit index over this layout wraps exactly here{_implied(block)}"
    return f"{why}; up to {block:,} blocks were found safe: declare the index (--index-limit) or cap the plan"


def _implied(block: int) -> str:
    """What one block adds to the kernel's index, if that wraps here: a range, since the block is a quotient."""
    if block == 0:
        return ""
    texts = []
    for bits, sign in ((31, "a signed"), (32, "an unsigned")):
        least, most = (1 << bits) // (block + 1) + 1, (1 << bits) // block
        if least <= most:
            texts.append(f"; {sign} one does if a block adds {least:,} to {most:,} to it")
    return "".join(texts)
