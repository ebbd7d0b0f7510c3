"""vLLM's own planner, asked about 260 random caches: kvcore gives the same blocks, bytes and tokens.

The answers are recorded (tests/data/vllm_planner.json); benchmarks/peers/compare_vllm.py has the command that remakes
them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.contract import Growth
from kvcore.errors import DoesNotFit
from kvcore.sizing.refusal import Refusal

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "vllm_planner.json").read_text())
CASES = [pytest.param(case, id=f"{number}-{case['config']}") for number, case in enumerate(RECORDED["cases"])]


def layout_of(case: dict[str, Any]) -> kvcore.CacheLayout:
    return kvcore.layout(
        str(DATA / "configs" / case["config"]),
        tp=case["tp"],
        dtype="bfloat16",
        max_num_batched_tokens=case["max_num_batched_tokens"],
        engine="vllm@0.32",
    )


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_vllm(case: dict[str, Any]) -> None:
    layout, said = layout_of(case), case["vllm"]
    settings = {"kv_cache_memory": case["available"], "max_model_len": case["max_model_len"], "engine": "vllm@0.32"}
    if "error" in said:
        with pytest.raises(DoesNotFit) as caught:
            kvcore.plan(layout, **settings)
        assert isinstance(caught.value.refusal, Refusal)
        estimated = re.search(r"estimated maximum model length is (\d+)", said["message"])
        assert estimated is not None
        assert caught.value.refusal.largest_model_len == int(estimated.group(1))
        return
    plan = kvcore.plan(layout, **settings)
    assert plan.num_blocks == said["num_blocks"]
    assert plan.bytes_per_block == said["bytes_per_block"]
    if any(group.growth is Growth.ENCODER for group in layout.groups):
        # vLLM takes the encoder's length from its scheduler's limit, which the oracle leaves at its default;
        # kvcore takes the positions that the model declares.
        return
    assert plan.engine_tokens == said["tokens"]
    assert plan.engine_concurrency is not None
    assert abs(float(plan.engine_concurrency) - said["max_concurrency"]) < 1e-6 * (1 + said["max_concurrency"])


def test_enough_was_asked() -> None:
    assert len(CASES) >= 200
    assert RECORDED["versions"]["vllm"] == "0.32.0"
    assert len({case["config"] for case in RECORDED["cases"]}) >= 60
