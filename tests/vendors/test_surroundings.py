"""WSL, Jetson and containers: hardware that is no PCI function of this host, and what is told where nothing works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]


def wsl(folder: Path) -> Path:
    """Windows' devices: /dev/dxg, and PCI functions of Microsoft's."""
    root = folder / "root"
    function = root / "sys/bus/pci/devices/5582:00:00.0"
    function.mkdir(parents=True)
    (function / "vendor").write_text("0x1414\n")
    (function / "class").write_text("0x030200\n")
    (root / "dev").mkdir()
    (root / "dev/dxg").touch()
    return root


def jetson(folder: Path) -> Path:
    root = folder / "root"
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/device-tree/compatible").write_bytes(b"nvidia,p3737-0000\0nvidia,tegra234\0")
    (root / "proc/meminfo").write_text("MemTotal: 31457280 kB\nMemFree: 1048576 kB\nMemAvailable: 20971520 kB\n")
    return root


def node(folder: Path) -> Path:
    """A sandbox that hides PCI; the kernel driver's device node is here."""
    (folder / "root/dev").mkdir(parents=True)
    (folder / "root/dev/nvidia0").touch()
    (folder / "root/dev/nvidiactl").touch()
    return folder / "root"


def seen(host: Machine, root: Path, **environ: str) -> Any:
    return host.ask(
        f"""
        from dataclasses import asdict
        from kvcore_cuda.platform import CudaBlockSizer
        plugin = CudaBlockSizer(Path({str(root)!r}))
        found = plugin.kvcore_detect()
        devices = plugin.kvcore_devices()
        answer = {{
            "state": found.state.value, "reason": found.reason, "evidence": [e.name for e in found.evidence],
            "devices": [asdict(d) for d in devices],
            "readings": [asdict(r) for d in devices for r in plugin.kvcore_read_memory(d)],
            "reserves": [r.name for d in devices for r in plugin.kvcore_reserves(d, Phase.PROFILE)],
        }}
        """,
        **environ,
    )


def test_wsl_is_read_by_version_1_and_gives_no_bytes_of_processes(machine: Make) -> None:
    """nvitop#30: version 2 is Unknown there; nvtop#432: processes have no bytes."""
    host = machine("nvml", "cuda").card(0, free=7 * GIB, pids="self:none,77:none")
    host.set({"err.nvmlDeviceGetMemoryInfo_v2": 999})
    answer = seen(host, wsl(host.folder))
    assert answer["state"] == "available"
    assert [d["key"] for d in answer["devices"]] == [UUIDS[0]]
    (reading,) = [r for r in answer["readings"] if r["free"] is not None]
    assert (reading["source"], reading["free"], reading["own"]) == ("nvml_v1", 7 * GIB, None)


def test_wsl_without_nvml_is_read_through_the_runtime(machine: Make) -> None:
    """The PCI address that the runtime names is Windows': this host's kernel knows no function there."""
    host = machine("cuda").card(0, context=GIB)
    answer = seen(host, wsl(host.folder), KVCORE_ALLOW_CONTEXT="1")
    assert answer["state"] == "available"
    assert [(r["source"], r["free"]) for r in answer["readings"] if r["free"] is not None] == [("driver", 7 * GIB)]


@pytest.mark.parametrize("number", [9, 3, 999])
def test_wsl_with_a_driver_that_does_not_work_is_not_absent(machine: Make, number: int) -> None:
    """Absent would let the CPU answer."""
    host = machine("nvml").card(0).set({"err.nvmlInit": number})
    answer = seen(host, wsl(host.folder))
    assert answer["state"] == "unusable"
    assert "/dev/dxg" in answer["reason"]
    assert f"({number})" in answer["reason"]
    assert "hardware" in answer["evidence"]


def test_windows_devices_without_nvidias_libraries_are_not_nvidias(machine: Make) -> None:
    """Every vendor's device has /dev/dxg."""
    host = machine()
    assert seen(host, wsl(host.folder))["state"] == "absent"


def test_another_vendors_pci_function_is_not_claimed_on_wsl(machine: Make) -> None:
    host = machine("cuda").card(0, pci="5582:00:00.0")
    assert seen(host, wsl(host.folder))["devices"] == []


