"""Answers: one object with data and text, shown as JSON, as plain columns or as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from kvcore import __version__
from kvcore.errors import DoesNotFit, KvcoreError
from kvcore.report.text import Section, plain, show_rich

__all__ = ["Answer", "emit", "emit_error", "output_options"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb found. ``sections`` is a function, so that text is made only when it is shown."""

    data: Mapping[str, object]
    sections: Callable[[], Sequence[Section]]
    exit_code: int = 0
    diagnostics: tuple[str, ...] = field(default=())


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json`` and ``--debug``, which every verb has."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback on errors.")(command)
    return click.option("--json", is_flag=True, expose_value=False, help="Answer as one JSON object.")(command)


def emit(answer: Answer, verb: str, *, as_json: bool) -> None:
    """The answer on standard output; diagnostics on standard error."""
    if as_json:
        status = "ok" if answer.exit_code == 0 else "no"
        _print_json(verb, status, data=answer.data, error=None, diagnostics=answer.diagnostics)
        return
    for line in answer.diagnostics:
        click.echo(line, err=True)
    if _on_terminal():
        show_rich(answer.sections())
    else:
        click.echo(plain(answer.sections()))


def emit_error(error: KvcoreError, verb: str, *, as_json: bool) -> None:
    """The error: as JSON on standard output (a program reads it there), as text on standard error."""
    from kvcore.report.data import refusal_data
    from kvcore.report.plan_text import refusal_sections
    from kvcore.sizing.refusal import Refusal

    refusal = error.refusal if isinstance(error, DoesNotFit) else None
    data = refusal_data(refusal) if isinstance(refusal, Refusal) else None
    if as_json:
        status = "no" if error.exit_code == 1 else "error"
        _print_json(verb, status, data=data, error=error.to_dict(), diagnostics=())
        return
    click.echo(_error_text(error), err=True)
    if data is not None:
        click.echo("\n" + plain(refusal_sections(data)), err=True)


def _error_text(error: KvcoreError) -> str:
    lines = [f"error[{error.code}]: {error.what}"]
    lines += [f"  --> {error.where}"] if error.where else []
    lines += [f"  {name}: {value}" for name in ("got", "expected", "hint") if (value := getattr(error, name))]
    return "\n".join(lines)


def _print_json(
    verb: str,
    status: str,
    *,
    data: Mapping[str, object] | None,
    error: dict[str, object] | None,
    diagnostics: Sequence[str],
) -> None:
    document = {
        "schema": f"kvcore.{verb}",
        "schema_version": SCHEMA_VERSION,
        "kvcore": __version__,
        "command": verb,
        "status": status,
        "data": data,
        "error": error,
        "diagnostics": list(diagnostics),
    }
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def _on_terminal() -> bool:
    import os

    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
