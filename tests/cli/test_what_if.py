"""Planning for devices and models that are not here: a catalogue, checkpoint sizes, the hub's cache, engines' flags."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.catalogue import catalogue
from kvcore.contract.facts import Basis
from kvcore.contract.validate import reading_faults
from kvcore.report.flags import EMITTED

from .conftest import CARD, QWEN, Ran

Kvcore = Callable[..., Ran]


@pytest.mark.parametrize("name", catalogue())
def test_every_device_of_the_catalogue_plans(kvcore: Kvcore, name: str) -> None:
    entry = catalogue()[name]
    assert entry.source
    (reading,) = entry.facts().readings
    assert reading_faults(reading) == []
    ran = kvcore("plan", "examples/models/tinyllama-1.1b-chat-v1.0.json", "--device-profile", name, "--json")
    assert ran.status == 0
    data = ran.json["data"]
    assert data["device"]["name"] == entry.device
    assert data["available_bytes"] == entry.total * 9 // 10


def test_the_catalogue_is_in_order_and_has_the_cards_that_people_ask_for() -> None:
    names = list(catalogue())
    assert names == sorted(names)
    wanted = "a100-40g a100-80g h100-80g h200-141g h20-96g h800-80g b200 l40s rtx-4090 v100-32g mi300x bi-v150 mr-v100"
    assert set(wanted.split()) <= set(names)


def test_a_device_that_nobody_knows(kvcore: Kvcore) -> None:
    ran = kvcore("plan", QWEN, "--device-profile", "h100-80", "--json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "KV-DOC-001")
    assert ran.json["error"]["hint"].startswith("did you mean h100-80g")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model's folder with its config and the index of its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(QWEN, folder / "config.json")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 61_064_245_248}}))
    return folder


def test_weights_come_from_the_index_beside_the_config(kvcore: Kvcore, checkpoint: Path) -> None:
    for model in (checkpoint, checkpoint / "config.json"):
        data = kvcore("plan", str(model), "--tp", "4", "--device-profile", "h100-80g", "--json").json["data"]
        (weights,) = [term for term in data["terms"] if term["name"] == "weights"]
        assert weights["signed_bytes"] == -61_064_245_248 // 4
        assert weights["basis"] == "modelled"
    given = kvcore(
        "plan", str(checkpoint), "--tp", "4", "--device-profile", "h100-80g", "--weights", "1GiB", "--json"
    ).json["data"]
    assert [t["signed_bytes"] for t in given["terms"] if t["name"] == "weights"] == [-(2**30)]


def test_weights_are_counted_from_the_config_without_an_index(kvcore: Kvcore, tmp_path: Path) -> None:
    more = {"vocab_size": 151936, "num_experts": 128, "moe_intermediate_size": 768}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(Path(QWEN).read_text()), **more}))
    ran = kvcore("plan", str(file), "--tp", "4", "--device-profile", "h100-80g", "--json")
    (weights,) = [term for term in ran.json["data"]["terms"] if term["name"] == "weights"]
    assert weights["source"] == "counted from the config"
    assert 14 * 2**30 < -weights["signed_bytes"] < 15 * 2**30
    assert ran.json["diagnostics"] == []
    unknown = kvcore("plan", QWEN, "--tp", "4", "--device-profile", "h100-80g", "--json")
    assert unknown.json["diagnostics"][0].startswith("the model's weights are not in the sum")


@pytest.mark.parametrize("metadata", [{}, {"total_size": -1}, {"total_size": "61"}, {"total_size": 1.5}, 7])
def test_an_index_without_a_size(kvcore: Kvcore, checkpoint: Path, metadata: object) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata}))
    ran = kvcore("plan", str(checkpoint), "--device-profile", "h100-80g", "--json")
    assert ran.status == 2
    assert ran.json["error"]["code"] in ("KV-CFG-040", "KV-CFG-011")


def test_a_model_by_its_name_in_the_hubs_cache(kvcore: Kvcore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub.constants", reason="huggingface-hub is not installed (an extra)")
    repository = tmp_path / "models--Qwen--Qwen3-30B-A3B"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    shutil.copy(QWEN, snapshot / "config.json")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    assert kvcore("plan", "Qwen/Qwen3-30B-A3B", "--tp", "4", "--kv-cache-memory", "8GiB", "--json").status == 0
    ran = kvcore("plan", "Qwen/Unknown", "--kv-cache-memory", "8GiB", "--json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "KV-CFG-001")


@pytest.mark.parametrize("engine", EMITTED)
def test_flags_carry_the_plan_over(kvcore: Kvcore, engine: str) -> None:
    arguments = ("plan", QWEN, "--tp", "4", "--engine", engine, "--device-profile", CARD, "--max-model-len", "8192")
    data = kvcore(*arguments, "--emit", engine, "--json").json["data"]
    blocks, tokens = data["num_blocks"], data["num_blocks"] * data["block_size"]
    numbers = {str(blocks), str(tokens), str(data["usable_blocks"] * data["block_size"])}
    words = data["flags"].replace("=", " ").replace(",", " ").replace(")", " ").split()
    assert numbers & set(words)
    assert data["flags"] in kvcore(*arguments, "--emit", engine).out
    assert kvcore(*arguments, "--json").json["data"]["flags"] is None


def test_a_nominal_device_is_said_to_be_one(kvcore: Kvcore) -> None:
    for entry in catalogue().values():
        settings = ("--device-profile", entry.name, "--max-model-len", "16", "--weights", "1GiB")
        ran = kvcore("plan", QWEN, *settings, "--json")
        codes = {warning["code"] for warning in ran.json["data"]["warnings"]}
        assert ("KV-W-005" in codes) == (entry.basis is Basis.DECLARED), entry.name
