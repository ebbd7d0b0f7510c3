"""The Paddle and torch back ends: on the host's place, and on a simulated iluvatar_gpu through the real Paddle."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.contract.facts import TensorView
from kvcore.contract.runtimes.interface import Runtime
from kvcore.contract.runtimes.on_paddle import PaddleRuntime
from kvcore.contract.runtimes.on_torch import TorchRuntime
from kvcore.errors import BufferMisuse, CapabilityMissing, OutOfMemory

from .conftest import GIB, UUIDS, Machine, compile_library

Make = Callable[..., Machine]
MIB = 1024**2
MODEL = "examples/models/qwen3-30b-a3b.json"


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


needs_paddle = pytest.mark.skipif(not has("paddle"), reason="paddlepaddle is not installed")
RUNTIMES = [
    pytest.param(lambda: PaddleRuntime("cpu", ("paddlepaddle",)), marks=needs_paddle, id="paddle"),
    pytest.param(
        lambda: TorchRuntime("cpu"),
        marks=pytest.mark.skipif(not has("torch"), reason="torch is not installed"),
        id="torch",
    ),
]


@pytest.mark.parametrize("make", RUNTIMES)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_a_block_is_zeroed_written_read_filled_and_given_back(make: Callable[[], Runtime], itemsize: int) -> None:
    block = make().allocate(0, "t", 4 * MIB, itemsize)
    assert block.read(0, 4 * MIB) == bytes(4 * MIB)
    block.write(12345, b"kvcore")
    block.fill(12347, 2, 65)
    assert block.read(12344, 8) == b"\0kvAAre\0"
    assert block.read(10, 0) == b""
    assert block.release() == 4 * MIB
    for misuse in (block.release, lambda: block.read(0, 1)):
        with pytest.raises(BufferMisuse):
            misuse()


@pytest.mark.parametrize("make", RUNTIMES)
@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, MIB * 2 + 1), (2 * MIB, 1), (0, -1)])
def test_outside_the_block_is_refused(make: Callable[[], Runtime], offset: int, nbytes: int) -> None:
    block = make().allocate(0, "t", 2 * MIB, 1)
    with pytest.raises(BufferMisuse):
        block.read(offset, nbytes)
    block.release()


@pytest.mark.parametrize("make", RUNTIMES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "float8_e4m3fn"])
def test_a_tensor_shares_the_blocks_memory(make: Callable[[], Runtime], dtype: str) -> None:
    runtime = make()
    block = runtime.allocate(0, "t", 2 * MIB, 2)
    tensor = block.tensor(TensorView((4, 2, 8), dtype, offset=256), runtime.name)
    assert list(tensor.shape) == [4, 2, 8]  # type: ignore[attr-defined]
    before = block.read(256, 4)
    address = tensor.data_ptr()  # type: ignore[attr-defined]
    block.write(256, b"\x01\x02\x03\x04")
    assert tensor.data_ptr() == address  # type: ignore[attr-defined]
    assert before == bytes(4)
    with pytest.raises(BufferMisuse) as caught:
        block.release()
    assert caught.value.code == "KV-BUF-004"
    del tensor
    assert block.release() == 2 * MIB


@pytest.mark.parametrize("make", RUNTIMES)
def test_more_than_the_host_has_is_out_of_memory(make: Callable[[], Runtime]) -> None:
    with pytest.raises(OutOfMemory) as caught:
        make().allocate(0, "t", 1 << 50, 2)
    assert "1,125,899,906,842,624 bytes" in str(caught.value.expected)


@pytest.mark.parametrize("make", RUNTIMES)
def test_numpy_is_not_offered(make: Callable[[], Runtime]) -> None:
    block = make().allocate(0, "t", 2 * MIB, 1)
    with pytest.raises(CapabilityMissing):
        block.tensor(TensorView((1,), "uint8"), "numpy")
    block.release()


@needs_paddle
def test_paddle_counts_what_it_holds() -> None:
    runtime = PaddleRuntime("cpu", ("paddlepaddle",))
    runtime.start()
    before = runtime.stats(0).current or 0
    block = runtime.allocate(0, "t", 8 * MIB, 2)
    assert (runtime.stats(0).current or 0) - before == 8 * MIB
    block.release()
    assert runtime.stats(0).current == before


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated custom device, built against the headers in Paddle's wheel."""
    found = importlib.util.find_spec("paddle")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("paddlepaddle is not installed: its wheel has the headers")
    include = Path(found.submodule_search_locations[0]) / "include"
    target = tmp_path_factory.mktemp("custom_device") / "libsimulated.so"
    compile_library(target, "paddle_device.cc", "-std=c++17", f"-I{include}", compiler="c++")
    return target.parent


@pytest.fixture
def host(machine: Make, plugin_folder: Path) -> Machine:
    made = machine("ixml").card(0, total=2 * GIB).card(1, total=GIB)
    made.environ.update(CUSTOM_DEVICE_ROOT=str(plugin_folder), KVCORE_RUNTIME="paddle")
    return made


def on(host: Machine, code: str, index: int = 1) -> object:
    start = f"""
from kvcore_iluvatar.platform import plugin
device = plugin.kvcore_devices()[{index}]
MIB = 1 << 20
def allocate(nbytes, elements=None):
    return plugin.kvcore_allocate(device, AllocationRequest("t", nbytes, 256, elements or nbytes // 2))
"""
    return host.ask(start + textwrap.dedent(code))


