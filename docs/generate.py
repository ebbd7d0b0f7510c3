"""Write the generated pages: settings, the command line's help, and real outputs for the prose.

    python docs/generate.py

A test compares the pages with what this makes.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from kvcore.cli.app import VERBS, run
from kvcore.settings import SETTINGS

DOCS = Path(__file__).parent
CARD = "tests/data/profiles/card-80g.json"
QWEN = "examples/models/qwen3-30b-a3b.json"

OUTPUTS = {
    "explain-seed.txt": f"explain {QWEN} --tp 4 --block-size 64 --kv-cache-memory 116391936000",
    "explain-share.txt": f"explain {QWEN} --tp 2 --device-profile {CARD} --weights 28.5GiB --activations 2GiB",
    "refused.txt": f"plan {QWEN} --device-profile {CARD} --weights 68GiB",
}


def pages() -> dict[str, str]:
    """File name below docs/ -> text."""
    made = {f"generated/{name}": _output(line) for name, line in OUTPUTS.items()}
    return {**made, "settings.md": _settings(), "cli.md": _cli()}


def _output(line: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        run(line.split())
    return f"$ kvcore {line}\n{shown.getvalue()}"


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
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
