"""``kvcore plugins``"""

from __future__ import annotations

import click

from kvcore.cli.answer import Answer, output_options
from kvcore.registry import default_registry
from kvcore.report.data import record_data
from kvcore.report.schema import PluginData
from kvcore.report.text import Section


@click.command("plugins")
@output_options
def command() -> Answer:
    """The plugins that were found, and what became of each."""
    records = [record_data(record) for record in default_registry().records]
    return Answer({"plugins": records}, lambda: [_section(records)])


def _section(records: list[PluginData]) -> Section:
    rows = tuple(
        (r["name"], r["distribution"], r["version"], r["state"], r["reason"] or r["vendor"] or "") for r in records
    )
    return Section(None, ("plugin", "distribution", "version", "state", ""), rows)
