"""From readings, reserves and policy to the bytes available for the cache on one rank, as terms that add up."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from fractions import Fraction

from kvcore.contract.facts import Basis, DeviceFacts, Reading, Reserve, ReserveKind
from kvcore.contract.validate import reading_faults
from kvcore.errors import PlanError
from kvcore.sizing.policy import OnShortage, Policy, ShareOf
from kvcore.units import format_bytes

__all__ = ["Baseline", "Budget", "Term", "make_budget", "merge_reserves"]


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the sum: ``nbytes`` is signed, and the terms of a budget add up to what is available.

    ``reserve`` is the kind of reserve that the line keeps from the cache, None for the other lines.
    """

    name: str
    nbytes: int
    reason: str
    source: str
    basis: str
    reserve: ReserveKind | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was free, and what this process held, before the engine loaded anything."""

    free: int
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory side of one rank.

    ``capacity``, ``free`` and ``own`` are None where no device was read. ``ceiling`` is the most the cache can be
    whatever was asked: what is free, less the reserves still to come and the margin. ``excess`` is how far an
    absolute size exceeds the ceiling (0 if it does not).
    """

    terms: tuple[Term, ...]
    available: int
    capacity: int | None
    free: int | None
    own: int | None
    ceiling: int | None
    excess: int
    warnings: tuple[tuple[str, str], ...]


def make_budget(
    facts: DeviceFacts | None,
    reserves: collections.abc.Sequence[Reserve],
    policy: Policy,
    rank: int,
    *,
    baseline: Baseline | None = None,
    temporary_bytes: int = 0,
) -> Budget:
    """The bytes available on ``rank``, from what its device says (``facts``; None if no device was read).

    ``temporary_bytes`` is a cache that the process holds now and will release. Raises :class:`PlanError` if the
    readings do not hold what the policy needs.
    """
    asked = policy.asked_bytes(rank)
    if facts is None:
        return _unread_budget(asked, reserves, policy)
    readings, warnings = _accept(facts.readings)
    after = _terms_after(merge_reserves(facts.reserves, reserves), policy, temporary_bytes)
    free = _free(readings, facts)
    ceiling = free.nbytes + sum(term.nbytes for term in after)
    own = _own(readings, baseline, free.nbytes)
    if asked is not None:
        wanted = [_asked_term(asked, policy)]
    else:
        wanted = _share_terms(readings, facts, free, own, after, policy, baseline)
    total = sum(term.nbytes for term in wanted)
    excess = max(0, total - ceiling)
    pinned_anyway = asked is not None and policy.on_shortage is OnShortage.WARN
    if excess and not pinned_anyway:
        wanted.append(
            Term("not_free", -excess, "part of the share that is not free: others hold it", free.source, free.basis)
        )
    if own.basis == "unknown":
        warnings.append(("KV-W-002", own.reason))
    capacity = _least(readings, "total")[0]
    warnings += [
        ("KV-W-005", f"the device's {capacity:,} bytes are declared, and no driver measured them: {r.note or r.source}")
        for r in readings
        if r.basis is Basis.DECLARED and r.total == capacity is not None
    ]
    return Budget(
        terms=tuple(wanted),
        available=sum(term.nbytes for term in wanted),
        capacity=capacity,
        free=free.nbytes,
        own=None if own.basis == "unknown" else -own.nbytes,
        ceiling=ceiling,
        excess=excess if asked is not None else 0,
        warnings=tuple(warnings),
    )


def merge_reserves(*sources: collections.abc.Sequence[Reserve]) -> tuple[Reserve, ...]:
    """Every reserve once: of two with the same name a measured one wins, else the later source.

    Estimates and measurements of the same thing are the classic double count, so the name is the identity.
    """
    merged: dict[str, Reserve] = {}
    for reserve in (r for source in sources for r in source):
        held = merged.get(reserve.name)
        if held is None or held.basis.value != "measured" or reserve.basis.value == "measured":
            merged[reserve.name] = reserve
    return tuple(merged.values())


def _unread_budget(asked: int | None, reserves: collections.abc.Sequence[Reserve], policy: Policy) -> Budget:
    if asked is None:
        raise PlanError(
            "no device was read, so a share of its memory is unknown",
            code="KV-PLAN-004",
            expected="a device, a device profile, or an absolute size (kv_cache_memory)",
        )
    warnings = [("KV-W-001", "no device was read: the size is taken as given, unverified against any memory")]
    idle = [reserve.name for reserve in reserves] + (["margin"] if policy.margin else [])
    if idle:
        text = f"{', '.join(idle)} had no effect: they come off a device's memory, and none was read"
        warnings.append(("KV-W-004", text))
    return Budget(
        terms=(_asked_term(asked, policy),),
        available=asked,
        capacity=None,
        free=None,
        own=None,
        ceiling=None,
        excess=0,
        warnings=tuple(warnings),
    )


def _accept(readings: collections.abc.Sequence[Reading]) -> tuple[list[Reading], list[tuple[str, str]]]:
    """The readings that can be used, and a warning for each that cannot: a fault never becomes a number."""
    accepted, warnings = [], []
    for reading in readings:
        if reading.skipped is not None:
            continue
        faults = reading_faults(reading)
        if faults:
            warnings.append(("KV-W-003", f"reading {reading.source} was refused: {'; '.join(faults)}"))
        else:
            accepted.append(reading)
    return accepted, warnings


