"""``kvcore plan MODEL``"""

from __future__ import annotations

from typing import Any

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import made_plan, resolved, setting_options
from kvcore.report.data import plan_data
from kvcore.report.plan_text import plan_sections


@click.command("plan")
@click.argument("model")
@setting_options
@output_options
def command(model: str, **options: Any) -> Answer:
    """How many blocks of MODEL's cache fit, and why.

    MODEL is a config.json or a directory that holds one. With --kv-cache-memory and no device named, nothing is
    measured: the plan follows from the size alone.
    """
    settings = resolved(options)
    data = plan_data(made_plan(model, settings), settings)
    return Answer(data, lambda: plan_sections(data))
