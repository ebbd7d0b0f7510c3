"""Write the generated pages: settings, the command line's help, and real outputs for the prose.

    python docs/generate.py

A test compares the pages with what this makes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvcore.cli.app import VERBS, run
from kvcore.cli.new_plugin import render
from kvcore.conformance.check import Check, all_checks
from kvcore.contract import hookspecs
from kvcore.settings import SETTINGS

DOCS = Path(__file__).parent
CARD = "tests/data/profiles/card-80g.json"
QWEN = "examples/models/qwen3-30b-a3b.json"

OUTPUTS = {
    "explain-seed.txt": f"explain {QWEN} --tp 4 --block-size 64 --kv-cache-memory 116391936000",
    "explain-share.txt": f"explain {QWEN} --tp 2 --device-profile {CARD} --weights 28.5GiB --activations 2GiB",
    "refused.txt": f"plan {QWEN} --device-profile {CARD} --weights 68GiB",
}


#: What the words of a story's template stand for.
SETTINGS_OF_THE_CAP = "--engine fastdeploy --max-model-len 32768"
ERNIE = "examples/models/ernie-4.5-vl-28b-a3b.json"
WORDS = {
    "QWEN141": f"{QWEN} --tp 4 {SETTINGS_OF_THE_CAP} --device-profile examples/profiles/qwen3-30b-a3b-tp4-141g.json",
    "ERNIE141": f"{ERNIE} --tp 2 {SETTINGS_OF_THE_CAP} "
    "--device-profile examples/profiles/ernie-4.5-vl-28b-a3b-tp2-141g.json",
    "QWEN_MODEL": f"{QWEN} --tp 4",
    "SETTINGS": SETTINGS_OF_THE_CAP,
}


def pages() -> dict[str, str]:
    """File name below docs/ -> text."""
    made = {f"generated/{name}": _output(line) for name, line in OUTPUTS.items()}
    made |= {f"generated/{name}": text for name, text in _tutorial_outputs().items()}
    made |= {"settings.md": _settings(), "cli.md": _cli(), "hooks.md": _hooks()}
    return {**made, "the-40000-cap.md": _story("the-40000-cap.md.in"), **_conformance()}


def _conformance() -> dict[str, str]:
    """A page for every check, and the index with the table of lies and what finds them."""
    checks, mutants = all_checks(), _mutants()
    text = (DOCS / "conformance" / "index.md.in").read_text(encoding="utf-8")
    rows = [f"| [{c.id}]({c.id}.md) | {c.title} | {c.level.value} |" for c in checks.values()]
    text = text.replace("{{checks}}", "\n".join(["| check | what holds | level |", "|---|---|---|", *rows]))
    rows = [f"| {m.__name__} | {_lie(m)} | {', '.join(sorted(m.kills))} |" for m in mutants]
    text = text.replace("{{mutants}}", "\n".join(["| mutant | its lie | found by |", "|---|---|---|", *rows]))
    pages = {f"conformance/{check.id}.md": _check_page(check, mutants) for check in checks.values()}
    return {"conformance/index.md": text, **pages}


def _check_page(check: Check, mutants: list[Any]) -> str:
    needs = ", ".join(capability.name for capability in check.needs) or "nothing"
    where = f"../../kvcore/conformance/checks/{check.run.__module__.rpartition('.')[2]}.py"
    found = [f"- {_lie(mutant)} ({mutant.__name__})" for mutant in mutants if check.id in mutant.kills]
    facts = f"Level {check.level.value}, since contract {check.since}, needs {needs}"
    lines = [f"# {check.id}: {check.name.replace('_', ' ')}", "", check.title, ""]
    lines += [f"{facts}{', in a process of its own' if check.fresh else ''}.", ""]
    lines += ["## Why", "", f"{check.why[:1].upper()}{check.why[1:]}", ""]
    lines += ["## How to fix", "", f"{check.fix[:1].upper()}{check.fix[1:]}", ""]
    lines += ["## Lies that it finds", "", *found, ""]
    lines += ["## The check", "", f"```{{literalinclude}} {where}", f":pyobject: {check.name}", "```", ""]
    return "\n".join(lines)


def _mutants() -> list[Any]:
    """The mutants of the suite's own tests that tell a lie: their common bases tell none."""
    path = DOCS.parent / "tests" / "conformance" / "mutants.py"
    spec = importlib.util.spec_from_file_location("kvcore_mutants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [mutant for mutant in module.MUTANTS.values() if mutant.kills]


def _lie(mutant: Any) -> str:
    return " ".join(str(mutant.__doc__).split())


def _story(template: str) -> str:
    """A page of prose whose ``{{run COMMAND}}`` and ``{{get KEY | PLAN}}`` are replaced by what kvcore says."""
    text = (DOCS / template).read_text(encoding="utf-8")
    text = re.sub(r"\{\{run (.*?)\}\}", lambda m: f"```console\n{_output(_line(m[1])).rstrip()}\n```", text)
    return re.sub(r"\{\{get (\w+) \| (.*?)\}\}", lambda m: f"{_figure(m[1], _line(m[2])):,}", text)


def _line(words: str) -> str:
    return " ".join(WORDS.get(word, word) for word in words.split(" "))


def _figure(key: str, line: str) -> int:
    data = json.loads(_printed(f"plan {line} --json"))["data"]
    unsafe = [bound["first_unsafe_block"] for bound in data["bounds"] if bound["first_unsafe_block"] is not None]
    number = min(unsafe) if key == "first_unsafe_block" else data[key]
    assert isinstance(number, int)
    return number


def _output(line: str) -> str:
    return f"$ kvcore {line}\n{_printed(line)}"


def _printed(line: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        run(shlex.split(line))
    return shown.getvalue()


def _hooks() -> str:
    """The page of hooks: prose, with each hook's signature and docstring from the specification itself."""
    text = (DOCS / "hooks.md.in").read_text(encoding="utf-8")
    text = re.sub(r"\{\{class (\w+)\}\}", lambda m: _prose(getattr(hookspecs, m[1])), text)
    text = re.sub(r"\{\{hook (\w+)\.(\w+)\}\}", lambda m: _hook(getattr(getattr(hookspecs, m[1]), m[2])), text)
    include = "```{{literalinclude}} ../{}\n:pyobject: {}\n:dedent:\n```"
    return re.sub(r"\{\{example (\S+) (\S+)\}\}", lambda m: include.format(m[1], m[2]), text)


def _hook(hook: object) -> str:
    return f"```python\n{signature(hook)}\n```\n\n{_prose(hook)}"


def signature(hook: object) -> str:
    """A hook's signature as it stands in the specification."""
    assert callable(hook)
    found = inspect.signature(hook)
    arguments = [
        p.name if p.annotation is inspect.Parameter.empty else f"{p.name}: {p.annotation}"
        for p in found.parameters.values()
    ]
    return f"def {hook.__name__}({', '.join(arguments)}) -> {found.return_annotation}"


def _prose(thing: object) -> str:
    """A docstring with its roles and literals as MyST writes them."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r":(\w+):`([^`]+)`", r"{\1}`\2`", text.replace("``", "`"))


TOY = DOCS.parent / "examples" / "kvcore-toy"
CARDS = {"TOY_CARDS": "TOY-5f3a:1GiB:96MiB,TOY-81c0:1GiB:96MiB"}
MODEL = f"{QWEN} --tp 4 --max-model-len 1024"


def _tutorial_outputs() -> dict[str, str]:
    """What the tutorial's commands say: first with the project as it is made, then with the one filled in."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "kvcore-toy")
        for name, text in render("toy", "Toy").items():
            file = bare / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return {
            "toy-bare.txt": _with_plugin(bare, "devices --platform toy", {}),
            "toy-absent.txt": _with_plugin(TOY, "devices --platform toy", {}),
            "toy-devices.txt": _with_plugin(TOY, "devices --platform toy", CARDS),
            "toy-plan.txt": _with_plugin(TOY, f"plan {MODEL} --platform toy --weights 16MiB", CARDS),
            "toy-allocate.txt": _with_plugin(TOY, f"allocate {MODEL} --platform toy --kv-cache-memory 64MiB", CARDS),
        }


def _with_plugin(project: Path, line: str, environ: dict[str, str]) -> str:
    """The output of ``kvcore LINE`` in a process that has the plugin of ``project`` as pip installs it."""
    with tempfile.TemporaryDirectory() as site:
        info = Path(site, "kvcore_toy-0.1.0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcore-toy\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text("[kvcore]\ntoy = kvcore_toy:plugin\n")
        path = os.pathsep.join((site, str(project / "src")))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
        ran = subprocess.run(
            [sys.executable, "-m", "kvcore", *shlex.split(line)],
            env={**clean, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=DOCS.parent,
            check=False,
        )
    return f"$ kvcore {line}\n{ran.stdout}"


def _settings() -> str:
    lines = [
        "# Settings",
        "",
        "Each setting can be a flag, a variable or a line of a TOML policy file (`--policy FILE`), in this order of",
        "precedence; a plan shows each value and where it came from. `KVCORE_POLICY` names a",
        "policy file where no flag does. Sizes take `24GiB` (1024) and `24GB` (1000).",
        "",
        "| flags | variable | value | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        flags = ", ".join(f"`{flag}`" for flag in setting.flags)
        value = f"`{setting.metavar}`".replace("|", "\\|") if setting.metavar else "switch"
        lines.append(f"| {flags} | `{setting.variable}` | {value} | {setting.default} | {setting.help} |")
    example = '```toml\n# policy.toml\nutilization = 0.85\nblock-size = 64\nreserve = ["graphs=1GiB"]\n```'
    return "\n".join([*lines, "", example, ""])


def _cli() -> str:
    parts = ["# Command line", "", "Exit status: 0 yes; 1 it ran, and the answer is no; 2 wrong usage or input;"]
    parts += ["3 no usable platform or device; 70 a fault of kvcore itself; 74 the answer could not be written.", ""]
    for verb in VERBS:
        parts += [f"## kvcore {verb}", "", "```console", _output(f"{verb} --help").rstrip(), "```", ""]
    return "\n".join(parts)


def main() -> None:
    """Write every page."""
    os.chdir(DOCS.parent)
    os.environ["COLUMNS"] = "80"  # help texts wrap at the terminal's width
    (DOCS / "generated").mkdir(exist_ok=True)
    (DOCS / "conformance").mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
