"""The driver back end through the real cuda-bindings: all or nothing, nothing left behind, the right device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]
MODEL = "examples/models/qwen3-30b-a3b.json"
START = """
from kvcore_cuda.platform import plugin
device = plugin.kvcore_devices()[0]
MIB = 1 << 20
def allocate(nbytes, name="t"):
    return plugin.kvcore_allocate(device, AllocationRequest(name, nbytes, 256, nbytes))
"""


def on(host: Machine, code: str, **environ: str) -> object:
    import textwrap

    return host.ask(START + textwrap.dedent(code), **environ)


@pytest.fixture
def host(machine: Make) -> Machine:
    return machine("nvml", "cuda").card(0, free=GIB, context=GIB // 8, pids="self:0")


def test_plan_allocate_verify_release(host: Machine) -> None:
    ran = host.kvcore("allocate", MODEL, "--tp", "4", "--max-model-len", "2048", "--platform", "cuda", "--json")
    assert ran.status == 0, ran.err
    assert UUIDS[0] in ran.out
    assert sum(host.held()) == 0


def test_memory_comes_zeroed_and_is_written_read_and_filled(host: Machine) -> None:
    answer = on(
        host,
        """
        b = allocate(3 * MIB + 5)
        zeros = plugin.kvcore_read(b, 0, 4096) == bytes(4096) and plugin.kvcore_read(b, b.nbytes - 7, 7) == bytes(7)
        plugin.kvcore_write(b, 12345, b"kvcore")
        plugin.kvcore_fill(b, 12347, 2, 65)
        answer = [b.nbytes, b.committed_bytes, zeros, plugin.kvcore_read(b, 12344, 8).hex(), plugin.kvcore_release(b)]
        """,
    )
    assert answer == [4 << 20, 4 << 20, True, b"\0kvAAre\0".hex(), 4 << 20]
    assert sum(host.held()) == 0


def test_own_memory_and_free_follow_an_allocation(host: Machine) -> None:
    answer = on(
        host,
        """
        before = plugin.kvcore_read_memory(device)[0]
        b = allocate(256 * MIB)
        after = plugin.kvcore_read_memory(device)
        stats = plugin.kvcore_memory_stats(device)
        plugin.kvcore_release(b)
        again = plugin.kvcore_read_memory(device)[0]
        peak = plugin.kvcore_memory_stats(device)
        plugin.kvcore_reset_peak(device)
        by_driver = [r.free for r in after if r.source == "driver"]
        answer = [before.own, before.free - after[0].free, after[0].own, by_driver,
                  [stats.current, stats.peak], [peak.current, peak.peak, plugin.kvcore_memory_stats(device).peak],
                  again.free == before.free]
        """,
    )
    taken = GIB // 4 + GIB // 8  # the buffer and the context
    assert answer == [0, taken, taken, [GIB - taken], [GIB // 4, GIB // 4], [0, GIB // 4, 0], True]


def test_a_full_device_refuses_and_keeps_nothing(host: Machine) -> None:
    answer = on(host, "allocate(GIB := 1 << 30)")
    assert answer["code"] == "KV-OOM-001"  # type: ignore[index]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in answer["got"]  # type: ignore[index]
    assert sum(host.held()) == 0


def test_a_cache_that_fails_half_way_is_rolled_back(host: Machine) -> None:
    """The device has less than it says: a tenant came between the plan and the allocation."""
    answer = on(
        host,
        """
        import kvcore
        layout = kvcore.layout("examples/models/qwen3-30b-a3b.json", tp=4)
        plan = kvcore.plan(layout, kvcore.platform("cuda").device(), max_model_len=1024)
        scenario = Path(os.environ["FAKE_SCENARIO"])
        scenario.write_text(scenario.read_text() + f"0.free={400 * MIB}\\n")
        kvcore.allocate(plan)
        """,
    )
    assert answer["code"] == "KV-OOM-001"  # type: ignore[index]
    assert sum(host.held()) == 0


def test_a_failing_memset_gives_the_memory_back(host: Machine) -> None:
    host.set({"err.cuMemsetD8": 700})
    answer = on(host, "allocate(MIB)")
    assert answer["code"] == "KV-DEV-028"  # type: ignore[index]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in answer["got"]  # type: ignore[index]
    assert sum(host.held()) == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("plugin.kvcore_release(b); plugin.kvcore_release(b)", "KV-BUF-001"),
        ("plugin.kvcore_release(b); plugin.kvcore_read(b, 0, 1)", "KV-BUF-002"),
        ("plugin.kvcore_read(b, b.nbytes, 1)", "KV-BUF-003"),
        ("plugin.kvcore_write(b, -1, b'x')", "KV-BUF-003"),
        ("plugin.kvcore_fill(b, 0, b.nbytes + 1, 0)", "KV-BUF-003"),
        ("plugin.kvcore_tensor(b, TensorView((1,), 'uint8'), 'paddle')", "KV-CAP-011"),
    ],
)
def test_misuse_is_typed(host: Machine, code: str, expected: str) -> None:
    assert on(host, f"b = allocate(MIB)\n{code}")["code"] == expected  # type: ignore[index]


def test_no_context_is_left_current_and_none_is_left(host: Machine) -> None:
    answer = on(
        host,
        """
        from cuda.bindings import driver
        b = allocate(MIB)
        active = driver.cuDevicePrimaryCtxGetState(0)[2]
        current = int(driver.cuCtxPopCurrent()[0])
        plugin.kvcore_release(b)
        answer = [active, current, driver.cuDevicePrimaryCtxGetState(0)[2]]
        """,
    )
    assert answer == [1, 201, 0]


def test_a_device_that_was_renumbered_is_not_written_to(machine: Make) -> None:
    host = machine("nvml", "cuda").card(0).card(1)
    answer = on(
        host,
        """
        scenario = Path(os.environ["FAKE_SCENARIO"])
        scenario.write_text(scenario.read_text() + "ordinals=1,0\\n")
        allocate(MIB)
        """,
    )
    assert answer["code"] == "KV-DEV-029"  # type: ignore[index]
    assert sum(host.held()) == 0


def test_a_context_to_come_is_reserved_once(host: Machine) -> None:
    answer = on(
        host,
        """
        before = [r.name for r in plugin.kvcore_reserves(device, Phase.PROFILE)]
        b = allocate(MIB)
        answer = [before, [r.name for r in plugin.kvcore_reserves(device, Phase.PROFILE)]]
        """,
    )
    assert answer == [["context"], []]


def test_a_runtime_that_does_not_exist_is_an_input_error(host: Machine) -> None:
    answer = on(host, "allocate(MIB)", KVCORE_RUNTIME="hip")
    assert answer["code"] == "KV-POL-060"  # type: ignore[index]


def test_a_runtime_that_cannot_start_says_why(machine: Make) -> None:
    host = machine("nvml").card(0)
    answer = on(host, "allocate(MIB)", KVCORE_RUNTIME="driver")
    assert answer["code"] == "KV-CAP-010"  # type: ignore[index]
    assert "driver: " in answer["got"]  # type: ignore[index]


def test_tenants_that_come_and_go_change_what_is_free_and_not_what_is_own(host: Machine) -> None:
    """B01, B03: the growth of a neighbour is never charged to this process."""
    host.set({"0.free@2": GIB // 2, "0.free@5": GIB})
    answer = on(host, "answer = [[(r.free, r.own) for r in plugin.kvcore_read_memory(device)][0] for _ in range(3)]")
    assert {own for _, own in answer} == {0}  # type: ignore[attr-defined]
    assert len({free for free, _ in answer}) == 2  # type: ignore[attr-defined]
