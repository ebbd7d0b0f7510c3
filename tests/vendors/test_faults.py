"""Every error of every call of both management libraries, calls that hang, figures that are none, drivers that go.

Each ends in a typed error with its remedy, or in the next source with the reason recorded: never in a number that the
failing call gave, never in "no hardware here", which would let the CPU answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.contract.runtimes.management import ASK_ANOTHER, ERRORS, NOT_THIS_VERSION

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]
LIBRARY = {"cuda": "nvml", "iluvatar": "ixml"}
VENDOR = {"cuda": "0x10de", "iluvatar": "0x1e3e"}
SIZER = {"cuda": "CudaBlockSizer", "iluvatar": "IluvatarBlockSizer"}
NUMBERS = [*sorted(ERRORS), 777]  # 777: one that no version of the header has
BOTH = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
COMMON = {
    "init": ("nvmlInit",),
    "count": ("nvmlDeviceGetCount",),
    "handle by index": ("nvmlDeviceGetHandleByIndex",),
    "handle by uuid": ("nvmlDeviceGetHandleByUUID",),
    "uuid": ("nvmlDeviceGetUUID",),
    "name": ("nvmlDeviceGetName",),
    "pci": ("nvmlDeviceGetPciInfo",),
    "memory": BOTH,
    "memory v1": BOTH[:1],
    "memory v2": BOTH[1:],
    "processes": ("nvmlDeviceGetComputeRunningProcesses",),
}
CALLS = {"cuda": {**COMMON, "mig mode": ("nvmlDeviceGetMigMode",)}, "iluvatar": COMMON}
#: Where the device is read all the same: by the other version, or without what the call would have added.
READ_ANYWAY = {
    "cuda": {
        "memory v1": set(NUMBERS),  # version 2 comes first, and answers
        "memory v2": set(NOT_THIS_VERSION),
        "pci": {3, 13},
        "processes": set(ASK_ANOTHER),
        "mig mode": {3, 13},
    },
    "iluvatar": {
        "memory v1": set(NOT_THIS_VERSION),
        "memory v2": set(NUMBERS),
        "pci": {3, 13},
        "processes": set(ASK_ANOTHER),
    },
}


def hardware(folder: Path, platform: str) -> Path:
    """A root where sysfs shows the vendor's card."""
    function = folder / "root/sys/bus/pci/devices/0000:3b:00.0"
    function.mkdir(parents=True, exist_ok=True)
    (function / "vendor").write_text(VENDOR[platform] + "\n")
    (function / "class").write_text("0x030200\n")
    return folder / "root"


def start(host: Machine, platform: str) -> str:
    return f"""
from dataclasses import asdict, replace
from kvcore_{platform}.platform import {SIZER[platform]}
plugin = {SIZER[platform]}(Path({str(hardware(host.folder, platform))!r}))
scenario = Path(os.environ["FAKE_SCENARIO"])
before = scenario.read_text()
def tried(call):
    try:
        return call()
    except KvcoreError as error:
        return error.to_dict()
def read():
    return [asdict(r) for d in plugin.kvcore_devices() for r in plugin.kvcore_read_memory(d)]
"""


@pytest.mark.parametrize("platform", LIBRARY)
def test_every_error_of_every_call(machine: Make, platform: str) -> None:
    host = machine(LIBRARY[platform]).card(0, free=3 * GIB, pids="self:1000", mig=0)
    answers = host.ask(
        start(host, platform)
        + f"""
from kvcore.contract.runtimes.choose import Runtimes
plugin.runtimes = Runtimes("none", ())  # so that the management library is the only source
answer = {{}}
for name, functions in {CALLS[platform]}.items():
    for number in {NUMBERS}:
        scenario.write_text(before + "".join(f"err.{{function}}={{number}}\\n" for function in functions))
        answer[f"{{name}} {{number}}"] = [
            tried(lambda: plugin.kvcore_detect().state.value), tried(read), Path(os.environ["FAKE_BALANCE"]).read_text()
        ] if name != "init" else [tried(lambda: plugin.kvcore_detect().state.value), tried(read), "0"]
"""
    )
    for name in CALLS[platform]:
        for number in NUMBERS:
            detected, said, balance = answers[f"{name} {number}"]
            where = (platform, name, number, said)
            assert balance == "0", where
            # The hardware is here, so it is never absent and the CPU never answers for it.
            assert detected in ("available", "unusable"), where
            if number in READ_ANYWAY[platform].get(name, ()):
                assert [r["free"] for r in said if r["free"] is not None] == [3 * GIB], where
                continue
            check_refused(number, said, name, where)


