"""The one sum: from layouts, facts, limits and policy to a number of blocks, the same on every rank.

:func:`make_plan` is pure. A :class:`Plan` holds everything it was made from, and every figure that a report shows is
one of its attributes, so that no message does arithmetic of its own.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING

from kvcore.contract.facts import DeviceFacts, Limit, LimitKind, Reserve
from kvcore.contract.layout import CacheLayout, Growth, RankPlace
from kvcore.conventions import GENERIC, Convention, TokensRule
from kvcore.errors import PolicyError
from kvcore.sizing.budget import Baseline, Budget, Term, make_budget
from kvcore.sizing.limits import Bound, index_thresholds, largest_fitting, limit_bounds
from kvcore.sizing.policy import OnShortage, Policy
from kvcore.units import format_bytes

if TYPE_CHECKING:
    from kvcore.sizing.lifts import Lift

__all__ = ["Alternative", "Inputs", "Outcome", "Plan", "PlanWarning", "RankPlan", "Shortage", "make_plan", "solve"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Layouts of the same model under another setting, tried when a plan is refused: ``tp = 8``, for example."""

    knob: str
    value: str
    layouts: tuple[CacheLayout, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a plan follows from. ``layouts`` and ``facts`` have one entry a rank, in rank order.

    ``engine`` says which blocks are kept from requests and what is printed; ``block_multiple`` is the number that
    blocks have to be a multiple of. ``model_max_len`` is the length that the model was made for, used when the policy
    names none.
    """

    layouts: tuple[CacheLayout, ...]
    facts: tuple[DeviceFacts | None, ...]
    policy: Policy
    limits: tuple[Limit, ...] = ()
    reserves: tuple[Reserve, ...] = ()
    engine: Convention = GENERIC
    block_multiple: int = 1
    model_max_len: int | None = None
    baseline: Baseline | None = None
    temporary_bytes: int = 0

    @property
    def reserved_blocks(self) -> int:
        """Blocks that the engine keeps for itself (vLLM's null block)."""
        return self.engine.null_blocks

    @property
    def max_model_len(self) -> int | None:
        """The length that one request must be able to reach, or None if nobody named one."""
        return self.model_max_len if self.policy.max_model_len is None else self.policy.max_model_len


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """Something that the reader of a plan should know; the code is stable."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's side: what it has, what bounds it, and how many blocks it could hold by itself."""

    place: RankPlace
    layout: CacheLayout
    facts: DeviceFacts | None
    budget: Budget
    bounds: tuple[Bound, ...]
    num_blocks: int

    @property
    def binding(self) -> Bound:
        """The bound that allows the fewest blocks; of equals the first."""
        return min(self.bounds, key=lambda bound: bound.max_blocks)

    @property
    def memory_blocks(self) -> int:
        """What memory alone would allow."""
        return next(bound.max_blocks for bound in self.bounds if bound.kind is LimitKind.MEMORY)


class Shortage(str, Enum):
    """In which way a plan falls short of what was asked."""

    NO_BLOCKS = "no_blocks"  #: not one usable block
    ASKED = "asked"  #: the absolute size asked exceeds what the device can give
    OVERRIDE = "override"  #: the number of blocks asked exceeds memory or a limit
    REQUEST = "request"  #: one request of the model's length does not fit


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer before policy decides what to do with a shortage. ``tightest`` indexes ``ranks``."""

    ranks: tuple[RankPlan, ...]
    tightest: int
    num_blocks: int
    usable_blocks: int
    shortage: Shortage | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How many blocks every rank holds, and everything that it follows from.

    ``num_blocks`` is the minimum over ranks; ``usable_blocks`` leaves out the blocks that the engine keeps.
    ``max_model_len`` is the length that was checked to fit (None: no length is known). ``lifts`` are the ways out of
    an index limit, if one decided.
    """

    model: str
    block_size: int
    num_blocks: int
    reserved_blocks: int
    max_model_len: int | None
    ranks: tuple[RankPlan, ...]
    tightest: int
    policy: Policy
    warnings: tuple[PlanWarning, ...]
    engine: Convention = GENERIC
    block_multiple: int = 1
    lifts: tuple[Lift, ...] = ()

    @property
    def rank(self) -> RankPlan:
        """The tightest rank: the one that the plan's terms and bounds are about."""
        return self.ranks[self.tightest]

    @property
    def layout(self) -> CacheLayout:
        """The layout of the tightest rank."""
        return self.rank.layout

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can use."""
        return self.num_blocks - self.reserved_blocks

    @property
    def tokens(self) -> int | None:
        """Tokens that the usable blocks hold; None if groups share a pool, where no single number is right."""
        return None if self.layout.pooled else self.usable_blocks * self.layout.block_tokens

    @property
    def engine_tokens(self) -> int | None:
        """The number that the engine prints as the tokens of its cache; None if it depends on an unknown length."""
        rule = self.engine.tokens
        if rule is TokensRule.BLOCKS_OVER_GROUPS:
            smallest = min(group.block_size for group in self.layout.groups if group.growth is not Growth.REQUEST)
            return self.num_blocks // len(self.layout.groups) * smallest * self.layout.dcp
        if rule is TokensRule.CONCURRENCY or self.layout.pooled:
            concurrency = self.engine_concurrency
            if concurrency is None or self.max_model_len is None:
                return None
            return concurrency.numerator * self.max_model_len // concurrency.denominator
        return (self.num_blocks if rule is TokensRule.BLOCKS else self.usable_blocks) * self.layout.block_tokens

    @property
    def engine_concurrency(self) -> Fraction | None:
        """What the engine prints as its concurrency at ``max_model_len``: over all blocks, not the usable ones."""
        if self.max_model_len is None:
            return None
        return Fraction(self.num_blocks, self.layout.request_blocks(self.max_model_len))

    @property
    def max_concurrency(self) -> Fraction | None:
        """How many requests of ``max_model_len`` tokens fit at once; None if no length is known."""
        if self.max_model_len is None:
            return None
        return Fraction(self.usable_blocks, self.layout.request_blocks(self.max_model_len))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the tightest rank."""
        return self.layout.bytes_per_block

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token on the tightest rank."""
        return self.layout.bytes_per_token

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache on the tightest rank, as allocated."""
        return self.layout.bytes(self.num_blocks)

    @property
    def available_bytes(self) -> int:
        """What the terms add up to on the tightest rank."""
        return self.rank.budget.available

    @property
    def unused_bytes(self) -> int:
        """What stays of the available bytes on the tightest rank: less than one block if memory binds."""
        return self.available_bytes - self.cache_bytes

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the tightest rank; they add up to ``available_bytes``."""
        return self.rank.budget.terms

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """All bounds on the tightest rank."""
        return self.rank.bounds

    @property
    def binding(self) -> Bound:
        """The bound that decided."""
        return self.rank.binding

    @property
    def blocks_without_binding(self) -> int:
        """The blocks that the other bounds would allow, on all ranks, if the one that decided were not there."""
        decided = (self.binding.kind, self.binding.source)
        others = [b.max_blocks for rank in self.ranks for b in rank.bounds if (b.kind, b.source) != decided]
        if not others or self.binding.kind is LimitKind.MEMORY:
            return self.num_blocks
        least = min(others)
        return max(self.num_blocks, least - least % self.block_multiple)

    def idle_bytes(self, rank: int) -> int:
        """Bytes that rank ``rank`` could fill with blocks, but for the tightest rank."""
        held = self.ranks[rank]
        return held.layout.bytes(held.num_blocks) - held.layout.bytes(min(self.num_blocks, held.num_blocks))


def make_plan(
    inputs: Inputs,
    *,
    alternatives: collections.abc.Callable[[], collections.abc.Iterable[Alternative]] | None = None,
) -> Plan:
    """The plan that follows from ``inputs``.

    ``alternatives`` is called only for a refusal, or if an index limit decided, to look for other settings. Raises
    :class:`DoesNotFit` if the plan falls short and the policy is to refuse (or nothing at all fits), and
    :class:`PlanError` or :class:`PolicyError` if the sum cannot be computed.
    """
    outcome = solve(inputs)
    shortage = outcome.shortage
    length = inputs.max_model_len
    refused = shortage is Shortage.NO_BLOCKS or inputs.policy.on_shortage is OnShortage.REFUSE
    if shortage is Shortage.REQUEST and inputs.policy.on_shortage is OnShortage.SHRINK:
        length = largest_model_len(outcome.ranks[outcome.tightest].layout, outcome.usable_blocks, length)
        refused = length == 0
    if shortage is not None and refused:
        from kvcore.sizing.refusal import refuse

        raise refuse(inputs, outcome, alternatives)
    plan = Plan(
        model=inputs.layouts[0].model,
        block_size=inputs.layouts[0].block_size,
        num_blocks=outcome.num_blocks,
        reserved_blocks=inputs.reserved_blocks,
        max_model_len=length,
        ranks=outcome.ranks,
        tightest=outcome.tightest,
        policy=inputs.policy,
        warnings=(),
        engine=inputs.engine,
        block_multiple=inputs.block_multiple,
    )
    _assert_identities(plan)
    lifts: tuple[Lift, ...] = ()
    if plan.binding.kind is LimitKind.INDEX:
        from kvcore.sizing.lifts import find_lifts

        lifts = tuple(find_lifts(inputs, outcome, alternatives))
    return replace(plan, warnings=tuple(_warnings(plan, shortage, inputs)), lifts=lifts)


def solve(inputs: Inputs) -> Outcome:
    """The sum on every rank, then the minimum; says in which way it falls short, and decides nothing."""
    _check_ranks(inputs)
    solved: dict[tuple[int, int, int | None], RankPlan] = {}
    ranks = []
    for number, (layout, facts) in enumerate(zip(inputs.layouts, inputs.facts, strict=True)):
        # Tensor-parallel ranks with equal devices are alike: solve one of them.
        key = (id(layout.groups), id(facts), inputs.policy.asked_bytes(number))
        known = solved.get(key)
        if known is None:
            known = solved[key] = _solve_rank(inputs, layout, facts, number)
        ranks.append(known if known.layout is layout else replace(known, layout=layout, place=layout.place))
    tightest = min(range(len(ranks)), key=lambda number: ranks[number].num_blocks)
    num_blocks = ranks[tightest].num_blocks
    num_blocks -= num_blocks % inputs.block_multiple
    usable = num_blocks - inputs.reserved_blocks
    return Outcome(tuple(ranks), tightest, num_blocks, usable, _shortage(inputs, ranks, usable))


def largest_model_len(layout: CacheLayout, usable_blocks: int, at_most: int | None) -> int:
    """The longest request that ``usable_blocks`` can hold, up to ``at_most`` tokens; 0 if there is none."""
    low, high = 0, usable_blocks * layout.block_tokens if at_most is None else at_most
    while low < high:
        middle = (low + high + 1) // 2
        if layout.request_blocks(middle) <= usable_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _check_ranks(inputs: Inputs) -> None:
    asked = inputs.policy.kv_cache_memory
    if asked is not None and len(asked) not in (1, len(inputs.layouts)):
        raise PolicyError(
            "one size for all ranks, or one for each",
            code="KV-POL-020",
            where=inputs.policy.origin("kv_cache_memory"),
            got=f"{len(asked)} sizes",
            expected=f"1 or {len(inputs.layouts)}",
        )


def _solve_rank(inputs: Inputs, layout: CacheLayout, facts: DeviceFacts | None, number: int) -> RankPlan:
    policy = inputs.policy
    reserves = (*inputs.reserves, *policy.reserves)
    budget = make_budget(
        facts, reserves, policy, number, baseline=inputs.baseline, temporary_bytes=inputs.temporary_bytes
    )
    fitting = largest_fitting(layout, budget.available)
    reason = f"{format_bytes(budget.available)} available, {format_bytes(layout.bytes_per_block)} a block"
    memory = Bound(LimitKind.MEMORY, fitting, reason, "sum of terms")
    others = limit_bounds(
        layout,
        None if facts is None else facts.allocation,
        (*(facts.limits if facts is not None else ()), *inputs.limits),
        policy,
        max_model_len=inputs.max_model_len,
        reserved_blocks=inputs.reserved_blocks,
    )
    at_fitting = layout.bytes(fitting)
    bounds = [
        memory,
        *(replace(b, idle_bytes=at_fitting - layout.bytes(min(b.max_blocks, fitting))) for b in others),
    ]
    override = policy.num_blocks_override
    if override is not None:
        bounds.append(
            Bound(LimitKind.OVERRIDE, override, "a number in place of the sum", policy.origin("num_blocks_override"))
        )
    return RankPlan(layout.place, layout, facts, budget, tuple(bounds), _blocks(policy, bounds))


def _blocks(policy: Policy, bounds: collections.abc.Sequence[Bound]) -> int:
    """The least bound; but a number asked under WARN replaces what memory allows, as it was asked to."""
    taken_anyway = policy.num_blocks_override is not None and policy.on_shortage is OnShortage.WARN
    return min(b.max_blocks for b in bounds if not (taken_anyway and b.kind is LimitKind.MEMORY))


def _shortage(inputs: Inputs, ranks: collections.abc.Sequence[RankPlan], usable: int) -> Shortage | None:
    if usable <= 0:
        return Shortage.NO_BLOCKS
    if any(rank.budget.excess for rank in ranks):
        return Shortage.ASKED
    override = inputs.policy.num_blocks_override
    if override is not None and any(rank.binding.max_blocks < override for rank in ranks):
        return Shortage.OVERRIDE
    length = inputs.max_model_len
    if length is not None and any(rank.layout.request_blocks(length) > usable for rank in ranks):
        return Shortage.REQUEST
    return None


def _warnings(plan: Plan, shortage: Shortage | None, inputs: Inputs) -> collections.abc.Iterator[PlanWarning]:
    seen = set()
    for rank in plan.ranks:
        for warning in rank.budget.warnings:
            if warning not in seen:
                seen.add(warning)
                yield PlanWarning(*warning)
    if shortage is not None:
        yield _shortage_warning(plan, shortage, inputs)
    if plan.max_model_len is None:
        yield PlanWarning("KV-W-030", "no model length is known: that one request fits was not checked")
    yield from _uneven_warning(plan)
    yield from _index_warning(plan)


def _shortage_warning(plan: Plan, shortage: Shortage, inputs: Inputs) -> PlanWarning:
    shrunk = inputs.policy.on_shortage is OnShortage.SHRINK
    if shortage is Shortage.REQUEST:
        asked = inputs.max_model_len
        done = f"cut to {plan.max_model_len:,}" if shrunk else "requests of that length can never run"
        return PlanWarning("KV-W-031", f"one request of {asked:,} tokens does not fit: {done}")
    if shortage is Shortage.OVERRIDE:
        asked = inputs.policy.num_blocks_override
        return PlanWarning("KV-W-032", f"{asked:,} blocks were asked; planned are {plan.num_blocks:,}")
    excess = max(rank.budget.excess for rank in plan.ranks)
    done = "cut to what the device can give" if shrunk else "taken as asked"
    return PlanWarning("KV-W-033", f"the size asked is {format_bytes(excess)} more than the device can give: {done}")


def _uneven_warning(plan: Plan) -> collections.abc.Iterator[PlanWarning]:
    most = max(range(len(plan.ranks)), key=plan.idle_bytes)
    idle = plan.idle_bytes(most)
    if plan.ranks[most].num_blocks != plan.rank.num_blocks:
        yield PlanWarning(
            "KV-W-010",
            f"ranks differ: rank {plan.tightest} allows {plan.rank.num_blocks:,} blocks, rank {most} "
            f"{plan.ranks[most].num_blocks:,}, so {format_bytes(idle)} stay idle there",
        )


def _index_warning(plan: Plan) -> collections.abc.Iterator[PlanWarning]:
    """An undeclared index width does not cut the plan; but beyond the first threshold it may be unsafe, and says so."""
    if any(bound.kind is LimitKind.INDEX for bound in plan.bounds):
        return
    thresholds = index_thresholds(plan.layout)
    if plan.num_blocks <= thresholds[0].max_blocks:
        return
    listed = ", ".join(f"{t.max_blocks:,} ({'signed' if t.signed else 'unsigned'} {t.unit.value})" for t in thresholds)
    yield PlanWarning(
        "KV-W-020",
        f"no kernel declared its index width; a 32-bit index into one tensor is safe up to {listed} blocks. "
        "Declare it with --kernel (see `kvcore kernels`) or --index-limit, or verify through the engine's kernels: "
        "kvcore.verify(cache, write=..., gather=...); `kvcore demo overflow` shows how",
    )


def _assert_identities(plan: Plan) -> None:
    """What must hold of every plan; a failure here is a fault of kvcore, not of its user."""
    assert plan.layout.pooled or plan.tokens == plan.usable_blocks * plan.block_size * plan.layout.dcp
    for rank in plan.ranks:
        assert sum(term.nbytes for term in rank.budget.terms) == rank.budget.available
        assert plan.num_blocks <= rank.num_blocks
        if plan.policy.num_blocks_override is None:
            assert rank.layout.bytes(plan.num_blocks) <= max(0, rank.budget.available)
