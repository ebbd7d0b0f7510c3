"""Overrides replace one term and skip no check; refusals carry figures and remedies that are true."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcore.contract import Basis, Limit, LimitKind, LimitUnit, Stride
from kvcore.errors import DoesNotFit, PlanError, PolicyError
from kvcore.sizing.budget import Baseline
from kvcore.sizing.plan import Alternative, Inputs, Shortage, make_plan, solve
from kvcore.sizing.policy import OnShortage, ShareOf
from kvcore.sizing.refusal import Refusal

from .build import GIB, facts, inputs, reading, reserve, uniform


def refusal_of(question: Inputs, **more: object) -> Refusal:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(question, **more)  # type: ignore[arg-type]
    refusal = caught.value.refusal
    assert isinstance(refusal, Refusal)
    return refusal


def remedies(refusal: Refusal) -> dict[str, str | None]:
    return {remedy.knob: remedy.value for remedy in refusal.remedies}


# B51, vllm-ascend: weights fill the share, the message printed -0.87 GiB and advised what could not help.
def b51(**policy: object) -> Inputs:
    layout = uniform(layers=40, heads=8, width=128, block_size=16)
    assert layout.bytes_per_token == 163_840
    total = 32 * GIB
    weights, others = round(27.5376 * GIB), round(2.13 * GIB)
    held = facts(reading(total, total))
    return inputs(
        layout, held, max_model_len=4096, reserves=(reserve("weights", weights), reserve("other", others)), **policy
    )


def test_negative_memory_is_refused_with_the_share_that_works() -> None:
    refusal = refusal_of(b51())
    assert refusal.shortage is Shortage.NO_BLOCKS
    assert round(refusal.available_bytes / GIB, 2) == -0.87
    assert remedies(refusal) == {"utilization": "0.947", "max_model_len": None}
    make_plan(b51(utilization=Fraction("0.947")))
    refusal_of(b51(utilization=Fraction("0.946")))


def test_an_override_of_one_block_is_refused_with_the_smallest_that_works() -> None:
    """B68: 2048 tokens in blocks of 16, one block reserved, need 129."""
    layout = uniform(block_size=16)
    held = facts(reading(GIB, GIB))
    question = inputs(layout, held, num_blocks_override=1, max_model_len=2048, reserved_blocks=1)
    refusal = refusal_of(replace(question, policy=replace(question.policy, num_blocks_override=2)))
    assert refusal.needed_blocks == 129
    assert remedies(refusal)["num_blocks_override"] == "129"
    assert remedies(refusal_of(question))["num_blocks_override"] == "129"


def test_thirteen_large_blocks_of_which_twelve_are_usable() -> None:
    """B70: 13 blocks of 8192 hold 106,496 tokens on paper and 98,304 in practice."""
    layout = uniform(block_size=8192)
    question = inputs(
        layout, facts(reading(GIB * 8, GIB * 8)), num_blocks_override=13, max_model_len=106_496, reserved_blocks=1
    )
    refusal = refusal_of(question)
    assert refusal.largest_model_len == 98_304
    assert refusal.needed_blocks == 14


def test_an_absolute_size_is_checked_against_what_is_there() -> None:
    """B72: 16 weights + 2 peak + 24 cache on 40 free: short by 2, 22 is the most."""
    layout = uniform()
    held = facts(reading(40 * GIB, 40 * GIB))
    reserves = (reserve("weights", 16 * GIB), reserve("peak", 2 * GIB, transient=True))
    refusal = refusal_of(inputs(layout, held, kv_cache_memory=(24 * GIB,), reserves=reserves))
    assert refusal.shortage is Shortage.ASKED
    assert refusal.gap_bytes == 2 * GIB
    assert remedies(refusal)["kv_cache_memory"] == str(22 * GIB)
    plan = make_plan(inputs(layout, held, kv_cache_memory=(22 * GIB,), reserves=reserves))
    assert plan.available_bytes == 22 * GIB


def test_shrink_and_warn_are_choices_and_leave_a_trace() -> None:
    layout = uniform()
    held = facts(reading(40 * GIB, 20 * GIB))
    question = inputs(layout, held, kv_cache_memory=(24 * GIB,), on_shortage=OnShortage.SHRINK)
    plan = make_plan(question)
    assert plan.available_bytes == 20 * GIB
    assert "KV-W-033" in {w.code for w in plan.warnings}
    plan = make_plan(replace(question, policy=replace(question.policy, on_shortage=OnShortage.WARN)))
    assert plan.available_bytes == 24 * GIB
    assert "KV-W-033" in {w.code for w in plan.warnings}


def test_shrink_cuts_the_length_to_the_usable_blocks() -> None:
    """B53: 8 blocks of 128 with one reserved hold 896 tokens, not 1024."""
    layout = uniform(block_size=128)
    question = inputs(
        layout,
        None,
        kv_cache_memory=(layout.bytes(8),),
        max_model_len=4096,
        reserved_blocks=1,
        on_shortage=OnShortage.SHRINK,
    )
    plan = make_plan(question)
    assert plan.max_model_len == 896
    assert plan.max_concurrency == 1
    assert "KV-W-031" in {w.code for w in plan.warnings}


def test_nothing_at_all_is_refused_whatever_the_policy() -> None:
    held = facts(reading(GIB, 0))
    for choice in OnShortage:
        assert refusal_of(inputs(uniform(), held, on_shortage=choice)).shortage is Shortage.NO_BLOCKS


def test_a_cap_only_lowers_and_shows_its_cost() -> None:
    layout = uniform()
    size = layout.bytes(74_000)
    capped = make_plan(
        inputs(layout, None, kv_cache_memory=(size,), max_blocks=40_000, max_blocks_reason="as it was before")
    )
    assert capped.num_blocks == 40_000
    assert capped.binding.kind is LimitKind.CAP
    assert capped.binding.idle_bytes == layout.bytes(34_000)
    free = make_plan(
        inputs(layout, None, kv_cache_memory=(size,), max_blocks=80_000, max_blocks_reason="as it was before")
    )
    assert free.num_blocks == 74_000


def test_a_cap_below_one_request_says_which_cap_works() -> None:
    layout = uniform(block_size=16)
    refusal = refusal_of(
        inputs(layout, None, kv_cache_memory=(GIB,), max_blocks=10, max_blocks_reason="x", max_model_len=1600)
    )
    assert remedies(refusal)["max_blocks"] == "100"
    assert refusal.gap_bytes == 0


def test_demand_leaves_out_what_requests_cannot_use() -> None:
    layout = uniform(block_size=16)
    plan = make_plan(
        inputs(
            layout,
            None,
            kv_cache_memory=(GIB,),
            max_num_seqs=4,
            max_model_len=160,
            limit_to_demand=True,
            reserved_blocks=1,
        )
    )
    assert plan.num_blocks == 41
    assert plan.binding.kind is LimitKind.DEMAND
    with pytest.raises(PlanError, match="demand is unknown"):
        make_plan(inputs(layout, None, kv_cache_memory=(GIB,), max_num_seqs=4, limit_to_demand=True))


def test_transient_reserves_enter_as_their_largest_and_persistent_ones_add() -> None:
    """B66: 40 - 16 - max(2, 3) - 0.5 = 20.5 GiB, not 22."""
    held = facts(reading(40 * GIB, 40 * GIB))
    reserves = (
        reserve("weights", 16 * GIB),
        reserve("text_peak", 2 * GIB, transient=True),
        reserve("encoder_peak", 3 * GIB, transient=True),
        reserve("encoder_cache", GIB // 2),
    )
    plan = make_plan(inputs(uniform(), held, utilization=Fraction(1), reserves=reserves))
    assert plan.available_bytes == 41 * GIB // 2


def test_a_measured_reserve_replaces_its_estimate_in_either_order() -> None:
    held = facts(reading(10 * GIB, 10 * GIB))
    estimate, measured = reserve("graphs", 3 * GIB), reserve("graphs", GIB, basis=Basis.MEASURED)
    for order in ((estimate, measured), (measured, estimate)):
        plan = make_plan(inputs(uniform(), held, utilization=Fraction(1), reserves=order))
        assert plan.available_bytes == 9 * GIB


def test_the_bases_of_the_share() -> None:
    """One device, four engines' meanings of 0.5: 10 total, 8 free before loading, 6 free now, 2 of it own."""
    held = facts(reading(10 * GIB, 6 * GIB, 2 * GIB))
    half = {"utilization": Fraction(1, 2), "baseline": Baseline(8 * GIB)}
    expected = {
        ShareOf.TOTAL: 3 * GIB,  # 5 of total, less 2 own
        ShareOf.FREE_BEFORE_LOAD: 2 * GIB,  # 4 of free before, less 2 grown
        ShareOf.FREE_AFTER_LOAD: 3 * GIB,  # half of 6
        ShareOf.REMAINDER: 4 * GIB,  # half of 10 - 2
    }
    for of, nbytes in expected.items():
        plan = make_plan(inputs(uniform(), held, utilization_of=of, **half))
        assert plan.available_bytes == nbytes, of


