"""The tutorial's plugin: what ``kvcore new-plugin toy`` makes, filled in until the suite passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.new_plugin import render
from kvcore.contract import Capability

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "kvcore-toy"
CARDS = "TOY-5f3a:1GiB:96MiB,TOY-81c0:1GiB:96MiB"
MODEL = "examples/models/qwen3-30b-a3b.json"


Kvcore = Callable[..., tuple[int, Any]]


@pytest.fixture
def kvcore(as_installed: Callable[[Path], str]) -> Kvcore:
    """``kvcore(*arguments)`` in a process that has the toy; keywords are environment variables."""

    def call(*arguments: str, **environ: str) -> tuple[int, Any]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "TOY_"))}
        env["PYTHONPATH"] = as_installed(TOY)
        command = [sys.executable, "-W", "error", "-m", "kvcore", *arguments, "--json"]
        ran = subprocess.run(command, env={**env, **environ}, capture_output=True, text=True, timeout=100, cwd=ROOT)
        assert ran.stdout, ran.stderr
        return ran.returncode, json.loads(ran.stdout)

    return call


def test_it_is_the_template_filled_in() -> None:
    """The platform's module and the README differ; the rest is as ``kvcore new-plugin toy --vendor Toy`` makes it."""
    for name, text in render("toy", "Toy").items():
        if name not in ("README.md", "src/kvcore_toy/platform.py"):
            assert (TOY / name).read_text(encoding="utf-8") == text, f"examples/kvcore-toy/{name} has drifted"


def test_the_suite_passes(kvcore: Kvcore) -> None:
    status, answer = kvcore("conformance", "toy", TOY_CARDS=CARDS)
    (platform,) = answer["data"]["platforms"]
    outcomes = {record["check"]: record["outcome"] for record in answer["data"]["records"]}
    assert status == 0
    assert platform["conforms"]
    assert platform["complete"]
    assert {check: outcome for check, outcome in outcomes.items() if outcome != "passed"} == {
        "ALC-005": "not applicable"  # a toy card bounds no single allocation
    }


def test_without_cards_it_is_absent_and_badly_described_unusable(kvcore: Kvcore) -> None:
    for cards, state in (("", "absent"), ("TOY-1", "unusable"), ("TOY-1:1GiX:0", "unusable")):
        _, answer = kvcore("doctor", TOY_CARDS=cards)
        (found,) = (p["detection"] for p in answer["data"]["plugins"] if p["name"] == "toy")
        assert found["state"] == state, cards
        assert "TOY_CARDS" in found["hint"]


def test_kvcore_plans_and_allocates_on_it(kvcore: Kvcore) -> None:
    settings = ("--tp", "4", "--platform", "toy", "--max-model-len", "128")
    status, answer = kvcore("plan", MODEL, *settings, TOY_CARDS=CARDS)
    assert status == 0
    assert answer["data"]["cache_bytes"] == 96 * 1024**2
    status, answer = kvcore(
        "allocate", MODEL, *settings, "--device", "TOY-81c0", "--kv-cache-memory", "32MiB", TOY_CARDS=CARDS
    )
    assert status == 0
    found = answer["data"]["allocation"]
    assert found["allocated_bytes"] == found["released_bytes"] == answer["data"]["cache_bytes"] > 0


def test_it_declares_every_capability() -> None:
    text = (TOY / "src/kvcore_toy/platform.py").read_text()
    assert all(f"Capability.{capability.name}: " in text for capability in Capability)
