"""FastDeploy's start-up in real processes of paddle.distributed, on readings of the host and of simulated cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.engines.fastdeploy import CACHE_DTYPES, start_of
from kvcore.errors import PolicyError
from kvcore.geometry.formats import cache_format

from ..ranks.test_processes import free_ports
from ..vendors.conftest import GIB, ROOT, Libraries, Machine
from .fastdeploy_worker import PaddleDisWorkerProc, config

WORKER = Path(__file__).with_name("fastdeploy_worker.py")
PARTS = {"cuda": ("nvml", "cuda"), "iluvatar": ("ixml", "cuda")}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``machines(platform, free)``: the environment of a rank on a simulated machine, or of the host."""
    libraries = Libraries(tmp_path_factory.mktemp("libraries"))

    def environ(platform: str, free: int) -> dict[str, str]:
        if platform == "cpu":
            return {"KVCORE_PLATFORM": "cpu"}
        machine = Machine(tmp_path_factory.mktemp(platform), libraries, PARTS[platform])
        for index in range(4):
            machine.card(index, free=free, context=GIB // 64, pids="self:0")
        machine.write()
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(libraries(part) for part in PARTS[platform]),
            "FAKE_SCENARIO": str(machine.scenario),
            "KVCORE_PLATFORM": platform,
            "KVCORE_RUNTIME": "driver",
        }

    return environ


def start(ranks: list[tuple[str, dict[str, str], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each rank answered; a rank is what it does, its environment, and its configuration."""
    pytest.importorskip("paddle", reason="paddlepaddle is not installed (an extra of kvcore)", exc_type=ImportError)
    size, port = len(ranks), free_ports(len(ranks) + 2)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "CUDA_"))}
    running = []
    for rank, (act, environ, options) in enumerate(ranks):
        paddle = {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(size),
            "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port + rank}",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port + other}" for other in range(size)),
            "PADDLE_MASTER": f"127.0.0.1:{port + size}",
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
        command = [sys.executable, str(WORKER), act, str(rank), str(size), json.dumps(options)]
        running.append(
            subprocess.Popen(
                command,
                env={**clean, **environ, **paddle},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
    answers = []
    try:
        for process in running:
            out, err = process.communicate(timeout=120)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            assert lines, err[-3000:]
            answers.append(json.loads(lines[-1]))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return answers


def test_two_ranks_on_the_host(machines: Any) -> None:
    ranks = [("profiles", machines("cpu", 0), {"utilization": 0.5, "device_ids": "0"})] * 2
    answers = start(ranks)
    assert {a.get("code") for a in answers} == {None}, answers
    (blocks,) = {a["num_blocks"] for a in answers}
    assert blocks == min(answers[0]["counts"]) > 0
    assert [a["allocated"] for a in answers] == [blocks] * 2
    assert all(a["published"] == {"get_profile_block_num.4711": blocks} for a in answers)


def test_four_ranks_on_cards_of_two_vendors_and_unequal_memory(machines: Any) -> None:
    """One rule on every rank: the least of four readings, not a constant on one vendor and a formula on another."""
    ranks = [
        ("profiles", machines("cuda", 5 * GIB), {"device_ids": "0,1,2,3"}),
        ("profiles", machines("iluvatar", 4 * GIB), {"vendor": "iluvatar", "device_ids": "0,1,2,3"}),
        ("profiles", machines("cuda", 3 * GIB), {"device_ids": "0,1,2,3"}),
        ("profiles", machines("iluvatar", 5 * GIB), {"vendor": "iluvatar"}),
    ]
    answers = start(ranks)
    assert {a.get("code") for a in answers} == {None}, answers
    assert [a["platform"] for a in answers] == ["cuda", "iluvatar", "cuda", "iluvatar"]
    (blocks,) = {a["allocated"] for a in answers}
    assert {tuple(a["counts"]) for a in answers} == {tuple(answers[0]["counts"])}
    assert blocks == min(answers[0]["counts"]) == answers[0]["counts"][2]
    assert answers[0]["counts"][0] == answers[0]["counts"][3]  # equal facts, equal count, whichever vendor's
    assert [a["tightest"] for a in answers] == [2] * 4
    assert [bool(a["published"]) for a in answers] == [True, False, False, False]


def test_blocks_that_are_given_are_checked_and_not_profiled(machines: Any) -> None:
    options = {"given": True, "blocks": 100, "device_ids": "0,1"}
    answers = start([("no-profile", machines("cuda", 3 * GIB), options)] * 2)
    assert [a.get("allocated") for a in answers] == [100, 100], answers
    assert [a["published"] for a in answers] == [{}, {}]
    too_many = start([("no-profile", machines("cuda", 3 * GIB), {**options, "blocks": 100_000})] * 2)
    assert {a["code"] for a in too_many} == {"KV-RNK-001"}


@pytest.mark.parametrize(
    ("act", "free", "options", "code", "said"),
    [
        ("raises", 4 * GIB, {}, "KV-RNK-001", "illegal memory access"),
        ("profiles", GIB // 8, {}, "KV-RNK-001", "KV-FIT-001"),
        ("no-cache", 4 * GIB, {}, "KV-RNK-008", "the cache did not fit"),
        ("profiles", 4 * GIB, {"quant": "dynamic_int2_zp"}, "KV-RNK-001", "KV-POL-070"),
    ],
)
def test_one_rank_that_fails_fails_both_in_time(
    machines: Any, act: str, free: int, options: dict[str, Any], code: str, said: str
) -> None:
    """Where ranks polled for a number above 0, one without blocks kept all of them for ever."""
    healthy = ("profiles", machines("cuda", 4 * GIB), {"device_ids": "0,1"})
    answers = start([healthy, (act, machines("iluvatar", free), {"device_ids": "0,1", **options})])
    assert [a["code"] for a in answers] == [code, code], answers
    assert answers[0]["got"] == answers[1]["got"]
    assert said in answers[0]["got"]
    assert all(a["seconds"] < 30 for a in answers)
    if code == "KV-RNK-001":
        assert [a["allocated"] for a in answers] == [None, None]
    if act == "raises":
        assert "illegal memory access" in answers[1]["cause"]


def test_names_of_stored_types_are_known() -> None:
    for name in CACHE_DTYPES.values():
        assert cache_format(name, "bfloat16").name == name


def test_the_configuration_is_read_by_fastdeploys_names() -> None:
    proc = PaddleDisWorkerProc(
        config(4, {"blocks": 2000, "quant": "block_wise_fp8", "device_ids": "4,5,6,7"}), 4, 5, "x"
    )
    start = start_of(proc)
    assert (start.tp, start.block_size, start.utilization, start.held_blocks) == (4, 64, 0.9, 2000)
    assert (start.given_blocks, start.cache_dtype, start.first_of_node) == (None, "fp8_block_wise", False)
    assert start_of(PaddleDisWorkerProc(config(4, {"device_ids": "4,5,6,7"}), 4, 4, "x")).first_of_node
    proc.fd_config.speculative_config = SimpleNamespace(method="mtp", num_gpu_block_expand_ratio=1)
    assert start_of(proc).draft_layers == 1
    proc.fd_config.quant_config.kv_cache_quant_type = "int1"
    with pytest.raises(PolicyError) as raised:
        start_of(proc)
    assert raised.value.code == "KV-POL-070"
