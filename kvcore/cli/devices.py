"""``kvcore devices``"""

from __future__ import annotations

import click

from kvcore.cli.answer import Answer, note, output_options
from kvcore.errors import KvcoreError
from kvcore.registry import default_registry
from kvcore.report.data import facts_data
from kvcore.report.schema import FactsData
from kvcore.report.text import Section
from kvcore.units import format_bytes


@click.command("devices")
@click.option("--platform", metavar="NAME", help="Only this platform's devices.")
@output_options
def command(platform: str | None) -> Answer:
    """The devices that this process can see, and what each source says of their memory."""
    registry = default_registry()
    names = [platform] if platform else sorted(registry.platforms)
    devices: list[FactsData] = []
    for name in names:
        handle = registry.choose(name).platform if platform else registry.platform(name)
        detection = handle.detect() if platform else registry.detect()[name]
        if detection.state.value != "available":
            note(f"{name}: {detection.reason}")
            continue
        try:
            devices += [facts_data(handle.facts(device)) for device in handle.devices()]
        except KvcoreError as error:
            if platform:
                raise
            note(f"{name}: {error.what}: {error.got}")
    return Answer({"devices": devices}, lambda: _sections(devices))


def _sections(devices: list[FactsData]) -> list[Section]:
    rows = tuple(
        (
            device["platform"],
            str(device["index"]),
            device["key"],
            reading["source"],
            format_bytes(reading["total_bytes"]),
            format_bytes(reading["free_bytes"]),
            format_bytes(reading["own_bytes"]),
            reading["skipped"] or device["name"],
        )
        for device in devices
        for reading in device["readings"]
    )
    headers = ("platform", "index", "key", "source", "total", "free", "own", "")
    return [Section(None, headers, rows, right=(1, 4, 5, 6))]
