"""A plan against what was expected: a number of blocks, or a saved plan that explains every move from it."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.errors import DocumentError, PolicyError
from kvcore.report.compare import diff_data, read_side, side_of
from kvcore.report.document import answer_text
from kvcore.report.schema import CheckData, PlanData
from kvcore.sizing.diff import difference

__all__ = ["checked"]


def checked(plan: PlanData, expect: int | str | os.PathLike[str], *, update: bool = False) -> CheckData:
    """Compare exactly: no percentage is near enough, since what moved can be named.

    ``expect`` is a number of blocks, or the file of a saved plan; with ``update`` the file is written anew. Raises
    :class:`DocumentError` for a file that cannot be used.
    """
    if isinstance(expect, int):
        if update:
            raise PolicyError(
                "a number cannot be updated",
                code="KV-POL-055",
                where="expect",
                got=expect,
                expected="a saved plan's file",
            )
        return _answer(plan, expect, None, updated=False)
    path = os.fspath(expect)
    if update and not Path(path).exists():
        _write(path, plan)
        return _answer(plan, plan["num_blocks"], path, updated=True)
    before, about = read_side(path)
    found = _answer(plan, before.num_blocks, path, updated=update)
    found["diff"] = diff_data(difference(before, side_of(plan, plan["num_blocks"])), about, "this plan")
    if update:
        _write(path, plan)
    return found


def _answer(plan: PlanData, expected: int, baseline: str | None, *, updated: bool) -> CheckData:
    return {
        "expected_blocks": expected,
        "num_blocks": plan["num_blocks"],
        "matches": plan["num_blocks"] == expected,
        "baseline": baseline,
        "updated": updated,
        "diff": None,
        "plan": plan,
    }


def _write(path: str, plan: PlanData) -> None:
    try:
        Path(path).write_text(answer_text("plan", "ok", data=plan) + "\n", encoding="utf-8")
    except OSError as error:
        raise DocumentError("cannot write the plan", code="KV-DOC-013", where=path, got=error.strerror) from error
