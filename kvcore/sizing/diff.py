"""What moved between two plans, and what each move is worth in blocks: the parts add up exactly to the difference.

The parts are taken over one by one, in the order in which the sum uses them: each term of the memory, the bytes of a
block, the device's rounding, then each other bound. A part is worth what the number of blocks changes when it is taken
over; so a term that moves while a limit decides is worth nothing, and lifting that limit is worth what it frees.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field

__all__ = ["Difference", "Move", "Side", "difference"]

#: The bound that the terms make; the others are given.
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Side:
    """One plan, on its tightest rank: ``terms`` in signed bytes and ``bounds`` in blocks, each by its name.

    ``bounds`` are all but memory's; ``memory_blocks`` is what that allows. ``rank`` is that rank's number.
    """

    num_blocks: int
    bytes_per_block: int
    terms: collections.abc.Mapping[str, int]
    memory_blocks: int
    bounds: collections.abc.Mapping[str, int] = field(default_factory=dict)
    rank: int = 0

    @property
    def available(self) -> int:
        """What the terms add up to."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Move:
    """One part that differs. ``before`` and ``after`` are bytes (a term, a block) or blocks (a bound, the rest).

    None is a part that one of the plans does not have.
    """

    kind: str
    name: str
    before: int | None
    after: int | None
    blocks: int


@dataclass(frozen=True, slots=True)
class Difference:
    """From ``before`` to ``after`` blocks, by ``moves`` whose blocks add up to the difference.

    ``ranks`` are the tightest ranks that were compared: where they differ, so do the cards that the terms are about.
    """

    before: int
    after: int
    moves: tuple[Move, ...]
    ranks: tuple[int, int] = (0, 0)

    @property
    def blocks(self) -> int:
        """How many blocks more (or, negative, fewer) there are."""
        return self.after - self.before


@dataclass(slots=True)
class _State:
    """A plan between the two, as far as it has been taken over."""

    terms: dict[str, int]
    bytes_per_block: int
    rounding: int
    bounds: dict[str, int]
    rest: int

    @classmethod
    def of(cls, side: Side) -> _State:
        held = cls(dict(side.terms), side.bytes_per_block, 0, dict(side.bounds), 0)
        # By how many blocks the device's rounding of tensors lowers what plain division gives.
        held.rounding = side.memory_blocks - held.divided
        # What a multiple of blocks takes off, or what was taken in place of what memory allows.
        held.rest = side.num_blocks - held.blocks
        return held

    @property
    def divided(self) -> int:
        return max(0, sum(self.terms.values())) // self.bytes_per_block

    @property
    def blocks(self) -> int:
        return min(self.divided + self.rounding, *self.bounds.values(), _UNBOUNDED) + self.rest


#: Above every number of blocks: a plan without other bounds has memory's alone.
_UNBOUNDED = 2**63


def difference(before: Side, after: Side) -> Difference:
    """The moves from ``before`` to ``after``; only what differs is listed."""
    state, goal = _State.of(before), _State.of(after)
    moves: list[Move] = []

    def moved(kind: str, name: str, old: int | None, new: int | None, blocks_then: int) -> None:
        if old != new:
            moves.append(Move(kind, name, old, new, state.blocks - blocks_then))

    for name in _in_order(before.terms, after.terms):
        then, old, new = state.blocks, state.terms.get(name), goal.terms.get(name)
        _put(state.terms, name, new)
        moved("term", name, old, new, then)
    then = state.blocks
    state.bytes_per_block = goal.bytes_per_block
    moved("block", "bytes_per_block", before.bytes_per_block, after.bytes_per_block, then)
    then, old_rounding = state.blocks, state.rounding
    state.rounding = goal.rounding
    moved("rounding", "device's rounding", old_rounding, goal.rounding, then)
    for name in _in_order(before.bounds, after.bounds):
        then, old, new = state.blocks, state.bounds.get(name), goal.bounds.get(name)
        _put(state.bounds, name, new)
        moved("bound", name, old, new, then)
    then, old_rest = state.blocks, state.rest
    state.rest = goal.rest
    moved("rest", "multiple or override", old_rest, goal.rest, then)
    found = Difference(before.num_blocks, after.num_blocks, tuple(moves), (before.rank, after.rank))
    assert sum(move.blocks for move in moves) == found.blocks
    return found


def _in_order(
    before: collections.abc.Mapping[str, int], after: collections.abc.Mapping[str, int]
) -> collections.abc.Iterable[str]:
    return dict.fromkeys([*before, *after])


def _put(parts: dict[str, int], name: str, value: int | None) -> None:
    if value is None:
        parts.pop(name, None)
    else:
        parts[name] = value
