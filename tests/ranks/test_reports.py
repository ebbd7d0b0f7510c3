"""Public bug reports about ranks that disagree, with their right values."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import kvcore
from kvcore.contract import CacheLayout, Group, Growth, Layer, RankPlace, Store
from kvcore.ranks.settle import AgreedPlan, Contribution, Scope, contribution, settle
from kvcore.sizing.plan import Plan, make_plan

from ..sizing.build import inputs

ROOT = Path(__file__).parents[2]
REPORTS = {r["id"]: r for r in json.loads((ROOT / "tests" / "data" / "rank_reports.json").read_text())}
GIB, MIB = 1024**3, 1024**2


def stage(layers: int, bytes_per_token: int, block_size: int, place: RankPlace) -> CacheLayout:
    held = tuple(Layer(n, (Store("kv", 1, bytes_per_token, "uint8", 1),)) for n in range(layers))
    group = Group("g", "g", Growth.TOKEN, held, block_size=block_size)
    return CacheLayout("reported", block_size, (group,), place=place)


def plan(layout: CacheLayout, available: int, length: int) -> Plan:
    return make_plan(inputs(layout, None, kv_cache_memory=(available,), max_model_len=length))


def agreed(plans: list[Plan], *, rank: int = 0, scope: Scope = Scope.ALL, per_replica: int = 1) -> AgreedPlan:
    sent = [contribution(p, r, r // per_replica).encode() for r, p in enumerate(plans)]
    return settle([Contribution.decode(raw, r) for r, raw in enumerate(sent)], plans[rank], rank, scope)


def case(number: str) -> tuple[Any, Any]:
    report = REPORTS[number]
    return report["inputs"], report["expect"]


def test_b41_each_stage_by_its_own_layers() -> None:
    given, expect = case("B41")
    size = given["block_size"]
    stages = [
        stage(layers, given["bytes_per_token_layer"], size, RankPlace(pp=2, pp_rank=rank))
        for rank, layers in enumerate(given["pp_layers"])
    ]
    blocks = given["max_model_len"] // size
    assert [layout.bytes(blocks) for layout in stages] == [round(gib * GIB) for gib in expect["needs_gib"]]
    small = round(Fraction(str(given["available_gib"][0])) * GIB)
    plans = [plan(stages[0], small, 1024), plan(stages[1], 32 * GIB, 1024)]
    result = agreed(plans)
    assert result.num_blocks * size == expect["rank0_max_len"]
    assert result.tightest == 0


def test_b43_replicas_whose_peers_read_by_number_agree_and_others_do_not() -> None:
    given, expect = case("B43")
    layout = stage(1, 1024, 16, RankPlace())
    plans = [plan(layout, layout.bytes(blocks), 1024) for blocks in given["dp_blocks"]]
    for rank, own in enumerate(given["dp_blocks"]):
        assert agreed(plans, rank=rank).num_blocks == expect["blocks"]
        assert agreed(plans, rank=rank, scope=Scope.PIPELINE).num_blocks == own


def test_b45_the_tightest_is_named_and_what_stays_idle_counted() -> None:
    given, expect = case("B45")
    layout = stage(1, given["block_mib"] * MIB // 16, 16, RankPlace())
    share = Fraction(str(given["fraction"]))
    plans = [plan(layout, int(share * round(Fraction(str(free)) * GIB)), 1024) for free in given["free_gib"]]
    result = agreed(plans)
    assert result.num_blocks == expect["blocks"]
    assert result.tightest == 1
    assert result.idle_bytes == (expect["idle_blocks_rank0"] * given["block_mib"] * MIB, 0)
    warning = result.plan.warnings[-1]
    assert warning.code == "KV-W-011"
    assert "rank 1" in warning.text


def test_b47_a_draft_model_has_as_many_blocks_as_the_model_that_it_drafts_for() -> None:
    """One layout has both models' layers, so one number of blocks is both pools'."""
    given, expect = case("B47")
    model, draft = "examples/models/qwen3-8b.json", "examples/models/tinyllama-1.1b-chat-v1.0.json"
    layout = kvcore.layout(model, draft=draft, block_size=1)
    tokens = expect["draft_tokens_at_least"]
    assert tokens > given["tokens_before_adjust"]
    made = kvcore.plan(layout, kv_cache_memory=layout.bytes(tokens), max_model_len=16)
    assert made.num_blocks == tokens
    shapes = {spec.shape[0] for spec in layout.tensors(made.num_blocks)}
    assert shapes == {tokens}
    assert any(layer.role.value == "draft" for group in layout.groups for layer in group.layers)


def test_every_report_of_the_kind_has_a_test() -> None:
    tested = {name.split("_")[1].upper() for name in globals() if name.startswith("test_b")}
    assert tested == set(REPORTS)
