"""``kvcore plan`` and ``explain``: the answers, their text, their JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from .conftest import CARD, QWEN, Ran

Kvcore = Callable[..., Ran]
SEED = (QWEN, "--tp", "4", "--block-size", "64", "--kv-cache-memory", "116391936000")


def test_the_seed_case(kvcore: Kvcore) -> None:
    ran = kvcore("plan", *SEED, "--json")
    assert ran.status == 0
    data = ran.json["data"]
    assert data["num_blocks"] == 74_000
    assert data["bytes_per_block"] == 1_572_864
    assert data["cache_bytes"] == 116_391_936_000


def test_an_explanation_adds_up_by_hand(kvcore: Kvcore) -> None:
    data = kvcore("explain", QWEN, "--tp", "2", "--device-profile", CARD, "--weights", "15GiB", "--json").json["data"]
    assert sum(term["signed_bytes"] for term in data["terms"]) == data["available_bytes"]
    assert data["cache_bytes"] + data["unused_bytes"] == data["available_bytes"]
    assert data["num_blocks"] * data["bytes_per_block"] <= data["cache_bytes"]
    assert data["tokens"] == data["usable_blocks"] * data["block_size"]
    assert data["num_blocks"] == min(bound["max_blocks"] for bound in data["bounds"])
    assert sum(group["bytes_per_token"] for group in data["groups"]) == data["bytes_per_token"]
    text = kvcore("explain", QWEN, "--tp", "2", "--device-profile", CARD, "--weights", "15GiB").out
    for term in data["terms"]:
        assert f"{term['signed_bytes']:,}" in text
    assert f"{data['available_bytes']:,}" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", *SEED),
        ("explain", *SEED),
        ("plan", QWEN, "--tp", "2", "--device-profile", CARD, "--weights", "15GiB", "--activations", "2GiB"),
        ("explain", QWEN, "--pp", "3", "--device-profile", CARD, "--reserve", "graphs=1GiB", "--margin", "256MiB"),
        ("plan", QWEN, "--device-profile", CARD, "--max-blocks", "40000", "--reason", "as before"),
        ("plan", QWEN, "--device-profile", CARD, "--index-limit", "bits=32,signed,unit=elements,stride=layer_kv"),
        ("plan", QWEN, "--device-profile", CARD, "--weights", "76GiB"),
        ("plan", QWEN, "--device-profile", CARD, "--num-blocks-override", "10"),
        ("plan", "examples/models/deepseek-v2-lite.json", "--device-profile", CARD, "--kv-cache-dtype", "fp8"),
    ],
    ids=["seed", "explain-seed", "weights", "explain-stages", "cap", "index", "refused", "override", "latent"],
)
def test_text_and_json(kvcore: Kvcore, snapshot: SnapshotAssertion, arguments: tuple[str, ...]) -> None:
    ran = kvcore(*arguments)
    assert (ran.status, ran.out, ran.err) == snapshot(name="text")
    assert kvcore(*arguments, "--json").json == snapshot(name="json")


def test_a_refusal_is_data_too(kvcore: Kvcore) -> None:
    ran = kvcore("plan", QWEN, "--device-profile", CARD, "--weights", "74GiB", "--json")
    assert ran.status == 1
    answer = ran.json
    assert answer["status"] == "no"
    assert answer["error"]["code"] == "KV-FIT-001"
    data = answer["data"]
    assert {"needed_bytes", "available_bytes", "largest_model_len", "remedies"} <= set(data)
    assert data["needed_bytes"] - data["available_bytes"] == data["gap_bytes"] > 0
    named = {remedy["knob"]: remedy["value"] for remedy in data["remedies"]}
    better = kvcore(
        "plan", QWEN, "--device-profile", CARD, "--weights", "74GiB", "--utilization", named["utilization"], "--json"
    )
    assert better.status == 0


def test_a_larger_tp_is_named_where_it_helps(kvcore: Kvcore) -> None:
    ran = kvcore("plan", QWEN, "--kv-cache-memory", "2GiB", "--json")
    assert ran.status == 1
    named = [(remedy["knob"], remedy["value"]) for remedy in ran.json["data"]["remedies"]]
    assert ("tp", "2") in named
    assert ("tp", "1") not in named
    assert kvcore("plan", QWEN, "--kv-cache-memory", "2GiB", "--tp", "2", "--json").status == 0


def test_a_saved_plan_is_explained_the_same(kvcore: Kvcore, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(kvcore("plan", *SEED, "--json").out)
    assert kvcore("explain", str(saved)).out == kvcore("explain", *SEED).out
    document = json.loads(saved.read_text())
    del document["data"]["terms"]
    saved.write_text(json.dumps(document))
    ran = kvcore("explain", str(saved), "--json")
    assert ran.status == 2
    assert ran.json["error"]["code"] == "KV-DOC-006"


def test_saved_answers_that_cannot_be_explained(kvcore: Kvcore, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(kvcore("plan", *SEED, "--json").out)
    ran = kvcore("explain", str(saved), "--tp", "8", "--json")
    assert (ran.status, ran.json["error"]["code"], ran.json["error"]["got"]) == (2, "KV-POL-047", "tp")
    document = json.loads(saved.read_text())
    for figure in ("available_bytes", "cache_bytes", "tokens", "usable_blocks"):
        wrong = {**document, "data": {**document["data"], figure: document["data"][figure] + 1}}
        saved.write_text(json.dumps(wrong))
        assert kvcore("explain", str(saved), "--json").json["error"]["code"] == "KV-DOC-011", figure
    saved.write_text(kvcore("plugins", "--json").out)
    assert kvcore("explain", str(saved), "--json").json["error"]["code"] == "KV-DOC-010"


def test_saved_refusals_and_explanations_are_explained(kvcore: Kvcore, tmp_path: Path) -> None:
    saved = tmp_path / "answer.json"
    saved.write_text(kvcore("explain", *SEED, "--json").out)
    assert kvcore("explain", str(saved)).out == kvcore("explain", *SEED).out
    refused = (QWEN, "--device-profile", CARD, "--weights", "74GiB")
    saved.write_text(kvcore("plan", *refused, "--json").out)
    again = kvcore("explain", str(saved))
    assert again.status == 1
    # The figures and remedies, without the error's first lines.
    assert again.out.strip() in kvcore("plan", *refused).err


def test_a_refusal_names_its_device(kvcore: Kvcore) -> None:
    ran = kvcore("plan", QWEN, "--tp", "2", "--device-profile", CARD, "--weights", "76GiB", "--json")
    assert ran.json["error"]["where"] == "acme device GPU-0001, rank 0"
    ran = kvcore("plan", QWEN, "--weights", "8TiB", "--json")
    assert ran.status == 1
    assert ran.json["diagnostics"][0].startswith("using cpu: ")


def test_one_size_for_each_rank(kvcore: Kvcore) -> None:
    data = kvcore("plan", QWEN, "--tp", "2", "--kv-cache-memory", "3GiB,4GiB", "--json").json["data"]
    assert [rank["available_bytes"] for rank in data["ranks"]] == [3 * 1024**3, 4 * 1024**3]
    assert data["num_blocks"] == data["ranks"][0]["num_blocks"]
    assert data["ranks"][1]["idle_bytes"] > 0
    assert any(warning["code"] == "KV-W-010" for warning in data["warnings"])


def test_concurrency_is_never_rounded_up(kvcore: Kvcore) -> None:
    data = kvcore("plan", *SEED, "--max-model-len", "4736065", "--on-shortage", "warn", "--json").json["data"]
    assert data["max_concurrency"] == 0.99
    assert math.isfinite(data["max_concurrency"])


@pytest.mark.parametrize("terminal", [{"COLUMNS": "80"}, {"COLUMNS": "200"}, {"TERM": "dumb"}, {"COLUMNS": "20"}])
def test_piped_output_is_the_same_at_every_width(process: Kvcore, terminal: dict[str, str]) -> None:
    ran = process("plan", *SEED, **terminal)
    assert ran.status == 0
    assert "116,391,936,000 bytes" in ran.out
    assert "\x1b" not in ran.out
    assert "…" not in ran.out


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_terminal_gets_tables_with_whole_numbers(columns: str) -> None:
    import os
    import pty
    import subprocess
    import sys

    leader, follower = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "kvcore", "explain", *SEED],
        stdout=follower,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": columns, "TERM": "xterm"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert running.wait(timeout=30) == 0
    text = shown.decode()
    assert "116,391,936,000" in text
    assert "1,572,864" in text
    assert "…" not in text