@pytest.mark.parametrize("management", ["nvml", None])
def test_jetson_is_unified_with_and_without_nvml(machine: Make, management: str | None) -> None:
    """pytorch#112121: NVML is missing or refuses; the memory is the host's, and so is what can be had of it."""
    host = machine(*filter(None, (management, "cuda"))).card(0, integrated=1, total=30 * GIB, free=GIB)
    host.set({f"err.nvmlDeviceGetMemoryInfo{version}": 3 for version in ("", "_v2")})
    host.set({"err.nvmlDeviceGetPciInfo": 3})
    answer = seen(host, jetson(host.folder))
    assert answer["state"] == "available"
    (device,) = answer["devices"]
    assert (device["kind"], device["mapping"]) == ("unified", "runtime")
    figures = [(r["source"], r["total"], r["free"]) for r in answer["readings"] if r["free"] is not None]
    assert figures == [("meminfo", 30 * GIB, 20 * GIB)]
    assert "unified_memory" in answer["reserves"]


def test_jetson_without_any_library_is_not_absent(machine: Make) -> None:
    host = machine()
    answer = seen(host, jetson(host.folder))
    assert answer["state"] == "unusable"
    assert "Tegra" in answer["reason"]


@pytest.mark.parametrize("keys", [{"integrated": 1}, {"addressing": 2}])
def test_unified_memory_whose_query_is_not_supported(machine: Make, keys: dict[str, int]) -> None:
    """nvitop#208: GB10 answers NOT_SUPPORTED to both versions, which is the same as a total of 0."""
    host = machine("nvml", "cuda").card(0, **keys)
    host.set({"err.nvmlDeviceGetMemoryInfo": 3, "err.nvmlDeviceGetMemoryInfo_v2": 3})
    answer = seen(host, jetson(host.folder))
    assert answer["devices"][0]["kind"] == "unified"
    assert [r["source"] for r in answer["readings"] if r["free"] is not None] == ["meminfo"]
    assert {"nvml_v1", "nvml_v2"} <= {r["source"] for r in answer["readings"] if "not supported" in str(r["skipped"])}


def test_a_device_node_where_pci_is_hidden_is_hardware(machine: Make) -> None:
    host = machine("nvml").card(0).set({"err.nvmlInit": 9})
    answer = seen(host, node(host.folder))
    assert answer["state"] == "unusable"
    assert "nvidia0" in answer["reason"]


def test_a_device_node_alone_does_not_make_another_vendors_driver_nvidias(machine: Make) -> None:
    host = machine("cuda").card(0)
    answer = seen(host, node(host.folder))
    assert (answer["state"], answer["devices"]) == ("unusable", [])


def test_without_bindings_and_nvml_it_is_told_what_to_install(machine: Make) -> None:
    host = machine("cuda").card(0)
    root = node(host.folder)
    answer = host.ask(
        f"""
        from kvcore.contract.runtimes.choose import Runtimes
        from kvcore_cuda.platform import CudaBlockSizer
        plugin = CudaBlockSizer(Path({str(root)!r}))
        plugin.runtimes = Runtimes("kvcore-cuda", ())
        answer = plugin.kvcore_detect().reason
        """
    )
    assert "pip install 'kvcore-cuda[driver]'" in answer


def test_nvml_counts_more_than_the_runtime_shows(machine: Make) -> None:
    host = machine("nvml", "cuda").card(0).card(1).set({"ordinals": "1"})
    assert [(d["index"], d["key"]) for d in host.devices()] == [(0, UUIDS[1])]


def test_the_entry_that_named_a_device_is_kept_beside_its_identity(machine: Make) -> None:
    """Three names of one device: the runtime's ordinal, the variable's entry, the UUID."""
    host = machine("nvml", "cuda").card(0).card(1).set({"ordinals": "1,0"})
    found = host.devices(CUDA_VISIBLE_DEVICES=f"{UUIDS[1][:8]}, {UUIDS[0]}")
    assert [(d["index"], d["visible"], d["key"], d["mapping"]) for d in found] == [
        (0, UUIDS[1][:8], UUIDS[1], "runtime"),
        (1, UUIDS[0], UUIDS[0], "runtime"),
    ]
    # Changed after the runtime had read it: the runtime's word counts, and no entry named this device.
    assert host.devices(CUDA_VISIBLE_DEVICES=UUIDS[0])[0]["visible"] is None


@pytest.mark.parametrize(
    ("environ", "mapping"),
    [
        ({}, "order"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "order"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "order"),  # counted in an order that nobody set
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "order"),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "environment"),
        ({"CUDA_VISIBLE_DEVICES": UUIDS[1]}, "environment"),
    ],
)
def test_how_sure_the_mapping_is_is_recorded(machine: Make, environ: dict[str, str], mapping: str) -> None:
    """Without a runtime to ask."""
    found = machine("nvml").card(0).card(1).devices(**environ)
    assert {d["mapping"] for d in found} == {mapping}
