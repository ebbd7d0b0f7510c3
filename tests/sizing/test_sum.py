"""The sum as laws: what must hold for every device, layout and policy."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcore.contract import AllocationLimits, CacheLayout, Limit, LimitKind, LimitUnit, Stride
from kvcore.errors import DoesNotFit
from kvcore.sizing.plan import Inputs, make_plan, solve
from kvcore.sizing.policy import OnShortage, ShareOf

from .build import facts, inputs, reading, reserve, uniform

sizes = st.integers(0, 2**44)
shares = st.fractions(min_value=Fraction(1, 1000), max_value=1, max_denominator=1000)
layouts = st.builds(
    uniform,
    layers=st.integers(1, 80),
    heads=st.integers(1, 16),
    width=st.sampled_from([4, 64, 80, 128, 256]),
    itemsize=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 16, 64, 128]),
    alignment=st.sampled_from([1, 256, 512, 4096, 2 * 1024**2]),
)


@st.composite
def questions(draw: st.DrawFn) -> Inputs:
    """One rank on one device, with reserves, a margin, other tenants and any base of the share."""
    layout = draw(layouts)
    total = layout.bytes(1) * draw(st.integers(1, 10**5)) + draw(st.integers(0, 2**24))
    free = total - draw(st.integers(0, total // 3) | st.integers(0, total))
    own = draw(st.integers(0, (total - free) // 2) | st.integers(0, total - free))
    reserves = tuple(
        reserve(f"r{i}", draw(st.integers(0, total // 16)), transient=draw(st.booleans()))
        for i in range(draw(st.integers(0, 4)))
    )
    return inputs(
        layout,
        facts(reading(total, free, own)),
        utilization=draw(shares),
        utilization_of=draw(st.sampled_from(ShareOf)),
        margin=draw(st.integers(0, total // 16)),
        reserves=reserves,
        on_shortage=OnShortage.SHRINK,
    )


def answer(question: Inputs) -> int:
    return max(0, solve(question).num_blocks)


@given(questions())
def test_terms_add_up_and_blocks_fill_what_is_available(question: Inputs) -> None:
    outcome = solve(question)
    rank = outcome.ranks[0]
    assert sum(term.nbytes for term in rank.budget.terms) == rank.budget.available
    n = rank.num_blocks
    assert rank.layout.bytes(n) <= max(0, rank.budget.available) < rank.layout.bytes(n + 1)


@given(questions(), st.integers(0, 2**40))
def test_more_memory_never_gives_fewer_blocks(question: Inputs, more: int) -> None:
    (held,) = question.facts
    assert held is not None
    (r,) = held.readings
    assert r.total is not None
    assert r.free is not None
    richer = facts(reading(r.total + more, r.free + more, r.own))
    assert answer(question) <= answer(replace(question, facts=(richer,)))


@given(questions(), st.integers(0, 2**40))
def test_a_larger_reserve_never_gives_more_blocks(question: Inputs, nbytes: int) -> None:
    more = replace(question, reserves=(*question.reserves, reserve("more", nbytes)))
    assert answer(more) <= answer(question)


@given(questions())
def test_the_cache_never_exceeds_what_is_free(question: Inputs) -> None:
    (held,) = question.facts
    assert held is not None
    free = held.readings[0].free
    assert free is not None
    assert question.layouts[0].bytes(answer(question)) <= free


@given(questions(), st.integers(1, 2**36))
def test_a_tighter_reading_wins_wherever_it_comes_from(question: Inputs, limit: int) -> None:
    (held,) = question.facts
    assert held is not None
    (r,) = held.readings
    container = reading(limit, min(limit, r.free or 0), None, source="cgroup")
    both = [facts(r, container), facts(container, r)]
    results = {answer(replace(question, facts=(f,))) for f in both}
    assert len(results) == 1
    assert results.pop() <= answer(question)


@given(layouts, st.integers(1, 10**7), st.integers(0, 2**24))
def test_an_absolute_size_is_filled_exactly(layout: CacheLayout, blocks: int, extra: int) -> None:
    asked = layout.bytes(blocks) + extra
    plan = make_plan(inputs(layout, None, kv_cache_memory=(asked,)))
    assert layout.bytes(plan.num_blocks) <= asked < layout.bytes(plan.num_blocks + 1)
    assert plan.available_bytes == asked


@given(layouts, st.integers(1, 10**6), st.integers(0, 3), st.sampled_from([1, 8, 64]))
def test_usable_and_multiple(layout: CacheLayout, blocks: int, reserved: int, multiple: int) -> None:
    question = inputs(
        layout, None, kv_cache_memory=(layout.bytes(blocks),), reserved_blocks=reserved, block_multiple=multiple
    )
    try:
        plan = make_plan(question)
    except DoesNotFit:
        assert blocks - blocks % multiple <= reserved
    else:
        assert plan.num_blocks % multiple == 0
        assert 0 <= blocks - plan.num_blocks < multiple or layout.alignment > 1
        assert plan.usable_blocks == plan.num_blocks - reserved
        assert plan.tokens == plan.usable_blocks * layout.block_size


@given(layouts, st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2**20)), min_size=2, max_size=8))
def test_ranks_take_the_minimum_of_their_own_counts(layout: CacheLayout, asked: list[tuple[int, int]]) -> None:
    sizes_asked = [layout.bytes(blocks) + extra for blocks, extra in asked]
    ranks = [layout] * len(sizes_asked)
    plan = make_plan(inputs(ranks, None, kv_cache_memory=tuple(sizes_asked)))
    alone = [make_plan(inputs(layout, None, kv_cache_memory=(size,))).num_blocks for size in sizes_asked]
    assert plan.num_blocks == min(alone)
    assert [rank.num_blocks for rank in plan.ranks] == alone
    assert plan.tightest == alone.index(min(alone))
    assert (len(set(alone)) > 1) == any(w.code == "KV-W-010" for w in plan.warnings)


def test_uneven_stages_are_never_least_memory_over_largest_cost() -> None:
    """Each stage divides its own memory by its own cost (B41: one checked the whole model)."""
    big, small = uniform(layers=30), uniform(layers=10)
    memory = (30_000_000, 10_000_000)
    plan = make_plan(inputs([big, small], None, kv_cache_memory=memory))
    assert plan.num_blocks == min(memory[0] // big.bytes_per_block, memory[1] // small.bytes_per_block)
    assert plan.num_blocks > min(memory) // max(big.bytes_per_block, small.bytes_per_block)


@given(layouts, st.integers(1, 2**20), st.sampled_from([31, 32]), st.sampled_from(list(LimitUnit)))
def test_an_index_limit_is_exact(layout: CacheLayout, stride: int, bits: int, unit: LimitUnit) -> None:
    """The largest block's last unit still has a number below the bound, and one block more has not."""
    assume(unit in (LimitUnit.BYTES, LimitUnit.ELEMENTS))
    limit = Limit(LimitKind.INDEX, unit, 2**bits, "a test", "test kernel", stride_size=stride)
    size = layout.bytes(2**bits // stride + 2)
    plan = make_plan(inputs(layout, None, kv_cache_memory=(size,), limits=(limit,)))
    n = plan.num_blocks
    assert n * stride - 1 <= 2**bits - 1 < (n + 1) * stride
    assert plan.binding.kind is LimitKind.INDEX
    assert plan.binding.idle_bytes == layout.bytes(plan.rank.memory_blocks) - layout.bytes(n) >= 0


@pytest.mark.parametrize(("heads", "expected"), [(1, 262_144), (2, 131_072), (4, 65_536), (8, 32_768), (16, 16_384)])
def test_the_element_limits_of_the_design(heads: int, expected: int) -> None:
    layout = uniform(layers=1, heads=heads, width=128, block_size=64)
    limit = Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, 2**31, "signed 32 bit", "kernel", stride=Stride.LAYER)
    plan = make_plan(inputs(layout, None, kv_cache_memory=(layout.bytes(expected + 5),), limits=(limit,)))
    assert plan.num_blocks == expected


