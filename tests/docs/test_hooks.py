"""The pages for vendors: every hook with its exact signature and its four questions, and code that exists."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.cli.app import VERBS
from kvcore.contract.hookspecs import BlockSizer, Contributor, Observer

ROOT = Path(__file__).parents[2]
HOOKS = {
    name: hook
    for specification in (BlockSizer, Contributor, Observer)
    for name, hook in vars(specification).items()
    if name.startswith("kvcore_")
}
SOURCE = ast.parse((ROOT / "kvcore" / "contract" / "hookspecs.py").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    parts = re.split(r"^### (\w+)$", PAGE, flags=re.MULTILINE)
    return {
        name: re.split(r"^## ", text, flags=re.MULTILINE)[0]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_every_hook_has_a_section_and_every_section_a_hook() -> None:
    assert list(sections()) == list(HOOKS)
    assert len(HOOKS) == 18


@pytest.mark.parametrize("name", HOOKS)
def test_a_section_has_the_exact_signature(name: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)\n```", sections()[name], flags=re.DOTALL)
    (shown,) = ast.parse(f"{block}: ...").body
    written = next(n for n in ast.walk(SOURCE) if isinstance(n, ast.FunctionDef) and n.name == name)
    assert isinstance(shown, ast.FunctionDef)
    assert shown.name == name
    assert ast.unparse(shown.args) == ast.unparse(written.args)
    assert shown.returns is not None
    assert written.returns is not None
    assert ast.unparse(shown.returns) == ast.unparse(written.returns)


@pytest.mark.parametrize("name", HOOKS)
def test_a_section_says_when_what_what_not_and_shows_it(name: str) -> None:
    text = sections()[name]
    for word in ("**Called** ", "**Return** ", "**Must not** ", "{literalinclude} "):
        assert text.count(word) == 1, word


def included() -> Iterator[tuple[str, str, str | None]]:
    """Page, file, and object of each piece of code that the pages include."""
    for page in ("hooks.md", "tutorial.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for path, options in re.findall(r"```\{literalinclude\} (\S+)\n(.*?)```", text, flags=re.DOTALL):
            name = re.search(r"^:pyobject: (\S+)$", options, flags=re.MULTILINE)
            yield page, path, name[1] if name else None


def found(tree: ast.AST, name: str) -> ast.AST | None:
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == first:
            return found(node, rest) if rest else node
    return None


@pytest.mark.parametrize(("page", "path", "name"), list(included()))
def test_what_the_pages_include_is_there(page: str, path: str, name: str | None) -> None:
    file = ROOT / "docs" / path
    assert file.is_file(), page
    if name is not None:
        node = found(ast.parse(file.read_text(encoding="utf-8")), name)
        assert node is not None, name
        hook = HOOKS.get(name.rpartition(".")[2])
        if hook is not None and isinstance(node, ast.FunctionDef):
            assert [a.arg for a in node.args.args] == list(inspect.signature(hook).parameters)


def test_the_tutorials_commands_exist() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE)
    verbs = [words[words.index("kvcore") + 1] for line in lines if "kvcore" in (words := shlex.split(line))[:2]]
    assert set(verbs) <= set(VERBS)
    assert {"new-plugin", "conformance"} <= set(verbs)


def test_the_plugin_of_a_site_limits_reserves_and_watches(as_installed: Callable[[Path], str], tmp_path: Path) -> None:
    """The pages' examples for contributors and observers, installed beside the tutorial's platform."""
    info = tmp_path / "site_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvcore]\nsite = site_plugin:plugin\n")
    (tmp_path / "site_plugin.py").write_text((ROOT / "examples" / "site_plugin.py").read_text())
    log = tmp_path / "log.jsonl"
    environ = {
        "PYTHONPATH": f"{tmp_path}:{as_installed(ROOT / 'examples' / 'kvcore-toy')}",
        "TOY_CARDS": "TOY-5f3a:1GiB:320MiB",
        "SITE_LOG": str(log),
        "PATH": "",
    }

    def kvcore(*arguments: str) -> dict[str, object]:
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "kvcore",
            *arguments,
            "--tp",
            "4",
            "--platform",
            "toy",
            "--json",
        ]
        ran = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        data: dict[str, object] = json.loads(ran.stdout)["data"]
        return data

    model = "examples/models/qwen3-30b-a3b.json"
    plan = kvcore("plan", model, "--max-model-len", "128")
    assert plan["available_bytes"] == 64 * 1024**2  # what is free, less the agent's 256 MiB
    assert "site kernel 4.1" in json.dumps(plan["bounds"])
    kvcore("allocate", model, "--max-model-len", "128", "--kv-cache-memory", "32MiB")
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events == ["planned", "planned", "allocated", "released"]
