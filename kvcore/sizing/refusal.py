"""Why a plan was refused, and for each knob the smallest value that works or that none does.

Every remedy is found by asking :func:`kvcore.sizing.plan.solve` again with one thing changed, so advice cannot drift
from the sum.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace
from fractions import Fraction

from kvcore.contract.facts import LimitKind
from kvcore.errors import DoesNotFit
from kvcore.sizing.budget import Term
from kvcore.sizing.limits import Bound
from kvcore.sizing.plan import Alternative, Inputs, Outcome, RankPlan, Shortage, largest_model_len, solve
from kvcore.sizing.policy import OnShortage, Policy, ShareOf
from kvcore.units import LARGEST_SIZE, format_bytes

__all__ = ["Refusal", "Remedy", "refuse"]

#: Utilization is searched in thousandths: finer than anyone sets it.
_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Remedy:
    """One knob: the smallest change of it that makes the plan feasible, or ``value`` None if none does."""

    knob: str
    value: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The figures of a refusal. Blocks and bytes are of the tightest rank.

    ``needed_bytes`` and ``needed_blocks`` are for what was asked (one request of ``max_model_len``, an absolute size,
    an override); ``gap_bytes`` is how much memory is missing (0 if memory is not what is short).
    ``largest_model_len`` is the longest request that fits (0: none).
    """

    shortage: Shortage
    rank: int
    bytes_per_block: int
    needed_blocks: int
    needed_bytes: int
    allowed_blocks: int
    available_bytes: int
    gap_bytes: int
    max_model_len: int | None
    largest_model_len: int
    binding: Bound
    terms: tuple[Term, ...]
    bounds: tuple[Bound, ...]
    remedies: tuple[Remedy, ...]


def refuse(
    inputs: Inputs,
    outcome: Outcome,
    alternatives: collections.abc.Callable[[], collections.abc.Iterable[Alternative]] | None,
) -> DoesNotFit:
    """The error for an outcome that falls short."""
    assert outcome.shortage is not None
    number, needed_blocks = _worst_rank(inputs, outcome)
    rank = outcome.ranks[number]
    available, needed_bytes = rank.budget.available, rank.layout.bytes(needed_blocks)
    if outcome.shortage is Shortage.ASKED:
        asked = inputs.policy.asked_bytes(number)
        assert asked is not None
        assert rank.budget.ceiling is not None
        available, needed_bytes = rank.budget.ceiling, asked
    length = inputs.max_model_len
    refusal = Refusal(
        shortage=outcome.shortage,
        rank=number,
        bytes_per_block=rank.layout.bytes_per_block,
        needed_blocks=needed_blocks,
        needed_bytes=needed_bytes,
        allowed_blocks=max(0, outcome.num_blocks),
        available_bytes=available,
        gap_bytes=max(0, needed_bytes - available),
        max_model_len=length,
        largest_model_len=largest_model_len(rank.layout, max(0, outcome.usable_blocks), length),
        binding=rank.binding,
        terms=rank.budget.terms,
        bounds=rank.bounds,
        remedies=tuple(_remedies(inputs, outcome, alternatives)),
    )
    working = [remedy.text for remedy in refusal.remedies if remedy.value is not None]
    return DoesNotFit(
        _what(refusal, inputs),
        refusal=refusal,
        code=_CODES[outcome.shortage],
        where=_where(rank, number if len(outcome.ranks) > 1 else None),
        got=f"{format_bytes(available)} available ({available:,} bytes), {refusal.allowed_blocks:,} blocks",
        expected=f"{format_bytes(needed_bytes)} ({needed_bytes:,} bytes), {needed_blocks:,} blocks",
        hint="; ".join(working) if working else "no single setting makes it fit",
    )


_CODES = {
    Shortage.NO_BLOCKS: "KV-FIT-001",
    Shortage.REQUEST: "KV-FIT-002",
    Shortage.ASKED: "KV-FIT-003",
    Shortage.OVERRIDE: "KV-FIT-004",
}


