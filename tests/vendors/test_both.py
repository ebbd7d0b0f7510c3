"""Both vendors: the same answer for the same facts, and no way to a number of blocks."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.contract.capabilities import Capability, Support
from kvcore.contract.runtimes.choose import Runtimes
from kvcore.contract.validate import platform_faults
from kvcore_cuda.platform import CudaBlockSizer
from kvcore_cuda.platform import plugin as cuda
from kvcore_iluvatar.platform import IluvatarBlockSizer
from kvcore_iluvatar.platform import plugin as iluvatar

from .conftest import GIB, PCIS, ROOT, UUIDS, Machine

Make = Callable[..., Machine]
MODEL = "examples/models/qwen3-30b-a3b.json"
PLATFORMS = {"cuda": ("nvml", "cuda"), "iluvatar": ("ixml", "cuda")}


@pytest.mark.parametrize(
    "keys",
    [
        {"free": 3 * GIB, "context": GIB // 4},
        {"free": 2 * GIB + 12345, "reserved": GIB // 2, "pids": "self:1000000000"},
        {"total": 4 * GIB - 1, "free": 4 * GIB - 1},
    ],
)
@pytest.mark.parametrize("options", [(), ("--block-size", "64"), ("--utilization", "0.37")])
def test_equal_facts_give_equal_plans(machine: Make, keys: dict[str, object], options: tuple[str, ...]) -> None:
    plans = {}
    for platform, parts in PLATFORMS.items():
        host = machine(*parts).card(0, **keys)
        arguments = ("--tp", "4", "--max-model-len", "512", "--platform", platform, *options)
        ran = host.kvcore("plan", MODEL, *arguments, "--json")
        assert ran.status == 0, ran.err
        plans[platform] = ran.json["data"]
    assert plans["cuda"]["num_blocks"] == plans["iluvatar"]["num_blocks"] > 0
    for name in ("available_bytes", "cache_bytes", "tokens", "usable_blocks", "unused_bytes"):
        assert plans["cuda"][name] == plans["iluvatar"][name], name
    terms = [[(term["name"], term["signed_bytes"]) for term in plans[name]["terms"]] for name in PLATFORMS]
    assert terms[0] == terms[1]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_plan_allocate_verify_release(machine: Make, platform: str) -> None:
    host = machine(*PLATFORMS[platform]).card(0, free=GIB, context=GIB // 8)
    ran = host.kvcore("allocate", MODEL, "--tp", "4", "--max-model-len", "1024", "--platform", platform)
    assert ran.status == 0, ran.err
    assert "verified" in ran.out
    assert "released" in ran.out
    assert sum(host.held()) == 0


@pytest.mark.parametrize("platform", PLATFORMS)
def test_devices_and_doctor_say_what_was_found(machine: Make, platform: str) -> None:
    host = machine(*PLATFORMS[platform]).card(0)
    ran = host.kvcore("devices", "--platform", platform, "--json")
    assert ran.json["data"]["devices"][0]["key"] == UUIDS[0]
    plugins = {p["name"]: p["detection"] for p in host.kvcore("doctor", "--json").json["data"]["plugins"]}
    other = next(name for name in PLATFORMS if name != platform)
    assert plugins[platform]["state"] == "available"
    assert plugins[other]["state"] == "absent"
    assert plugins[other]["hint"]


def test_a_machine_with_both_vendors_needs_a_word(machine: Make) -> None:
    host = machine("nvml", "ixml").card(0)
    ran = host.kvcore("plan", MODEL, "--tp", "4", "--json")
    assert ran.status == 3
    assert ran.json["error"]["code"] == "KV-PLG-010"
    assert "cuda" in ran.json["error"]["got"]
    assert "iluvatar" in ran.json["error"]["got"]


def test_without_hardware_each_says_why_and_what_would_change_it(machine: Make) -> None:
    plugins = {p["name"]: p["detection"] for p in machine().kvcore("doctor", "--json").json["data"]["plugins"]}
    for name, vendor in (("cuda", "0x10de"), ("iluvatar", "0x1e3e")):
        assert plugins[name]["state"] == "absent"
        assert vendor in plugins[name]["reason"]
        assert plugins[name]["hint"]


@pytest.mark.parametrize("parts", [(), ("nvml",), ("upnp",)], ids=["nothing", "stub", "namesake"])
def test_doctor_says_in_a_line_a_plugin_why_not_and_what_would_change_it(machine: Make, parts: tuple[str, ...]) -> None:
    host = machine(*parts).set({"err.nvmlInit": 9})
    lines = host.kvcore("doctor", COLUMNS="300").out.splitlines()
    for name, vendor in (("cuda", "0x10de"), ("iluvatar", "0x1e3e")):
        at = next(index for index, line in enumerate(lines) if line.split()[:2] == [name, f"kvcore-{name}"])
        assert "absent" in lines[at]
        assert f"no PCI function of vendor {vendor}" in lines[at]
        own = itertools.takewhile(lambda line: line.startswith(" "), lines[at + 1 :])
        assert any(line.strip().startswith("to change it") for line in own)
    if parts == ("nvml",):
        assert "driver not loaded (9)" in "".join(lines)
    if parts == ("upnp",):
        assert "another project's" in "".join(lines)


SOURCES = [*ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("kvcore/contract/runtimes/*.py")]
FORBIDDEN = {"block", "blocks", "cap", "caps", "capped", "budget", "budgets", "token", "tokens"}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield value


def words(identifier: str) -> set[str]:
    # The contract's own name for what a vendor implements.
    plain = identifier.replace("BlockSizer", "")
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", plain)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_vendor_names_blocks_caps_or_budgets(path: Path) -> None:
    found = {name for name in identifiers(ast.parse(path.read_text())) if words(name) & FORBIDDEN}
    assert not found


def test_the_words_are_found_where_they_are() -> None:
    """So that the test above can fail."""
    tree = ast.parse("def determine_available(x):\n    num_blocks = min(x.blockCount, MAX_CAP)")
    assert {name for name in identifiers(tree) if words(name) & FORBIDDEN} == {"num_blocks", "blockCount", "MAX_CAP"}


@pytest.mark.parametrize(("first", "expected"), [("", False), ("import kvcore.sizing.plan; ", True)])
def test_a_vendor_loads_nothing_that_computes_or_knows_a_model(first: str, expected: bool) -> None:
    """With ``first`` it does, so that this can fail."""
    script = (
        f"{first}import sys, kvcore_cuda.platform as a, kvcore_iluvatar.platform as b\n"
        "a.plugin.kvcore_platform(); a.plugin.kvcore_detect(); b.plugin.kvcore_platform(); b.plugin.kvcore_detect()\n"
        "names = ('kvcore.sizing', 'kvcore.geometry', 'kvcore.cache', 'paddle', 'torch')\n"
        "print([m for m in sys.modules if m.startswith(names)])"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout.strip() != "[]") is expected, ran.stdout


@pytest.mark.parametrize("plugin", [cuda, iluvatar], ids=["cuda", "iluvatar"])
def test_a_vendor_states_no_limit_on_blocks_and_sees_no_layout(plugin: object) -> None:
    assert not hasattr(plugin, "kvcore_limits")
    assert not hasattr(plugin, "kvcore_planned")


def test_the_simulated_identities_are_distinct() -> None:
    assert len(set(UUIDS)) == len(UUIDS) == len(set(PCIS)) == len(PCIS)


@pytest.mark.parametrize("make", [CudaBlockSizer, IluvatarBlockSizer])
def test_without_a_runtime_a_vendor_reads_and_declares_that_it_cannot_allocate(
    make: Callable[[], CudaBlockSizer | IluvatarBlockSizer],
) -> None:
    plugin = make()
    plugin.runtimes = Runtimes("kvcore-vendor", ())
    info = plugin.kvcore_platform()
    assert platform_faults(info) == []
    assert info.capabilities[Capability.READ_MEMORY].support is Support.FULL
    for capability in (Capability.ALLOCATE, Capability.RAW_ACCESS, Capability.COMMIT, Capability.MEMORY_STATS):
        assert info.capabilities[capability].support is Support.UNSUPPORTED
        assert "pip install" in str(info.capabilities[capability].reason)
