"""The pure part of an agreement: every rank computes the same result from the same contributions.

A rank contributes its plan or its failure, never nothing: "wait until every number is positive" is how one rank with 0
blocks hangs all (FastDeploy's Iluvatar worker).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum

from kvcore.errors import KvcoreError, RanksDisagree
from kvcore.sizing.plan import Plan, PlanWarning
from kvcore.units import format_bytes

__all__ = ["AgreedPlan", "Contribution", "Scope", "contribution", "needed_blocks", "settle"]

#: Ranks whose reasons are spelled out in an error; the rest are counted.
NAMED = 8


class Scope(str, Enum):
    """Among which ranks block numbers travel, so that their counts must be equal."""

    ALL = "all"  #: all of the group: transfer peers and data-parallel replicas too
    PIPELINE = "pipeline"  #: the stages and tensor-parallel ranks of one replica
    TENSOR = "tensor"  #: the tensor-parallel ranks of one stage


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank brings: its count, or why it has none. ``parts`` are what must be equal on all ranks.

    ``needed_blocks`` are those of one request of the planned length and the engine's own; counts are whole numbers of
    any width.
    """

    rank: int
    replica: int
    stage: int
    device: str | None
    num_blocks: int | None
    needed_blocks: int
    bytes_per_block: int
    parts: dict[str, str]
    error: str | None

    def encode(self) -> bytes:
        """As bytes for an exchange."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes, rank: int) -> Contribution:
        """What rank ``rank`` sent; raises :class:`RanksDisagree` if it is not a contribution."""
        import msgspec

        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RanksDisagree(
                "a rank's contribution cannot be read",
                code="KV-RNK-005",
                where=f"rank {rank}",
                got=str(error),
                expected="a contribution of the same kvcore",
            ) from error


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """The same on every rank, but for ``plan``: this rank's own, with the agreed number of blocks.

    ``counts`` are what each rank could hold by itself, in rank order; ``idle_bytes`` what it leaves unused of that.
    """

    plan: Plan
    num_blocks: int
    tightest: int
    counts: tuple[int, ...]
    idle_bytes: tuple[int, ...]


def contribution(outcome: Plan | KvcoreError, rank: int, replica: int = 0) -> Contribution:
    """What ``rank`` brings of its plan, or of the error that kept it from one."""
    if isinstance(outcome, KvcoreError):
        return Contribution(rank, replica, 0, None, None, 0, 0, {}, f"{outcome.code}: {outcome.what}")
    held, facts = outcome.rank, outcome.rank.facts
    return Contribution(
        rank=rank,
        replica=replica,
        stage=held.place.pp_rank,
        device=None if facts is None else facts.device.key,
        num_blocks=outcome.num_blocks,
        needed_blocks=needed_blocks(outcome),
        bytes_per_block=held.layout.bytes_per_block,
        parts=_parts(outcome),
        error=None,
    )


def needed_blocks(plan: Plan) -> int:
    """The blocks of one request of the planned length, and those that the engine keeps for itself."""
    length = plan.max_model_len
    return (1 if length is None else plan.rank.layout.request_blocks(length)) + plan.reserved_blocks


def settle(
    contributions: Sequence[Contribution], plan: Plan | KvcoreError, rank: int, scope: Scope = Scope.ALL
) -> AgreedPlan:
    """The agreement that follows from all contributions, for ``rank`` with its own ``plan``.

    Raises :class:`RanksDisagree`, the same on every rank: KV-RNK-001 if any failed, KV-RNK-002 if they plan for
    different things, KV-RNK-004 if one request no longer fits.
    """
    _refuse_failures(contributions)
    _refuse_differences(contributions)
    assert isinstance(plan, Plan)
    tightest_of = _tightest(contributions, scope)
    _refuse_too_few(contributions, tightest_of, scope)
    mine = next(_party(c, scope) for c in contributions if c.rank == rank)
    tightest = tightest_of[mine]
    agreed = _count(tightest)
    peers = [c for c in contributions if _party(c, scope) == mine]
    counts = tuple(_count(c) for c in contributions)
    idle = tuple((_count(c) - agreed) * c.bytes_per_block if _party(c, scope) == mine else 0 for c in contributions)
    warnings = plan.warnings
    if len({_count(c) for c in peers}) > 1:
        text = (
            f"ranks differ: rank {tightest.rank} allows {agreed:,} blocks, and {format_bytes(sum(idle))} stay idle on "
            f"the others"
        )
        warnings = (*warnings, PlanWarning("KV-W-011", text))
    return AgreedPlan(replace(plan, num_blocks=agreed, warnings=warnings), agreed, tightest.rank, counts, idle)


def _parts(plan: Plan) -> dict[str, str]:
    """What must be equal on all ranks. Stages have their own layers, so only block tables count of the layout."""
    layout, policy = plan.layout, plan.policy
    tables = [(g.name, g.growth.value, g.window, g.block_size, str(g.share)) for g in layout.groups]
    asked = (policy.max_model_len, policy.max_num_seqs, policy.max_blocks, policy.num_blocks_override)
    shares = (str(policy.utilization), policy.utilization_of.value, policy.on_shortage.value, policy.limit_to_demand)
    parts = {
        "model": layout.model,
        "block tables": hashlib.sha256(repr((layout.block_size, layout.dcp, tables)).encode()).hexdigest()[:16],
        "block size": str(layout.block_size),
        "engine": plan.engine.name,
        "policy": repr((asked, shares)),
    }
    facts = plan.rank.facts
    # Versions are compared among ranks that have the same plugin: vendors may be mixed.
    return parts if facts is None else {**parts, **{f"version of {name}": value for name, value in facts.versions}}


def _count(contribution: Contribution) -> int:
    assert contribution.num_blocks is not None
    return contribution.num_blocks


def _party(contribution: Contribution, scope: Scope) -> tuple[int, ...]:
    """Ranks with the same party share block numbers."""
    if scope is Scope.ALL:
        return ()
    replica = contribution.replica
    return (replica,) if scope is Scope.PIPELINE else (replica, contribution.stage)


def _tightest(contributions: Sequence[Contribution], scope: Scope) -> dict[tuple[int, ...], Contribution]:
    """Each party's rank with the fewest blocks, the lowest of several."""
    found: dict[tuple[int, ...], Contribution] = {}
    for c in contributions:
        party = _party(c, scope)
        best = found.get(party)
        if best is None or (_count(c), c.rank) < (_count(best), best.rank):
            found[party] = c
    return found