def _worst_rank(inputs: Inputs, outcome: Outcome) -> tuple[int, int]:
    """The rank that the refusal is about, and the blocks it would need."""
    if outcome.shortage is Shortage.ASKED:
        number = max(range(len(outcome.ranks)), key=lambda n: outcome.ranks[n].budget.excess)
    else:
        number = outcome.tightest
    return number, _needed_blocks(inputs, outcome, outcome.ranks[number])


def _needed_blocks(inputs: Inputs, outcome: Outcome, rank: RankPlan) -> int:
    override = inputs.policy.num_blocks_override
    if outcome.shortage is Shortage.OVERRIDE and override is not None:
        return override
    length = inputs.max_model_len
    request = rank.layout.request_blocks(length) if length is not None else 1
    needed = request + inputs.reserved_blocks
    return -(-needed // inputs.block_multiple) * inputs.block_multiple


def _where(rank: RankPlan, number: int | None) -> str | None:
    device = [] if rank.facts is None else [f"{rank.facts.device.platform} device {rank.facts.device.key}"]
    return ", ".join([*device, *([] if number is None else [f"rank {number}"])]) or None


def _what(refusal: Refusal, inputs: Inputs) -> str:
    if refusal.shortage is Shortage.ASKED:
        return f"the cache size asked is {format_bytes(refusal.gap_bytes)} more than the device can give"
    if refusal.shortage is Shortage.OVERRIDE:
        return (
            f"{refusal.needed_blocks:,} blocks were asked, but {refusal.binding.kind.value} allows "
            f"{refusal.binding.max_blocks:,}: {refusal.binding.reason}"
        )
    kind = refusal.binding.kind.value
    if refusal.shortage is Shortage.NO_BLOCKS:
        kept = f" and the engine keeps {inputs.reserved_blocks}" if inputs.reserved_blocks else ""
        return f"there is no room for a cache: {kind} allows {refusal.allowed_blocks:,} blocks{kept}"
    return (
        f"one request of {refusal.max_model_len:,} tokens needs {refusal.needed_blocks:,} blocks, and {kind} allows "
        f"{refusal.allowed_blocks:,}; the largest length that fits is {refusal.largest_model_len:,}"
    )


def _remedies(
    inputs: Inputs,
    outcome: Outcome,
    alternatives: collections.abc.Callable[[], collections.abc.Iterable[Alternative]] | None,
) -> collections.abc.Iterator[Remedy]:
    policy = inputs.policy
    if inputs.max_model_len is not None:
        yield _model_len_remedy(inputs, outcome)
    if policy.kv_cache_memory is None and policy.num_blocks_override is None:
        yield _utilization_remedy(inputs)
    if policy.kv_cache_memory is not None:
        yield _size_remedy(inputs, outcome)
    if policy.margin:
        yield _margin_remedy(inputs)
    if policy.max_blocks is not None:
        yield _count_remedy(inputs, "max_blocks", policy.max_blocks)
    if policy.num_blocks_override is not None:
        yield _count_remedy(inputs, "num_blocks_override", policy.num_blocks_override)
    if outcome.ranks[outcome.tightest].binding.kind is LimitKind.INDEX:
        yield _index_remedy(inputs)
    for alternative in alternatives() if alternatives is not None else ():
        changed = replace(inputs, layouts=alternative.layouts, facts=(inputs.facts[0],) * len(alternative.layouts))
        if _asked_per_rank(policy) is None and _fits(changed):
            yield Remedy(alternative.knob, alternative.value, f"set {alternative.knob} to {alternative.value}")


def _asked_per_rank(policy: Policy) -> tuple[int, ...] | None:
    """Sizes given rank by rank cannot be carried over to another number of ranks."""
    sizes = policy.kv_cache_memory
    return sizes if sizes is not None and len(sizes) > 1 else None


def _fits(inputs: Inputs) -> bool:
    return solve(inputs).shortage is None


def _with(inputs: Inputs, **changes: object) -> Inputs:
    return replace(inputs, policy=replace(inputs.policy, **changes))  # type: ignore[arg-type]


def _least_that_fits(low: int, high: int, fits: collections.abc.Callable[[int], bool]) -> int | None:
    """The smallest value in ``low .. high`` for which a monotone ``fits`` holds, or None."""
    if low > high or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _model_len_remedy(inputs: Inputs, outcome: Outcome) -> Remedy:
    layout = outcome.ranks[outcome.tightest].layout
    length = largest_model_len(layout, max(0, outcome.usable_blocks), inputs.max_model_len)
    if length and _fits(_with(inputs, max_model_len=length)):
        return Remedy("max_model_len", str(length), f"lower max_model_len to {length:,} or less")
    return Remedy("max_model_len", None, "no shorter max_model_len helps")


def _utilization_remedy(inputs: Inputs) -> Remedy:
    def fits(step: int) -> bool:
        return _fits(_with(inputs, utilization=Fraction(step, _STEPS)))

    now = inputs.policy.utilization * _STEPS
    step = _least_that_fits(now.numerator // now.denominator + 1, _STEPS, fits)
    if step is None:
        return Remedy("utilization", None, "no utilization up to 1 helps")
    value = f"{step / _STEPS:.3f}".rstrip("0").rstrip(".")
    of = "" if inputs.policy.utilization_of is ShareOf.TOTAL else f" ({inputs.policy.utilization_of.value})"
    return Remedy("utilization", value, f"raise utilization{of} to {value} or more")


def _size_remedy(inputs: Inputs, outcome: Outcome) -> Remedy:
    if outcome.shortage is Shortage.ASKED:
        ceilings = [rank.budget.ceiling for rank in outcome.ranks if rank.budget.ceiling is not None]
        size = min(ceilings)
        if size > 0 and _fits(_with(inputs, kv_cache_memory=(size,))):
            return Remedy("kv_cache_memory", str(size), f"lower kv_cache_memory to {size:,} bytes or less")
        return Remedy("kv_cache_memory", None, "no kv_cache_memory helps: the device has too little")

    def fits(size: int) -> bool:
        return _fits(_with(inputs, kv_cache_memory=(size,)))

    ceiling = min((r.budget.ceiling for r in outcome.ranks if r.budget.ceiling is not None), default=LARGEST_SIZE)
    asked = inputs.policy.kv_cache_memory
    assert asked is not None
    size_needed = _least_that_fits(min(asked) + 1, ceiling, fits)
    if size_needed is None:
        return Remedy("kv_cache_memory", None, "no kv_cache_memory that the device can give helps")
    text = f"raise kv_cache_memory to {size_needed:,} bytes ({format_bytes(size_needed)}) or more"
    return Remedy("kv_cache_memory", str(size_needed), text)


def _margin_remedy(inputs: Inputs) -> Remedy:
    margin = inputs.policy.margin

    def fits(given_up: int) -> bool:
        return _fits(_with(inputs, margin=margin - given_up))

    given_up = _least_that_fits(1, margin, fits)
    if given_up is None:
        return Remedy("margin", None, "no smaller margin helps")
    return Remedy("margin", str(margin - given_up), f"lower the margin to {margin - given_up:,} bytes or less")


def _index_remedy(inputs: Inputs) -> Remedy:
    from kvcore.sizing.lifts import with_index_limits

    if _fits(with_index_limits(inputs, lambda _: None)):
        return Remedy("index", "64 bits", "use a kernel that indexes in 64 bits")
    return Remedy("index", None, "no wider index helps")


def _count_remedy(inputs: Inputs, knob: str, count: int) -> Remedy:
    """A cap or an override is too low for one request, or too high for memory or a limit."""
    # Whatever the other bounds allow with this one lifted is the most it can usefully be.
    lifted = solve(_with(inputs, **{knob: None, "on_shortage": OnShortage.REFUSE}))
    most = lifted.num_blocks

    def fits(value: int) -> bool:
        return _fits(_with(inputs, **{knob: value}))

    value = _least_that_fits(count + 1, most, fits) if most > count else (most if most > 0 and fits(most) else None)
    if value is None:
        return Remedy(knob, None, f"no {knob} helps")
    way = "raise" if value > count else "lower"
    return Remedy(knob, str(value), f"{way} {knob} to {value:,}")
