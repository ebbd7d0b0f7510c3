"""Against a real device, where there is one: what the simulated ones pass, and what only hardware can tell.

``pytest -k platform`` selects these. Each runs in a process of its own; a platform whose hardware is absent is skipped
with what would make it available, one whose hardware is here and does not work fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.contract import DetectionState
from kvcore_cuda.platform import plugin as cuda
from kvcore_iluvatar.platform import plugin as iluvatar

from .conftest import ROOT, Machine

MODEL = "examples/models/qwen3-30b-a3b.json"
PLUGINS = {"cuda": cuda, "iluvatar": iluvatar}
RUNTIMES = ("driver", "torch", "paddle")
#: By how much a runtime's total may differ from the management library's, which counts what firmware keeps.
TOLERANCE = 20

pytestmark = pytest.mark.hardware("any")


@pytest.fixture(params=PLUGINS)
def platform(request: pytest.FixtureRequest) -> str:
    found = PLUGINS[request.param].kvcore_detect()
    if found.state is DetectionState.ABSENT:
        pytest.skip(f"{request.param}: {found.reason}; {found.hint}")
    assert found.state is DetectionState.AVAILABLE, f"{found.reason}; {found.hint}"
    return str(request.param)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, platform: str) -> str:
    if PLUGINS[platform].runtimes.named(request.param) is None:  # type: ignore[attr-defined]
        pytest.skip(f"no {request.param} for {platform} is installed")
    return str(request.param)


def process(*command: str, **environ: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environ}, capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def kvcore(*arguments: str, **environ: str) -> Any:
    answer = json.loads(process("-m", "kvcore", *arguments, "--json", **environ))
    return answer["data"]


def ask(platform: str, code: str, **environ: str) -> Any:
    start = f"""
import json
from kvcore.contract import *
from kvcore_{platform}.platform import plugin
device = plugin.kvcore_devices()[0]
MIB = 1 << 20
def read(name):
    return next((getattr(r, name) for r in plugin.kvcore_read_memory(device) if getattr(r, name) is not None), None)
"""
    script = f"{start}\n{textwrap.dedent(code)}\nprint(json.dumps(answer))"
    return json.loads(process("-c", script, **environ).splitlines()[-1])


def test_platform_plans_allocates_verifies_and_releases(platform: str, runtime: str) -> None:
    sizes = ("--tp", "4", "--max-model-len", "1024", "--kv-cache-memory", "1GiB")
    answer = kvcore("allocate", MODEL, *sizes, "--platform", platform, KVCORE_RUNTIME=runtime)
    found = answer["allocation"]
    assert found["device"]["platform"] == platform
    assert found["committed_bytes"] == found["allocated_bytes"] == found["released_bytes"] > 2**29
    assert found["verified_bytes"] > 0


def test_platform_takes_what_it_says_and_gives_it_back(platform: str, runtime: str) -> None:
    """Free memory falls by the buffer while it is held, and own grows by it; both by the driver's account."""
    answer = ask(
        platform,
        """
        small = plugin.kvcore_allocate(device, AllocationRequest("context", 2 * MIB, 256, 2 * MIB))
        free, own = read("free"), read("own")
        buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 512 * MIB, 256, 512 * MIB))
        taken, grown = free - read("free"), None if own is None or read("own") is None else read("own") - own
        plugin.kvcore_release(buffer)
        answer = [taken, grown, free - read("free")]
        plugin.kvcore_release(small)
        """,
        KVCORE_RUNTIME=runtime,
    )
    taken, grown, kept = answer
    assert 512 * 2**20 <= taken <= 544 * 2**20
    assert grown is None or 512 * 2**20 <= grown <= 544 * 2**20
    assert abs(kept) <= 32 * 2**20


def test_platform_reads_one_device_from_every_source(platform: str, runtime: str) -> None:
    """An index into the wrong list, a card for its slice, KiB for bytes: the totals would differ by far."""
    totals = ask(
        platform,
        """
        buffer = plugin.kvcore_allocate(device, AllocationRequest("context", 2 * MIB, 256, 2 * MIB))
        answer = {r.source: r.total for r in plugin.kvcore_read_memory(device) if r.total is not None}
        plugin.kvcore_release(buffer)
        """,
        KVCORE_RUNTIME=runtime,
    )
    assert totals
    assert max(totals.values()) - min(totals.values()) <= max(totals.values()) // TOLERANCE, totals


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_platform_shares_its_memory_with_a_framework(platform: str, runtime: str, framework: str) -> None:
    answer = ask(
        platform,
        f"""
        declared = plugin.kvcore_platform().capabilities[Capability("tensor_{framework}")]
        if declared.support is not Support.FULL:
            answer = declared.reason
        else:
            buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 2 * MIB, 256, 2 * MIB))
            plugin.kvcore_write(buffer, 4096, bytes(range(16)))
            tensor = plugin.kvcore_tensor(buffer, TensorView((2, 8), "uint8", 4096), "{framework}")
            seen = [int(value) for row in tensor.cpu().tolist() for value in row]
            plugin.kvcore_write(buffer, 4096 + 5, bytes([99]))
            answer = [seen, int(tensor.cpu().tolist()[0][5])]
            del tensor
            plugin.kvcore_release(buffer)
        """,
        KVCORE_RUNTIME=runtime,
    )
    if isinstance(answer, str):
        pytest.skip(answer)
    assert answer == [list(range(16)), 99]


def test_platform_records_a_profile_that_gives_the_same_plan(platform: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    process("-m", "kvcore", "record", "--platform", platform, "--output", str(path))
    sizes = (MODEL, "--tp", "4", "--max-model-len", "1024", "--kv-cache-memory", "1GiB")
    live = kvcore("plan", *sizes, "--platform", platform)
    replayed = kvcore("plan", *sizes, "--device-profile", str(path))
    assert live["num_blocks"] == replayed["num_blocks"] > 0


def test_these_tests_pass_on_a_simulated_card(machine: Callable[..., Machine]) -> None:
    """So that they are known to work on the day that there is a device. Only the driver's back end can be simulated."""
    host = machine("nvml", "cuda").card(0, pids="self:0", context=2**28)
    alone = ("-p", "no:cacheprovider", "--confcutdir", str(Path(__file__).parent))
    ran = host.process("-m", "pytest", "-q", "-rs", *alone, __file__, "-k", "platform and cuda")
    assert ran.status == 0, ran.out
    assert " passed" in ran.out
