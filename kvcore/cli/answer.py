"""Answers: one object with data and text, shown as JSON, as plain columns or as tables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from kvcore.errors import DoesNotFit, KvcoreError
from kvcore.report.document import answer_text
from kvcore.report.text import Section, plain, printable, show_rich

__all__ = ["Answer", "CannotWrite", "emit", "emit_error", "note", "output_options", "silence"]


class CannotWrite(KvcoreError):
    """Standard output is closed, or its device is full: the answer was found and is lost."""

    exit_code = 74  # EX_IOERR of sysexits.h
    default_code = "KV-OUT-001"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb found. ``sections`` is a function, so that text is made only when it is shown."""

    data: Mapping[str, object]
    sections: Callable[[], Sequence[Section]]
    exit_code: int = 0


def note(text: str) -> None:
    """Something to know beside the answer, which is said also if there is none: standard error, or ``diagnostics``."""
    click.get_current_context().obj.append(text)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json`` and ``--debug``, which every verb has."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback on errors.")(command)
    return click.option("--json", is_flag=True, expose_value=False, help="Answer as one JSON object.")(command)


def emit(answer: Answer, verb: str | None, *, as_json: bool, notes: Sequence[str] = ()) -> None:
    """The answer on standard output, the notes on standard error. Raises :class:`CannotWrite`."""
    if as_json:
        status = "ok" if answer.exit_code == 0 else "no"
        _print_json(verb, status, data=answer.data, error=None, diagnostics=notes)
        return
    _say_beside(notes)
    with _writing():
        if _on_terminal():
            show_rich(answer.sections())
        else:
            click.echo(_encodable(plain(answer.sections())))


def emit_error(error: KvcoreError, verb: str | None, *, as_json: bool, notes: Sequence[str] = ()) -> None:
    """The error: as JSON on standard output (a program reads it there), as text on standard error.

    Raises :class:`CannotWrite` where the JSON cannot be written.
    """
    from kvcore.report.data import refusal_data
    from kvcore.report.plan_text import refusal_sections
    from kvcore.sizing.refusal import Refusal

    refusal = error.refusal if isinstance(error, DoesNotFit) else None
    data = refusal_data(refusal) if isinstance(refusal, Refusal) else None
    if as_json:
        status = "no" if error.exit_code == 1 else "error"
        _print_json(verb, status, data=data, error=error.to_dict(), diagnostics=notes)
        return
    refused = [] if data is None else ["\n" + plain(refusal_sections(data))]
    _say_beside([*notes, _error_text(error), *refused])


def silence() -> None:
    """Nothing more can be written to standard output, and the interpreter must not try when it ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    if sys.stdout is None:
        raise CannotWrite("the answer cannot be written", where="standard output", got="it is closed")
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        silence()
        raise CannotWrite("the answer cannot be written", where="standard output", got=error.strerror) from error


def _say_beside(lines: Iterable[str]) -> None:
    # Where standard error cannot be written, the exit status is all that is left to say it with.
    with contextlib.suppress(OSError):
        for line in lines:
            click.echo(printable(line, lines=True), err=True)


def _encodable(text: str) -> str:
    """``text`` with escapes for what standard output has no character for."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _error_text(error: KvcoreError) -> str:
    lines = [f"error[{error.code}]: {error.what}"]
    lines += [f"  --> {error.where}"] if error.where else []
    lines += [f"  {name}: {value}" for name in ("got", "expected", "hint") if (value := getattr(error, name))]
    return "\n".join(lines)


def _print_json(
    verb: str | None,
    status: str,
    *,
    data: Mapping[str, object] | None,
    error: dict[str, object] | None,
    diagnostics: Sequence[str],
) -> None:
    text = answer_text(verb, status, data=data, error=error, diagnostics=diagnostics)
    with _writing():
        click.echo(text)


def _on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
