"""Iluvatar's sources, one after the other, and each one's reason where it gave nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.contract.runtimes.management import ManagementFault
from kvcore_iluvatar.ixsmi import parse_query

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]
MIB = 1024**2
LINE = f"Iluvatar BI-V100, {UUIDS[0]}, 00000000:3B:00.0, 32768, 257, 32511"


def command(folder: Path, body: str) -> str:
    """A folder for PATH with a command ixsmi; the Python of these tests must stay on PATH for nobody."""
    path = folder / "bin" / "ixsmi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


def pci(folder: Path) -> Path:
    function = folder / "root/sys/bus/pci/devices/0000:3b:00.0"
    function.mkdir(parents=True)
    (function / "vendor").write_text("0x1e3e\n")
    (function / "class").write_text("0x120000\n")
    return folder / "root"


@pytest.mark.parametrize("library", ["ixml", "ixml_plain"])
def test_the_library_is_asked_with_version_1_first(machine: Make, library: str) -> None:
    host = machine(library).card(0, total=32 * GIB, free=31 * GIB)
    (device,) = host.devices("iluvatar")
    assert (device["key"], device["name"]) == (UUIDS[0], "Simulated")
    reading = host.readings("iluvatar")[0]
    assert (reading["source"], reading["total"], reading["free"], reading["own"]) == (
        "ixml_v1",
        32 * GIB,
        31 * GIB,
        0,
    )
    assert host.detection("iluvatar")["state"] == "available"
    assert (host.folder / "balance").read_text() == "0"


def test_version_2_by_the_value_that_the_build_takes(machine: Make) -> None:
    host = machine("ixml").card(0, reserved=GIB).set({"err.nvmlDeviceGetMemoryInfo": 3})
    skipped, reading, *_ = host.readings("iluvatar")
    assert "not supported (3)" in skipped["skipped"]
    assert (reading["source"], reading["reserved"]) == ("ixml_v2", GIB)


@pytest.mark.parametrize("number", [15, 16, 17, 18])
def test_a_device_that_is_not_fit_stops(machine: Make, number: int) -> None:
    host = machine("ixml").card(0).set({"err.nvmlDeviceGetMemoryInfo": number})
    assert host.readings("iluvatar")["code"].startswith("KV-DEV-02")


@pytest.mark.parametrize("folder", ["lib64", "lib"])
def test_the_library_is_found_in_corexs_folders(machine: Make, libraries: Callable[[str], str], folder: str) -> None:
    host = machine("upnp").card(0)
    home = host.folder / "corex"
    (home / folder).mkdir(parents=True)
    (home / folder / "libixml.so").symlink_to(Path(libraries("ixml")) / "libixml.so")
    assert host.readings("iluvatar", COREX_HOME=str(home))[0]["total"] == 8 * GIB


def test_another_projects_libixml_is_not_claimed(machine: Make) -> None:
    """Debian's libupnp-dev installs UPnP's XML library under this very name."""
    found = machine("upnp").card(0).detection("iluvatar")
    assert found["state"] == "absent"
    assert "another project's" in found["reason"]


def test_nvidias_driver_is_no_trace_of_iluvatar(machine: Make) -> None:
    """On a machine with NVIDIA's devices nothing of CoreX is looked for, and the driver is not started."""
    host = machine("nvml", "cuda").card(0)
    found = host.detection("iluvatar")
    assert found["state"] == "absent"
    assert [e["name"] for e in found["evidence"]] == ["runtime"]
    assert "dlopen" not in found["reason"]


def test_nvidias_cards_behind_ixml_are_not_claimed(machine: Make) -> None:
    found = machine("ixml").card(0, vendor="0x10de").detection("iluvatar")
    assert found["state"] == "absent"


def test_the_two_libraries_live_in_one_process_under_the_same_names(machine: Make) -> None:
    """nvmlInit of one must never be nvmlInit of the other."""
    host = machine("nvml", "ixml").card(0)
    answer = host.ask(
        """
        from kvcore_cuda.platform import plugin as cuda
        from kvcore_iluvatar.platform import plugin as iluvatar
        first = cuda.kvcore_devices()[0]
        second = iluvatar.kvcore_devices()[0]
        answer = [cuda.kvcore_read_memory(first)[0].source, iluvatar.kvcore_read_memory(second)[0].source,
                  cuda.kvcore_read_memory(first)[0].source]
        """
    )
    assert answer == ["nvml_v2", "ixml_v1", "nvml_v2"]


