"""``kvcore new-plugin NAME``: a vendor's plugin to start from, as a project of its own.

The template is plain files in ``kvcore/templates/plugin`` with ``$name`` for what differs (string.Template). There are
seven of them and eight words; copier or cookiecutter would be one more thing to install before the first hook.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
from pathlib import Path
from string import Template

import click

from kvcore import __version__
from kvcore.cli.answer import Answer, output_options
from kvcore.contract.capabilities import CONTRACT_VERSION, Capability
from kvcore.errors import InputError
from kvcore.report.text import Section

__all__ = ["command", "render"]

TEMPLATE = Path(__file__).parents[1] / "templates" / "plugin"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST = 40
#: The vendor stands in TOML and Python strings and in prose.
_UNFIT = re.compile(r'["\\]|[^ -~\u00a0-\U0010ffff]')


@click.command("new-plugin")
@click.argument("name")
@click.option("--vendor", metavar="NAME", help="The vendor as people write it; else NAME.")
@click.option("--into", metavar="DIR", default=".", show_default="here", help="Where to make kvcore-NAME.")
@output_options
def command(name: str, vendor: str | None, into: str) -> Answer:
    """Make kvcore-NAME, a platform plugin to fill in: installable, typed, and honest that it offers nothing yet."""
    _check_name(name)
    files = render(name, _checked_vendor(name if vendor is None else vendor))
    target = Path(into) / f"kvcore-{name}"
    _write(target, files)
    data = {
        "name": name,
        "distribution": f"kvcore-{name}",
        "module": _module(name),
        "path": str(target),
        "files": sorted(files),
    }
    made = Section(lines=tuple(f"made {target / file}" for file in sorted(files)))
    then = (f"cd {shlex.quote(str(target))} && pip install -e '.[test]'", f"kvcore conformance {name}")
    return Answer(data, lambda: [made, Section("Next", lines=then)])


def render(name: str, vendor: str) -> dict[str, str]:
    """Path within the project -> text."""
    words = {
        "name": name,
        "vendor": vendor,
        "distribution": f"kvcore-{name}",
        "module": _module(name),
        "class_name": "".join(part.capitalize() for part in name.split("-")) + "BlockSizer",
        "contract": str(CONTRACT_VERSION),
        "kvcore_version": __version__,
        "capabilities": "\n".join(f'    Capability.{c.name}: not_implemented("not written yet"),' for c in Capability),
    }
    return {
        _place(file.relative_to(TEMPLATE), words): Template(file.read_text(encoding="utf-8")).substitute(words)
        for file in TEMPLATE.rglob("*.tmpl")
    }


def _place(file: Path, words: dict[str, str]) -> str:
    """``src/MODULE/platform.py.tmpl`` as ``src/kvcore_acme/platform.py``."""
    path = file.with_suffix("").as_posix().replace("MODULE", words["module"])
    return ".gitignore" if path == "gitignore" else path


def _module(name: str) -> str:
    return f"kvcore_{name.replace('-', '_')}"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        raise InputError(
            "not a name for a platform",
            code="KV-IN-010",
            where="NAME",
            got=ascii(name[:80]),
            expected=f"lower-case letters, digits and single hyphens, a letter first, at most {LONGEST}",
        )
    taken = sorted(importlib.metadata.entry_points(group="kvcore").names)
    if name in taken:
        raise InputError(
            "a platform of this name is installed",
            code="KV-IN-011",
            where="NAME",
            got=name,
            expected=f"none of {', '.join(taken)}",
            hint="kvcore refuses a name that two distributions claim",
        )


def _checked_vendor(vendor: str) -> str:
    if not vendor.strip() or len(vendor) > LONGEST or _UNFIT.search(vendor):
        raise InputError(
            "not a vendor's name",
            code="KV-IN-010",
            where="--vendor",
            got=ascii(vendor[:80]),
            expected=f"1 to {LONGEST} characters, without quotes, backslashes and line ends",
        )
    return vendor.strip()


def _write(target: Path, files: dict[str, str]) -> None:
    """All files, in a folder that was not there before; on an error nothing is left of it."""
    try:
        target.mkdir()
    except OSError as error:
        raise _refused(target, error) from error
    try:
        for path, text in files.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise _refused(target, error) from error
        raise


def _refused(target: Path, error: OSError) -> InputError:
    return InputError(
        "the project cannot be made",
        code="KV-IN-012",
        where=os.fspath(target),
        got=error.strerror,
        expected="a folder that does not exist, in one that does",
        hint="nothing is overwritten: choose another place with --into",
    )
