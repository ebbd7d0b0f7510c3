"""``kvcore plan MODEL``"""

from __future__ import annotations

from typing import Any

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import made_plan, resolved, setting_options
from kvcore.report.data import plan_data
from kvcore.report.flags import EMITTED, engine_flags
from kvcore.report.plan_text import plan_sections


@click.command("plan")
@click.argument("model")
@click.option("--emit", type=click.Choice(sorted(EMITTED)), help="Also print what makes this engine do the plan.")
@setting_options
@output_options
def command(model: str, emit: str | None, **options: Any) -> Answer:
    """How many blocks of MODEL's cache fit, and why.

    MODEL is a config.json, a directory that holds one, or a model's name in the local hub cache. With
    --kv-cache-memory and no device named, nothing is measured: the plan follows from the size alone.
    --device-profile takes a file or a device of the catalogue, such as h100-80g.
    """
    settings = resolved(options)
    data = plan_data(made_plan(model, settings), settings)
    if emit is not None:
        data = {**data, "flags": engine_flags(emit, data)}
    return Answer(data, lambda: plan_sections(data))
