"""The tutorial's plugin: what ``kvcore new-plugin toy`` makes, filled in until the suite passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.new_plugin import render
from kvcore.contract import Capability

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "kvcore-toy"
CARDS = "TOY-5f3a:1GiB:96MiB,TOY-81c0:1GiB:96MiB"
MODEL = "examples/models/qwen3-30b-a3b.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metadata that an installation writes: the entry point of the toy's pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((TOY / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / f"kvcore_toy-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text(f"[kvcore]\ntoy = {project['entry-points']['kvcore']['toy']}\n")
    return folder


def kvcore(site: Path, *arguments: str, **environ: str) -> tuple[int, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "TOY_"))}
    env["PYTHONPATH"] = os.pathsep.join((str(site), str(TOY / "src")))
    command = [sys.executable, "-W", "error", "-m", "kvcore", *arguments, "--json"]
    ran = subprocess.run(command, env={**env, **environ}, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def test_it_is_the_template_filled_in() -> None:
    """The platform's module and the README differ; the rest is as ``kvcore new-plugin toy --vendor Toy`` makes it."""
    for name, text in render("toy", "Toy").items():
        if name not in ("README.md", "src/kvcore_toy/platform.py"):
            assert (TOY / name).read_text(encoding="utf-8") == text, f"examples/kvcore-toy/{name} has drifted"


def test_the_suite_passes(site: Path) -> None:
    status, answer = kvcore(site, "conformance", "toy", TOY_CARDS=CARDS)
    (platform,) = answer["data"]["platforms"]
    outcomes = {record["check"]: record["outcome"] for record in answer["data"]["records"]}
    assert status == 0
    assert platform["conforms"]
    assert platform["complete"]
    assert {check: outcome for check, outcome in outcomes.items() if outcome != "passed"} == {
        "ALC-005": "not applicable"  # a toy card bounds no single allocation
    }


def test_without_cards_it_is_absent_and_badly_described_unusable(site: Path) -> None:
    for cards, state in (("", "absent"), ("TOY-1", "unusable"), ("TOY-1:1GiX:0", "unusable")):
        _, answer = kvcore(site, "doctor", TOY_CARDS=cards)
        (found,) = (p["detection"] for p in answer["data"]["plugins"] if p["name"] == "toy")
        assert found["state"] == state, cards
        assert "TOY_CARDS" in found["hint"]


def test_kvcore_plans_and_allocates_on_it(site: Path) -> None:
    settings = ("--tp", "4", "--platform", "toy", "--max-model-len", "128")
    status, answer = kvcore(site, "plan", MODEL, *settings, TOY_CARDS=CARDS)
    assert status == 0
    assert answer["data"]["cache_bytes"] == 96 * 1024**2
    status, answer = kvcore(
        site, "allocate", MODEL, *settings, "--device", "TOY-81c0", "--kv-cache-memory", "32MiB", TOY_CARDS=CARDS
    )
    assert status == 0
    found = answer["data"]["allocation"]
    assert found["allocated_bytes"] == found["released_bytes"] == answer["data"]["cache_bytes"] > 0


def test_it_declares_every_capability() -> None:
    text = (TOY / "src/kvcore_toy/platform.py").read_text()
    assert all(f"Capability.{capability.name}: " in text for capability in Capability)
