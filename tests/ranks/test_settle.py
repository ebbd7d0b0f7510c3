"""Every rank computes the same agreement, or the same error, from the same contributions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.contract import CacheLayout, RankPlace
from kvcore.errors import KvcoreError, PlanError, RanksDisagree
from kvcore.ranks.settle import Contribution, Scope, contribution, settle
from kvcore.sizing.plan import Plan, make_plan

from ..sizing.build import inputs, uniform


def plan(blocks: int, *, layers: int = 2, stage: int = 0, length: int = 16, **policy: object) -> Plan:
    layout: CacheLayout = uniform(layers=layers, place=RankPlace(pp=2, pp_rank=stage))
    size = layout.bytes(blocks)
    return make_plan(inputs(layout, None, kv_cache_memory=(size,), max_model_len=length, **policy))


def agreement(plans: list[Plan | KvcoreError], rank: int, scope: Scope = Scope.ALL, replicas: int = 1) -> object:
    """What rank ``rank`` makes of everyone's contributions, once they have been bytes."""
    per_replica = len(plans) // replicas
    sent = [contribution(p, r, r // per_replica).encode() for r, p in enumerate(plans)]
    received = [Contribution.decode(raw, r) for r, raw in enumerate(sent)]
    try:
        agreed = settle(received, plans[rank], rank, scope)
    except RanksDisagree as error:
        return error.to_dict()
    return agreed.num_blocks, agreed.tightest, agreed.counts, agreed.idle_bytes


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=12))
def test_all_ranks_take_the_least(counts: list[int]) -> None:
    """Counts of any width: an int32 reduction would wrap at 2**31."""
    plans: list[Plan | KvcoreError] = [plan(count) for count in counts]
    answers = [agreement(plans, rank) for rank in range(len(plans))]
    least = min(counts)
    size = uniform(layers=2).bytes_per_block
    expected = (least, counts.index(least), tuple(counts), tuple((c - least) * size for c in counts))
    assert answers == [expected] * len(plans)


@given(st.lists(st.none() | st.integers(1, 100), min_size=2, max_size=12).filter(lambda c: None in c))
def test_one_failure_is_everyones(counts: list[int | None]) -> None:
    """A rank with nothing to give says so, and nobody waits for its number to become positive."""
    plans: list[Plan | KvcoreError] = [
        PlanError(f"no room on {rank}", code="KV-FIT-001") if count is None else plan(count)
        for rank, count in enumerate(counts)
    ]
    answers = [agreement(plans, rank) for rank in range(len(plans))]
    assert all(answer == answers[0] for answer in answers)
    error = answers[0]
    assert isinstance(error, dict)
    assert error["code"] == "KV-RNK-001"
    failing = [rank for rank, count in enumerate(counts) if count is None]
    for rank in failing[:8]:
        assert f"rank {rank}: KV-FIT-001: no room on {rank}" in str(error["got"])


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (lambda p: replace(p, policy=replace(p.policy, max_num_seqs=7)), "policy"),
        (lambda p: replace(p, ranks=(replace(p.rank, layout=replace(p.layout, model="another")),)), "model"),
        (lambda p: replace(p, ranks=(replace(p.rank, layout=replace(p.layout, block_size=32)),)), "block size"),
    ],
)
def test_what_differs_is_named(changed: object, part: str) -> None:
    other = changed(plan(50))  # type: ignore[operator]
    error = agreement([plan(50), plan(50), other], 1)
    assert isinstance(error, dict)
    assert error["code"] == "KV-RNK-002"
    assert part in str(error["where"])
    assert "on rank 2" in str(error["got"])


def test_uneven_stages_each_have_their_own_layers() -> None:
    """vllm#34076: each stage divides its own memory by its own cost."""
    layouts = [uniform(layers=n, heads=4, width=128, place=RankPlace(pp=2, pp_rank=s)) for s, n in enumerate((16, 32))]
    memory = (round(3.18 * 2**30), 40 * 2**30)
    plans: list[Plan | KvcoreError] = [
        make_plan(inputs(layout, None, kv_cache_memory=(size,), max_model_len=1000))
        for layout, size in zip(layouts, memory, strict=True)
    ]
    answer = agreement(plans, 0)
    assert isinstance(answer, tuple)
    assert answer[0] * 16 == 104_192
    assert answer[1] == 0


def test_replicas_keep_their_counts_unless_block_numbers_travel() -> None:
    """vllm#46106: three replicas of one rank; a transfer peer must not read past another's end."""
    plans: list[Plan | KvcoreError] = [plan(count) for count in (41_000, 38_500, 40_200)]
    assert agreement(plans, 0, Scope.ALL, replicas=3) == agreement(plans, 1, Scope.ALL, replicas=3)
    assert [agreement(plans, r, Scope.PIPELINE, replicas=3)[0] for r in range(3)] == [41_000, 38_500, 40_200]  # type: ignore[index]
    assert agreement(plans, 0, Scope.ALL, replicas=3)[0] == 38_500  # type: ignore[index]


def test_the_tightest_rank_and_what_stays_idle() -> None:
    """InternLM/lmdeploy#1053: 4096 and 3788 blocks: 308 blocks stay idle on rank 0, and a warning says so."""
    plans: list[Plan | KvcoreError] = [plan(4096), plan(3788)]
    sent = [contribution(p, rank) for rank, p in enumerate(plans)]
    agreed = settle(sent, plans[0], 0)
    assert (agreed.num_blocks, agreed.tightest) == (3788, 1)
    assert agreed.idle_bytes == (308 * uniform(layers=2).bytes_per_block, 0)
    assert agreed.plan.num_blocks == 3788
    assert "KV-W-011" in {warning.code for warning in agreed.plan.warnings}


def test_a_request_that_no_longer_fits_is_an_error_on_all() -> None:
    plans: list[Plan | KvcoreError] = [plan(100, length=1600), plan(50, length=160)]
    same = [plan(100, length=1600), replace(plan(100, length=1600), num_blocks=50)]
    answers = [agreement(list(same), rank) for rank in range(2)]
    assert answers[0] == answers[1]
    assert isinstance(answers[0], dict)
    assert answers[0]["code"] == "KV-RNK-004"
    assert isinstance(agreement(plans, 0), dict)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"\xff", b'{"rank": "x"}'])
def test_what_is_no_contribution(raw: bytes) -> None:
    with pytest.raises(RanksDisagree) as caught:
        Contribution.decode(raw, 3)
    assert (caught.value.code, caught.value.where) == ("KV-RNK-005", "rank 3")
