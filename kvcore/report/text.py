"""Sections of text, and two ways to show them: plain columns for pipes, rich tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Section", "plain", "printable", "show_rich"]


@dataclass(frozen=True, slots=True)
class Section:
    """A titled block: rows of cells under ``headers`` (none: label and value), or lines of text.

    ``right`` are the columns that hold numbers. A row whose first cell is ``=`` is a total: a rule precedes it.
    """

    title: str | None = None
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` with all that cannot be printed as escapes: names come from files, and a terminal obeys what it is sent.

    With ``lines``, line feeds and tabs stay.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text)


def plain(sections: Iterable[Section]) -> str:
    """Columns wide enough for their longest cell; nothing is cut or wrapped, whatever the terminal's width."""
    blocks = []
    for section in sections:
        lines = [printable(section.title)] if section.title else []
        lines += _columns(section)
        lines += [printable(line, lines=True) for line in section.lines]
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block)


def show_rich(sections: Iterable[Section]) -> None:
    """Tables on standard output by rich."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False)
    for section in sections:
        if section.title and not section.rows:
            console.print(Text(printable(section.title), style="bold"))
        if section.rows:
            table = Table(
                title=None if section.title is None else Text(printable(section.title)),
                title_justify="left",
                title_style="bold",
                box=box.SIMPLE_HEAD if section.headers else None,
                show_header=bool(section.headers),
                pad_edge=False,
            )
            for number in range(len(section.rows[0])):
                header = section.headers[number] if section.headers else ""
                # Numbers and names are never cut: only the last column, which is prose, may fold.
                last = number == len(section.rows[0]) - 1
                table.add_column(
                    header, justify="right" if number in section.right else "left", no_wrap=not last, overflow="fold"
                )
            for row in section.rows:
                table.add_row(*(Text(printable(cell)) for cell in row), style="bold" if row[0] == "=" else None)
            console.print(table)
        for line in section.lines:
            console.print(Text(printable(line, lines=True)))


def _columns(section: Section) -> list[str]:
    shown = [tuple(printable(cell) for cell in row) for row in section.rows]
    rows = [section.headers, *shown] if section.headers else shown
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        if row[0] == "=":
            lines.append("  ".join("-" * width for width in widths))
        lines.append(_line(row, widths, section.right))
    return lines


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
