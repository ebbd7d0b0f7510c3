"""The suite's doors, its verdicts, and what a vendor sees of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvcore.conformance.check import Level, all_checks
from kvcore.conformance.config import read_config
from kvcore.conformance.records import Outcome, Record, judged, tally
from kvcore.conformance.run import PlatformRun
from kvcore.conformance.setting import built_in
from kvcore.errors import InputError
from kvcore.report.schema import schemas

HERE = Path(__file__).parent
RECORD = Record("MEM-003", "name", "acme", "core", 1, Outcome.FAILED, 0.0)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


class Project:
    """A vendor's project: a mutant of the replay platform that is installed there under its own name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")

    def uses(self, mutant: str) -> None:
        self.write(
            "conftest.py",
            f"""
            from dataclasses import replace
            from kvcore.conformance.setting import built_in

            def pytest_kvcore_setting(config, platform):
                base = built_in(platform)
                return replace(base, plugin="mutants:{mutant}", environ={{**base.environ, "PYTHONPATH": {str(HERE)!r}}})
            """,
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "PYTEST_"))}
        return subprocess.run(
            [sys.executable, "-m", *command],
            env={**env, "PY_COLORS": "0"},
            capture_output=True,
            text=True,
            timeout=100,
            cwd=self.folder,
        )

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("pytest", "-p", "no:cacheprovider", *arguments)


STUB = "from kvcore.conformance.test_platforms import test_platform\n"


def test_one_line_runs_the_suite(project: Project) -> None:
    project.write("tests/test_platforms.py", STUB)
    project.uses("honest")
    ran = project.pytest("-k", "platform", "--kvcore-platform", "replay", "-q")
    assert ran.returncode == 0, ran.stdout
    assert f"replay: {len(all_checks())} passed" in ran.stdout


def test_the_suite_runs_from_anywhere_and_the_marker_agrees_with_the_word(project: Project) -> None:
    project.uses("honest")
    for select in ("-k", "-m"):
        arguments = ("--pyargs", "kvcore.conformance", select, "platform", "--kvcore-platform", "replay", "-q")
        ran = project.pytest(*arguments, "--collect-only", "--rootdir", str(project.folder))
        assert f"{len(all_checks())} tests collected" in ran.stdout, ran.stdout + ran.stderr


def test_a_failure_explains_itself_and_is_reported(project: Project) -> None:
    project.write("tests/test_platforms.py", STUB)
    project.uses("mutant_UsedOfV2AsV1")
    ran = project.pytest("--kvcore-platform", "replay", "--kvcore-report", "out.json", "-q")
    assert ran.returncode == 1
    for part in ("MEM-006", "platform: replay", "call: kvcore_read_memory", "got: ", "unit: bytes", "fix: ", "see: "):
        assert part in ran.stdout, ran.stdout
    report = json.loads((project.folder / "out.json").read_text())
    jsonschema.validate(report, schemas()["kvcore.conformance"])
    assert report["status"] == "no"
    bad = [record for record in report["data"]["records"] if record["outcome"] == "failed"]
    assert [record["check"] for record in bad] == ["MEM-006"]


def test_a_page_can_be_published(project: Project) -> None:
    ran = project.run("kvcore", "conformance", "replay", "--check", "MEM", "--report", "out.html")
    assert ran.returncode == 0, ran.stderr
    page = (project.folder / "out.html").read_text()
    assert page.startswith("<!doctype html>")
    for check in all_checks().values():
        assert (check.id in page) == check.id.startswith("MEM")


EXPECTED = '[tool.kvcore.conformance.expected-failures]\n"{key}" = "{reason}"\n'


@pytest.mark.parametrize(
    ("mutant", "key", "status", "said"),
    [
        ("mutant_UsedOfV2AsV1", "MEM-006", 0, "expected failure"),
        ("mutant_UsedOfV2AsV1", "replay/MEM-006", 0, "expected failure"),
        ("mutant_UsedOfV2AsV1", "other/MEM-006", 1, "1 failed"),
        ("honest", "MEM-006", 1, "unexpected pass"),
    ],
)
def test_expected_failures_are_strict(project: Project, mutant: str, key: str, status: int, said: str) -> None:
    project.write("pyproject.toml", EXPECTED.format(key=key, reason="fixed in library 3.2"))
    project.write("tests/test_platforms.py", STUB)
    project.uses(mutant)
    ran = project.pytest("--kvcore-platform", "replay", "-q", "-k", "MEM-006")
    assert ran.returncode == status, ran.stdout
    assert said in ran.stdout


