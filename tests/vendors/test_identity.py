"""Which device is which: the runtime's ordinals against the management library's order, slices, other vendors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.contract.runtimes.softlimit import paddle_limit_reading, soft_limit_reading

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]
SLICE = "MIG-99999999-0000-4000-8000-000000000009"


def two_cards(host: Machine) -> Machine:
    """NVML counts by PCI address; the runtime's first is the faster, NVML's second."""
    return host.card(0, name="Slow", free=GIB).card(1, name="Fast", free=7 * GIB).set({"ordinals": "1,0"})


def test_the_runtime_names_its_ordinals(machine: Make) -> None:
    devices = two_cards(machine("nvml", "cuda")).devices()
    assert [(d["index"], d["key"], d["name"], d["mapping"]) for d in devices] == [
        (0, UUIDS[1], "Fast", "runtime"),
        (1, UUIDS[0], "Slow", "runtime"),
    ]


def test_a_reading_is_of_the_card_that_the_ordinal_names(machine: Make) -> None:
    """B11: an index into the wrong list measures the wrong card."""
    assert two_cards(machine("nvml", "cuda")).readings(index=0)[0]["free"] == 7 * GIB


def test_without_a_runtime_unlike_cards_by_number_are_no_answer(machine: Make) -> None:
    answer = two_cards(machine("nvml")).devices()
    assert answer["code"] == "KV-DEV-026"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in answer["hint"]


def test_without_a_runtime_the_order_that_was_set_is_taken(machine: Make) -> None:
    devices = two_cards(machine("nvml")).devices(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1")
    assert [(d["index"], d["key"], d["visible"], d["mapping"]) for d in devices] == [(0, UUIDS[1], "1", "environment")]


def test_without_a_runtime_a_uuid_prefix_is_enough(machine: Make) -> None:
    """vllm#51677: NVML itself takes no prefixes."""
    (device,) = two_cards(machine("nvml")).devices(CUDA_VISIBLE_DEVICES=UUIDS[1][:8])
    assert device["key"] == UUIDS[1]


def test_hiding_every_device_is_no_silent_cpu(machine: Make) -> None:
    """vllm#8402: an empty variable is not an unset one."""
    host = machine("nvml").card(0)
    found = host.detection(CUDA_VISIBLE_DEVICES="")
    assert found["state"] == "unusable"
    assert "CUDA_VISIBLE_DEVICES" in found["hint"]
    ran = host.kvcore("plan", "examples/models/qwen3-30b-a3b.json", "--tp", "4", "--json", CUDA_VISIBLE_DEVICES="")
    assert ran.status == 3
    assert ran.json["error"]["code"] == "KV-PLG-010"


def sliced(host: Machine, slices: int = 1) -> Machine:
    host.card(0, total=80 * GIB, mig=1, slices=slices, runtime_slice=0)
    for n in range(slices):
        host.set(
            {
                f"0.{n}.uuid": SLICE[:-1] + str(9 - n),
                f"0.{n}.name": "Simulated slice",
                f"0.{n}.total": (10 - n) * GIB,
                f"0.{n}.gi": n + 1,
                f"0.{n}.ci": 0,
            }
        )
    return host


@pytest.mark.parametrize("parts", [("nvml",), ("nvml", "cuda")])
def test_a_slice_is_measured_as_a_slice(machine: Make, parts: tuple[str, ...]) -> None:
    """B09: the card's 80 GiB are not the slice's 10."""
    host = sliced(machine(*parts))
    (device,) = host.devices()
    assert (device["key"], device["kind"], device["parent"]) == (SLICE, "partition", UUIDS[0])
    reading = host.readings()[0]
    assert (reading["total"], reading["scope"]) == (10 * GIB, "partition")


def test_the_runtime_says_which_of_several_slices(machine: Make) -> None:
    (device,) = sliced(machine("nvml", "cuda"), 2).devices()
    assert device["key"] == SLICE


@pytest.mark.parametrize("name", [SLICE[:-1] + "8", f"MIG-{UUIDS[0]}/2/0"])
def test_without_a_runtime_a_slice_is_named_by_either_form(machine: Make, name: str) -> None:
    host = sliced(machine("nvml"), 2)
    (device,) = host.devices(CUDA_VISIBLE_DEVICES=name)
    assert device["key"] == SLICE[:-1] + "8"
    assert host.readings(CUDA_VISIBLE_DEVICES=name)[0]["total"] == 9 * GIB


def test_a_refused_slice_is_never_the_whole_card(machine: Make) -> None:
    """An unprivileged container may not ask; then the runtime is asked, if it may be."""
    host = sliced(machine("nvml", "cuda")).set({"err.nvmlDeviceGetMemoryInfo_v2": 4, "err.nvmlDeviceGetMemoryInfo": 4})
    readings = host.readings()
    assert all(reading["total"] is None for reading in readings)
    assert "KVCORE_ALLOW_CONTEXT" in readings[1]["skipped"]
    allowed = host.readings(KVCORE_ALLOW_CONTEXT="1")
    assert [r["total"] for r in allowed if r["total"] is not None] == [10 * GIB]