def check_refused(number: int, said: Any, name: str, where: object) -> None:
    if isinstance(said, dict):
        assert number not in ASK_ANOTHER, where
        assert said["code"].startswith("KV-DEV-02"), where
        assert f"({number})" in said["got"], where
        remedy = None if number not in ERRORS else ERRORS[number].remedy
        assert said["hint"] == remedy, where
        return
    assert number in ASK_ANOTHER, where
    assert all(r["skipped"] and r["total"] is r["free"] is r["used"] is r["own"] is None for r in said), where
    # A card that this process may not ask about is another container's, and no source was skipped.
    if said and number != 4:
        assert any(f"({number})" in r["skipped"] for r in said), where


def test_the_remedy_of_each_error_that_has_one_is_told() -> None:
    told = {number: meaning.remedy for number, meaning in ERRORS.items() if meaning.remedy}
    assert {15, 16, 17, 18, 28, 9, 12, 4} <= told.keys()
    assert "restart the container" in str(told[18])
    assert "reset" in str(told[16])


def test_the_tables_numbers_are_those_of_nvidias_binding() -> None:
    import pynvml

    theirs = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and value}
    assert set(ERRORS) == theirs


SLICES = ("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId")


def test_every_error_while_listing_slices_never_makes_the_card_one_device(machine: Make) -> None:
    host = machine("nvml").card(0, total=80 * GIB, mig=1, slices=1)
    host.set({"0.0.uuid": "MIG-99999999-0000-4000-8000-000000000009", "0.0.name": "Slice", "0.0.total": 10 * GIB})
    answers = host.ask(
        start(host, "cuda")
        + f"""
answer = {{}}
for function in {SLICES}:
    for number in {NUMBERS}:
        scenario.write_text(before + f"err.{{function}}={{number}}\\n")
        answer[f"{{function}} {{number}}"] = tried(read)
"""
    )
    for said in answers.values():
        assert isinstance(said, dict) or not any(r["total"] == 80 * GIB for r in said), said
    hidden = answers["nvmlDeviceGetMigDeviceHandleByIndex 4"]
    assert hidden["code"] == "KV-DEV-026"
    assert "MIG mode" in hidden["what"]


def test_a_slice_that_nvml_may_not_list_is_the_runtimes(machine: Make) -> None:
    """vllm#55381, sglang#2933: the container may see its slice, and NVML may not show it."""
    host = machine("nvml", "cuda").card(0, total=80 * GIB, mig=1, slices=1, runtime_slice=0)
    key = "MIG-99999999-0000-4000-8000-000000000009"
    host.set({"0.0.uuid": key, "0.0.total": 10 * GIB, "err.nvmlDeviceGetMigDeviceHandleByIndex": 4})
    (device,) = host.devices()
    assert (device["key"], device["kind"], device["parent"]) == (key, "partition", UUIDS[0])
    assert not [r for r in host.readings() if r["total"]]
    (reading,) = [r for r in host.readings(KVCORE_ALLOW_CONTEXT="1") if r["total"]]
    assert (reading["source"], reading["total"], reading["scope"]) == ("driver", 10 * GIB, "partition")


@pytest.mark.parametrize(
    ("platform", "call"),
    [(p, c) for p in LIBRARY for c in ("nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetHandleByUUID")]
    + [("cuda", "nvmlDeviceGetMemoryInfo_v2"), ("iluvatar", "nvmlDeviceGetMemoryInfo")],
)
def test_a_library_that_hangs_is_an_error_in_time_and_unusable(machine: Make, platform: str, call: str) -> None:
    host = machine(LIBRARY[platform]).card(0).set({f"slow.{call}": 3})
    read, detected = host.ask(
        start(host, platform)
        + """
import cuda.bindings.driver  # an import takes longer than the limit
plugin.surroundings = replace(plugin.surroundings, seconds=0.5)
answer = [tried(read), plugin.kvcore_detect().state.value]
"""
    )
    assert read["code"] == "KV-DEV-025"
    assert LIBRARY[platform] in read["where"]
    assert "0.5 s" in read["got"]
    assert detected == ("available" if "UUID" in call or "Memory" in call else "unusable")


IN_TIME = """
import cuda.bindings.driver
plugin.surroundings = replace(plugin.surroundings, seconds=0.5)
answer = tried(read)
"""


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetPCIBusId"])
def test_a_driver_that_hangs_is_an_error_in_time(machine: Make, call: str) -> None:
    host = machine("nvml", "cuda").card(0).set({f"slow.{call}": 3})
    code = start(host, "cuda") + IN_TIME
    assert host.ask(code)["where"] == "driver"


