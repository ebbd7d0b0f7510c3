"""As a vendor does it: generate, install with pip in an environment of its own, run the suite's three doors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.cli.app import run

ROOT = Path(__file__).parents[2]
TOY = ROOT / "examples" / "kvcore-toy"


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "PYTHON", "VIRTUAL_ENV"))}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated project, beside ``venv`` where it, kvcore and pytest are installed."""
    folder = tmp_path_factory.mktemp("vendor")
    assert run(["new-plugin", "acme", "--vendor", "Acme", "--into", str(folder)]) == 0
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, capture_output=True, timeout=100)
    pip = [str(folder / "venv/bin/pip"), "install", "--quiet", "--retries", "1"]
    # Asked for by themselves, so that only a missing index skips, and never a fault of what is installed next.
    probe = subprocess.run([*pip, "hatchling", "pytest>=9"], env=clean(), capture_output=True, text=True, timeout=110)
    if probe.returncode:
        pytest.skip(f"pip reaches no package index here: {probe.stderr.strip().splitlines()[-1][:120]}")
    packages = (f"{ROOT}[conformance]", str(folder / "kvcore-acme"), str(TOY))
    ran = subprocess.run([*pip, *packages], env=clean(), capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    return folder / "kvcore-acme"


def installed(project: Path, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program, *arguments = command
    return subprocess.run(
        [str(project.parent / "venv/bin" / program), *arguments],
        env=clean(), capture_output=True, text=True, timeout=100, cwd=cwd or project,
    )  # fmt: skip


def test_the_generated_plugin_is_installed_and_reports_honestly(project: Path) -> None:
    ran = installed(project, "kvcore", "plugins", "--json")
    (record,) = (p for p in json.loads(ran.stdout)["data"]["plugins"] if p["name"] == "acme")
    assert (record["state"], record["distribution"], record["version"]) == ("loaded", "kvcore-acme", "0.1.0")
    ran = installed(project, "kvcore", "conformance", "acme", "--json")
    counts = json.loads(ran.stdout)["data"]["platforms"][0]["counts"]
    assert ran.returncode == 0
    assert set(counts) == {"passed", "not implemented"}
    assert counts["not implemented"] > counts["passed"] > 0


@pytest.mark.parametrize(
    "arguments",
    [("-k", "platform"), ("--pyargs", "kvcore.conformance", "-k", "platform", "--kvcore-platform", "acme")],
    ids=["the project's own tests", "from anywhere"],
)
def test_pytest_runs_the_same_checks(project: Path, arguments: tuple[str, ...]) -> None:
    ran = installed(project, "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"acme: \d+ passed, \d+ not implemented", ran.stdout), ran.stdout


def test_a_filled_in_plugin_passes_its_own_tests(project: Path) -> None:
    """The tutorial's, whose conftest.py gives the checks two simulated cards."""
    ran = installed(project, "pytest", "-q", "-p", "no:cacheprovider", "-k", "platform", cwd=TOY)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"toy: 6\d passed, 1 not applicable", ran.stdout), ran.stdout
