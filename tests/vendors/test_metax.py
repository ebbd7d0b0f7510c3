"""The metax platform: a third library, KiB in place of bytes, a runtime of its own, and a plugin not installed here.

The plugin is found as an installed one is, through its entry point, in processes whose PYTHONPATH has its sources.
"""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from .conftest import GIB, PCIS, ROOT, UUIDS, Libraries, Machine, compile_library

KIB, MIB = 1024, 1024**2
PLUGIN = ROOT / "plugins" / "metax"
MODEL = "examples/models/qwen3-30b-a3b.json"
VARIABLES = ("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

Make = Callable[..., Machine]


@pytest.fixture
def metax(
    tmp_path: Path,
    libraries: Libraries,
    as_installed: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    """``metax("mxsml")``: a machine with these parts and the plugin."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(*parts: str) -> Machine:
        return Machine(tmp_path, libraries, parts, {"PYTHONPATH": as_installed(PLUGIN)})

    return make


def card(host: Machine, index: int = 0, **keys: object) -> Machine:
    return host.card(index, **{"name": "MXC500", "total": 64 * GIB, "free": 63 * GIB, **keys})


def reading(host: Machine, **environ: str) -> Any:
    (found,) = host.readings("metax", **environ)
    return found


def with_root(host: Machine, code: str) -> Any:
    """``code`` with a plugin that sees one PCI function of MetaX."""
    function = host.folder / "root/sys/bus/pci/devices/0000:0e:00.0"
    function.mkdir(parents=True, exist_ok=True)
    (function / "vendor").write_text("0x9999\n")
    (function / "class").write_text("0x030000\n")
    return host.ask(
        f"""
        from dataclasses import asdict
        from kvcore_metax.platform import MetaxBlockSizer
        plugin = MetaxBlockSizer(Path({str(host.folder / "root")!r}), seconds=2.0)
        {code}
        """
    )


def test_it_is_found_as_an_installed_plugin_is(metax: Make) -> None:
    host = card(metax("mxsml"))
    record = next(p for p in host.kvcore("plugins", "--json").json["data"]["plugins"] if p["name"] == "metax")
    assert (record["state"], record["distribution"], record["vendor"]) == ("loaded", "kvcore-metax", "MetaX")


def test_kibibytes_are_read_as_bytes(metax: Make) -> None:
    """A C500 as gpustack's sample has it: 67,108,864 KiB, of which 845,824 KiB are in use when it idles."""
    host = card(metax("mxsml"), **{"raw.used": 845824})
    found = reading(host)
    assert (found["source"], found["scope"]) == ("mxsml", "device")
    assert (found["total"], found["used"]) == (65536 * MIB, 826 * MIB)
    assert found["free"] == found["total"] - found["used"]
    assert found["reserved"] is None


def test_a_process_counts_bytes_where_a_device_counts_kib(metax: Make) -> None:
    host = card(metax("mxsml"), pids=f"self:{3 * GIB},4711:{GIB}")
    card(host, 1, pids=f"self:{GIB},4712:5")
    assert reading(host, MACA_VISIBLE_DEVICES="0")["own"] == 3 * GIB
    assert reading(host, MACA_VISIBLE_DEVICES="1")["own"] == GIB


def test_a_process_that_is_not_listed_holds_nothing_only_without_a_runtime(metax: Make) -> None:
    host = card(metax("mxsml"), pids="4711:1000")
    assert reading(host)["own"] == 0
    runtime = host.folder / "libmcruntime.so"
    compile_library(runtime, "upnp.c")
    own = host.ask(
        f"""
        import ctypes
        ctypes.CDLL({str(runtime)!r})
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[0]
        answer = [plugin.kvcore_read_memory(device)[0].own, plugin.kvcore_reserves(device, Phase.CONTEXT)]
        """
    )
    assert own == [None, []]


@pytest.mark.parametrize(
    "keys",
    [{"total": 0, "free": 0}, {"raw.used": -1}, {"raw.used": 64 * MIB + 1}],
    ids=["no total", "negative", "more than all"],
)
def test_figures_that_cannot_be_are_unknown_and_not_0(metax: Make, keys: dict[str, object]) -> None:
    found = reading(card(metax("mxsml"), **keys))
    assert [found[name] for name in ("total", "free", "used", "own")] == [None] * 4
    assert "KiB in use, which is no answer" in found["skipped"]


def test_the_devices_of_a_machine(metax: Make) -> None:
    host = card(card(metax("mxsml")), 1, uuid="")
    first, second = host.devices("metax")
    assert (first["key"], first["name"], first["kind"], first["mapping"]) == (UUIDS[0], "MXC500", "discrete", "order")
    assert second["key"] == PCIS[1]


def test_a_divided_card_is_its_virtual_functions(metax: Make) -> None:
    host = card(card(metax("mxsml"), mode=1), 1, mode=2, total=16 * GIB, free=16 * GIB)
    (device,) = host.devices("metax")
    assert (device["index"], device["key"], device["kind"]) == (0, UUIDS[1], "partition")
    found = reading(host)
    assert (found["scope"], found["total"]) == ("partition", 16 * GIB)


@pytest.mark.parametrize(
    ("environ", "keys"),
    [
        ({"MACA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"MACA_VISIBLE_DEVICES": " 2 "}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [2]),
        ({"MACA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"MACA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_the_variables_choose_and_order(metax: Make, environ: dict[str, str], keys: list[int]) -> None:
    host = card(card(card(metax("mxsml")), 1), 2)
    found = host.devices("metax", **environ)
    assert [d["key"] for d in found] == [UUIDS[k] for k in keys]
    assert [d["index"] for d in found] == list(range(len(keys)))
    assert {d["mapping"] for d in found} <= {"environment"}


@pytest.mark.parametrize(
    "environ",
    [
        {"MACA_VISIBLE_DEVICES": "0,0"},
        {"MACA_VISIBLE_DEVICES": "7"},
        {"MACA_VISIBLE_DEVICES": "-1"},
        {"MACA_VISIBLE_DEVICES": UUIDS[0]},
        {"MACA_VISIBLE_DEVICES": "0,"},
        {"MACA_VISIBLE_DEVICES": "\u0661"},
        {"MACA_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
    ],
)
def test_a_list_of_undocumented_meaning_is_an_error(metax: Make, environ: Mapping[str, str]) -> None:
    host = card(card(metax("mxsml")), 1)
    error = host.devices("metax", **environ)
    assert error["code"] == "KV-DEV-026"
    assert error["hint"]
    found = host.detection("metax", **environ)
    assert found["state"] == "unusable"
    assert error["what"] in found["reason"]


def test_a_card_of_several_dies_is_not_guessed_at(metax: Make) -> None:
    host = card(metax("mxsml"), dies=2)
    assert host.devices("metax")["code"] == "KV-DEV-026"
    assert "2 dies" in host.devices("metax")["got"]


def test_an_old_build_without_dies_and_texts(metax: Make) -> None:
    host = card(metax("mxsml_old")).set({"err.mxSmlGetMemoryInfo@2": 4})
    assert [d["key"] for d in host.devices("metax")] == [UUIDS[0]]
    assert reading(host)["total"] == 64 * GIB
    host.set({"err.mxSmlGetMemoryInfo": 4})
    assert host.readings("metax")["got"] == "mxSmlGetMemoryInfo: failed (4)"


@pytest.mark.parametrize("number", [3, 8])
def test_what_the_library_cannot_say_is_a_skipped_source(metax: Make, number: int) -> None:
    found = reading(card(metax("mxsml")).set({"err.mxSmlGetMemoryInfo": number}))
    assert found["skipped"] == f"mxSmlGetMemoryInfo: simulated error {number} ({number})"
    assert found["total"] is None


@pytest.mark.parametrize(
    ("number", "code"), [(1, "KV-DEV-020"), (4, "KV-DEV-020"), (6, "KV-DEV-027"), (20, "KV-DEV-027")]
)
def test_a_library_that_fails_is_a_typed_error(metax: Make, number: int, code: str) -> None:
    error = card(metax("mxsml")).set({"err.mxSmlGetMemoryInfo": number}).readings("metax")
    assert error["code"] == code
    assert UUIDS[0] in error["where"]
    assert f"({number})" in error["got"]


def test_a_list_of_processes_that_fails_is_no_claim_of_nothing(metax: Make) -> None:
    host = card(metax("mxsml"), pids="self:5").set({"err.mxSmlGetProcessInfo": 4})
    assert host.readings("metax")["code"] == "KV-DEV-020"
    assert reading(host.set({"err.mxSmlGetProcessInfo": 3}))["own"] == 0


def test_a_device_that_has_gone_is_named(metax: Make) -> None:
    host = card(card(metax("mxsml")), 1)
    error = host.ask(
        """
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[1]
        os.environ["MACA_VISIBLE_DEVICES"] = "0"
        answer = plugin.kvcore_read_memory(device)
        """
    )
    assert (error["code"], error["expected"]) == ("KV-DEV-027", UUIDS[1])


def test_a_library_that_hangs_is_left(metax: Make) -> None:
    host = card(metax("mxsml")).set({"slow.mxSmlGetDeviceInfo": 5})
    error = with_root(host, "answer = plugin.kvcore_devices()")
    assert error["code"] == "KV-DEV-025"


def test_without_anything_of_metax_it_is_absent_and_says_what_would_help(metax: Make) -> None:
    found = metax().detection("metax")
    assert found["state"] == "absent"
    assert found["reason"] == "no PCI function of vendor 0x9999, and no libmxsml.so"
    assert "/opt/mxdriver" in found["hint"]


def test_a_library_without_hardware_does_not_stand_in_the_way_of_the_cpu(metax: Make) -> None:
    for lines in ({"count": 0}, {"err.mxSmlInit": 26}):
        found = metax("mxsml").set(lines).detection("metax")
        assert found["state"] == "absent", found


@pytest.mark.parametrize(
    ("parts", "lines", "said"),
    [
        ((), {}, "and no libmxsml.so"),
        (("mxsml",), {"count": 0}, "finds no device"),
        (("mxsml",), {"err.mxSmlInit": 8}, "mxSmlInit: simulated error 8 (8)"),
    ],
)
def test_hardware_that_cannot_be_used_is_unusable_with_the_reason(
    metax: Make, parts: tuple[str, ...], lines: dict[str, object], said: str
) -> None:
    found = with_root(metax(*parts).set(lines), "answer = asdict(plugin.kvcore_detect())")
    assert found["state"] == "unusable"
    assert "1 PCI function" in found["reason"]
    assert said in found["reason"]
    assert found["hint"]
    assert ["pci 0x9999", "0000:0e:00.0"] in [[e["name"], e["value"]] for e in found["evidence"]]


def test_hidden_devices_are_unusable(metax: Make) -> None:
    found = card(metax("mxsml")).detection("metax", MACA_VISIBLE_DEVICES="")
    assert (found["state"], "hides every one of 1" in found["reason"]) == ("unusable", True)


def test_detection_touches_nothing(metax: Make) -> None:
    answer = card(metax("mxsml")).ask(
        """
        import sys, threading
        from kvcore_metax.platform import plugin
        before = dict(os.environ), set(threading.enumerate())
        state = plugin.kvcore_detect().state.value
        answer = [state, (dict(os.environ), set(threading.enumerate())) == before,
                  sorted({"paddle", "torch", "numpy"} & set(sys.modules))]
        """
    )
    assert answer == ["available", True, []]


def test_a_plan_on_it_counts_the_same_as_on_the_others(metax: Make) -> None:
    plans = []
    for platform, parts in (("metax", ("mxsml",)), ("cuda", ("nvml", "cuda"))):
        host = metax(*parts).card(0, total=24 * GIB, free=20 * GIB)
        ran = host.kvcore("plan", MODEL, "--tp", "4", "--platform", platform, "--max-model-len", "512", "--json")
        assert ran.status == 0, ran.err
        plans.append(ran.json["data"])
    ours, theirs = plans
    assert ours["device"]["platform"] == "metax"
    for name in ("num_blocks", "available_bytes", "cache_bytes", "tokens"):
        assert ours[name] == theirs[name], name


def test_without_a_runtime_nothing_is_allocated_and_the_reason_said(metax: Make) -> None:
    size = ("--kv-cache-memory", "256MiB", "--max-model-len", "2048")
    ran = card(metax("mxsml")).kvcore("allocate", MODEL, "--tp", "4", "--platform", "metax", *size, "--json")
    assert ran.status == 3
    assert ran.json["error"]["code"] == "KV-CAP-001"
    assert "paddle-metax-gpu" in ran.json["error"]["got"]


@pytest.fixture
def with_maca(metax: Make) -> Machine:
    host = card(metax("mxsml", "mcruntime"), total=2 * GIB, free=2 * GIB, pids="self:0", context=64 * MIB)
    return card(host, 1, total=GIB, free=GIB, pids="self:0", context=64 * MIB)


def test_macas_runtime_allocates_and_the_library_sees_it(with_maca: Machine) -> None:
    """The library's KiB and the runtime's bytes are the same figures."""
    answer = with_maca.ask(
        """
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[1]
        before = plugin.kvcore_read_memory(device)
        b = plugin.kvcore_allocate(device, AllocationRequest("t", (63 << 20) + 2, 256, (63 << 19) + 1))
        zeros = plugin.kvcore_read(b, 40 << 20, 4096) == bytes(4096)
        plugin.kvcore_write(b, 40 << 20, b"kvcore")
        plugin.kvcore_fill(b, (40 << 20) + 2, 2, 65)
        read = plugin.kvcore_read(b, 40 << 20, 6).decode()
        during = plugin.kvcore_read_memory(device)
        stats = plugin.kvcore_memory_stats(device)
        freed = plugin.kvcore_release(b)
        after = plugin.kvcore_read_memory(device)
        answer = [zeros, read, freed, before[0].free - during[0].free, during[0].own, stats.current,
                  len(before), [(r.source, r.total, r.free) for r in during], after[0].free == before[0].free]
        """
    )
    zeros, read, freed, taken, own, counted, sources, during, given_back = answer
    assert (zeros, read, freed) == (True, "kvAAre", 64 * MIB)
    assert taken == own == (64 + 64) * MIB  # the context is this process's too
    assert counted == 64 * MIB
    assert sources == 1  # asking the runtime before it is used would make a context
    assert during == [[source, GIB, GIB - taken] for source in ("mxsml", "mcruntime")]
    assert given_back


def test_plan_allocate_verify_release_with_macas_runtime(with_maca: Machine) -> None:
    settings = ("--platform", "metax", "--device", UUIDS[1], "--kv-cache-memory", "256MiB", "--max-model-len", "2048")
    ran = with_maca.kvcore("allocate", MODEL, "--tp", "4", *settings, "--json")
    assert ran.status == 0, ran.err
    assert sum(with_maca.held()) == 0


@pytest.mark.parametrize("environ", [{"MACA_VISIBLE_DEVICES": "1"}, {}])
def test_a_runtime_that_numbers_otherwise_than_the_library_is_found_out(
    with_maca: Machine, environ: dict[str, str]
) -> None:
    """By its PCI address: with the variable both agree; by the scenario's order the runtime's 0 is the library's 1."""
    if not environ:
        with_maca.set({"ordinals": "1,0"})
    answer = with_maca.ask(
        """
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[0]
        buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 20, 256, 1 << 19))
        answer = [device.key, plugin.kvcore_release(buffer)]
        """,
        **environ,
    )
    if environ:
        assert answer == [UUIDS[1], 2 * MIB]
    else:
        assert answer["code"] == "KV-DEV-029"
        assert PCIS[1].split(".")[0] in answer["got"]


def test_the_current_device_of_a_thread_is_left_as_it_was(with_maca: Machine) -> None:
    answer = with_maca.ask(
        """
        import ctypes
        from kvcore_metax.platform import plugin
        runtime = ctypes.CDLL("libmcruntime.so")
        runtime.mcSetDevice(1)
        buffer = plugin.kvcore_allocate(plugin.kvcore_devices()[0], AllocationRequest("t", 1 << 20, 256, 1 << 19))
        plugin.kvcore_write(buffer, 5, b"x")
        current = ctypes.c_int()
        runtime.mcGetDevice(ctypes.byref(current))
        answer = current.value
        """
    )
    assert answer == 1


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ({"err.mcMalloc": 2}, "KV-OOM-001"),
        ({"err.mcMalloc": 1}, "KV-DEV-028"),
        ({"err.mcMemset": 700}, "KV-DEV-028"),
        ({"err.mcGetDeviceCount": 3}, "KV-DEV-028"),
    ],
)
def test_what_macas_runtime_refuses_is_typed_and_leaves_nothing(
    with_maca: Machine, lines: dict[str, object], code: str
) -> None:
    answer = with_maca.set(lines).ask(
        """
        from kvcore_metax.platform import plugin
        plugin.kvcore_allocate(plugin.kvcore_devices()[0], AllocationRequest("t", 1 << 20, 256, 1 << 19))
        """
    )
    assert answer["code"] == code
    assert sum(with_maca.held()) == 0


def test_a_forked_process_reads_and_is_refused_the_runtime(with_maca: Machine) -> None:
    answer = with_maca.ask(
        """
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[0]
        buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 20, 256, 1 << 19))
        reading, writing = os.pipe()
        if not os.fork():
            said = [[r.source for r in plugin.kvcore_read_memory(device)]]
            for call in (
                lambda: plugin.kvcore_read(buffer, 0, 1),
                lambda: plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 20, 256, 1 << 19)),
            ):
                try:
                    said.append(call())
                except KvcoreError as error:
                    said.append([error.code, error.got])
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
        os.close(writing)
        answer = json.loads(os.fdopen(reading).read())
        plugin.kvcore_release(buffer)
        """
    )
    sources, read, allocated = answer
    assert sources == ["mxsml"]
    assert read[0] == allocated[0] == "KV-DEV-030"
    assert "forked after process" in allocated[1]


DECLARED = """
from kvcore_metax.platform import plugin
found = plugin.kvcore_platform().capabilities
answer = [found[Capability.ALLOCATE].support.value, found[Capability.TENSOR_PADDLE].support.value]
"""


def test_another_vendors_runtime_is_refused_when_it_is_used_and_not_before(with_maca: Machine) -> None:
    assert with_maca.ask(DECLARED, KVCORE_RUNTIME="torch") == ["full", "unsupported"]
    answer = with_maca.ask(
        """
        from kvcore_metax.platform import plugin
        plugin.kvcore_allocate(plugin.kvcore_devices()[0], AllocationRequest("t", 1 << 20, 256, 1 << 19))
        """,
        KVCORE_RUNTIME="torch",
    )
    assert (answer["code"], answer["expected"]) == ("KV-POL-060", "driver, paddle")


@pytest.fixture(scope="module")
def custom_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated ``metax_gpu``, built against the headers in Paddle's wheel."""
    found = importlib.util.find_spec("paddle")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("paddlepaddle is not installed: its wheel has the headers")
    include = Path(found.submodule_search_locations[0]) / "include"
    target = tmp_path_factory.mktemp("custom_device") / "libsimulated.so"
    flags = ("-std=c++17", f"-I{include}", '-DDEVICE_TYPE="metax_gpu"')
    return compile_library(target, "paddle_device.cc", *flags, compiler="c++").parent


@pytest.fixture
def with_paddle(metax: Make, custom_device: Path) -> Machine:
    host = card(metax("mxsml"), total=2 * GIB, free=2 * GIB)
    card(host, 1, total=GIB, free=GIB)
    host.environ["CUSTOM_DEVICE_ROOT"] = str(custom_device)
    return host


def test_paddles_tensors_are_declared_where_paddle_allocates(with_paddle: Machine, libraries: Libraries) -> None:
    assert with_paddle.ask(DECLARED) == ["full", "full"]
    both = Machine(with_paddle.folder, libraries, ("mxsml", "mcruntime"), with_paddle.environ, with_paddle.lines)
    assert both.ask(DECLARED) == ["full", "unsupported"]
    assert both.ask(DECLARED, KVCORE_RUNTIME="paddle") == ["full", "full"]


def test_paddle_allocates_and_the_library_sees_it(with_paddle: Machine) -> None:
    code = """
        from kvcore_metax.platform import plugin
        MIB = 1 << 20
        device = plugin.kvcore_devices()[1]
        before = plugin.kvcore_read_memory(device)[0].free
        b = plugin.kvcore_allocate(device, AllocationRequest("t", 63 * MIB + 2, 256, 63 * MIB // 2 + 1))
        zeros = plugin.kvcore_read(b, 40 * MIB, 4096) == bytes(4096)
        plugin.kvcore_write(b, 40 * MIB, b"kvcore")
        plugin.kvcore_fill(b, 40 * MIB + 2, 2, 65)
        read = plugin.kvcore_read(b, 40 * MIB, 6).decode()
        tensor = plugin.kvcore_tensor(b, TensorView((8, 64), "bfloat16", 4096), "paddle")
        place = str(tensor.place)
        during = plugin.kvcore_read_memory(device)
        del tensor
        answer = [zeros, read, place, b.nbytes, b.committed_bytes, before - during[0].free,
                  [(r.source, r.total, r.free) for r in during[1:]],
                  plugin.kvcore_memory_stats(device).current >= 64 * MIB,
                  plugin.kvcore_release(b), plugin.kvcore_read_memory(device)[0].free == before]
        """
    zeros, read, place, nbytes, committed, taken, by_paddle, counted, freed, given_back = with_paddle.set(
        {"1.paddle_total": GIB}
    ).ask(textwrap.dedent(code))
    assert zeros
    assert read == "kvAAre"
    assert place == "Place(metax_gpu:1)"
    assert nbytes == committed == freed == 64 * MIB
    assert taken >= 64 * MIB
    assert by_paddle == [["paddle", GIB, None]]
    assert counted
    assert given_back


def test_plan_allocate_verify_release(with_paddle: Machine) -> None:
    ran = with_paddle.kvcore(
        "allocate", MODEL, "--tp", "4", "--platform", "metax", "--device", UUIDS[1],
        "--kv-cache-memory", "256MiB", "--max-model-len", "2048", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert UUIDS[1] in ran.out
    assert sum(with_paddle.held()) == 0


def test_a_full_device_is_out_of_memory_and_a_renumbered_one_an_error(with_paddle: Machine) -> None:
    answer = with_paddle.ask(
        """
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[1]
        codes = []
        for prepare, request in (
            (lambda: None, AllocationRequest("t", 2 << 30, 256, 1 << 30)),
            (lambda: None, AllocationRequest("t", 1 << 32, 256, 1 << 31)),
            (lambda: os.environ.update(MACA_VISIBLE_DEVICES="1,0"), AllocationRequest("t", 1 << 20, 256, 1 << 19)),
        ):
            prepare()
            try:
                plugin.kvcore_allocate(device, request)
            except KvcoreError as error:
                codes.append(error.code)
        answer = codes
        """
    )
    assert answer == ["KV-OOM-001", "KV-OOM-002", "KV-DEV-029"]
    assert sum(with_paddle.held()) == 0


def test_it_conforms_as_far_as_it_goes_without_a_runtime(metax: Make) -> None:
    """Two devices with neighbours, this process listed: what cannot be done here is declared, and nothing fails."""
    host = card(metax("mxsml"), pids=f"4711:{GIB},self:0", free=50 * GIB)
    ran = card(host, 1, pids="self:0").kvcore("conformance", "metax", "--json")
    data = ran.json["data"]
    failed = [record for record in data["records"] if record["outcome"] in ("failed", "unexpected pass")]
    assert not failed, json.dumps(failed, indent=1)
    assert ran.status == 0
    assert data["platforms"][0]["counts"]["passed"] > 30, data["platforms"]


def test_it_conforms_with_paddle(with_paddle: Machine) -> None:
    """Every check, on two devices of the real Paddle over a simulated plug-in.

    TEN-001 writes one element through a tensor. The simulated plug-in has no kernels, so Paddle computes that on the
    CPU and the write is lost (see on_paddle.py); MetaX's own has them.
    """
    with_paddle.set({"0.pids": f"4711:{GIB // 2},self:0", "1.pids": "self:0", "0.free": GIB})
    data = with_paddle.kvcore("conformance", "metax", "--json").json["data"]
    failed = {record["check"]: record["explained"] for record in data["records"] if record["outcome"] == "failed"}
    assert set(failed) == {"TEN-001"}, "\n\n".join(failed.values())
    assert data["platforms"][0]["counts"] == {"passed": len(data["records"]) - 1, "failed": 1}
    assert sum(with_paddle.held()) == 0


def test_the_first_use_may_come_from_several_threads(with_paddle: Machine) -> None:
    """Each of them starts Paddle; a Paddle that is half imported refuses dtypes that it knows."""
    answer = with_paddle.ask(
        """
        import threading
        from kvcore_metax.platform import plugin
        device = plugin.kvcore_devices()[0]
        failed = []
        def work():
            try:
                buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 20, 256, 1 << 20))
                plugin.kvcore_release(buffer)
            except Exception as error:
                failed.append(repr(error))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = failed
        """
    )
    assert answer == []
