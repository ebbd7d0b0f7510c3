"""``kvcore new-plugin``: what it makes is a plugin, is typed and linted, and claims nothing that it does not do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.cli.app import run
from kvcore.cli.new_plugin import TEMPLATE, render
from kvcore.contract import Capability

ROOT = Path(__file__).parents[2]


def made(folder: Path, name: str = "big-chip", *arguments: str) -> Path:
    assert run(["new-plugin", name, "--into", str(folder), *arguments]) == 0
    return folder / f"kvcore-{name}"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["new-plugin", "--json", *arguments]) == 2
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return answer


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def python(as_installed: Callable[[Path], str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``python(folder, *arguments)`` in a process that has the project in ``folder``."""

    def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
        env["PYTHONPATH"] = as_installed(folder)
        return subprocess.run(
            [sys.executable, "-W", "error", *command], env=env, capture_output=True, text=True, timeout=60, cwd=folder
        )

    return run_in


Python = Callable[..., subprocess.CompletedProcess[str]]


def test_the_answer_names_what_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["new-plugin", "acme", "--into", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, json.loads((ROOT / "kvcore/schemas/kvcore.new-plugin.json").read_text()))
    data = answer["data"]
    assert (data["distribution"], data["module"]) == ("kvcore-acme", "kvcore_acme")
    assert data["files"] == sorted(tree(Path(data["path"])))
    assert {"pyproject.toml", "README.md", "tests/test_platforms.py", "src/kvcore_acme/platform.py"} <= set(
        data["files"]
    )


def test_no_word_of_the_template_is_left(tmp_path: Path) -> None:
    folder = made(tmp_path, "x", "--vendor", "Ünïcode & Söhne, Inc.")
    for name, content in tree(folder).items():
        text = f"{name}\n{content.decode()}"
        assert not re.search(r"\$|MODULE|\.tmpl", text), name
    assert 'vendor="Ünïcode & Söhne, Inc."' in (folder / "src/kvcore_x/platform.py").read_text(encoding="utf-8")


@given(
    st.from_regex(r"[a-z][a-z0-9]{0,9}(-[a-z0-9]{1,5}){0,3}", fullmatch=True),
    st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters='"\\'), min_size=1, max_size=40),
)
def test_every_name_and_vendor_gives_valid_python_and_toml(name: str, vendor: str) -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    files = render(name, vendor)
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["entry-points"]["kvcore"] == {name: f"kvcore_{name.replace('-', '_')}:plugin"}
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    assert f"{vendor} devices" in files["README.md"]


@pytest.mark.parametrize("name", ["Acme", "a_b", "a--b", "-a", "a-", "1a", "ä", "a b", "a/b", "..", "a" * 41])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    error = refused(capsys, "--into", str(tmp_path), "--", name)
    assert (error["code"], error["where"]) == ("KV-IN-010", "NAME")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cpu", "replay", "cuda"])
def test_a_name_that_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert refused(capsys, name, "--into", str(tmp_path))["code"] == "KV-IN-011"


@pytest.mark.parametrize("vendor", ["", " ", 'A"; import os', "A\\", "A\nB", "A\u2028B\x85", "A" * 41])
def test_a_vendor_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], vendor: str) -> None:
    error = refused(capsys, "acme", "--vendor", vendor, "--into", str(tmp_path))
    assert (error["code"], error["where"]) == ("KV-IN-010", "--vendor")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path, "acme")
    (folder / "mine.txt").write_text("mine")
    before = tree(folder)
    error = refused(capsys, "acme", "--into", str(tmp_path))
    assert (error["code"], error["where"]) == ("KV-IN-012", str(folder))
    assert tree(folder) == before
    (tmp_path / "kvcore-other").write_text("a file")
    assert refused(capsys, "other", "--into", str(tmp_path))["code"] == "KV-IN-012"
    assert refused(capsys, "acme", "--into", str(tmp_path / "nowhere"))["got"] == "No such file or directory"


def test_a_project_that_cannot_be_written_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real refusal of the system: names on this file system end at 255 bytes, and so does a path's part."""
    deep = tmp_path
    while len(str(deep)) < 4096 - 140:
        deep = deep / ("d" * 100)
    os.makedirs(deep.parent, exist_ok=True)
    rest = 4095 - len(str(deep.parent)) - len("/kvcore-acme") - 20
    into = deep.parent / ("d" * max(1, min(rest, 200)))
    into.mkdir()
    error = refused(capsys, "acme", "--into", str(into))
    assert error["code"] == "KV-IN-012"
    assert list(into.iterdir()) == []


def test_what_is_made_is_linted(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for command in (["check"], ["format", "--check"]):
        ran = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_mypy_finds_a_hook_with_another_signature_and_nothing_else(tmp_path: Path) -> None:
    """One run, because mypy reads kvcore's sources for it: what was made has no other error."""
    folder = made(tmp_path)
    platform = folder / "src/kvcore_big_chip/platform.py"
    wrong = "    @hookimpl\n    def kvcore_release(self, buffer: str) -> int:\n        return 0\n\n\n# mypy compares"
    platform.write_text(platform.read_text().replace("\n# mypy compares", wrong))
    ran = subprocess.run([sys.executable, "-m", "mypy"], cwd=folder, capture_output=True, text=True, timeout=100)
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert ran.returncode == 1
    assert len(errors) == 2, ran.stdout
    assert all("kvcore_release" in error or "BlockSizer" in error for error in errors)


def test_it_is_loaded_and_every_hook_says_that_it_is_not_offered(tmp_path: Path, python: Python) -> None:
    folder = made(tmp_path)
    ran = python(folder, "-m", "kvcore", "plugins", "--json")
    (record,) = (p for p in json.loads(ran.stdout)["data"]["plugins"] if p["name"] == "big-chip")
    assert (record["state"], record["vendor"]) == ("loaded", "big-chip")
    code = """
        import inspect, json
        from kvcore.contract import *
        from kvcore.errors import CapabilityMissing
        from kvcore_big_chip import plugin
        answers = {}
        for name, hook in vars(BlockSizer).items():
            if not name.startswith("kvcore_") or name == "kvcore_platform":
                continue
            arguments = {p: "numpy" if p == "framework" else None for p in list(inspect.signature(hook).parameters)[1:]}
            try:
                getattr(plugin, name)(**arguments)
            except CapabilityMissing as missing:
                answers[name] = missing.got
        declared = {c.value: s.support.value for c, s in plugin.kvcore_platform().capabilities.items()}
        print(json.dumps([answers, declared]))
    """
    answers, declared = json.loads(python(folder, "-c", textwrap.dedent(code)).stdout)
    assert len(answers) == 12
    assert set(answers.values()) == {"not_implemented: not written yet"}
    assert declared == {c.value: "not_implemented" for c in Capability}


def test_kvcore_does_not_pass_over_a_platform_that_cannot_say(tmp_path: Path, python: Python) -> None:
    model = ROOT / "examples/models/qwen3-30b-a3b.json"
    ran = python(made(tmp_path), "-m", "kvcore", "plan", str(model), "--tp", "4", "--json")
    assert ran.returncode == 3
    error = json.loads(ran.stdout)["error"]
    assert error["code"] == "KV-PLG-010"
    assert "big-chip" in error["what"]


def test_the_template_is_in_the_package() -> None:
    assert (ROOT / "kvcore") in TEMPLATE.parents
    assert len(list(TEMPLATE.rglob("*.tmpl"))) == len(render("acme", "Acme")) == 7