def test_a_binding_of_the_vendors_is_asked_second(machine: Make) -> None:
    host = machine("upnp")
    (host.folder / "ixsmi.py").write_text(
        f"""
class NVMLError(Exception):
    value = 3
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return 0
def nvmlDeviceGetUUID(handle): return b"{UUIDS[0]}"
def nvmlDeviceGetName(handle): return b"BI-V150"
def nvmlDeviceGetPciInfo(handle): raise NVMLError
def nvmlDeviceGetComputeRunningProcesses(handle): return []
class Memory:
    total, free, used = {32 * GIB}, {30 * GIB}, {2 * GIB}
def nvmlDeviceGetMemoryInfo(handle): return Memory
"""
    )
    readings = host.readings("iluvatar", PYTHONPATH=str(host.folder))
    assert (readings[0]["source"], readings[0]["free"]) == ("ixsmi_module_v1", 30 * GIB)
    assert "another project's" in next(r["skipped"] for r in readings if r["source"] == "ixml")


def test_the_command_is_asked_third_and_counts_in_mib(machine: Make) -> None:
    host = machine("upnp")
    readings = host.readings("iluvatar", PATH=command(host.folder, f"echo '{LINE}'"))
    assert (readings[0]["source"], readings[0]["total"], readings[0]["free"]) == (
        "ixsmi_v1",
        32768 * MIB,
        32511 * MIB,
    )
    assert {"ixml", "ixsmi_module"} <= {r["source"] for r in readings if r["skipped"]}


def test_a_library_that_cannot_say_leaves_it_to_the_command(machine: Make) -> None:
    host = machine("ixml").card(0).set({"err.nvmlDeviceGetMemoryInfo": 3, "err.nvmlDeviceGetMemoryInfo_v2": 3})
    readings = host.readings("iluvatar", PATH=command(host.folder, f"echo '{LINE}'"))
    assert [r["source"] for r in readings if r["free"] is not None] == ["ixsmi_v1"]
    assert {"ixml_v1", "ixml_v2"} <= {r["source"] for r in readings if r["skipped"]}


@pytest.mark.parametrize(
    "body",
    [
        "echo 'Field \"memory.total\" is not a valid field to query.'",
        "exit 3",
        "echo boom; exit 1",
        "true",
        f"echo '{LINE[:-20]}'",
        "printf '\\377\\376\\n'",
    ],
)
def test_a_command_that_fails_is_a_skipped_source(machine: Make, body: str) -> None:
    host = machine("upnp")
    answer = host.detection("iluvatar", PATH=command(host.folder, body))
    assert answer["state"] == "absent"
    assert any(e["name"] == "ixsmi" for e in answer["evidence"])


def test_a_command_that_hangs_is_left_and_ended(machine: Make) -> None:
    host = machine("upnp")
    answer = host.ask(
        """
        from kvcore_iluvatar.ixsmi import IxsmiCommand
        from kvcore.contract.runtimes.management import ManagementFault
        try:
            answer = IxsmiCommand(seconds=0.2).cards()
        except ManagementFault as fault:
            answer = str(fault)
        """,
        PATH=command(host.folder, "exec sleep 30"),
    )
    assert "no answer within 0.2 s" in answer


@pytest.mark.parametrize(
    "line",
    [
        LINE.replace("32768", "32.768"),  # another country's thousand
        LINE.replace("32768", "-1"),
        LINE.replace("32768", "N/A"),
        LINE.replace("32768", "[Unknown Error]"),
        LINE.replace("32768", "32768 GiB"),
        LINE.replace("32768", "٣٢٧٦٨"),
        LINE.replace("32768", ""),
        LINE.replace("32768", "9" * 30),
        LINE + ", 5",
        LINE.replace("GPU-", ""),
        LINE.replace("00000000:3B:00.0", "bus"),
        f"{LINE}\n{LINE}",
        "",
        "No devices were found",
    ],
)
def test_an_answer_that_is_not_exactly_what_was_asked_is_none(line: str) -> None:
    with pytest.raises(ManagementFault):
        parse_query(line)


def test_figures_with_their_unit_are_taken() -> None:
    ((card, figures),) = parse_query(LINE.replace("32768", "32768 MiB"))
    assert (card.pci, figures.total) == ("0000:3b:00", 32768 * MIB)