def _least(readings: collections.abc.Sequence[Reading], name: str) -> tuple[int | None, str, str]:
    """The smallest known value of a figure, the source that gave it and how that came by it."""
    known = [(value, r.source, r.basis.value) for r in readings if (value := getattr(r, name)) is not None]
    return min(known) if known else (None, "", "unknown")


def _free(readings: collections.abc.Sequence[Reading], facts: DeviceFacts) -> Term:
    free, source, basis = _least(readings, "free")
    if free is None:
        raise PlanError(
            "no source says how much memory is free",
            code="KV-PLAN-002",
            where=f"{facts.device.platform} device {facts.device.key}",
            got=_what_was_read(facts),
            expected="at least one valid reading with 'free'",
            hint="give the cache an absolute size (kv_cache_memory), or see `kvcore doctor`",
        )
    return Term("free", free, "free now", source, basis)


def _own(readings: collections.abc.Sequence[Reading], baseline: Baseline | None, free: int) -> Term:
    """What this process holds: its own counter, else how much less is free than at the baseline."""
    reason = "what this process holds now"
    for reading in readings:
        if reading.own is not None:
            return Term("own", -reading.own, reason, reading.source, reading.basis.value)
    if baseline is not None:
        # Memory that grew since the baseline is never an error: a neighbour left.
        grown = max(0, baseline.free - free)
        return Term("own", -grown, f"{reason}, as growth since the baseline", "baseline", "measured")
    text = "what this process holds is unknown and no baseline was taken: it is counted as a neighbour's"
    return Term("own", 0, text, "none", "unknown")


def _terms_after(reserves: collections.abc.Sequence[Reserve], policy: Policy, temporary: int) -> list[Term]:
    """What comes off, whatever the share was taken of: reserves still to come, margin, and a cache to be released."""
    terms = [
        Term(r.name, -r.nbytes, r.reason, r.source, r.basis.value, r.kind)
        for r in reserves
        if r.kind is ReserveKind.PERSISTENT
    ]
    transient = [r for r in reserves if r.kind is ReserveKind.TRANSIENT]
    if transient:
        top = max(transient, key=lambda r: r.nbytes)
        others = ", ".join(r.name for r in transient if r is not top)
        reason = f"{top.reason} (transient; the largest counts{', over ' + others if others else ''})"
        terms.append(Term(top.name, -top.nbytes, reason, top.source, top.basis.value, top.kind))
    if policy.margin:
        terms.append(Term("margin", -policy.margin, "kept free on purpose", policy.origin("margin"), "declared"))
    if temporary:
        terms.append(Term("temporary_cache", temporary, "held now and released before the cache", "caller", "measured"))
    return terms


def _asked_term(asked: int, policy: Policy) -> Term:
    return Term("asked", asked, "absolute size of the cache", policy.origin("kv_cache_memory"), "declared")


def _share_terms(
    readings: collections.abc.Sequence[Reading],
    facts: DeviceFacts,
    free: Term,
    own: Term,
    after: collections.abc.Sequence[Term],
    policy: Policy,
    baseline: Baseline | None,
) -> list[Term]:
    share, of = policy.utilization, policy.utilization_of
    if of is ShareOf.FREE_AFTER_LOAD:
        return [_share_term(share, free.nbytes, "free now", free.source, free.basis), *after]
    if of is ShareOf.FREE_BEFORE_LOAD:
        before = free.nbytes if baseline is None else baseline.free
        grown = 0 if baseline is None else max(0, before - free.nbytes)
        growth = Term("own", -grown, "taken since the baseline", "baseline", "measured")
        return [_share_term(share, before, "free before loading", free.source, free.basis), growth, *after]
    capacity, source, basis = _least(readings, "total")
    if capacity is None:
        raise PlanError(
            "no source says how much memory the device has",
            code="KV-PLAN-003",
            where=f"{facts.device.platform} device {facts.device.key}",
            got=_what_was_read(facts),
            expected="at least one valid reading with 'total'",
            hint="give the cache an absolute size (kv_cache_memory), or a share of_free_after_load",
        )
    if of is ShareOf.TOTAL:
        return [_share_term(share, capacity, "total", source, basis), own, *after]
    terms = [Term("total", capacity, "the device's memory", source, basis), own, *after]
    remainder = max(0, sum(term.nbytes for term in terms))
    kept = remainder - _part(share, remainder)
    terms.append(Term("kept_back", -kept, f"{_percent(1 - share)} of the remainder", "policy", "declared"))
    return terms


def _share_term(share: Fraction, whole: int, of: str, source: str, basis: str) -> Term:
    return Term("share", _part(share, whole), f"{_percent(share)} of {of} {format_bytes(whole)}", source, basis)


def _part(share: Fraction, whole: int) -> int:
    """``floor(share * whole)``, exactly."""
    return share.numerator * whole // share.denominator


def _percent(share: Fraction) -> str:
    hundred = share * 100
    return f"{hundred.numerator} %" if hundred.denominator == 1 else f"{float(hundred):.4g} %"


def _what_was_read(facts: DeviceFacts) -> str:
    lines = [f"{r.source}: {r.skipped or '; '.join(reading_faults(r)) or 'no such figure'}" for r in facts.readings]
    return "; ".join(lines) or "no readings"
