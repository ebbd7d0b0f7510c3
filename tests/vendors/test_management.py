"""What each error of a management library leads to, through the real pynvml."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.contract.runtimes.management import ASK_ANOTHER, ERRORS

from .conftest import GIB, UUIDS, Machine

Make = Callable[..., Machine]


def test_version_2_tells_reserved_memory_apart(machine: Make) -> None:
    host = machine("nvml").card(0, free=3 * GIB, reserved=GIB // 2)
    (reading, *_) = host.readings()
    assert reading["source"] == "nvml_v2"
    assert reading["reserved"] == GIB // 2
    assert reading["total"] == reading["free"] + reading["used"] + reading["reserved"]


def test_version_1_where_the_driver_has_no_second(machine: Make) -> None:
    host = machine("nvml_v1").card(0, free=3 * GIB, reserved=GIB // 2)
    skipped, reading, *_ = host.readings()
    assert skipped["source"] == "nvml_v2"
    assert "function not found (13)" in skipped["skipped"]
    assert reading["source"] == "nvml_v1"
    assert reading["free"] == 3 * GIB
    assert reading["reserved"] is None


@pytest.mark.parametrize("number", [2, 3, 13, 25, 999])
def test_errors_that_are_about_the_version_lead_to_version_1(machine: Make, number: int) -> None:
    host = machine("nvml").card(0).set({"err.nvmlDeviceGetMemoryInfo_v2": number})
    skipped, reading, *_ = host.readings()
    assert f"({number})" in skipped["skipped"]
    assert (reading["source"], reading["total"]) == ("nvml_v1", 8 * GIB)


def test_every_error_of_the_memory_query_is_typed_or_skipped_and_never_a_number(machine: Make) -> None:
    """One process for all: the scenario is read again at each call."""
    host = machine("nvml").card(0)
    answers = host.ask(
        f"""
        from dataclasses import asdict
        from kvcore_cuda.platform import plugin
        device = plugin.kvcore_devices()[0]
        scenario = Path(os.environ["FAKE_SCENARIO"])
        before = scenario.read_text()
        answer = {{}}
        for number in {sorted(ERRORS)} + [777]:
            fails = f"err.nvmlDeviceGetMemoryInfo={{number}}\\nerr.nvmlDeviceGetMemoryInfo_v2={{number}}\\n"
            scenario.write_text(before + fails)
            try:
                answer[number] = [asdict(r) for r in plugin.kvcore_read_memory(device)]
            except KvcoreError as error:
                answer[number] = error.to_dict()
        """
    )
    for number in [*ERRORS, 777]:
        answer = answers[str(number)]
        if number in ASK_ANOTHER:
            assert all(r["skipped"] and r["total"] is None and r["free"] is None for r in answer), number
            assert any(f"({number})" in r["skipped"] for r in answer)
        else:
            assert answer["code"].startswith("KV-DEV-02"), number
            assert f"({number})" in answer["got"]
    codes = {number: answers[str(number)]["code"] for number in (15, 16, 17, 18, 28)}
    assert codes == {15: "KV-DEV-021", 16: "KV-DEV-022", 17: "KV-DEV-023", 18: "KV-DEV-024", 28: "KV-DEV-027"}
    assert "restart" in answers["18"]["hint"]
    assert "restart the machine" in answers["15"]["hint"]


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_every_error_while_listing_is_typed_or_means_that_nvml_cannot_say(machine: Make, call: str) -> None:
    host = machine("nvml").card(0)
    answers = host.ask(
        f"""
        from kvcore_cuda.platform import plugin
        scenario = Path(os.environ["FAKE_SCENARIO"])
        before = scenario.read_text()
        answer = {{}}
        for number in {sorted(ERRORS)} + [777]:
            scenario.write_text(before + f"err.{call}={{number}}\\n")
            try:
                library, cards, skipped = plugin.survey()
                answer[number] = [len(cards), *(r.skipped for r in skipped)]
            except KvcoreError as error:
                answer[number] = error.to_dict()
        """
    )
    for number in [*ERRORS, 777]:
        answer = answers[str(number)]
        if number in ASK_ANOTHER:
            assert answer[0] == 0
            # A card that this process may not ask about is another container's.
            assert number == 4 or f"({number})" in answer[1], number
        else:
            assert answer["code"].startswith("KV-DEV-02"), number


def test_a_lost_permission_is_not_hidden_by_version_1(machine: Make) -> None:
    """vllm#55381: a swallowed permission error selected wrong defaults."""
    host = machine("nvml").card(0).set({"err.nvmlDeviceGetMemoryInfo_v2": 4})
    readings = host.readings()
    assert "no permission (4)" in readings[0]["skipped"]
    assert not [r for r in readings if r["source"] == "nvml_v1"]


@pytest.mark.parametrize("number", [18, 15, 16, 17])
def test_a_driver_that_is_not_fit_is_unusable_and_says_why(machine: Make, number: int) -> None:
    found = machine("nvml").card(0).set({"err.nvmlInit": number}).detection()
    assert found["state"] == "unusable"
    assert f"({number})" in found["reason"]
    assert found["hint"]


@pytest.mark.parametrize("number", [9, 12, 3])
def test_a_library_without_a_driver_is_not_a_device(machine: Make, number: int) -> None:
    """A stub from a toolkit loads, and fails at init."""
    found = machine("nvml").card(0).set({"err.nvmlInit": number}).detection()
    assert found["state"] == "absent"
    assert f"({number})" in found["reason"]


