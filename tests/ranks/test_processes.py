"""Real ranks over real libraries: all agree, or all that are left fail with the same error within their time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.sizing.limits import largest_fitting

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")


def library(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.timeout(180), id=name)


LIBRARIES = [library("torch"), library("paddle")]


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, count):
        held = [socket.socket() for _ in range(count)]
        try:
            for number, one in enumerate(held):
                one.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        else:
            return first
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")


def ranks(name: str, acts: list[str], timeout: int = 20, **environ: str) -> list[dict[str, Any] | None]:
    """What each rank answered; None for one that was killed. No process outlives this."""
    pytest.importorskip(name, reason=f"{name} is not installed (an extra of kvcore)", exc_type=ImportError)
    port = free_ports(len(acts) + 2)
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), name, act, str(rank), str(len(acts)), str(port), str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environ},
        )
        for rank, act in enumerate(acts)
    ]
    answers: list[dict[str, Any] | None] = []
    try:
        for process, act in zip(running, acts, strict=True):
            if act == "late":
                answers.append(None)
                continue
            out, err = process.communicate(timeout=120)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            assert lines or process.returncode == -9, err[-3000:]
            answers.append(json.loads(lines[-1]) if lines else None)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return answers


@pytest.mark.parametrize("name", LIBRARIES)
def test_all_ranks_get_the_same(name: str) -> None:
    answers = ranks(name, ["plans"] * 3)
    shared = [{k: v for k, v in (answer or {}).items() if k not in ("rank", "seconds")} for answer in answers]
    assert shared == [{"num_blocks": 298, "tightest": 2, "counts": [300, 299, 298]}] * 3


@pytest.mark.parametrize("name", LIBRARIES)
def test_one_that_fails_fails_all_with_its_reason(name: str) -> None:
    answers = ranks(name, ["plans", "fails", "plans"])
    assert {(a or {}).get("code") for a in answers} == {"KV-RNK-001"}
    assert {(a or {}).get("got") for a in answers} == {"rank 1: KV-FIT-001: this rank has no memory"}


@pytest.mark.parametrize("name", LIBRARIES)
def test_another_model_is_found_out(name: str) -> None:
    answers = ranks(name, ["plans", "other"])
    assert {(a or {}).get("code") for a in answers} == {"KV-RNK-002"}
    assert all("tinyllama" in str((a or {}).get("got")) for a in answers)
    assert answers[0] is not None
    assert answers[1] is not None
    assert answers[0]["got"] == answers[1]["got"]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("act", ["dies", "late"])
def test_one_that_does_not_answer_is_named_within_the_time(name: str, act: str) -> None:
    # Rank 0 keeps the store, so another one has to be the one that is gone.
    answers = ranks(name, ["plans", "plans", act], timeout=5)
    for answer in answers[:2]:
        assert answer is not None
        assert (answer["code"], answer["where"]) == ("KV-RNK-003", "rank 2")
        assert answer["seconds"] < 12


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_allocation_that_fails_on_one_rank_is_given_back_on_all(name: str, tmp_path: Path) -> None:
    card = json.loads((ROOT / "tests/data/profiles/card-80g.json").read_text())
    card["readings"] = [{**card["readings"][0], "total": 2**20, "free": 2**16, "used": 0, "own": 0}]
    profile = tmp_path / "small.json"
    profile.write_text(json.dumps(card))
    answers = ranks(name, ["full", "full"], KVCORE_REPLAY=str(profile))
    assert {(a or {}).get("code") for a in answers} == {"KV-RNK-008"}
    assert {(a or {}).get("got") for a in answers} == {
        "rank 0: KV-OOM-001: the replayed device has no room for an allocation"
    }


@pytest.mark.parametrize("name", LIBRARIES)
def test_out_of_memory_is_tried_again_together_with_fewer_blocks(name: str, tmp_path: Path) -> None:
    """Rank 0's device has less room than its reading said when the plan was made."""
    layout = kvcore.layout("examples/models/tinyllama-1.1b-chat-v1.0.json", block_size=16)
    free = layout.bytes(12) + 4096
    card = json.loads((ROOT / "tests/data/profiles/card-80g.json").read_text())
    card["readings"] = [{**card["readings"][0], "total": 2 * free, "free": free, "used": free, "own": 0}]
    profile = tmp_path / "small.json"
    profile.write_text(json.dumps(card))
    answers = ranks(name, ["full3", "full3"], KVCORE_REPLAY=str(profile))
    blocks = {(a or {}).get("num_blocks") for a in answers}
    assert len(blocks) == 1, answers
    (agreed,) = blocks
    # What 20 blocks a tensor had got hold of before the device was full, in blocks.
    tensors = layout.tensors(20)
    held = free // tensors[0].nbytes * tensors[0].nbytes
    assert agreed == largest_fitting(layout.with_alignment(512), held) < 20
    assert [(a or {}).get("freed", 0) > 0 for a in answers] == [True, True]
    none_left = ranks(name, ["full0", "full0"], KVCORE_REPLAY=str(profile))
    assert {(a or {}).get("code") for a in none_left} == {"KV-RNK-008"}


@pytest.mark.parametrize("name", LIBRARIES)
def test_ranks_that_share_a_device_take_one_turn_together(name: str, tmp_path: Path) -> None:
    answers = ranks(name, ["turns", "turns"], XDG_RUNTIME_DIR=str(tmp_path))
    assert {(a or {}).get("num_blocks") for a in answers} == {299}, answers


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_device_that_another_engine_holds_is_said_on_all_ranks(name: str, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        answers = ranks(name, ["turns", "turns"], timeout=3, XDG_RUNTIME_DIR=str(tmp_path))
    finally:
        holder.kill()
        holder.communicate()
    assert {(a or {}).get("code") for a in answers} == {"KV-RNK-010"}
    after = ranks(name, ["turns", "turns"], XDG_RUNTIME_DIR=str(tmp_path))  # the holder was killed: its lock went too
    assert {(a or {}).get("num_blocks") for a in after} == {299}, after


HOLDER = """
import time
import kvcore
with kvcore.device_turn(kvcore.platform("cpu").device()):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_single_process_agrees_with_itself() -> None:
    from kvcore.ranks.groups import SingleGroup

    layout = kvcore.layout("examples/models/tinyllama-1.1b-chat-v1.0.json", block_size=16)
    plan = kvcore.plan(layout, kv_cache_memory="64MiB", max_model_len=1024)
    agreed = kvcore.agree(plan, SingleGroup())
    assert agreed.plan == plan
    assert agreed.counts == (plan.num_blocks,)
