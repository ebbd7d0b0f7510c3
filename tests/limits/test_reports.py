"""Public bug reports about limits, sizing, overrides and reporting, with their right values."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvcore import api
from kvcore.contract import (
    Basis,
    CacheLayout,
    Device,
    Group,
    Growth,
    Layer,
    MemoryStats,
    Phase,
    Reading,
    Reserve,
    ReserveKind,
    Scope,
    Store,
    hookimpl,
)
from kvcore.errors import DoesNotFit
from kvcore.platforms.replay import ReplayBlockSizer
from kvcore.profiling import profile_run
from kvcore.report.compare import side_of
from kvcore.report.data import plan_data, refusal_data
from kvcore.sizing.budget import Baseline
from kvcore.sizing.diff import difference
from kvcore.sizing.plan import Inputs, Plan, make_plan
from kvcore.sizing.policy import Policy
from kvcore.sizing.refusal import Refusal

from ..cache.conftest import handle_of
from .test_known_kernels import card

ROOT = Path(__file__).parents[2]
REPORTS = {r["id"]: r for r in json.loads((ROOT / "tests" / "data" / "limit_reports.json").read_text())}
GIB, MIB = 1024**3, 1024**2


def size(gib: float) -> int:
    """A printed number of GiB in bytes."""
    return round(Fraction(str(gib)) * GIB)


def layout(bytes_per_token: int, block_size: int = 16, growth: Growth = Growth.TOKEN) -> CacheLayout:
    layer = Layer(0, (Store("kv", 1, bytes_per_token, "uint8", 1),))
    return CacheLayout("reported", block_size, (Group("g", "g", growth, (layer,), block_size=block_size),))


def reserve(name: str, gib: float, *, transient: bool = False, phase: Phase | None = None) -> Reserve:
    kind = ReserveKind.TRANSIENT if transient else ReserveKind.PERSISTENT
    return Reserve(name, size(gib), kind, Basis.MEASURED, "report", name, phase)


def plan_of(held: CacheLayout, total_gib: float, reserves: tuple[Reserve, ...], **policy: Any) -> Plan:
    return make_plan(Inputs((held,), (card(total=size(total_gib)),), Policy(**policy), reserves=reserves))


def test_every_report_is_answered_by_a_test_that_names_it() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for name, report in REPORTS.items():
        assert any(re.search(rf"\b{name}\b", source) for source in sources), f"{name}: {report['title']}"


def test_the_term_that_moved_is_the_peak_of_a_step() -> None:
    """B49: 20,000 tokens start and 29,000 do not, since the step, and so its peak, grew with the limit."""
    given = REPORTS["B49"]["inputs"]
    held = layout(given["bytes_per_token"], given["block_size"])

    def planned(case: dict[str, Any]) -> Plan:
        terms = (reserve("non_torch", given["non_torch_gib"]), reserve("peak", case["peak_gib"], transient=True))
        return plan_of(held, given["total_gib"], terms, max_model_len=case["max_model_len"])

    fits = planned(given["runs"][0])
    with pytest.raises(DoesNotFit) as caught:
        planned(given["runs"][1])
    refused = caught.value.refusal
    assert isinstance(refused, Refusal)
    # The log's figures have two decimals of a GiB, which is five blocks.
    assert abs(fits.num_blocks - given["runs"][0]["blocks"]) <= 5
    assert abs(refused.allowed_blocks - given["runs"][1]["blocks"]) <= 5
    assert refused.needed_blocks == REPORTS["B49"]["expect"]["29000"]["needed_blocks"] == 1813
    one, other = plan_data(fits), refusal_data(refused)
    found = difference(side_of(one, one["num_blocks"]), side_of(other, other["allowed_blocks"]))
    assert [move.name for move in found.moves] == ["peak"]
    # B112 asks the same: a refusal says what moved since the last plan that was accepted (tests/limits/test_diff.py).
    assert found.blocks == refused.allowed_blocks - fits.num_blocks


def test_a_passing_transient_is_not_booked_for_ever() -> None:
    """B56: a first step's workspace charged as graph memory takes a quarter of the pool."""
    small, large = REPORTS["B56"]["inputs"]["graph_gib"]
    tokens = REPORTS["B56"]["inputs"]["tokens"]
    per_token = round((size(large) - size(small)) / (tokens[0] - tokens[1]))
    held = layout(per_token, 1)
    pool = Fraction(tokens[0] * per_token, GIB)
    total = float(round((pool + Fraction(str(small)) + 8) / Fraction(9, 10), 3))
    step = reserve("activations", 8, transient=True)
    right = plan_of(held, total, (reserve("graphs", small), step, reserve("workspace", large - small, transient=True)))
    wrong = plan_of(held, total, (reserve("graphs", large), step))
    assert abs(right.num_blocks - tokens[0]) < 2000
    assert round(wrong.num_blocks / right.num_blocks - 1, 3) == REPORTS["B56"]["expect"]["change"]