def test_a_neighbours_memory_lowers_what_is_free_and_is_never_mine() -> None:
    held = facts(reading(10 * GIB, 3 * GIB, 0))
    plan = make_plan(inputs(uniform(), held))
    assert plan.available_bytes == 3 * GIB
    assert {term.name: term.nbytes for term in plan.terms} == {
        "share": 9 * GIB + (GIB * 10 * 9 // 10 - 9 * GIB),
        "own": 0,
        "not_free": 3 * GIB - 9 * GIB,
    }


def test_an_unknown_is_an_error_and_a_fault_is_named() -> None:
    with pytest.raises(PlanError, match="how much memory is free"):
        make_plan(inputs(uniform(), facts(reading(GIB, None))))
    with pytest.raises(PlanError, match="how much memory the device has"):
        make_plan(inputs(uniform(), facts(reading(None, GIB))))
    wrapped = reading(GIB, 2**64 - 5, source="slicer")
    plan = make_plan(inputs(uniform(), facts(wrapped, reading(GIB, GIB // 2))))
    assert plan.available_bytes == GIB // 2
    assert any(w.code == "KV-W-003" and "slicer" in w.text for w in plan.warnings)
    with pytest.raises(PlanError, match="slicer"):
        make_plan(inputs(uniform(), facts(wrapped)))


def test_one_size_or_one_for_each_rank() -> None:
    with pytest.raises(PolicyError, match="one for each"):
        make_plan(inputs([uniform()] * 4, None, kv_cache_memory=(GIB, GIB)))


def test_an_undeclared_index_width_is_said_and_not_cut() -> None:
    layout = uniform(layers=1, heads=8, width=128, block_size=64)
    plan = make_plan(inputs(layout, None, kv_cache_memory=(layout.bytes(40_000),)))
    assert plan.num_blocks == 40_000
    (warning,) = [w for w in plan.warnings if w.code == "KV-W-020"]
    assert "16,384 (signed bytes)" in warning.text
    assert "32,768 (signed elements)" in warning.text
    assert "65,536 (unsigned elements)" in warning.text
    declared = Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, 2**63, "64 bit", "kernel", stride=Stride.LAYER)
    plan = make_plan(inputs(layout, None, kv_cache_memory=(layout.bytes(40_000),), limits=(declared,)))
    assert not [w for w in plan.warnings if w.code == "KV-W-020"]
    small = make_plan(inputs(layout, None, kv_cache_memory=(layout.bytes(16_384),)))
    assert not [w for w in small.warnings if w.code == "KV-W-020"]


def test_alternatives_are_asked_only_when_refused_and_only_true_ones_are_named() -> None:
    layout = uniform(layers=4, heads=4, block_size=16)
    asked = []

    def alternatives() -> list[Alternative]:
        asked.append(1)
        return [
            Alternative("tp", "2", (uniform(layers=4, heads=2, block_size=16),) * 2),
            Alternative("tp", "4", (uniform(layers=4, heads=1, block_size=16),) * 4),
        ]

    memory = layout.bytes(40)
    fits = inputs(layout, None, kv_cache_memory=(memory,), max_model_len=640)
    make_plan(fits, alternatives=alternatives)
    assert not asked
    refusal = refusal_of(replace(fits, policy=replace(fits.policy, max_model_len=1281)), alternatives=alternatives)
    assert [(r.knob, r.value) for r in refusal.remedies if r.knob == "tp"] == [("tp", "4")]


@given(
    st.integers(1, 2**34),
    st.fractions(Fraction(1, 100), 1, max_denominator=100),
    st.integers(1, 2**22),
    st.integers(0, 2),
)
def test_every_remedy_named_works_and_nothing_smaller_does(
    total: int, share: Fraction, length: int, reserved: int
) -> None:
    layout = uniform(layers=8, heads=2, width=64, block_size=16)
    question = inputs(
        layout, facts(reading(total, total)), utilization=share, max_model_len=length, reserved_blocks=reserved
    )
    assume(solve(question).shortage is not None)
    named = remedies(refusal_of(question))
    value = named["max_model_len"]
    if value is None:
        assert solve(replace(question, policy=replace(question.policy, max_model_len=1))).shortage is not None
    else:
        for tried, works in ((int(value), True), (int(value) + 1, False)):
            found = solve(replace(question, policy=replace(question.policy, max_model_len=tried)))
            assert (found.shortage is None) is works
    value = named["utilization"]
    if value is None:
        assert solve(replace(question, policy=replace(question.policy, utilization=Fraction(1)))).shortage is not None
    else:
        step = Fraction(1, 1000)
        for tried_share, works in ((Fraction(value), True), (Fraction(value) - step, False)):
            if tried_share > share:
                found = solve(replace(question, policy=replace(question.policy, utilization=tried_share)))
                assert (found.shortage is None) is works


def test_reserves_without_a_device_are_said_to_have_no_effect() -> None:
    plan = make_plan(inputs(uniform(), None, kv_cache_memory=(GIB,), reserves=(reserve("weights", GIB),), margin=1))
    (warning,) = [w for w in plan.warnings if w.code == "KV-W-004"]
    assert "weights, margin" in warning.text
    assert plan.available_bytes == GIB