def test_a_custom_device_allocates_through_the_real_paddle(host: Machine) -> None:
    answer = on(
        host,
        """
        before = plugin.kvcore_read_memory(device)[0].free
        b = allocate(64 * MIB)
        zeros = [plugin.kvcore_read(b, o, 4096) == bytes(4096) for o in (0, 33 * MIB, 64 * MIB - 4096)]
        plugin.kvcore_write(b, 40 * MIB + 1, b"kvcore")
        plugin.kvcore_fill(b, 40 * MIB + 3, 2, 65)
        read = plugin.kvcore_read(b, 40 * MIB, 8).hex()
        tensor = plugin.kvcore_tensor(b, TensorView((8, 4, 16, 64), "bfloat16", 4096), "paddle")
        place, shape = str(tensor.place), list(tensor.shape)
        stats = plugin.kvcore_memory_stats(device)
        during = plugin.kvcore_read_memory(device)
        del tensor
        answer = [zeros, read, place, shape, stats.current >= 64 * MIB, before - during[0].free >= 64 * MIB,
                  [(r.source, r.total) for r in during if r.source == "paddle"], plugin.kvcore_release(b),
                  before == plugin.kvcore_read_memory(device)[0].free]
        """,
    )
    zeros, read, place, shape, counted, taken, by_paddle, freed, given_back = answer  # type: ignore[misc]
    assert zeros == [True] * 3
    assert read == b"\0kvAAre\0".hex()
    assert (place, shape) == ("Place(iluvatar_gpu:1)", [8, 4, 16, 64])
    assert counted
    assert taken
    # The vendor's plug-in has no statistics, and Paddle answers 0 of 0: that is unknown, not a size.
    assert by_paddle == [["paddle", None]]
    assert (freed, given_back) == (64 * MIB, True)


def test_a_size_that_paddle_knows_is_a_total_and_says_nothing_of_what_is_free(host: Machine) -> None:
    host.set({"1.paddle_total": GIB})
    answer = on(
        host,
        """
        b = allocate(2 * MIB)
        answer = [(r.total, r.free) for r in plugin.kvcore_read_memory(device) if r.source == "paddle"]
        """,
    )
    assert answer == [[GIB, None]]


def test_a_full_custom_device_is_out_of_memory(host: Machine) -> None:
    answer = on(host, "allocate(2 << 30)")
    assert answer["code"] == "KV-OOM-001"  # type: ignore[index]
    assert "CustomDevice error" in answer["got"]  # type: ignore[index]


def test_a_tensor_of_2_31_elements_is_refused_before_it_is_tried(host: Machine) -> None:
    answer = on(host, "allocate(1 << 32, 1 << 31)")
    assert answer["code"] == "KV-OOM-002"  # type: ignore[index]
    assert "Paddle#" in answer["expected"]  # type: ignore[index]


def test_the_limit_is_part_of_the_plan(host: Machine) -> None:
    answer = on(host, "l = plugin.kvcore_allocation_limits(device)\nanswer = [l.max_elements, l.reason]")
    assert answer[0] == 2**31 - 2**21  # type: ignore[index]
    assert "64-bit" in answer[1]  # type: ignore[index]


def test_plan_allocate_verify_release_on_iluvatar_through_paddle(host: Machine) -> None:
    ran = host.kvcore(
        "allocate", MODEL, "--tp", "4", "--platform", "iluvatar", "--device", UUIDS[1],
        "--kv-cache-memory", "256MiB", "--max-model-len", "2048", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert UUIDS[1] in ran.out
    assert sum(host.held()) == 0


def test_of_several_custom_devices_the_second_one_is_not_counted_wrongly(
    host: Machine, plugin_folder: Path, tmp_path: Path
) -> None:
    """Paddle's counters take the first kind that is registered, whatever the place says."""
    include = Path(str(importlib.util.find_spec("paddle").submodule_search_locations[0])) / "include"  # type: ignore[union-attr, index]
    folder = tmp_path / "two"
    flags = ("-std=c++17", f"-I{include}", '-DDEVICE_TYPE="other_gpu"')
    compile_library(folder / "libother.so", "paddle_device.cc", *flags, compiler="c++")
    (folder / "libsimulated.so").symlink_to(plugin_folder / "libsimulated.so")
    host.environ["CUSTOM_DEVICE_ROOT"] = str(folder)
    kinds, said = host.ask(
        """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import paddle
        from kvcore.contract.runtimes.interface import RuntimeUnavailable
        from kvcore.contract.runtimes.on_paddle import PaddleRuntime
        kinds = list(paddle.device.get_all_custom_device_type())
        said = []
        for kind in kinds:
            try:
                PaddleRuntime(kind, ()).start()
                said.append("")
            except RuntimeUnavailable as unavailable:
                said.append(str(unavailable))
        answer = [kinds, said]
        """
    )
    assert set(kinds) == {"iluvatar_gpu", "other_gpu"}
    assert said[0] == ""
    assert "several custom devices" in said[1]


def test_a_paddle_without_the_device_says_so(machine: Make, tmp_path: Path) -> None:
    if not has("paddle"):
        pytest.skip("paddlepaddle is not installed")
    made = machine("ixml").card(0).card(1)
    made.environ.update(CUSTOM_DEVICE_ROOT=str(tmp_path / "none"), KVCORE_RUNTIME="paddle")
    answer = on(made, "allocate(MIB)")
    assert answer["code"] == "KV-CAP-010"  # type: ignore[index]
    assert "no custom device iluvatar_gpu" in answer["got"]  # type: ignore[index]


@pytest.mark.parametrize("root", ["", "/nonexistent"])
def test_a_variable_that_paddle_left_behind_is_no_device(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """A process that imported Paddle without plug-ins hands CUSTOM_DEVICE_ROOT="" on to the processes it starts."""
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", root)
    assert not PaddleRuntime("iluvatar_gpu", ("paddle-iluvatar-gpu",)).installed()