CONSTANT = """
from dataclasses import asdict
from kvcore_iluvatar.platform import IluvatarBlockSizer
plugin = IluvatarBlockSizer(Path({root!r}))
device = plugin.kvcore_devices()[0]
answer = [device.key, [asdict(r) for r in plugin.kvcore_read_memory(device)], plugin.kvcore_detect().state.value]
"""


def test_a_declared_constant_is_the_last_resort_and_marked(machine: Make) -> None:
    host = machine("upnp")
    code = CONSTANT.format(root=str(pci(host.folder)))
    key, readings, state = host.ask(code, FD_ILUVATAR_KVCACHE_MEM="2.5")
    assert (key, state) == ("0000:3b:00", "available")
    (reading,) = [r for r in readings if r["skipped"] is None]
    assert (reading["source"], reading["free"], reading["total"]) == ("FD_ILUVATAR_KVCACHE_MEM", 5 * GIB // 2, None)
    assert reading["basis"] == "declared"
    assert {"ixml", "ixsmi_module", "ixsmi", "pci_v1"} <= {r["source"] for r in readings if r["skipped"]}


@pytest.mark.parametrize("text", ["three", "-1", "0", "nan", "1e-30", ""])
def test_a_constant_that_is_no_size_is_skipped(machine: Make, text: str) -> None:
    host = machine("upnp")
    _, readings, _ = host.ask(CONSTANT.format(root=str(pci(host.folder))), FD_ILUVATAR_KVCACHE_MEM=text)
    assert all(r["skipped"] for r in readings)


def test_nothing_is_invented_where_nothing_is_known(machine: Make) -> None:
    host = machine("upnp")
    _, readings, _ = host.ask(CONSTANT.format(root=str(pci(host.folder))))
    assert all(r["skipped"] for r in readings)


def test_a_constant_does_not_overrule_a_measurement(machine: Make) -> None:
    readings = machine("ixml").card(0).readings("iluvatar", FD_ILUVATAR_KVCACHE_MEM="1")
    assert not [r for r in readings if r["source"] == "FD_ILUVATAR_KVCACHE_MEM"]


@pytest.mark.parametrize("variable", ["IX_VISIBLE_DEVICES", "ILUVATAR_COREX_VISIBLE_DEVICES"])
def test_a_containers_variable_names_its_cards(machine: Make, variable: str) -> None:
    host = machine("ixml").card(0).card(1)
    assert [d["key"] for d in host.devices("iluvatar", **{variable: UUIDS[1]})] == [UUIDS[1]]
    # By number it counts the host's cards, which a container does not see.
    assert len(host.devices("iluvatar", **{variable: "7"})) == 2
    assert [
        d["key"] for d in host.devices("iluvatar", **{variable: f"{UUIDS[0]},{UUIDS[1]}"}, CUDA_VISIBLE_DEVICES="1")
    ] == [UUIDS[1]]


@pytest.mark.parametrize(
    "body",
    [
        f"printf '{LINE[:40]}'",  # ended half way
        f"echo '{LINE.replace('32768', '32.768').replace('32511', '32.511')}'",
        f"echo '{LINE.replace('32768', '32 768')}'",
        "echo '名称, 通用唯一识别码, 总线, 显存总量, 已用显存, 空闲显存'",
        f"echo '{LINE.replace('32768', '0')}'",
        f"echo '{LINE.replace('32511', '40000')}'",  # more free than there is
        f"echo '{LINE.replace('32511', '-1')}'",
    ],
)
def test_what_the_command_says_wrongly_is_never_a_plan(machine: Make, body: str) -> None:
    """Truncated, in another language, of another country's numbers, impossible: and the CPU does not answer for it."""
    host = machine("upnp")
    answer = host.ask(
        f"""
        import kvcore
        from kvcore_iluvatar.platform import plugin
        from dataclasses import replace
        plugin.surroundings = replace(plugin.surroundings, root=Path({str(pci(host.folder))!r}))
        layout = kvcore.layout("examples/models/qwen3-30b-a3b.json", tp=4)
        plan = kvcore.plan(layout, kvcore.platform("iluvatar").device(), max_model_len=512)
        answer = {{"code": plan.num_blocks, "got": ""}}
        """,
        PATH=command(host.folder, body),
    )
    assert answer["code"] == "KV-PLAN-002"
    assert "ixsmi" in answer["got"]


def test_figures_of_the_library_that_cannot_be_used_leave_it_to_the_command(machine: Make) -> None:
    host = machine("ixml").card(0, raw__free=2**64 - 5)
    readings = host.readings("iluvatar", PATH=command(host.folder, f"echo '{LINE}'"))
    assert [r["source"] for r in readings if r["free"] == 32511 * MIB] == ["ixsmi_v1"]


def test_a_command_that_goes_away_between_two_calls(machine: Make) -> None:
    host = machine("upnp")
    path = command(host.folder, f"echo '{LINE}'")
    answer = host.ask(
        f"""
        from kvcore_iluvatar.platform import plugin
        device = plugin.kvcore_devices()[0]
        os.unlink({str(host.folder / "bin" / "ixsmi")!r})
        plugin.kvcore_read_memory(device)
        """,
        PATH=path,
    )
    assert answer["code"] == "KV-DEV-027"


def test_a_card_of_the_commands_that_the_kernel_knows_as_anothers_is_not_claimed(machine: Make) -> None:
    """Its UUID looks the same, and the command names no vendor; sysfs does."""
    host = machine("upnp")
    root = pci(host.folder)
    (root / "sys/bus/pci/devices/0000:3b:00.0/vendor").write_text("0x10de\n")
    answer = host.ask(
        f"""
        from kvcore_iluvatar.platform import IluvatarBlockSizer
        plugin = IluvatarBlockSizer(Path({str(root)!r}))
        found = plugin.kvcore_detect()
        answer = [found.state.value, found.reason]
        """,
        PATH=command(host.folder, f"echo '{LINE}'"),
    )
    assert answer[0] == "absent"
    assert "PCI vendor 0x10de" in answer[1]


def test_the_command_is_found_in_corexs_bin_with_its_libraries(machine: Make) -> None:
    """It often is not on PATH, and needs CoreX's folders on LD_LIBRARY_PATH."""
    host = machine("upnp")
    home = host.folder / "corex"
    (home / "bin").mkdir(parents=True)
    path = home / "bin" / "ixsmi"
    path.write_text(f"#!/bin/sh\ncase $LD_LIBRARY_PATH in {home}/lib64:{home}/lib*) echo '{LINE}';; esac\n")
    path.chmod(0o755)
    assert host.readings("iluvatar", COREX_HOME=str(home))[0]["source"] == "ixsmi_v1"
    assert host.detection("iluvatar", COREX_HOME=str(home))["state"] == "available"


def test_the_runtime_is_asked_where_no_library_says_what_is_free(machine: Make) -> None:
    host = machine("ixml", "cuda").card(0, context=GIB)
    host.set({"err.nvmlDeviceGetMemoryInfo": 3, "err.nvmlDeviceGetMemoryInfo_v2": 3})
    readings = host.readings("iluvatar", KVCORE_ALLOW_CONTEXT="1", FD_ILUVATAR_KVCACHE_MEM="1")
    assert [(r["source"], r["free"]) for r in readings if r["free"] is not None] == [("driver", 7 * GIB)]


def test_the_librarys_names_stay_its_own(machine: Make) -> None:
    """RTLD_LOCAL: whoever looks for nvmlInit in the whole process finds NVIDIA's, or none."""
    host = machine("ixml").card(0)
    answer = host.ask(
        """
        import ctypes
        from kvcore_iluvatar.platform import plugin
        plugin.kvcore_read_memory(plugin.kvcore_devices()[0])
        answer = ["libixml.so" in Path("/proc/self/maps").read_text(), hasattr(ctypes.CDLL(None), "nvmlInit_v2")]
        """
    )
    assert answer == [True, False]


def test_a_node_of_16_chips_is_16_devices(machine: Make) -> None:
    """A BI-V150 is two chips, each a device of its own; FastDeploy counts 16 to a node."""
    host = machine("ixml")
    for index in range(16):
        keys = {"uuid": f"GPU-{index:08x}-0000-4000-8000-000000000000", "pci": f"0000:{index + 16:02x}:00.0"}
        host.set({f"{index}.{key}": value for key, value in {**keys, "name": "BI-V150", "total": 32 * GIB}.items()})
    host.set({"count": 16})
    assert len({d["key"] for d in host.devices("iluvatar")}) == 16
