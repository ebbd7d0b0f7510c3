"""Compare saved plans: from two answers of kvcore, or an answer and a plan, to what moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcore.errors import DocumentError
from kvcore.geometry.keys import read_json_object
from kvcore.report.schema import DiffData, MoveData, checked_plan, checked_refusal
from kvcore.report.text import Section
from kvcore.sizing.diff import MEMORY, Difference, Move, Side
from kvcore.units import format_bytes, format_count

__all__ = ["diff_data", "diff_sections", "read_side", "side_of"]


def read_side(path: str) -> tuple[Side, str]:
    """The plan (or refusal) in a saved answer, and what it is about. Raises :class:`DocumentError`."""
    if not Path(path).is_file():
        raise DocumentError(
            "no such saved plan", code="KV-DOC-012", where=path, expected="an answer of `kvcore plan --json`"
        )
    document = read_json_object(path)
    if document.get("status") == "no":
        refusal = checked_refusal(document, where=path)
        return side_of(refusal, refusal["allowed_blocks"]), f"{path} (refused)"
    plan = checked_plan(document, where=path)
    return side_of(plan, plan["num_blocks"]), f"{path} ({plan['model']})"


def side_of(data: Mapping[str, Any], num_blocks: int) -> Side:
    """One side of a comparison from a plan's or a refusal's data."""
    bounds = data["bounds"]
    memory = next(bound["max_blocks"] for bound in bounds if bound["kind"] == MEMORY)
    return Side(
        num_blocks,
        data["bytes_per_block"],
        _named((term["name"], term["signed_bytes"]) for term in data["terms"]),
        memory,
        _named((f"{b['kind']} [{b['source']}]", b["max_blocks"]) for b in bounds if b["kind"] != MEMORY),
        data["tightest_rank"] if "tightest_rank" in data else data["rank"],
    )


def diff_data(found: Difference, before: str, after: str) -> DiffData:
    """A comparison, JSON-ready."""
    return {
        "before": before,
        "after": after,
        "before_blocks": found.before,
        "after_blocks": found.after,
        "moved_blocks": found.blocks,
        "before_rank": found.ranks[0],
        "after_rank": found.ranks[1],
        "moves": [_move(move) for move in found.moves],
    }


def diff_sections(data: Mapping[str, Any]) -> list[Section]:
    """A row for each move; they add up to the difference."""
    rows = [
        ("", move["kind"], move["name"], _size(move, "before"), _size(move, "after"), f"{move['blocks']:+,}")
        for move in data["moves"]
    ]
    ends = (format_count(data["before_blocks"]), format_count(data["after_blocks"]))
    rows.append(("=", "blocks", "", *ends, f"{data['moved_blocks']:+,}"))
    title = f"From {data['before']} to {data['after']}"
    table = Section(title, ("", "part", "name", "before", "after", "blocks"), tuple(rows), right=(3, 4, 5))
    if data["before_rank"] == data["after_rank"]:
        return [table]
    ranks = f"Another rank is the tightest: {data['before_rank']} before, {data['after_rank']} after."
    return [table, Section(lines=(f"{ranks} The terms compared are each one's own.",))]


def _size(move: Mapping[str, Any], side: str) -> str:
    value = move[side]
    if value is None:
        return "-"
    return f"{value:,} ({format_bytes(value)})" if move["unit"] == "bytes" else format_count(value)


def _move(move: Move) -> MoveData:
    return {
        "kind": move.kind,
        "name": move.name,
        "unit": "bytes" if move.kind in ("term", "block") else "blocks",
        "before": move.before,
        "after": move.after,
        "blocks": move.blocks,
    }


def _named(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """By name; of equal names the second gets a number, so that none is lost."""
    named: dict[str, int] = {}
    seen: dict[str, int] = {}
    for name, value in pairs:
        seen[name] = seen.get(name, 0) + 1
        named[name if seen[name] == 1 else f"{name} #{seen[name]}"] = value
    return named