def pci(folder: Path, vendor: str) -> Path:
    for address in ("0000:3b:00.0", "0000:5b:00.0"):
        function = folder / "root/sys/bus/pci/devices" / address
        function.mkdir(parents=True, exist_ok=True)
        (function / "vendor").write_text(f"{vendor}\n")
        (function / "class").write_text("0x030200\n")
    return folder / "root"


def without_management(host: Machine, vendor: str, **environ: str) -> object:
    root = pci(host.folder, vendor)
    return host.ask(
        f"""
        from kvcore_cuda.platform import CudaBlockSizer
        plugin = CudaBlockSizer(Path({str(root)!r}))
        found = plugin.kvcore_detect()
        devices = plugin.kvcore_devices()
        readings = [(r.source, r.total, r.free) for d in devices for r in plugin.kvcore_read_memory(d) if not r.skipped]
        answer = [found.state.value, [d.key for d in devices], readings]
        """,
        **environ,
    )


def test_without_a_management_library_the_runtime_is_asked(machine: Make) -> None:
    """A container without the utility capability: CUDA works and NVML is not mounted."""
    host = machine("cuda").card(0, context=GIB)
    assert without_management(host, "0x10de") == ["available", [UUIDS[0]], []]
    assert without_management(host, "0x10de", KVCORE_ALLOW_CONTEXT="1") == [
        "available",
        [UUIDS[0]],
        [["driver", 8 * GIB, 7 * GIB]],
    ]


def test_another_vendors_libcuda_is_not_claimed(machine: Make) -> None:
    """CoreX brings a libcuda.so.1 of its own."""
    assert without_management(machine("cuda").card(0), "0x1e3e") == ["absent", [], []]


def test_hardware_without_any_library_is_unusable(machine: Make) -> None:
    host = machine()
    assert host.ask(
        f"""
        from kvcore_cuda.platform import CudaBlockSizer
        found = CudaBlockSizer(Path({str(pci(host.folder, "0x10de"))!r})).kvcore_detect()
        answer = [found.state.value, found.hint]
        """
    ) == [
        "unusable",
        "install the NVIDIA driver; in a container, NVIDIA_DRIVER_CAPABILITIES must include utility",
    ]


