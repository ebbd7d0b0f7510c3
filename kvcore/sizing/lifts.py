"""What would lift an index limit that decides a plan: each way tried by asking the sum again, never estimated.

A wider index, tensors that are not packed, more ranks; and smaller blocks, which allow more of them but, since the
index counts what is in them, rarely more tokens.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace

from kvcore.contract.facts import DeviceFacts, Limit, LimitKind, Stride
from kvcore.contract.layout import CacheLayout
from kvcore.sizing.plan import Alternative, Inputs, Outcome, solve

__all__ = ["Lift", "find_lifts", "with_index_limits"]


@dataclass(frozen=True, slots=True)
class Lift:
    """One way, and what the plan would be: ``value`` is None if no value of ``knob`` holds more tokens.

    ``cache_bytes`` are of the tightest rank, ``tokens`` None where groups share a pool.
    """

    knob: str
    value: str | None
    num_blocks: int | None
    tokens: int | None
    cache_bytes: int | None
    text: str


def find_lifts(
    inputs: Inputs,
    outcome: Outcome,
    alternatives: collections.abc.Callable[[], collections.abc.Iterable[Alternative]] | None,
) -> collections.abc.Iterator[Lift]:
    """The ways out of the index limit that decided ``outcome``."""
    yield _lift("index", "64 bits", with_index_limits(inputs, lambda _: None), "with a kernel that indexes in 64 bits")
    yield from _unpacked(inputs, outcome)
    yield from _smaller_block(inputs, outcome)
    yield from _more_ranks(inputs, outcome, alternatives)


def _unpacked(inputs: Inputs, outcome: Outcome) -> collections.abc.Iterator[Lift]:
    packed = [limit for limit in _index_limits(inputs) if limit.stride in (Stride.LAYER_KV, Stride.ALL_LAYERS)]
    if not packed:
        return
    apart = with_index_limits(inputs, lambda limit: replace(limit, stride=Stride.LAYER, stride_size=None))
    if _holds_more(solve(apart), outcome):
        yield _lift("layout", Stride.LAYER.value, apart, "with each layer's K and V in tensors of their own")


def _smaller_block(inputs: Inputs, outcome: Outcome) -> collections.abc.Iterator[Lift]:
    """Half the block, half again, and so on, as far as the engine allows."""
    size = inputs.layouts[0].block_size
    if inputs.layouts[0].pooled or any(limit.stride_size is not None for limit in _index_limits(inputs)):
        return  # a pool's pages follow from its states, and a stride given as a number from its block
    while size % 2 == 0 and size // 2 % inputs.engine.block_multiple == 0:
        size //= 2
        smaller = replace(inputs, layouts=tuple(_in_blocks_of(layout, size) for layout in inputs.layouts))
        if _holds_more(solve(smaller), outcome):
            yield _lift("block_size", str(size), smaller, f"with blocks of {size} tokens")
            return
    yield Lift("block_size", None, None, None, None, "no smaller block holds more tokens: the index counts them too")


def _more_ranks(
    inputs: Inputs,
    outcome: Outcome,
    alternatives: collections.abc.Callable[[], collections.abc.Iterable[Alternative]] | None,
) -> collections.abc.Iterator[Lift]:
    sizes = inputs.policy.kv_cache_memory
    if alternatives is None or (sizes is not None and len(sizes) > 1):
        return
    for alternative in alternatives():
        changed = replace(inputs, layouts=alternative.layouts, facts=(inputs.facts[0],) * len(alternative.layouts))
        if alternative.knob == "tp" and _holds_more(solve(changed), outcome):
            yield _lift("tp", alternative.value, changed, f"with {alternative.value} tensor-parallel ranks")
            return
    yield Lift("tp", None, None, None, None, "no more tensor-parallel ranks hold more tokens a rank")


def _lift(knob: str, value: str, changed: Inputs, text: str) -> Lift:
    outcome = solve(changed)
    layout = outcome.ranks[outcome.tightest].layout
    blocks = max(0, outcome.num_blocks)
    return Lift(knob, value, blocks, _tokens(outcome), layout.bytes(blocks), text)


def _holds_more(outcome: Outcome, before: Outcome) -> bool:
    now, then = _tokens(outcome), _tokens(before)
    if now is None or then is None:
        return outcome.usable_blocks > before.usable_blocks
    return now > then


def _tokens(outcome: Outcome) -> int | None:
    layout = outcome.ranks[outcome.tightest].layout
    return None if layout.pooled else max(0, outcome.usable_blocks) * layout.block_tokens


def _in_blocks_of(layout: CacheLayout, size: int) -> CacheLayout:
    groups = tuple(replace(group, block_size=size) if group.block_size else group for group in layout.groups)
    return replace(layout, block_size=size, groups=groups)


def _index_limits(inputs: Inputs) -> list[Limit]:
    stated = [limit for facts in inputs.facts if facts is not None for limit in facts.limits]
    return [limit for limit in (*stated, *inputs.limits, *inputs.policy.limits) if limit.kind is LimitKind.INDEX]


def with_index_limits(inputs: Inputs, change: collections.abc.Callable[[Limit], Limit | None]) -> Inputs:
    """``inputs`` with every index limit changed, wherever it was stated; None takes it away."""

    def changed(limits: collections.abc.Iterable[Limit]) -> tuple[Limit, ...]:
        results = (change(limit) if limit.kind is LimitKind.INDEX else limit for limit in limits)
        return tuple(limit for limit in results if limit is not None)

    made: dict[int, DeviceFacts] = {}
    facts: list[DeviceFacts | None] = []
    for read in inputs.facts:
        if read is None:
            facts.append(None)
        else:
            facts.append(made.setdefault(id(read), replace(read, limits=changed(read.limits))))
    policy = replace(inputs.policy, limits=changed(inputs.policy.limits))
    return replace(inputs, facts=tuple(facts), limits=changed(inputs.limits), policy=policy)
