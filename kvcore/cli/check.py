"""``kvcore check --model MODEL --profile FILE --expect BLOCKS``"""

from __future__ import annotations

from typing import Any

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import made_plan, resolved, setting_options
from kvcore.errors import PolicyError
from kvcore.report.compare import diff_sections
from kvcore.report.data import plan_data
from kvcore.report.expect import checked
from kvcore.report.plan_text import sum_sections
from kvcore.report.schema import CheckData
from kvcore.report.text import Section
from kvcore.units import format_count


@click.command("check")
@click.option("--model", required=True, metavar="MODEL", help="As for `kvcore plan`.")
@click.option("--profile", metavar="FILE", help="The same as --device-profile.")
@click.option(
    "--expect", required=True, metavar="BLOCKS|FILE", help="A number, or a saved answer of `kvcore plan --json`."
)
@click.option("--update", is_flag=True, help="Write the plan to --expect's file.")
@setting_options
@output_options
def command(model: str, profile: str | None, expect: str, *, update: bool, **options: Any) -> Answer:
    """Whether a plan has exactly the blocks that are expected; if not, what moved.

    In place of a baseline with a tolerance: five per cent of a large cache are gigabytes, and what moved can be named.
    A saved plan as --expect names every part that moved from it; exit status 1 if the number differs.
    """
    if profile is not None:
        if options.get("device_profile") is not None:
            raise PolicyError("one device profile", code="KV-POL-056", where="--profile and --device-profile")
        options["device_profile"] = profile
    settings = resolved(options)
    plan = plan_data(made_plan(model, settings), settings)
    data = checked(plan, int(expect) if expect.isascii() and expect.isdigit() else expect, update=update)
    return Answer(data, lambda: _sections(data), exit_code=0 if data["matches"] or data["updated"] else 1)


def _sections(data: CheckData) -> list[Section]:
    verdict = "as expected" if data["matches"] else f"expected {format_count(data['expected_blocks'])}"
    lines = [f"{format_count(data['num_blocks'])} blocks, {verdict}"]
    if data["updated"]:
        lines.append(f"wrote {data['baseline']}")
    shown = [Section(lines=tuple(lines))]
    if data["diff"] is not None and data["diff"]["moves"]:
        return [*shown, *diff_sections(data["diff"])]
    return shown if data["matches"] else [*shown, *sum_sections(data["plan"])]
