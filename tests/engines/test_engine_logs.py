"""Start-up logs of real engines: some memory inside what was printed gives exactly the printed figures.

Each case in tests/data/engine_logs.json is a public log (its ``source``), with the published config of its model. The
rules that the figures need belong to a family or to an engine's convention; nothing here knows a case by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.contract import CacheLayout, Growth
from kvcore.conventions import Convention, convention
from kvcore.errors import DoesNotFit
from kvcore.sizing.plan import Plan
from kvcore.sizing.refusal import Refusal

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "engine_logs.json").read_text())
GIB, MIB = 2**30, 2**20
NAMES = {"tensorrt-llm": "trtllm", "lmdeploy (turbomind)": "lmdeploy"}
STATE_DTYPES = {2: "bfloat16", 4: "float32"}


def cases(*methods: str) -> list[Any]:
    return [pytest.param(c, id=c["id"]) for c in CASES if c["calc"]["method"] in methods]


def engine(case: dict[str, Any]) -> Convention:
    """The convention of the engine, at the version that printed the log where versions differ."""
    name = NAMES.get(case["engine"], case["engine"])
    version = re.match(r"\d+\.\d+", case["version"])
    return convention(f"{name}@{version.group()}" if name == "vllm" and version else name)


def layouts(case: dict[str, Any]) -> tuple[CacheLayout, ...]:
    calc = case["calc"]
    return kvcore.layouts(
        str(DATA / case["config_file"]),
        tp=case["tp"],
        pp=case["pp"],
        block_size=case["block_size"],
        dtype=case["dtype"],
        kv_cache_dtype=case["kv_cache_dtype"],
        state_dtype=STATE_DTYPES[calc["ssm_bytes"]] if "ssm_bytes" in calc else None,
        draft_layers=calc.get("extra_layers", 0),
        max_num_batched_tokens=calc.get("max_num_batched_tokens", 8192),
        engine=engine(case),
    )


def memory(case: dict[str, Any]) -> tuple[int, int] | None:
    """The interval of bytes that the printed memory stands for, on the rank with the least."""
    if "available_kv_bytes" in case:
        return case["available_kv_bytes"], case["available_kv_bytes"]
    gib = case.get("available_gib")
    if "per_rank_non_kv_gib" in case:
        gib = Fraction(str(case["requested_gib"])) - max(Fraction(str(n)) for n in case["per_rank_non_kv_gib"])
    if gib is None:
        return None
    half = Fraction(1, 2 * 10 ** case.get("available_decimals", 2))
    # Two rounded figures stand behind a difference.
    half *= 2 if "per_rank_non_kv_gib" in case else 1
    exact = Fraction(str(gib))
    return int((exact - half) * GIB), int((exact + half) * GIB)


def plan(case: dict[str, Any], nbytes: int) -> Plan:
    return kvcore.plan(
        layouts(case),
        kv_cache_memory=nbytes,
        max_model_len=case["max_model_len"],
        engine=engine(case),
        on_shortage="warn",
    )


def candidates(case: dict[str, Any]) -> Iterator[Plan]:
    """A plan for each number of blocks that the printed memory allows; for the printed tokens if it was not printed."""
    layout = min(layouts(case), key=lambda held: -held.bytes_per_block)
    interval = memory(case)
    if interval is None:
        # No memory was printed: any that gives the printed tokens may be meant.
        tokens = case["printed"]["tokens"]
        least = tokens // layout.block_size * len(layout.groups)
        interval = layout.bytes(least), layout.bytes(least + len(layout.groups))
    low, high = interval
    for blocks in range(low // layout.bytes_per_block, high // layout.bytes_per_block + 1):
        yield plan(case, min(high, max(low, layout.bytes(blocks))))


def shows(printed: float, value: Fraction | float | None, decimals: int = 2) -> bool:
    """Whether ``value`` is printed so, rounded to nearest."""
    return value is not None and abs(Fraction(str(printed)) - Fraction(value)) <= Fraction(1, 2 * 10**decimals)


def figures(made: Plan) -> dict[str, object]:
    return {
        "blocks": made.num_blocks,
        "tokens": made.engine_tokens,
        "max_concurrency": made.engine_concurrency,
        "attention_block": made.layout.block_size,
    }


def agrees(case: dict[str, Any], made: Plan) -> bool:
    found = figures(made)
    printed = case["printed"]
    exact = all(printed[name] == found[name] for name in ("blocks", "tokens", "attention_block") if name in printed)
    concurrency = printed.get("max_concurrency")
    return exact and (concurrency is None or shows(concurrency, made.engine_concurrency))


@pytest.mark.parametrize("case", cases("uniform", "hybrid"))
def test_memory_gives_blocks_tokens_and_concurrency(case: dict[str, Any]) -> None:
    tried = list(candidates(case))
    found = [made for made in tried if agrees(case, made)]
    assert found, (case["printed"], [figures(made) for made in tried[:: max(1, len(tried) // 5)]])
    printed, layout = case["printed"], found[0].layout
    if "cpu_blocks" in printed:
        # vLLM's first engine swapped to 4 GiB of host memory by default.
        assert plan(case, 4 * GIB).num_blocks == printed["cpu_blocks"]
    if "padding_layers" in printed:
        empty = len(layout.groups) * layout.slots - layout.num_layers
        kind = max(sum(len(g.layers) for g in layout.groups if g.kind == k) for k in {g.kind for g in layout.groups})
        assert empty == printed["padding_layers"]
        assert shows(printed["padding_waste_pct"], Fraction(empty * 100, kind))
    if "mamba_padding_pct" in printed:
        state = next(group.page_bytes for group in layout.groups if group.growth is Growth.REQUEST)
        assert shows(printed["mamba_padding_pct"], Fraction((layout.page_bytes - state) * 100, state))


@pytest.mark.parametrize("case", cases("need"))
def test_a_refusal_names_what_is_needed_and_what_fits(case: dict[str, Any]) -> None:
    interval = memory(case)
    assert interval is not None
    (layout, *_) = layouts(case)
    needed = layout.bytes(layout.request_blocks(case["max_model_len"]))
    assert shows(case["printed"]["need_gib"], Fraction(needed, GIB))
    lengths = []
    for blocks in range(interval[0] // layout.bytes_per_block, interval[1] // layout.bytes_per_block + 1):
        with pytest.raises(DoesNotFit) as caught:
            kvcore.plan(
                layouts(case),
                kv_cache_memory=min(interval[1], max(interval[0], layout.bytes(blocks))),
                max_model_len=case["max_model_len"],
                engine=engine(case),
            )
        assert isinstance(caught.value.refusal, Refusal)
        lengths.append(caught.value.refusal.largest_model_len)
    assert case["printed"]["est_max_len"] in lengths


@pytest.mark.parametrize("case", cases("pool", "alloc"))
def test_blocks_give_the_bytes_that_were_allocated(case: dict[str, Any]) -> None:
    printed, (layout, *_) = case["printed"], layouts(case)
    if "tokens" in printed:
        kept = engine(case).null_blocks
        blocks = printed.get("blocks", printed["tokens"] // layout.block_size + kept)
        made = plan(case, layout.bytes(blocks))
        assert made.num_blocks == blocks
        assert made.engine_tokens == printed["tokens"]
        stores = [(t.store, t.nbytes) for t in layout.tensors(blocks)]
        for name, store in (("k_gb", "k"), ("v_gb", "v")):
            if name in printed:
                assert shows(printed[name], Fraction(sum(nbytes for s, nbytes in stores if s == store), GIB))
        for name in ("kv_gb", "allocated_gib"):
            if name in printed:
                assert shows(printed[name], Fraction(layout.bytes(blocks), GIB))
    if "block_mb" in printed:
        assert Fraction(layout.bytes_per_block, MIB) == Fraction(str(printed["block_mb"]))
        assert plan(case, layout.bytes(printed["blocks"])).num_blocks == printed["blocks"]


def test_every_log_is_checked() -> None:
    assert len(CASES) == 50
    assert len(cases("uniform", "hybrid", "need", "pool", "alloc")) == 50
    assert all((DATA / case["config_file"]).exists() for case in CASES)
