"""Compare what a plan promised with what came of it, once the cache is allocated and the engine is warm.

The lines add up exactly to what this process holds: what it held when the plan was made, each reserve, the cache, and
what nobody accounted for. From what is left of the promise follows by how many blocks the plan could grow, or must
shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import Device, LimitKind, Reserve, ReserveKind
from kvcore.contract.layout import CacheLayout
from kvcore.handle import PlatformHandle
from kvcore.profiling import free_and_own
from kvcore.sizing.budget import Budget
from kvcore.sizing.limits import largest_fitting
from kvcore.sizing.plan import Plan

__all__ = ["Audit", "AuditLine", "audit_plan"]


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One term: ``promised_bytes`` by the plan (None: it did not know of it), and ``outcome_bytes``.

    ``measured`` says whether the outcome was measured; else the promise stands for it.
    """

    name: str
    promised_bytes: int | None
    outcome_bytes: int
    measured: bool

    @property
    def moved_bytes(self) -> int:
        """How much more than promised (negative: less)."""
        return self.outcome_bytes - (self.promised_bytes or 0)


@dataclass(frozen=True, slots=True)
class Audit:
    """A plan's promise and its outcome on one rank, in bytes; None where the platform cannot say.

    ``lines`` add up to ``held_bytes``, what this process holds now; the one called ``unaccounted`` is what no other
    explains. ``promised_bytes`` is what the plan meant this process to hold at its peak, None for an absolute size,
    which promises nothing about the rest. ``transient_bytes`` will be needed again by a step and is not held now.
    ``headroom_bytes`` is what is left (negative: missing), and ``blocks`` what that is worth: how many the plan could
    grow by within its other bounds, or (negative) must shrink by.
    """

    num_blocks: int
    lines: tuple[AuditLine, ...]
    held_bytes: int | None
    promised_bytes: int | None
    free_bytes: int | None
    transient_bytes: int
    margin_bytes: int
    headroom_bytes: int | None
    blocks: int | None

    @property
    def unaccounted_bytes(self) -> int | None:
        """What this process holds and no line explains; None if what it holds is unknown."""
        return next((line.outcome_bytes for line in self.lines if line.name == "unaccounted"), None)

    @property
    def overshoot_bytes(self) -> int | None:
        """By how much this process holds more than was promised for its peak; 0 if it does not."""
        if self.held_bytes is None or self.promised_bytes is None:
            return None
        return max(0, self.held_bytes - self.promised_bytes)


def audit_plan(
    platform: PlatformHandle, plan: Plan, device: Device, *, rank: int = 0, measured: Sequence[Reserve] = ()
) -> Audit:
    """Audit rank ``rank`` of ``plan`` on ``device``, whose cache is allocated.

    ``measured`` are what profiles of single phases found (:func:`kvcore.api.profile`): each takes the place of the
    promise of its name. Raises :class:`~kvcore.errors.DeviceError` if the device cannot be read.
    """
    held = plan.ranks[rank]
    budget, layout = held.budget, held.layout
    found = {reserve.name: reserve.nbytes for reserve in measured}
    free, own = free_and_own(platform, device)
    lines = _lines(budget, layout.bytes(plan.num_blocks), found, own)
    transient = _transient_to_come(platform, device, budget, found)
    margin = -sum(term.nbytes for term in budget.terms if term.name == "margin")
    promised = _promised(budget)
    headroom = _headroom(promised, own, free, transient, margin)
    others = [bound.max_blocks for bound in held.bounds if bound.kind not in (LimitKind.MEMORY, LimitKind.OVERRIDE)]
    blocks = None if headroom is None else _worth(layout, plan.num_blocks, headroom, others)
    return Audit(plan.num_blocks, lines, own, promised, free, transient, margin, headroom, blocks)


def _lines(budget: Budget, cache_bytes: int, found: dict[str, int], own: int | None) -> tuple[AuditLine, ...]:
    lines = []
    if budget.own is not None:
        before = budget.own - _temporary(budget)
        lines.append(AuditLine("held at planning", before, before, measured=True))
    for term in budget.terms:
        if term.reserve is ReserveKind.PERSISTENT:
            outcome = found.get(term.name, -term.nbytes)
            lines.append(AuditLine(term.name, -term.nbytes, outcome, measured=term.name in found))
    lines.append(AuditLine("cache", cache_bytes, cache_bytes, measured=True))
    if own is not None and budget.own is not None:
        explained = sum(line.outcome_bytes for line in lines)
        lines.append(AuditLine("unaccounted", None, own - explained, measured=True))
    return tuple(lines)


def _promised(budget: Budget) -> int | None:
    """What the plan meant this process to hold at its peak: what it held, what was kept back, and the cache's part."""
    if budget.own is None or any(term.name == "asked" for term in budget.terms):
        return None
    kept = -sum(term.nbytes for term in budget.terms if term.reserve is not None or term.name == "margin")
    return budget.own - _temporary(budget) + kept + budget.available


def _temporary(budget: Budget) -> int:
    """The cache that was held at planning and has been released since."""
    return sum(term.nbytes for term in budget.terms if term.name == "temporary_cache")


def _transient_to_come(platform: PlatformHandle, device: Device, budget: Budget, found: dict[str, int]) -> int:
    """What a step needs beyond what is held now: its peak, less what the allocator keeps and can hand out again."""
    terms = [term for term in budget.terms if term.reserve is ReserveKind.TRANSIENT]
    needed = max((found.get(term.name, -term.nbytes) for term in terms), default=0)
    if not platform.supports(Capability.MEMORY_STATS):
        return needed
    stats = platform.memory_stats(device)
    if stats.current is None:
        return needed
    if stats.peak is not None:
        needed = max(0, stats.peak - stats.current)
    kept = 0 if stats.reserved is None else max(0, stats.reserved - stats.current)
    return max(0, needed - kept)


def _headroom(promised: int | None, own: int | None, free: int | None, transient: int, margin: int) -> int | None:
    left = [] if promised is None or own is None else [promised - own]
    left += [] if free is None else [free]
    return min(left) - transient - margin if left else None


def _worth(layout: CacheLayout, num_blocks: int, headroom: int, others: list[int]) -> int:
    """The largest change of ``num_blocks`` that the headroom pays for, by the layout's own bytes."""
    fitting = largest_fitting(layout, layout.bytes(num_blocks) + headroom)
    return min([fitting, *others]) - num_blocks
