"""The documentation says what the code does: generated pages, codes, hooks, README."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.contract import Capability
from kvcore.contract.hookspecs import BlockSizer

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("kvcore/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
CODE = re.compile(r"KV-(?:000|[A-Z]+-\d{3})")


def test_generated_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # Help texts wrap at the terminal's width.
    monkeypatch.setenv("COLUMNS", "80")
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    for name, text in generate.pages().items():
        assert (ROOT / "docs" / name).read_text() == text, f"docs/{name} has drifted: run python docs/generate.py"


def test_every_code_has_a_section_and_every_section_a_code() -> None:
    used = {code for path in SOURCES for code in CODE.findall(path.read_text())}
    sections = re.findall(r"^### (KV-\S+)$", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert len(set(sections)) == len(sections)
    assert set(sections) == used


def test_hooks_are_documented_with_when_what_and_what_not() -> None:
    hooks = {name: member for name, member in vars(BlockSizer).items() if name.startswith("kvcore_")}
    assert len(hooks) == 13
    for name, hook in hooks.items():
        assert inspect.getdoc(hook), name
        for parameter in list(inspect.signature(hook).parameters.values())[1:]:
            assert parameter.default is inspect.Parameter.empty, f"{name}: pluggy never passes defaults"
            assert parameter.annotation is not inspect.Parameter.empty, name


def test_every_capability_says_what_it_means() -> None:
    source = (ROOT / "kvcore" / "contract" / "capabilities.py").read_text()
    for capability in Capability:
        assert re.search(rf'{capability.name} = "{capability.value}"  #: ', source), capability


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_readmes_first_command_prints_what_the_readme_shows() -> None:
    shown = blocks("console")[0]
    command, _, expected = shown.partition("\n")
    assert command.startswith("$ pip install -e . && kvcore ")
    arguments = command.partition("&& kvcore ")[2].split()
    ran = subprocess.run(
        [sys.executable, "-m", "kvcore", *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected


def test_the_readmes_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = blocks("python")[0].replace("device, utilization=0.5", 'device, kv_cache_memory="1GiB"')
    assert 'kv_cache_memory="1GiB"' in code
    script = code.replace("kvcore.platform()", 'kvcore.platform("cpu")')
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120, cwd=ROOT)


def test_the_readmes_plugin_is_a_plugin() -> None:
    namespace: dict[str, object] = {}
    exec(blocks("python")[1], namespace)
    plugin = namespace["plugin"]
    assert hasattr(plugin, "kvcore_read_memory")
    assert hasattr(plugin, "kvcore_allocate")


def test_the_example_runs() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "examples/engine.py"], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert "request of 40 tokens read back" in ran.stdout


def test_the_project_speaks_of_itself_alone() -> None:
    """No machine's paths, no registry's address, no lock file."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    assert "uv.lock" not in listed
    suspicious = re.compile(r"(?<![\w.])/(?:home|work|root|Users)/\w|index-url|extra-index")
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".json", ".txt") and path != Path(__file__):
            assert not suspicious.search(path.read_text()), name
