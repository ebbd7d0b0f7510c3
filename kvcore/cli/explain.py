"""``kvcore explain MODEL`` or ``kvcore explain PLAN.json``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import made_plan, resolved, setting_options
from kvcore.errors import PolicyError
from kvcore.geometry.keys import read_json_object
from kvcore.report.data import plan_data
from kvcore.report.plan_text import explain_sections, refusal_sections
from kvcore.report.schema import checked_plan, checked_refusal


@click.command("explain")
@click.argument("model")
@setting_options
@output_options
def command(model: str, **options: Any) -> Answer:
    """Every term and bound of a plan, to add up by hand.

    MODEL is as for `kvcore plan`, with the same settings; or it is a saved answer of `kvcore plan --json`,
    which has its own.
    """
    document = _saved_answer(model)
    if document is not None:
        _refuse_settings(model, options)
        return _explained(document, model)
    settings = resolved(options)
    data = plan_data(made_plan(model, settings), settings)
    return Answer(data, lambda: explain_sections(data))


def _saved_answer(path: str) -> dict[str, Any] | None:
    """A saved answer of kvcore, or None if the file is something else: a model's config, or no file at all."""
    if not Path(path).is_file():
        return None
    document = read_json_object(path)
    return document if str(document.get("schema")).startswith("kvcore.") else None


def _explained(document: dict[str, Any], path: str) -> Answer:
    if document.get("status") == "no":
        refusal = checked_refusal(document, where=path)
        return Answer(refusal, lambda: refusal_sections(refusal), exit_code=1)
    plan = checked_plan(document, where=path)
    return Answer(plan, lambda: explain_sections(plan))


def _refuse_settings(path: str, options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise PolicyError(
            "a saved plan has its settings: others would have no effect",
            code="KV-POL-047",
            where=path,
            got=", ".join(given),
            expected="a model's config, or no settings",
        )
