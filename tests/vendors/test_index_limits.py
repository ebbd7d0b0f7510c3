"""A narrow kernel clamps a plan with its reason on every platform, by the core alone: no vendor knows of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import GIB, Machine

MODEL = "examples/models/qwen3-30b-a3b.json"
PARTS = {"cpu": (), "replay": (), "cuda": ("nvml", "cuda"), "iluvatar": ("ixml", "cuda")}
#: 48 layers of K and V with one head of 128 values of 2 bytes, in blocks of 64 tokens.
PACKED_BLOCK = 48 * 2 * 128 * 2 * 64


@pytest.mark.parametrize("platform", PARTS)
def test_a_narrow_kernel_clamps_on_every_platform(machine: Callable[..., Machine], platform: str) -> None:
    host = machine(*PARTS[platform])
    if PARTS[platform]:
        host.card(0, total=80 * GIB, free=79 * GIB)
    settings = ("--tp", "4", "--block-size", "64", "--max-model-len", "4096", "--platform", platform)
    environ = {"KVCORE_REPLAY": "tests/data/profiles/card-80g.json"} if platform == "replay" else {}
    ran = host.kvcore("plan", MODEL, *settings, "--kernel", "aiter-packed", "--json", **environ)
    assert ran.status == 0, ran
    plan = ran.json["data"]
    assert plan["device"]["platform"] == platform
    assert plan["num_blocks"] == 2**31 // PACKED_BLOCK == 1365
    assert plan["binding"]["kind"] == "index"
    assert plan["binding"]["source"] == "kernel aiter-packed"
    assert plan["binding"]["first_unsafe_block"] == 1365
    assert plan["binding"]["idle_bytes"] > 0
    assert plan["blocks_without_binding"] > 1365
    lifts = {lift["knob"]: lift for lift in plan["lifts"]}
    assert lifts["index"]["num_blocks"] == plan["blocks_without_binding"]
    assert lifts["layout"]["num_blocks"] > 1365