def _refuse_failures(contributions: Sequence[Contribution]) -> None:
    failed = [c for c in contributions if c.error is not None]
    if failed:
        raise RanksDisagree(
            f"{len(failed)} of {len(contributions)} ranks failed",
            code="KV-RNK-001",
            where=_ranks([c.rank for c in failed]),
            got=_listed([f"rank {c.rank}: {c.error}" for c in failed]),
            expected="a plan from every rank",
        )


def _refuse_differences(contributions: Sequence[Contribution]) -> None:
    """Parts that several ranks have must be equal on them."""
    seen: dict[str, dict[str, int]] = {}
    for c in contributions:
        for name, value in c.parts.items():
            seen.setdefault(name, {}).setdefault(value, c.rank)
    different = {name: values for name, values in seen.items() if len(values) > 1}
    if different:
        shown = [
            f"{name}: " + ", ".join(f"{value!r} on rank {rank}" for value, rank in values.items())
            for name, values in different.items()
        ]
        raise RanksDisagree(
            "ranks plan for different things",
            code="KV-RNK-002",
            where=", ".join(different),
            got=_listed(shown),
            expected="the same model, policy and versions on every rank",
        )


def _refuse_too_few(
    contributions: Sequence[Contribution], tightest: dict[tuple[int, ...], Contribution], scope: Scope
) -> None:
    """What one rank could hold may be too few for a request once the others have had their say."""
    for c in contributions:
        agreed = _count(tightest[_party(c, scope)])
        if agreed < c.needed_blocks:
            raise RanksDisagree(
                "one request no longer fits into what all ranks can hold",
                code="KV-RNK-004",
                where=f"rank {c.rank}",
                got=f"{agreed:,} blocks",
                expected=f"{c.needed_blocks:,} blocks",
                hint="lower max_model_len, or give the tightest rank more memory",
            )


def _listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + more


def _ranks(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:NAMED]))}{more}"
