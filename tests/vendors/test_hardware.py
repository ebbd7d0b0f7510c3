"""Against a real device, where there is one: the same verbs that the simulated ones pass."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kvcore.contract.probes import pci_devices

from .conftest import ROOT

VENDORS = {"cuda": "0x10de", "iluvatar": "0x1e3e"}


@pytest.mark.hardware("any")
@pytest.mark.parametrize("runtime", ["driver", "torch", "paddle"])
@pytest.mark.parametrize("platform", VENDORS)
def test_platform_plans_allocates_verifies_and_releases(platform: str, runtime: str) -> None:
    if not pci_devices(VENDORS[platform]):
        pytest.skip(f"no PCI function of vendor {VENDORS[platform]} on this machine")
    if importlib.util.find_spec({"driver": "cuda"}.get(runtime, runtime)) is None:
        pytest.skip(f"{runtime} is not installed")
    command = ["allocate", "examples/models/qwen3-30b-a3b.json", "--tp", "4", "--max-model-len", "1024"]
    ran = subprocess.run(
        [sys.executable, "-m", "kvcore", *command, "--kv-cache-memory", "1GiB", "--platform", platform, "--json"],
        env={**os.environ, "KVCORE_RUNTIME": runtime},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["schema"]