def unified(host: Machine, available_kib: int, limit: int | None = None) -> dict[str, object]:
    root = host.folder / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 125367738 kB\nMemFree: 27812140 kB\nMemAvailable: {available_kib} kB\n"
    )
    if limit is not None:
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/\n")
        (root / "proc/self/mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        for name, text in (("memory.max", limit), ("memory.current", GIB), ("memory.stat", "inactive_file 0")):
            (group / name).write_text(f"{text}\n")
    answer: dict[str, object] = host.ask(
        f"""
        from kvcore_cuda.platform import CudaBlockSizer
        plugin = CudaBlockSizer(Path({str(root)!r}))
        device = plugin.kvcore_devices()[0]
        readings = plugin.kvcore_read_memory(device)
        answer = {{
            "kind": device.kind.value,
            "used": [(r.source, r.total, r.free, r.own) for r in readings if not r.skipped],
            "skipped": [r.source for r in readings if r.skipped],
            "reserves": [(r.name, r.nbytes) for r in plugin.kvcore_reserves(device, Phase.PROFILE)],
        }}
        """
    )
    return answer


@pytest.mark.parametrize(
    "keys",
    [
        {"integrated": 1, "total": 0},
        {"integrated": 1, "total": 119 * GIB, "free": 26 * GIB},  # answers, with the strictly free memory
        {"addressing": 2, "total": 0},
    ],
)
def test_unified_memory_is_what_the_host_can_give(machine: Make, keys: dict[str, int]) -> None:
    """B13: 26.5 GiB strictly free, 56.3 GiB to be had."""
    answer = unified(machine("nvml", "cuda").card(0, **keys), 59063644)
    assert answer["kind"] == "unified"
    assert [row[:3] for row in answer["used"]] == [["meminfo", 125367738 * 1024, 59063644 * 1024]]  # type: ignore[attr-defined]
    assert ["unified_memory", -(-125367738 * 1024 // 20)] in answer["reserves"]  # type: ignore[operator]


def test_unified_memory_keeps_to_the_containers_limit(machine: Make) -> None:
    answer = unified(machine("nvml", "cuda").card(0, integrated=1, total=0), 59063644, limit=16 * GIB)
    assert ["cgroup_v2", 16 * GIB, 15 * GIB, None] in answer["used"]  # type: ignore[operator]


def test_discrete_memory_that_is_shared_by_address_alone_stays_discrete(machine: Make) -> None:
    """GH200 shares page tables with the host, and has memory of its own."""
    (device,) = machine("nvml", "cuda").card(0, addressing=2).devices()
    assert device["kind"] == "discrete"


@pytest.mark.parametrize(
    ("text", "total"),
    [("1g", GIB), ("1G", GIB), ("512m", GIB // 2), ("64k", 65536), ("23028m", 24146608128), ("1000", 1000)],
)
def test_a_slicers_limit_is_a_reading(text: str, total: int) -> None:
    reading = soft_limit_reading(0, {"CUDA_DEVICE_MEMORY_LIMIT": text})
    assert reading is not None
    assert (reading.total, reading.free, reading.scope.value) == (total, None, "soft")


def test_a_devices_own_limit_comes_first_and_0_is_none() -> None:
    environ = {"CUDA_DEVICE_MEMORY_LIMIT": "4g", "CUDA_DEVICE_MEMORY_LIMIT_1": "2g", "CUDA_DEVICE_MEMORY_LIMIT_2": "0"}
    totals = [None if r is None else r.total for r in (soft_limit_reading(n, environ) for n in range(3))]
    assert totals == [4 * GIB, 2 * GIB, None]


@pytest.mark.parametrize(
    "text", ["much", "-1", "1t", "1.5g", "99999999999999999999", "18446744073709551615", "1g 2g", "\x1b[0m"]
)
def test_a_limit_that_is_no_size_is_a_skipped_source(text: str) -> None:
    reading = soft_limit_reading(0, {"CUDA_DEVICE_MEMORY_LIMIT": text})
    assert reading is not None
    assert reading.total is None
    assert reading.skipped is not None
    assert "\x1b" not in reading.skipped


def test_a_wrapped_counter_never_becomes_memory(machine: Make) -> None:
    """HAMi: usage above the limit makes free wrap around; the sum refuses the reading and has no other."""
    host = machine("nvml").card(0, raw__free=2**64 - 1813956)
    ran = host.kvcore("plan", "examples/models/qwen3-30b-a3b.json", "--tp", "4", "--platform", "cuda", "--json")
    assert ran.status != 0
    assert ran.json["error"]["code"] == "KV-PLAN-002"
    assert "below zero" in ran.json["error"]["got"]


@pytest.mark.parametrize(("text", "total"), [("512", GIB // 2), ("0", None), ("", None)])
def test_the_limit_of_paddles_allocator_is_a_reading(text: str, total: int | None) -> None:
    reading = paddle_limit_reading({"FLAGS_gpu_memory_limit_mb": text})
    assert (None if reading is None else reading.total) == total


@pytest.mark.parametrize("text", ["half", "-1", "1.5", "9" * 30, "9" * 5000])
def test_a_limit_of_paddles_that_is_no_size_is_skipped(text: str) -> None:
    reading = paddle_limit_reading({"FLAGS_gpu_memory_limit_mb": text})
    assert reading is not None
    assert reading.skipped is not None
    assert reading.total is None


def test_paddles_limit_counts_where_paddle_can_allocate(machine: Make) -> None:
    host = machine("nvml").card(0)
    limited = {"FLAGS_gpu_memory_limit_mb": "512"}
    assert {r["total"] for r in host.readings(**limited)} == {8 * GIB, None}
    if importlib.util.find_spec("paddle") is None:
        pytest.skip("paddlepaddle is not installed")
    built = host.folder / "paddlepaddle_gpu-3.3.1.dist-info"
    built.mkdir()
    (built / "METADATA").write_text("Metadata-Version: 2.1\nName: paddlepaddle-gpu\nVersion: 3.3.1\n")
    totals = {r["total"] for r in host.readings(**limited, PYTHONPATH=str(host.folder))}
    assert totals == {8 * GIB, GIB // 2, None}


def test_corexs_libcuda_in_front_of_nvidias_is_never_written_to(machine: Make) -> None:
    """LD_PRELOAD of CoreX's libcuda.so.1: NVML lists NVIDIA's card, and the runtime's first device is Iluvatar's."""
    host = machine("nvml", "cuda").card(0).card(1).set({"count": 1, "ordinals": "1"})
    root = pci(host.folder, "0x10de")
    (root / "sys/bus/pci/devices/0000:5b:00.0/vendor").write_text("0x1e3e\n")
    start = f"""
        from kvcore_cuda.platform import CudaBlockSizer
        plugin = CudaBlockSizer(Path({str(root)!r}))
        device = plugin.kvcore_devices()[0]
        readings = plugin.kvcore_read_memory(device)
        skipped = [r.skipped for r in readings if r.source == "driver"]
        answer = [device.key, device.mapping.value, readings[0].source, skipped]
        """
    assert host.ask(start) == [UUIDS[0], "order", "nvml_v2", ["its devices are another vendor's"]]
    refused = host.ask(start + "plugin.kvcore_allocate(device, AllocationRequest('t', 1 << 21, 256, 1 << 21))\n")
    assert refused["code"] == "KV-DEV-029"
    assert sum(host.held()) == 0
