"""Public reports of memory that was read wrongly, each with its figures (tests/data/memory_reports.json)."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvcore.contract.facts import AllocationLimits, Device, DeviceFacts, Mapping, MemoryKind, Reading, Scope
from kvcore.contract.runtimes.unified import unified_readings
from kvcore.contract.validate import reading_faults
from kvcore.sizing.budget import Baseline, Budget, make_budget
from kvcore.sizing.policy import Policy

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]
MIB, KIB, GB = 1024**2, 1024, 10**9
REPORTS = {report["id"]: report for report in json.loads(Path("tests/data/memory_reports.json").read_text())}
SLICE = "MIG-99999999-0000-4000-8000-000000000009"


def report(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return REPORTS[name]["inputs"], REPORTS[name]["right"]["expect"]


def gib(value: float) -> int:
    return int(Fraction(str(value)) * GIB)


def rounded(size: int) -> float:
    return round(size / GIB, 2)


def budget(readings: list[Reading], share: float, baseline: Baseline | None = None) -> Budget:
    device = Device("cuda", 0, UUIDS[0], "Simulated", MemoryKind.DISCRETE, Mapping.RUNTIME)
    facts = DeviceFacts(device, tuple(readings), AllocationLimits())
    return make_budget(facts, (), Policy(utilization=Fraction(str(share))), 0, baseline=baseline)


def as_readings(rows: list[dict[str, Any]]) -> list[Reading]:
    names = ("total", "free", "used", "reserved", "own", "note", "skipped")
    return [Reading(r["source"], Scope(r["scope"]), **{name: r[name] for name in names}) for r in rows]


def test_b01_a_neighbours_memory_is_not_this_processs() -> None:
    given, expected = report("B01")
    total = 96 * GIB
    before, after = given["non_torch_at_start"], given["non_torch_after_profile"]
    readings = [Reading("nvml_v1", Scope.DEVICE, total=total, free=total - after, used=after)]
    made = budget(readings, given["utilization"], Baseline(free=total - before))
    assert made.own == expected["own_non_torch_bytes"]


def test_b03_two_engines_that_start_together_get_what_they_get_apart() -> None:
    given, expected = report("B03")
    total = gib(given["total_gib"])
    own = [gib(share * 32) - gib(kv) for share, kv in zip(given["utilization"], expected["kv_gib"], strict=True)]
    for other in (0, max(own)):
        answers = [
            budget([Reading("nvml_v2", Scope.DEVICE, total=total, free=total - mine - other, own=mine)], share)
            for share, mine in zip(given["utilization"], own, strict=True)
        ]
        assert [rounded(answer.available) for answer in answers] == expected["kv_gib"]


def test_b05_what_is_in_use_is_taken_off_once() -> None:
    given, expected = report("B05")
    total, own = given["total_mib"] * MIB, gib(given["own_non_kv_gib"])
    free = total - given["used_at_start_mib"] * MIB - own
    made = budget([Reading("smi", Scope.DEVICE, total=total, free=free, own=own)], given["utilization"])
    assert abs(made.available / GIB / given["vendor_divisor"] - expected["kv_gib"]) < 0.005


def test_b07_a_counter_below_zero_is_refused_and_the_next_source_decides(machine: Make) -> None:
    given, expected = report("B07")
    host = machine("nvml").card(0, total=given["limit_bytes"], free=GIB, used=given["used_raw"])
    readings = as_readings(host.readings())
    assert given["used_raw"] - 2**64 == expected["as_signed"]
    assert bool(reading_faults(readings[0])) is not expected["valid"]
    other = Reading("driver", Scope.DEVICE, total=2 * GIB, free=GIB)
    made = budget([*readings, other], 1)
    assert made.capacity == 2 * GIB
    assert any("nvml_v2" in text for _, text in made.warnings)


def test_b09_a_slice_is_not_its_card(machine: Make) -> None:
    given, expected = report("B09")
    host = machine("nvml").card(0, total=given["nvml_total_gb"] * GB, mig=1, slices=1)
    host.set({"0.0.uuid": SLICE, "0.0.name": "Slice", "0.0.total": given["slice_total_gb"] * GB})
    made = budget(as_readings(host.readings()), given["utilization"])
    assert made.capacity == expected["total_gb"] * GB
    assert made.available == int(expected["budget_gb"] * GB)


def test_b11_a_slice_is_measured_on_its_own_card(machine: Make) -> None:
    given, expected = report("B11")
    host = machine("nvml")
    for index in range(4):
        host.card(index, total=80 * GIB, free=given["cards"]["0"]["free_gib"] * GIB)
    host.set({"3.mig": 1, "3.slices": 1, "3.0.uuid": SLICE, "3.0.name": "Slice", "3.0.total": 16 * GIB})
    host.set({"3.0.free": given["cards"]["3"]["free_gib"] * GIB})
    (device,) = host.devices(CUDA_VISIBLE_DEVICES=SLICE)
    assert (device["index"], device["key"], device["parent"]) == (given["logical_index"], SLICE, UUIDS[3])
    assert host.readings(CUDA_VISIBLE_DEVICES=SLICE)[0]["free"] == expected["free_gib"] * GIB


def test_b13_unified_memory_counts_what_can_be_had(tmp_path: Path) -> None:
    given, expected = report("B13")
    total, available = gib(given["total_gib"]) // KIB, gib(given["free_at_check_gib"]) // KIB
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {total} kB\nMemFree: {given['mem_free_kib']} kB\nMemAvailable: {available} kB\n"
    )
    made = budget(unified_readings(0, tmp_path), given["utilization"])
    (lacking,) = [term for term in made.terms if term.name == "not_free"]
    assert rounded(-lacking.nbytes) == expected["shortfall_gib"]
    assert made.free is not None
    assert made.capacity is not None
    assert int(made.free / made.capacity * 1000) / 1000 == expected["max_utilization"]


def test_b15_the_figures_of_a_reading_are_of_one_pool() -> None:
    given, expected = report("B15")
    total, free = gib(given["vram_total_gib"]), gib(given["vram_free_gib"])
    made = budget([Reading("vram", Scope.DEVICE, total=total, free=free, own=0)], given["utilization"])
    assert made.available == gib(expected["budget_gib"])


def test_b17_the_least_of_independent_totals_counts(machine: Make) -> None:
    """A runtime that reports the linked cards as one: 192 GiB of a 32 GiB card."""
    given, expected = report("B17")
    host = machine("nvml", "cuda").card(0, total=given["card_gib"] * GIB, pids="self:0")
    host.set({"0.runtime_total": given["runtime_total_gib"] * GIB, "0.runtime_free": given["runtime_total_gib"] * GIB})
    rows = host.ask(
        """
        from dataclasses import asdict
        from kvcore_cuda.platform import plugin
        device = plugin.kvcore_devices()[0]
        plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 21, 256, 1 << 21))
        answer = [asdict(r) for r in plugin.kvcore_read_memory(device)]
        """
    )
    readings = as_readings(rows)
    assert {r.source for r in readings if r.total is not None} == {"nvml_v2", "driver"}
    made = budget([r for r in readings if r.own is None or r.own < GIB], given["utilization"])
    share = next(term for term in made.terms if term.name == "share")
    assert rounded(share.nbytes) == expected["budget_gib"]


def test_every_report_is_a_test() -> None:
    assert {name for name in globals() if name.startswith("test_b") and name[6:8].isdigit()} == {
        next(n for n in globals() if n.startswith(f"test_{key.lower()}_")) for key in REPORTS
    }
    with pytest.raises(KeyError):
        report("B00")