def test_buffers_of_communicators_count_whenever_they_appear() -> None:
    """B58: by an own counter, by a baseline from before they existed, or as a reserve of their phase: one number."""
    before, after = map(size, REPORTS["B58"]["inputs"]["free_gib"])
    buffers = before - after
    assert round(buffers / GIB, 2) == REPORTS["B58"]["expect"]["buffers_gib"]
    held, total = layout(131072), size(80)

    def blocks(free: int, own: int | None, baseline: Baseline | None, *reserves: Reserve) -> int:
        reading = Reading("test", Scope.DEVICE, total=total, free=free, own=own)
        facts = replace(card(), readings=(reading,))
        return make_plan(Inputs((held,), (facts,), Policy(), reserves=reserves, baseline=baseline)).num_blocks

    counted = blocks(after, buffers, None)
    assert blocks(after, None, Baseline(before)) == counted
    communicators = Reserve(
        "communicators", buffers, ReserveKind.PERSISTENT, Basis.MEASURED, "test", "buffers", Phase.COMMUNICATORS
    )
    assert blocks(before, 0, None, communicators) == counted
    # A baseline from after they came into being gives them away: 4.52 GiB of other people's memory.
    assert blocks(after, None, Baseline(after)) > counted


def test_tables_that_grow_with_blocks_are_computed_at_the_real_length() -> None:
    """B60: from the layout, at the length that was asked for and not at that of a dry run."""
    given, expected = REPORTS["B60"]["inputs"], REPORTS["B60"]["expect"]
    held = layout(1024, given["block_size"])

    def table(length: int) -> int:
        return int(given["batch"] * given["kv_factor"] * held.request_blocks(length) * given["bytes_per_entry"])

    assert table(given["dry_len"]) / MIB == expected["dry_mib"]
    assert table(given["real_len"]) / MIB == expected["real_mib"]
    assert table(given["real_len"]) * given["graphs"] / MIB == expected["all_graphs_mib"]


def test_a_profile_is_read_before_anything_can_be_released() -> None:
    """B64: on one vendor, emptying the framework's cache also frees the runtime's own memory."""
    assert REPORTS["B64"]["expect"]["use"] == "before"
    order: list[str] = []

    class Recording(ReplayBlockSizer):
        @hookimpl
        def kvcore_memory_stats(self, device: Device) -> MemoryStats:
            order.append("peak")
            return MemoryStats("test", current=1 * GIB, peak=3 * GIB)

        @hookimpl
        def kvcore_reset_peak(self, device: Device) -> None:
            order.append("reset")

        @hookimpl
        def kvcore_read_memory(self, device: Device) -> list[Reading]:
            order.append("read")
            return [Reading("test", Scope.DEVICE, total=8 * GIB, free=4 * GIB, own=2 * GIB * order.count("run"))]

    handle = handle_of(Recording([card()]))
    found = profile_run(handle, handle.device(), lambda: order.append("run"))
    assert order == ["read", "reset", "run", "peak", "read"]
    assert (found.grown_bytes, found.transient_bytes) == (2 * GIB, 2 * GIB)


def test_a_size_is_a_ceiling_also_for_states() -> None:
    """B74: 256 states need 12.28 GiB of 6; 125 fit."""
    given, expected = REPORTS["B74"]["inputs"], REPORTS["B74"]["expect"]
    held = layout(given["state_bytes_per_seq"], growth=Growth.REQUEST)
    assert round(given["max_num_seqs"] * given["state_bytes_per_seq"] / GIB, 2) == expected["state_gib"]
    plan = make_plan(Inputs((held,), (None,), Policy(kv_cache_memory=(size(given["cache_gib"]),), max_model_len=4096)))
    assert plan.num_blocks == expected["max_seqs"] == plan.max_concurrency
    assert plan.cache_bytes <= size(given["cache_gib"])
    with pytest.raises(DoesNotFit) as caught:
        make_plan(
            Inputs(
                (held,),
                (None,),
                Policy(
                    kv_cache_memory=(size(given["cache_gib"]),),
                    num_blocks_override=given["max_num_seqs"],
                    max_model_len=4096,
                ),
            )
        )
    assert isinstance(caught.value.refusal, Refusal)
    assert caught.value.refusal.needed_blocks == given["max_num_seqs"]


def hybrid(**more: Any) -> Plan:
    model = ROOT / "tests" / "data" / "configs" / "gemma-3-12b-it.json"
    layouts = api.layouts(model, engine="vllm", max_num_batched_tokens=2048)
    return api.plan(layouts, kv_cache_memory="40GiB", engine="vllm", max_model_len=32768, **more)


def test_tokens_and_concurrency_are_one_figure() -> None:
    """B106: 33.04 requests of 32,768 tokens are 1,082,655 tokens, whatever another formula says."""
    given = REPORTS["B106"]
    assert round(given["inputs"]["concurrency"] * given["inputs"]["max_model_len"]) == given["expect"]["tokens"]
    plan = hybrid()
    assert plan.layout.pooled
    assert plan.engine_concurrency is not None
    assert plan.engine_tokens == int(plan.engine_concurrency * 32768)


def test_a_request_has_a_fixed_part_and_a_slope() -> None:
    """B110: two numbers, since no ratio of pool and tokens gives both."""
    plan = hybrid()
    data = plan_data(plan)
    names = {"blocks": "num_blocks"}
    for field in REPORTS["B110"]["expect"]["fields"]:
        assert data[names.get(field, field)] is not None  # type: ignore[literal-required]
    cost = [plan.layout.request_blocks(n) * plan.bytes_per_block for n in (8192, 16384, 32768)]
    for n, total in zip((8192, 16384, 32768), cost, strict=True):
        modelled = data["fixed_bytes_per_request"] + data["marginal_bytes_per_token"] * n
        assert abs(modelled - total) <= plan.bytes_per_block * len(plan.layout.groups)
    assert cost[2] * 8192 < cost[0] * 32768, "bytes per token fall with the length, so no single figure is right"