def test_a_driver_that_hangs_when_asked_what_is_free_is_an_error_in_time(machine: Make) -> None:
    host = machine("cuda").card(0).set({"slow.cuMemGetInfo": 3})
    code = start(host, "cuda") + IN_TIME
    readings = host.ask(code, KVCORE_ALLOW_CONTEXT="1")
    assert "driver did not answer" in next(r["skipped"] for r in readings if r["source"] == "driver")


#: Figures that no device has: total, free, used, each as the library gives it.
NONSENSE = [
    {"raw.free": 8 * GIB + 1},
    {"raw.free": 2**64 - 1},
    {"raw.free": 2**63},
    {"total": 2**64 - 1, "raw.free": 2**64 - 1},
    {"total": 0},
    {"total": 0, "raw.free": GIB},
]


@pytest.mark.parametrize("platform", LIBRARY)
def test_figures_that_are_none_are_never_taken(machine: Make, platform: str) -> None:
    """free above total, below zero (as an unsigned number), a total of 0: no plan, and no plan of the CPU."""
    host = machine(LIBRARY[platform]).card(0)
    answers = host.ask(
        f"""
        import kvcore
        scenario = Path(os.environ["FAKE_SCENARIO"])
        before = scenario.read_text()
        layout = kvcore.layout("examples/models/qwen3-30b-a3b.json", tp=4)
        answer = []
        for keys in {NONSENSE}:
            scenario.write_text(before + "".join(f"0.{{name}}={{value}}\\n" for name, value in keys.items()))
            try:
                answer.append(kvcore.plan(layout, kvcore.platform("{platform}").device(), max_model_len=512).num_blocks)
            except KvcoreError as error:
                answer.append([error.code, error.got])
        scenario.write_text(before)
        plan = kvcore.plan(layout, kvcore.platform("{platform}").device(), max_model_len=512)
        answer.append(plan.num_blocks)
        """
    )
    *refused, good = answers
    assert good > 0
    assert [code for code, _ in refused] == ["KV-PLAN-002"] * len(NONSENSE), refused
    assert all(LIBRARY[platform] in got for _, got in refused)


@pytest.mark.parametrize("platform", LIBRARY)
@pytest.mark.parametrize("gone", ["err.nvmlInit=9", "err.nvmlInit=12", "err.nvmlDeviceGetHandleByUUID=6", "count=0"])
def test_a_driver_that_disappears_between_two_calls(machine: Make, platform: str, gone: str) -> None:
    host = machine(LIBRARY[platform]).card(0)
    answer = host.ask(
        start(host, platform)
        + f"""
device = plugin.kvcore_devices()[0]
scenario.write_text(before + "{gone}\\n")
plugin.kvcore_read_memory(device)
"""
    )
    assert answer["code"] == "KV-DEV-027"
    assert answer["hint"]


def test_an_old_driver_without_the_third_list_of_processes_is_read(machine: Make) -> None:
    """nvidia-ml-py answers NVMLLibraryMismatchError, which is no NVMLError: the driver is old, not broken."""
    reading = machine("nvml_v1").card(0, free=3 * GIB, pids="self:1000").readings()[1]
    assert (reading["free"], reading["own"]) == (3 * GIB, 1000)


def test_the_slicers_limit_bounds_what_nvml_says_and_the_runtimes_refusal_is_recorded(machine: Make) -> None:
    """HAMi: NVML shows the limit even above the card's size, and the runtime refuses once usage is above it."""
    host = machine("nvml", "cuda").card(0, total=96 * GIB, runtime_total=32 * GIB)
    host.set({"err.cuMemGetInfo": 1})
    readings = host.ask(
        """
        from dataclasses import asdict
        from kvcore_cuda.platform import plugin
        device = plugin.kvcore_devices()[0]
        buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 21, 256, 1 << 21))
        answer = [asdict(r) for r in plugin.kvcore_read_memory(device)]
        """,
        CUDA_DEVICE_MEMORY_LIMIT_0="24g",
    )
    by_source = {r["source"]: r for r in readings}
    assert by_source["CUDA_DEVICE_MEMORY_LIMIT_0"]["total"] == 24 * GIB
    assert "CUDA_ERROR_INVALID_VALUE" in by_source["driver"]["skipped"]
    assert min(r["total"] for r in readings if r["total"]) == 24 * GIB