@pytest.mark.parametrize(
    ("table", "code"),
    [
        (EXPECTED.format(key="MEM-999", reason="gone"), "KV-IN-022"),
        (EXPECTED.format(key="MEM-001", reason=" "), "KV-IN-023"),
        ("[tool.kvcore.conformance]\nskip = ['MEM-001']\n", "KV-IN-021"),
        ("[tool.kvcore.conformance]\nplatforms = 'acme'\n", "KV-IN-021"),
        ("[tool.kvcore.conformance]\nexpected-failures = ['MEM-001']\n", "KV-IN-021"),
        ("[tool.kvcore", "KV-IN-020"),
    ],
)
def test_a_wrong_table_is_refused(project: Project, table: str, code: str) -> None:
    project.write("pyproject.toml", table)
    with pytest.raises(InputError) as raised:
        read_config(project.folder)
    assert raised.value.code == code
    assert project.run("kvcore", "conformance", "replay").returncode == 2


def test_without_a_table_nothing_is_expected(tmp_path: Path) -> None:
    assert read_config(tmp_path).expected == {}


def test_a_platform_that_is_not_there_is_an_error(project: Project) -> None:
    ran = project.pytest("--pyargs", "kvcore.conformance", "--kvcore-platform", "acme")
    assert ran.returncode != 0
    assert "acme is not installed" in ran.stdout + ran.stderr
    assert project.run("kvcore", "conformance", "acme").returncode == 3


def test_without_a_device_nothing_is_proved(project: Project) -> None:
    ran = project.run("kvcore", "conformance", "cuda", "--json")
    if ran.returncode == 0:
        pytest.skip("a CUDA device is here")
    assert ran.returncode == 3
    (platform,) = json.loads(ran.stdout)["data"]["platforms"]
    assert platform["complete"] is False
    only = project.pytest("--pyargs", "kvcore.conformance", "--kvcore-platform", "cuda", "-k", "MEM-0", "-q")
    assert only.returncode == 5, only.stdout


def test_the_command_line_and_the_listing_match_their_schema(project: Project) -> None:
    for arguments in (("replay", "--check", "CAP"), ("--list",)):
        ran = project.run("kvcore", "conformance", *arguments, "--json")
        assert ran.returncode == 0, ran.stderr
        answer = json.loads(ran.stdout)
        jsonschema.validate(answer, schemas()["kvcore.conformance"])
    assert [check["check"] for check in answer["data"]["checks"]] == list(all_checks())


def test_a_project_that_does_not_use_it_sees_nothing_of_it(project: Project) -> None:
    project.write(
        "test_other.py",
        """
        import sys

        def test_nothing_of_the_suite_is_imported():
            names = ("kvcore.conformance.check", "kvcore.api", "numpy", "click")
            assert [n for n in sys.modules if n.startswith(names)] == []
        """,
    )
    ran = project.pytest("-q", "-W", "error")
    assert ran.returncode == 0, ran.stdout
    assert "kvcore" not in ran.stdout


def test_newer_checks_advise_and_older_ones_bind() -> None:
    newer = replace(RECORD, since=2)
    assert judged(newer, 1, None).outcome is Outcome.ADVISORY
    assert judged(newer, 2, None).outcome is Outcome.FAILED
    assert judged(newer, None, None).outcome is Outcome.FAILED
    assert judged(RECORD, 1, None).outcome is Outcome.FAILED


def test_a_verdict_needs_something_that_passed() -> None:
    def conforms(*outcomes: Outcome) -> bool:
        (found,) = tally([replace(RECORD, outcome=outcome) for outcome in outcomes])
        return found.conforms

    assert not conforms(Outcome.UNSUPPORTED, Outcome.NO_DEVICE)
    assert not conforms(Outcome.PASSED, Outcome.FAILED)
    assert not conforms(Outcome.PASSED, Outcome.UNEXPECTED)
    assert conforms(Outcome.PASSED, Outcome.EXPECTED, Outcome.ADVISORY, Outcome.NOT_IMPLEMENTED)


def test_what_a_plugin_prints_or_kills_stays_in_its_process() -> None:
    base = replace(built_in("replay"), plugin="mutants:mutant_Crashes", timeout=5.0)
    setting = replace(base, environ={**base.environ, "PYTHONPATH": str(HERE)})
    checks = all_checks()
    with PlatformRun(setting) as run:
        crashed, after = run.run(checks["RAW-003"]), run.run(checks["RAW-002"])
    assert crashed.got == "killed by signal 11"
    assert after.outcome is Outcome.PASSED
    with PlatformRun(replace(setting, plugin="mutants:mutant_Hangs", timeout=1.0)) as run:
        hung: Any = run.run(checks["STA-003"])
    assert "no answer within 1 s" in hung.got


def test_a_plugin_that_cannot_be_imported_fails_with_the_reason() -> None:
    with PlatformRun(replace(built_in("replay"), plugin="no_such_module:plugin")) as run:
        for check in (all_checks()["MEM-001"], all_checks()["RUN-002"]):
            record = run.run(check)
            assert record.outcome is Outcome.FAILED
            assert "no_such_module" in str(record.got)


def test_levels_are_both_used() -> None:
    assert {check.level for check in all_checks().values()} == set(Level)
