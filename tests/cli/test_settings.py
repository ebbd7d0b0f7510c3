"""Where values come from, and what is refused: each wrong value is one typed error, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.settings import SETTINGS, Setting

from .conftest import CARD, QWEN, Ran

Kvcore = Callable[..., Ran]


def origins(ran: Ran) -> dict[str, tuple[str, str]]:
    assert ran.status == 0, ran
    return {s["name"]: (s["value"], s["origin"]) for s in ran.json["data"]["settings"]}


def test_precedence_and_origin(kvcore: Kvcore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('utilization = 0.8\ntp = 2\nblock-size = 32\nreserve = ["graphs=1GiB", "nccl=512MiB:transient"]\n')
    monkeypatch.setenv("KVCORE_TP", "4")
    monkeypatch.setenv("KVCORE_BLOCK_SIZE", "64")
    found = origins(
        kvcore("plan", QWEN, "--device-profile", CARD, "--policy", str(file), "--block-size", "128", "--json")
    )
    assert found["block_size"] == ("128", "--block-size")
    assert found["tp"] == ("4", "KVCORE_TP")
    assert found["utilization"] == ("0.8", f"{file}: utilization")
    assert found["reserve"] == ("graphs=1GiB,nccl=512MiB:transient", f"{file}: reserve")
    assert found["margin"] == ("0", "default")


def test_a_variable_can_name_the_policy_file(kvcore: Kvcore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "policy.toml", tmp_path / "other.toml"
    file.write_text("block-size = 32")
    other.write_text("tp = 2")
    monkeypatch.setenv("KVCORE_POLICY", str(file))
    found = origins(kvcore("plan", QWEN, "--device-profile", CARD, "--json"))
    assert found["block_size"] == ("32", f"{file}: block_size")
    found = origins(kvcore("plan", QWEN, "--device-profile", CARD, "--policy", str(other), "--json"))
    assert found["block_size"] == ("the engine's", "default")
    assert found["tp"] == ("2", f"{other}: tp")


def test_a_misspelled_variable_is_said(kvcore: Kvcore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_UTILISATION", "0.1")
    monkeypatch.setenv("KVCORE_ACME_LIBRARY", "a plugin's own")
    card = ("plan", QWEN, "--device-profile", CARD, "--weights", "1GiB")
    ran = kvcore(*card, "--json")
    said = "KVCORE_UTILISATION is no setting and has no effect: did you mean KVCORE_UTILIZATION?"
    assert ran.json["diagnostics"] == [said]
    assert kvcore(*card).err == said + "\n"


#: Any text is a reason.
CAN_BE_WRONG = [setting for setting in SETTINGS if setting.name != "max_blocks_reason"]
#: Their errors name the file or device that is not there, and not where its name stands.
NAME_THINGS = {"device_profile": "nowhere.json", "draft": "nowhere.json", "platform": "nowhere", "device": "nowhere"}


@pytest.mark.parametrize("setting", CAN_BE_WRONG, ids=[setting.name for setting in CAN_BE_WRONG])
def test_a_wrong_value_is_where_it_stands(
    kvcore: Kvcore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    """Flag, variable and file: the same error, at the place that has to be changed, before anything is measured."""
    wrong = NAME_THINGS.get(setting.name, "-1e30")
    file = tmp_path / "policy.toml"
    file.write_text(f'{setting.name} = "{wrong}"')
    base = ("plan", QWEN, "--json")
    found = [kvcore(*base, "--policy", str(file)).json["error"]]
    monkeypatch.setenv(setting.variable, wrong)
    found.append(kvcore(*base).json["error"])
    if not setting.switch:
        found.append(kvcore(*base, setting.flags[0], wrong).json["error"])
    assert len({error["code"] for error in found}) == 1
    if setting.name not in NAME_THINGS:
        places = [f"{file}: {setting.name}", setting.variable, setting.flags[-1]]
        assert [error["where"] for error in found] == places[: len(found)]


def test_names_that_engines_use(kvcore: Kvcore) -> None:
    one = kvcore(
        "plan",
        QWEN,
        "--device-profile",
        CARD,
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.8",
        "--json",
    )
    two = kvcore("plan", QWEN, "--device-profile", CARD, "--tp", "2", "--utilization", "0.8", "--json")
    assert one.json == two.json
    assert one.status == 0


def test_every_setting_has_a_variable_and_a_place_in_a_file(kvcore: Kvcore, tmp_path: Path) -> None:
    variables = [setting.variable for setting in SETTINGS]
    assert len(set(variables)) == len(variables)
    help_text = kvcore("plan", "--help").out
    for setting in SETTINGS:
        for flag in setting.flags:
            assert flag in help_text
        assert setting.variable in help_text.replace("\n", " ")


BAD_FLAGS = [
    ("--tp", "0", "KV-POL-025"),
    ("--tp", "-1", "KV-POL-025"),
    ("--tp", "1.5", "KV-POL-025"),
    ("--tp", "nan", "KV-POL-025"),
    ("--tp", "1" + "0" * 30, "KV-POL-025"),
    ("--tp", "\N{ARABIC-INDIC DIGIT FIVE}", "KV-POL-025"),
    ("--tp", "", "KV-POL-025"),
    ("--block-size", "99999999999", "KV-POL-032"),
    ("--utilization", "0", "KV-POL-023"),
    ("--utilization", "1.01", "KV-POL-023"),
    ("--utilization", "-0.5", "KV-POL-023"),
    ("--utilization", "nan", "KV-POL-010"),
    ("--utilization", "inf", "KV-POL-010"),
    ("--utilization", "1/0", "KV-POL-010"),
    ("--utilization", "1e999999999", "KV-POL-010"),
    ("--utilization", "ninety", "KV-POL-010"),
    ("--utilization-of", "of_moon", "KV-POL-026"),
    ("--kv-cache-memory", "24 parsecs", "KV-POL-011"),
    ("--kv-cache-memory", "-1GiB", "KV-POL-013"),
    ("--kv-cache-memory", "0", "KV-POL-024"),
    ("--kv-cache-memory", "0.3", "KV-POL-012"),
    ("--kv-cache-memory", "1e30", "KV-POL-013"),
    ("--kv-cache-memory", "GiB", "KV-POL-010"),
    ("--kv-cache-memory", "1GiB,,2GiB", "KV-POL-010"),
    ("--kv-cache-memory", "1GiB,2GiB", "KV-POL-020"),
    ("--margin", "lots", "KV-POL-011"),
    ("--weights", "1XB", "KV-POL-011"),
    ("--reserve", "graphs", "KV-POL-041"),
    ("--reserve", "graphs=1GiB:sometimes", "KV-POL-041"),
    ("--reserve", "=1GiB", "KV-POL-041"),
    ("--index-limit", "bits=16", "KV-POL-042"),
    ("--index-limit", "bits=32,signed,unsigned", "KV-POL-042"),
    ("--index-limit", "bits=32,stride=moon", "KV-POL-042"),
    ("--index-limit", "wide", "KV-POL-042"),
    ("--index-limit", "bits=32,bits=64", "KV-POL-042"),
    ("--index-limit", "bits=32,signed=false", "KV-POL-042"),
    ("--index-limit", "bits=32,stride=0", "KV-POL-025"),
    ("--index-limit", "bits=32,stride=\N{SUPERSCRIPT TWO}", "KV-POL-025"),
    ("--dtype", "\x1b[31mred", "KV-POL-037"),
    ("--device-profile", "a\x00b", "KV-POL-037"),
    ("--max-blocks", "40000", "KV-POL-021"),
    ("--reason", "because", "KV-POL-021"),
    ("--dtype", "int3", "KV-POL-030"),
    ("--kv-cache-dtype", "fp7", "KV-POL-031"),
    ("--pp-layers", "1,2", "KV-POL-034"),
    ("--pp", "100", "KV-POL-034"),
    ("--draft-layers", "1", "KV-POL-035"),
    ("--draft-layers", "-1", "KV-POL-025"),
    ("--on-shortage", "pray", "KV-POL-026"),
    ("--engine", "llama.cpp", "KV-POL-028"),
    ("--engine", "vllm@next", "KV-POL-052"),
    ("--block-size", "0x10", "KV-POL-025"),
    ("--mamba-ssm-cache-dtype", "int8", "KV-POL-030"),
    ("--platform", " ", "KV-POL-027"),
    ("--policy", "nowhere.toml", "KV-POL-001"),
    ("--no-such-flag", "1", "KV-IN-002"),
]


@pytest.mark.parametrize(("flag", "value", "code"), BAD_FLAGS, ids=[f"{f} {v[:20]}" for f, v, _ in BAD_FLAGS])
def test_bad_flags(kvcore: Kvcore, flag: str, value: str, code: str) -> None:
    profile = () if flag in ("--platform", "--device-profile") else ("--device-profile", CARD)
    if flag in ("--kv-cache-memory",):
        profile = ()
    ran = kvcore("plan", QWEN, *profile, flag, value, "--json")
    assert ran.status == 2, ran
    answer = ran.json
    assert answer["status"] == "error"
    assert answer["data"] is None
    assert answer["error"]["code"] == code
    text = kvcore("plan", QWEN, *profile, flag, value)
    assert text.out == ""
    assert text.err.startswith(f"error[{code}]: ")
    assert "Traceback" not in text.err


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("utilisation = 0.9", "KV-POL-002", "did you mean utilization?"),
        ("blok_size = 16", "KV-POL-002", "did you mean block_size?"),
        ("tp = [1, true]", "KV-POL-006", "tp"),
        ("tp = {a = 1}", "KV-POL-006", "tp"),
        ("tp = 1979-05-27", "KV-POL-006", "tp"),
        ("tp = true", "KV-POL-025", "tp"),
        ("utilization = nan", "KV-POL-010", "utilization"),
        ("utilization = inf", "KV-POL-010", "utilization"),
        ("tp = 1\ntensor-parallel-size = 1", "KV-POL-003", "tp"),
        ("tp = ", "KV-POL-005", "TOML"),
        ("tp = 1\ntp = 2", "KV-POL-005", "TOML"),
        ("[tp]\nx = 1", "KV-POL-006", "tp"),
        ('device_profile = "a\\u0000b"', "KV-POL-037", "device_profile"),
        ('dtype = "\\u001b[31mred"', "KV-POL-037", "dtype"),
        ('reserve = ["a=1GiB", "a=2GiB"]', "KV-POL-046", "reserve"),
        ('weights = "1GiB"\nreserve = "weights=2GiB"', "KV-POL-046", "weights"),
        ("# " + "x" * 70_000, "KV-POL-004", "large"),
    ],
)
def test_bad_policy_files(kvcore: Kvcore, tmp_path: Path, text: str, code: str, said: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    ran = kvcore("plan", QWEN, "--policy", str(file))
    assert ran.status == 2
    assert ran.err.startswith(f"error[{code}]: ")
    assert said in ran.err
    assert str(file) in ran.err


def test_settings_that_do_not_go_together(kvcore: Kvcore) -> None:
    ran = kvcore("plan", QWEN, "--kv-cache-memory", "1GiB", "--utilization", "0.5", "--json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "KV-POL-043")
    ran = kvcore("plan", QWEN, "--device-profile", CARD, "--platform", "cpu", "--json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "KV-POL-044")
    ran = kvcore("allocate", QWEN, "--device-profile", CARD, "--json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "KV-POL-045")


@pytest.mark.parametrize("arguments", [(), ("plan",), ("nonsense",), ("plan", QWEN, "extra"), ("completion", "tcsh")])
def test_wrong_usage_is_exit_2(kvcore: Kvcore, arguments: tuple[str, ...]) -> None:
    ran = kvcore(*arguments)
    assert ran.status == 2 or (arguments == () and "Verbs" in ran.out + ran.err)
    assert "Traceback" not in ran.err


def test_a_traceback_only_on_request(kvcore: Kvcore) -> None:
    assert "Traceback" in kvcore("plan", "nowhere.json", "--debug").err
    assert "Traceback" not in kvcore("plan", "nowhere.json").err


def test_a_fault_of_our_own_says_so(kvcore: Kvcore, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcore.cli.planning

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(kvcore.cli.planning, "read_config", broken)
    ran = globals()["_run"](("plan", QWEN, "--kv-cache-memory", "1GiB"))
    assert ran == 70


def _run(arguments: tuple[str, ...]) -> int:
    from kvcore.cli.app import run

    return run(arguments)


def test_a_size_on_the_command_line_takes_the_place_of_a_share_in_a_file(kvcore: Kvcore, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("utilization = 0.8")
    found = origins(kvcore("plan", QWEN, "--tp", "4", "--policy", str(file), "--kv-cache-memory", "8GiB", "--json"))
    assert found["kv_cache_memory"] == ("8GiB", "--kv-cache-memory")
    assert found["utilization"] == ("0.9", "default")
    file.write_text('utilization = 0.8\nkv-cache-memory = "8GiB"')
    assert kvcore("plan", QWEN, "--policy", str(file), "--json").json["error"]["code"] == "KV-POL-043"