def test_total_0_is_not_a_size(machine: Make) -> None:
    readings = machine("nvml").card(0, total=0).readings()
    assert all(r["total"] is None for r in readings)
    assert "a total of 0" in readings[0]["skipped"]


def test_sessions_are_balanced_also_when_a_call_fails(machine: Make) -> None:
    host = machine("nvml").card(0).set({"err.nvmlDeviceGetMemoryInfo_v2": 15})
    assert host.readings()["code"] == "KV-DEV-021"
    assert (host.folder / "balance").read_text() == "0"


def test_a_driver_that_disappears_between_two_calls(machine: Make) -> None:
    host = machine("nvml").card(0).card(1)
    answer = host.ask(
        """
        from kvcore_cuda.platform import plugin
        device = plugin.kvcore_devices()[1]
        scenario = Path(os.environ["FAKE_SCENARIO"])
        scenario.write_text(scenario.read_text() + "count=1\\n")
        plugin.kvcore_read_memory(device)
        """
    )
    assert answer["code"] == "KV-DEV-027"
    assert UUIDS[1] in answer["expected"]


def test_a_call_that_hangs_is_an_error_within_the_limit(machine: Make) -> None:
    host = machine("nvml").card(0).set({"slow.nvmlDeviceGetCount": 5})
    answer = host.ask(
        """
        from dataclasses import replace
        from kvcore_cuda.platform import plugin
        plugin.surroundings = replace(plugin.surroundings, seconds=0.2)
        plugin.kvcore_devices()
        """
    )
    assert answer["code"] == "KV-DEV-025"
    assert "nvml" in answer["where"]


def test_detection_changes_nothing(machine: Make) -> None:
    """No driver, no framework, no context, no variable."""
    host = machine("nvml", "cuda").card(0)
    answer = host.ask(
        """
        import sys
        from kvcore_cuda.platform import plugin
        before = dict(os.environ)
        state = plugin.kvcore_detect().state.value
        maps = Path("/proc/self/maps").read_text()
        answer = [state, dict(os.environ) == before, "libcuda.so" in maps,
                  [name for name in ("paddle", "torch", "cuda.bindings.driver") if name in sys.modules]]
        """
    )
    assert answer == ["available", True, False, []]
    assert sum(host.held()) == 0


def test_the_redirecting_distribution_of_pynvml_is_survived(machine: Make) -> None:
    """pynvml 13 warns at import, and the process turns warnings into errors."""
    host = machine("nvml").card(0)
    (host.folder / "sitecustomize.py").write_text(
        "import sys, warnings\n"
        "class Redirect:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pynvml':\n"
        "            warnings.warn('use nvidia-ml-py', FutureWarning)\n"
        "sys.meta_path.insert(0, Redirect())\n"
    )
    assert host.readings(PYTHONPATH=str(host.folder))[0]["total"] == 8 * GIB


def test_an_old_pynvml_package_is_named_and_not_believed(machine: Make) -> None:
    host = machine("nvml").card(0)
    (host.folder / "pynvml").mkdir()
    (host.folder / "pynvml" / "__init__.py").write_text("def nvmlInit(): pass\n")
    found = host.detection(PYTHONPATH=str(host.folder))
    assert found["state"] == "absent"
    assert "is not nvidia-ml-py" in found["reason"]


def test_cards_of_other_containers_are_passed_over(machine: Make) -> None:
    host = machine("nvml").card(0).card(1).set({"err.nvmlDeviceGetHandleByIndex.0": 4})
    assert [device["key"] for device in host.devices()] == [UUIDS[1]]


def test_another_vendors_cards_behind_nvml_are_not_claimed(machine: Make) -> None:
    """A link from libixml.so to libnvidia-ml.so.1 makes NVML count Iluvatar's cards, whose UUIDs look the same."""
    found = machine("nvml").card(0, vendor="0x1e3e").detection()
    assert found["state"] == "absent"
    assert "PCI vendor 0x1e3e" in found["reason"]


@pytest.mark.parametrize(
    ("pids", "expected"),
    [("self:1000,77:5", 1000), ("77:5", 0), ("self:none", None), ("", 0)],
)
def test_own_memory_is_this_processs_by_the_drivers_own_list(machine: Make, pids: str, expected: int | None) -> None:
    """Without a list, a process that never loaded a driver holds nothing."""
    host = machine("nvml").card(0, **({"pids": pids} if pids else {}))
    assert host.readings()[0]["own"] == expected


def test_own_memory_is_unknown_when_it_cannot_be_told(machine: Make) -> None:
    """A container hides this process from the driver's list, and a context is alive."""
    host = machine("nvml", "cuda").card(0, pids="77:5", context=GIB)
    answer = host.ask(
        """
        from kvcore_cuda.platform import plugin
        device = plugin.kvcore_devices()[0]
        before = plugin.kvcore_read_memory(device)[0].own
        buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 21, 256, 1 << 21))
        during = plugin.kvcore_read_memory(device)
        plugin.kvcore_release(buffer)
        sources = [(r.source, r.total is None) for r in during]
        answer = [before, during[0].own, sources, plugin.kvcore_read_memory(device)[0].own]
        """
    )
    assert answer == [0, None, [["nvml_v2", False], ["driver", False]], 0]
