"""``kvcore diff BEFORE AFTER``"""

from __future__ import annotations

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.report.compare import diff_data, diff_sections, read_side
from kvcore.sizing.diff import difference


@click.command("diff")
@click.argument("before")
@click.argument("after")
@output_options
def command(before: str, after: str) -> Answer:
    """Which term or bound moved between two plans, and what each move is worth in blocks.

    BEFORE and AFTER are saved answers of `kvcore plan --json`; either may be a refusal. The parts are taken over one by
    one, in the order of the sum, and add up exactly to the difference.
    """
    (first, one), (second, other) = read_side(before), read_side(after)
    data = diff_data(difference(first, second), one, other)
    return Answer(data, lambda: diff_sections(data))
