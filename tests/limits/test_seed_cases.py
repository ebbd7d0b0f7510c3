"""The two published baselines, from a card's memory, a share and named terms; and what the old cap cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.app import run
from kvcore.documents import load_device_profile

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "examples" / "profiles"
MODELS = ROOT / "examples" / "models"
MIB = 1024**2

#: Profile -> model, ranks, published blocks, and from which power of ten the figure was printed.
CASES = {
    "qwen3-30b-a3b-tp4-141g": ("qwen3-30b-a3b", 4, 74_000, 1000),
    "qwen3-30b-a3b-tp4-80g": ("qwen3-30b-a3b", 4, 36_592, 1),
    "ernie-4.5-vl-28b-a3b-tp2-141g": ("ernie-4.5-vl-28b-a3b", 2, 65_400, 100),
}
BYTES_PER_BLOCK = {"qwen3-30b-a3b": 48 * 2 * 1 * 128 * 2 * 64, "ernie-4.5-vl-28b-a3b": 28 * 2 * 2 * 128 * 2 * 64}


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``planned(profile, *settings)``: the data of the plan of a case."""

    def call(profile: str, *settings: str) -> Any:
        model, tp, _, _ = CASES[profile]
        card = str(PROFILES / f"{profile}.json")
        line = ["plan", str(MODELS / f"{model}.json"), "--tp", str(tp), "--engine", "fastdeploy"]
        assert run([*line, "--max-model-len", "32768", "--device-profile", card, *settings, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["data"]

    return call


@pytest.mark.parametrize("profile", CASES)
def test_the_published_number_follows(planned: Callable[..., Any], profile: str) -> None:
    model, _, published, printed = CASES[profile]
    plan = planned(profile)
    assert round(plan["num_blocks"] / printed) * printed == published
    assert plan["num_blocks"] == published
    assert plan["bytes_per_block"] == BYTES_PER_BLOCK[model]
    assert plan["binding"]["kind"] == "memory"
    assert plan["block_size"] == 64


@pytest.mark.parametrize("profile", CASES)
def test_what_is_derived_says_so_and_can_be_derived_again(profile: str) -> None:
    model, _, published, _ = CASES[profile]
    facts = load_device_profile(PROFILES / f"{profile}.json")
    (reading,) = facts.readings
    assert reading.total is not None
    others = sum(reserve.nbytes for reserve in facts.reserves if reserve.name != "everything_else")
    (left,) = (reserve.nbytes for reserve in facts.reserves if reserve.name == "everything_else")
    derived = reading.total * 9 // 10 - published * BYTES_PER_BLOCK[model] - others
    assert left == derived // MIB * MIB
    for reserve in facts.reserves:
        assert reserve.reason.startswith("derived: ")
        assert reserve.basis.value == "modelled"


def test_one_term_explains_both_baselines(planned: Callable[..., Any]) -> None:
    """What was left beside weights and cache on the 80 GB card gives the other number on the 141 GB card."""
    facts = load_device_profile(PROFILES / "qwen3-30b-a3b-tp4-80g.json")
    (left,) = (reserve.nbytes for reserve in facts.reserves if reserve.name == "everything_else")
    plan = planned("qwen3-30b-a3b-tp4-141g", "--reserve", f"everything_else={left}")
    assert round(plan["num_blocks"], -3) == 74_000


@pytest.mark.parametrize(
    ("profile", "lost", "percent"),
    [("qwen3-30b-a3b-tp4-141g", 34_000, 46), ("ernie-4.5-vl-28b-a3b-tp2-141g", 25_400, 39)],
)
def test_what_the_old_cap_cost(planned: Callable[..., Any], profile: str, lost: int, percent: int) -> None:
    model, _, published, _ = CASES[profile]
    plan = planned(profile, "--max-blocks", "40000", "--reason", "too many blocks crash a kernel")
    assert (plan["num_blocks"], plan["binding"]["kind"]) == (40_000, "cap")
    assert plan["blocks_without_binding"] - plan["num_blocks"] == lost
    assert round(lost * 100 / published) == percent
    assert plan["binding"]["idle_bytes"] == lost * BYTES_PER_BLOCK[model]
    assert plan["binding"]["reason"] == "too many blocks crash a kernel"


def test_a_cap_needs_a_reason_and_cannot_raise(
    planned: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned("qwen3-30b-a3b-tp4-80g", "--max-blocks", "74000", "--reason", "hope")
    assert (plan["num_blocks"], plan["binding"]["kind"]) == (36_592, "memory")
    assert plan["blocks_without_binding"] == 36_592
    assert run(["plan", str(MODELS / "qwen3-30b-a3b.json"), "--kv-cache-memory", "8GiB", "--max-blocks", "9"]) == 2
    assert "KV-POL-021" in capsys.readouterr().err
    monkeypatch.setenv("KVCORE_MAX_BLOCKS", "40000")
    monkeypatch.setenv("KVCORE_MAX_BLOCKS_REASON", "from the environment")
    plan = planned("qwen3-30b-a3b-tp4-141g")
    assert plan["binding"]["source"] == "KVCORE_MAX_BLOCKS"
    assert plan["num_blocks"] == 40_000


def test_the_cap_was_unsafe_where_it_mattered_and_wasteful_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """B39: with 8 heads a rank the index ends below 40,000 blocks, with 2 far above."""
    for tp, expected in (("1", 32_768), ("4", 131_072)):
        line = ["plan", str(MODELS / "qwen3-8b.json"), "--tp", tp, "--engine", "fastdeploy"]
        run([*line, "--kernel", "fastdeploy-triton-rope-write", "--kv-cache-memory", "800GiB", "--json"])
        bounds = json.loads(capsys.readouterr().out)["data"]["bounds"]
        assert [b["max_blocks"] for b in bounds if b["kind"] == "index"] == [expected]


def test_a_share_of_a_declared_total_is_not_called_measured(planned: Callable[..., Any]) -> None:
    (share,) = [term for term in planned("qwen3-30b-a3b-tp4-141g")["terms"] if term["name"] == "share"]
    assert share["basis"] == "declared"