@given(layouts, st.integers(1, 2**31))
def test_block_ids_and_slots_are_bounds_too(layout: CacheLayout, bound: int) -> None:
    """A block table of 32 bits counts blocks; a slot mapping of 32 bits counts tokens (B37: LightLLM#998)."""
    memory = layout.bytes(bound + 1)
    ids = Limit(LimitKind.BLOCK_ID, LimitUnit.BLOCKS, bound, "type of the block table", "engine")
    slots = Limit(LimitKind.SLOTS, LimitUnit.TOKENS, bound, "type of the slot mapping", "engine")
    by_id = solve(inputs(layout, None, kv_cache_memory=(memory,), limits=(ids,)))
    by_slot = solve(inputs(layout, None, kv_cache_memory=(memory,), limits=(slots,)))
    assert by_id.num_blocks == bound
    assert by_slot.num_blocks == bound // layout.block_size
    both = solve(inputs(layout, None, kv_cache_memory=(memory,), limits=(ids, slots)))
    assert both.num_blocks == min(by_id.num_blocks, by_slot.num_blocks)


@given(layouts, st.integers(1, 2**40), st.integers(1, 2**34))
def test_allocation_limits_bound_every_tensor(layout: CacheLayout, memory: int, most: int) -> None:
    held = facts(reading(memory, memory), allocation=AllocationLimits(max_bytes=most, max_elements=most))
    outcome = solve(inputs(layout, held, utilization=Fraction(1)))
    n = max(0, outcome.num_blocks)
    assert all(t.nbytes <= most and t.elements <= most for t in layout.tensors(n))
    if outcome.ranks[0].binding.kind is LimitKind.ALLOCATION:
        assert any(t.nbytes > most or t.elements > most for t in layout.tensors(n + 1))


@given(questions())
def test_the_same_inputs_give_the_same_plan(question: Inputs) -> None:
    assume(solve(question).usable_blocks > 0)
    assert make_plan(question) == make_plan(question)
