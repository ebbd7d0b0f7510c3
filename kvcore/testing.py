"""For an engine's tests: a plan with exactly the blocks that are expected, or an assertion that says what moved.

::

    def test_the_cache_of_the_benchmark_card() -> None:
        plan = kvcore.plan(kvcore.layouts("config.json", tp=4), facts=device_profile("card.json"))
        assert_plan(plan, 74_000)  # or "baselines/card.json", a saved plan
"""

from __future__ import annotations

import os

from kvcore.report.compare import diff_sections
from kvcore.report.data import plan_data
from kvcore.report.expect import checked
from kvcore.report.plan_text import sum_sections
from kvcore.report.text import plain
from kvcore.sizing.plan import Plan

__all__ = ["assert_plan"]


def assert_plan(plan: Plan, expect: int | str | os.PathLike[str], *, update: bool = False) -> None:
    """Raise :class:`AssertionError` unless ``plan`` has exactly the expected blocks.

    ``expect`` is a number of blocks, or the file of a saved plan, from which the message lists every part that moved
    and what it is worth in blocks. With ``update`` the file is written anew, and nothing is asserted.
    """
    __tracebackhide__ = True
    data = checked(plan_data(plan), expect, update=update)
    if data["matches"] or data["updated"]:
        return
    sections = sum_sections(data["plan"]) if data["diff"] is None else diff_sections(data["diff"])
    raise AssertionError(
        f"{data['num_blocks']:,} blocks are planned, and {data['expected_blocks']:,} expected\n\n{plain(sections)}"
    )
