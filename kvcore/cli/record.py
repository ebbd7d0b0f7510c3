"""``kvcore record``"""

from __future__ import annotations

from pathlib import Path

import click

from kvcore import api
from kvcore.cli.answer import Answer, output_options
from kvcore.cli.planning import chosen_device
from kvcore.documents import dump_device_profile
from kvcore.errors import DocumentError
from kvcore.report.data import device_data
from kvcore.report.text import Section
from kvcore.settings import resolve


@click.command("record")
@click.option("--platform", metavar="NAME", help="Platform of the device.")
@click.option("--device", metavar="INDEX|KEY", help="Device, by logical index or key.")
@click.option("--output", metavar="FILE", help="Where to write the profile; without it, standard output.")
@output_options
def command(platform: str | None, device: str | None, output: str | None) -> Answer:
    """Write down a device as a profile: readings, limits, versions, and nothing personal."""
    settings = resolve({"platform": platform, "device": device}, names=("platform", "device"))
    facts = api.device_facts(chosen_device(settings))
    text = dump_device_profile(facts)
    if output is not None:
        try:
            Path(output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise DocumentError(
                "cannot write the device profile", code="KV-DOC-009", where=output, got=error.strerror
            ) from error
    data = {"device": device_data(facts.device), "output": output, "profile": text}
    lines = text.rstrip().splitlines() if output is None else [f"wrote {output}"]
    return Answer(data, lambda: [Section(lines=tuple(lines))])
