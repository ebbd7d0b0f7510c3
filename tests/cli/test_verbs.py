"""The other verbs, and what holds of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvcore.cli.app import VERBS
from kvcore.documents import load_device_profile
from kvcore.report.schema import schemas

from .conftest import CARD, QWEN, ROOT, Ran

Kvcore = Callable[..., Ran]
SCHEMAS = ROOT / "kvcore" / "schemas"


def checked(ran: Ran, verb: str) -> Any:
    """The answer, valid by the shipped schema of its verb."""
    schema = json.loads((SCHEMAS / f"kvcore.{verb}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(ran.json, schema)
    return ran.json


def test_shipped_schemas_are_those_of_the_code() -> None:
    shipped = {path.stem: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    assert shipped == json.loads(json.dumps(schemas())), "run python -m kvcore.report.schema"


@pytest.mark.parametrize(
    ("verb", "arguments", "status"),
    [
        ("plan", (QWEN, "--device-profile", CARD), 0),
        ("plan", (QWEN, "--kv-cache-memory", "8GiB", "--tp", "2"), 0),
        ("plan", (QWEN, "--device-profile", CARD, "--weights", "76GiB"), 1),
        ("plan", ("nowhere.json",), 2),
        ("explain", (QWEN, "--device-profile", CARD, "--pp", "2"), 0),
        ("allocate", (QWEN, "--tp", "4", "--kv-cache-memory", "64MiB", "--max-model-len", "1024"), 0),
        ("allocate", (QWEN, "--tp", "4", "--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--audit"), 0),
        ("allocate", (QWEN, "--tp", "4", "--kv-cache-memory", "64TiB"), 1),
        ("devices", (), 0),
        ("devices", ("--platform", "cpu"), 0),
        ("devices", ("--platform", "nothing"), 3),
        ("record", (), 0),
        ("plugins", (), 0),
        ("doctor", (), 0),
        ("completion", ("bash",), 0),
        ("check", ("--model", QWEN, "--tp", "4", "--kv-cache-memory", "8GiB", "--expect", "21845"), 0),
        ("check", ("--model", QWEN, "--tp", "4", "--kv-cache-memory", "8GiB", "--expect", "21846"), 1),
        ("check", ("--model", QWEN, "--profile", CARD, "--weights", "76GiB", "--expect", "1"), 1),
        ("check", ("--model", QWEN, "--kv-cache-memory", "8GiB", "--expect", "nowhere.json"), 2),
        ("check", ("--model", QWEN, "--kv-cache-memory", "8GiB", "--expect", "9", "--update"), 2),
        ("check", ("--model", QWEN, "--profile", CARD, "--device-profile", CARD, "--expect", "9"), 2),
        ("diff", ("nowhere.json", "nowhere.json"), 2),
        ("diff", (QWEN, QWEN), 2),
        ("kernels", (), 0),
        ("kernels", ("--engine", "vllm"), 0),
        ("demo", ("overflow",), 0),
        ("demo", ("other",), 2),
    ],
)
def test_json_follows_its_schema(kvcore: Kvcore, verb: str, arguments: tuple[str, ...], status: int) -> None:
    ran = kvcore(verb, *arguments, "--json")
    assert ran.status == status
    answer = checked(ran, verb)
    assert answer["command"] == verb
    assert answer["status"] == {0: "ok", 1: "no"}.get(status, "error")
    assert kvcore(verb, *arguments).status == status


def test_the_profile_schema_accepts_what_is_recorded(kvcore: Kvcore, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    assert kvcore("record", "--platform", "cpu", "--output", str(file)).status == 0
    schema = json.loads((SCHEMAS / "kvcore.device-profile.json").read_text())
    jsonschema.validate(json.loads(file.read_text()), schema)
    assert load_device_profile(file).device.key == "host"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**json.loads(file.read_text()), "extra": 1}, schema)
    ran = kvcore("record", "--output", str(tmp_path / "no" / "such" / "folder.json"), "--json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "KV-DOC-009")


def test_recorded_here_planned_there(kvcore: Kvcore, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    kvcore("record", "--output", str(file))
    settings = (QWEN, "--tp", "4", "--utilization", "0.5")
    recorded = kvcore("plan", *settings, "--device-profile", str(file), "--json").json["data"]
    again = kvcore("plan", *settings, "--device-profile", str(file), "--json").json["data"]
    assert recorded == again
    live = kvcore("plan", *settings, "--json").json["data"]
    # Free memory moves between two readings; the terms do not change their kind.
    assert [term["name"] for term in live["terms"]] == [term["name"] for term in recorded["terms"]]


def test_allocation_on_a_replayed_device(process: Kvcore) -> None:
    arguments = (QWEN, "--tp", "4", "--kv-cache-memory", "60GiB", "--platform", "replay")
    rehearsed = process("allocate", *arguments, "--json", KVCORE_REPLAY=CARD, KVCORE_REPLAY_BACKING="address_space")
    assert rehearsed.status == 0, rehearsed
    found = rehearsed.json["data"]["allocation"]
    assert found["allocated_bytes"] == found["released_bytes"] == rehearsed.json["data"]["cache_bytes"]
    assert found["committed_bytes"] == 0
    refused = process("allocate", *arguments, "--json", KVCORE_REPLAY="nowhere.json")
    assert (refused.status, refused.json["error"]["code"]) == (3, "KV-PLG-012")


def test_falling_back_to_the_cpu_is_said(kvcore: Kvcore) -> None:
    ran = kvcore("plan", QWEN, "--tp", "4")
    assert ran.status == 0
    assert ran.err.startswith("using cpu: no accelerator is here")
    assert "cuda: " in ran.err
    assert kvcore("plan", QWEN, "--tp", "4", "--platform", "cpu", "--weights", "1MiB").err == ""


def test_the_doctor_has_a_line_for_each_plugin(kvcore: Kvcore) -> None:
    answer = kvcore("doctor", "--json").json["data"]
    assert {plugin["name"] for plugin in answer["plugins"]} == {"cpu", "replay", "cuda", "iluvatar"}
    assert answer["choice"]["platform"] == "cpu"
    for plugin in answer["plugins"]:
        assert plugin["detection"]["reason"]
        if plugin["detection"]["state"] != "available" and plugin["name"] != "replay":
            assert plugin["detection"]["hint"]


def test_help_lists_every_verb_without_importing_any(process: Kvcore) -> None:
    ran = process("--help")
    assert ran.status == 0
    for verb, text in VERBS.items():
        assert verb in ran.out
        assert text in ran.out
    script = "import sys; from kvcore.cli.app import run; run(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stderr
    assert [m for m in shown.split() if m.startswith("kvcore.cli.")] == ["kvcore.cli.answer", "kvcore.cli.app"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    ran = subprocess.run(
        [
            "bash",
            "-c",
            f"set -o pipefail; {sys.executable} -m kvcore explain {QWEN} --kv-cache-memory 8GiB | head -n 1",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert ran.returncode == 0
    assert ran.stderr == ""


ANSWER = f"plan {QWEN} --kv-cache-memory 8GiB"


@pytest.mark.parametrize(
    "line",
    [
        f"{ANSWER} >/dev/full",
        f"{ANSWER} >&-",
        f"{ANSWER} --json >/dev/full",
        f"{ANSWER} --json >&-",
        "plan nowhere.json --json >/dev/full",
        "plan nowhere.json --json >&-",
        "plan --help >/dev/full",
    ],
)
def test_an_answer_that_cannot_be_written_is_an_error_of_its_own(line: str) -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m kvcore {line}"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ran.returncode == 74
    assert ran.stderr.startswith("error[KV-OUT-001]: ")
    assert "Traceback" not in ran.stderr


def test_without_standard_error_the_status_still_says_it() -> None:
    for redirection in ("2>/dev/full", "2>&-"):
        line = f"{sys.executable} -m kvcore plan nowhere.json {redirection}"
        assert subprocess.run(["bash", "-c", line], timeout=60, cwd=ROOT).returncode == 2


def test_names_from_files_do_not_act_on_a_terminal(kvcore: Kvcore, tmp_path: Path) -> None:
    profile = json.loads(Path(CARD).read_text())
    profile["device"]["name"] = "card\x1b[2J\n\ud800"
    file = tmp_path / "card.json"
    file.write_text(json.dumps(profile).replace("\\ud800", ""))
    ran = kvcore("plan", QWEN, "--device-profile", str(file))
    assert ran.status == 0
    assert "(card\\x1b[2J\\n)" in ran.out
    odd = tmp_path / "odd\udcff.json"
    odd.write_bytes(Path(QWEN).read_bytes())
    assert kvcore("plan", str(odd), "--device-profile", CARD).out.startswith("odd\\udcff on ")


def test_without_a_verb_there_is_help_or_the_schema_of_an_error(kvcore: Kvcore) -> None:
    ran = kvcore()
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("Usage: kvcore ")
    answer = checked(kvcore("no-such-verb", "--json"), "error")
    assert (answer["command"], answer["error"]["code"]) == (None, "KV-IN-002")


def test_a_fault_of_kvcore_says_so(kvcore: Kvcore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("provoked")

    monkeypatch.setattr("kvcore.cli.planning.read_config", broken)
    ran = kvcore("plan", QWEN, "--kv-cache-memory", "8GiB")
    assert (ran.status, ran.out) == (70, "")
    assert ran.err.startswith("error[KV-BUG-001]: ")
    assert "provoked" in ran.err
    assert "Traceback" not in ran.err
    assert "Traceback" in kvcore("plan", QWEN, "--kv-cache-memory", "8GiB", "--debug").err
    answer = checked(kvcore("plan", QWEN, "--kv-cache-memory", "8GiB", "--json"), "plan")
    assert answer["error"]["code"] == "KV-BUG-001"


def test_recording_takes_the_device_that_variables_name(kvcore: Kvcore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_DEVICE", "77")
    ran = kvcore("record", "--json")
    assert (ran.status, ran.json["error"]["code"]) == (3, "KV-DEV-002")
    assert kvcore("record", "--device", "0", "--json").status == 0


def test_an_interrupt_ends_cleanly_and_leaves_nothing() -> None:
    import os
    import signal
    import time

    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvcore",
            "allocate",
            QWEN,
            "--tp",
            "4",
            "--kv-cache-memory",
            "6GiB",
            "--platform",
            "cpu",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with open(f"/proc/{running.pid}/statm", encoding="ascii") as stream:
            if int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") > 512 * 1024**2:
                break
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode in (130, 0)
    assert "Traceback" not in err
