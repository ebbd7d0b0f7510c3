"""``kvcore explain MODEL`` or ``kvcore explain PLAN.json``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import chosen_facts, fallback_note, made_plan, resolved, setting_options
from kvcore.geometry.keys import read_json_object
from kvcore.report.data import plan_data
from kvcore.report.plan_text import explain_sections
from kvcore.report.schema import PlanData, checked_plan


@click.command("explain")
@click.argument("model")
@setting_options
@output_options
def command(model: str, **options: Any) -> Answer:
    """Every term and bound of a plan, to add up by hand.

    MODEL is as for `kvcore plan`, with the same settings; or it is a saved answer of `kvcore plan --json`.
    """
    saved = _saved_plan(model)
    if saved is not None:
        return Answer(saved, lambda: explain_sections(saved))
    settings = resolved(options)
    facts, choice = chosen_facts(settings, needed=False)
    data = plan_data(made_plan(model, settings, facts), settings)
    return Answer(data, lambda: explain_sections(data), diagnostics=fallback_note(choice))


def _saved_plan(path: str) -> PlanData | None:
    """The data of a saved plan, or None if the file is something else: a model's config, or no file at all."""
    if not Path(path).is_file():
        return None
    document = read_json_object(path)
    if document.get("schema") != "kvcore.plan":
        return None
    return checked_plan(document, where=path)
