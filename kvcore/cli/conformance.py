"""``kvcore conformance``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore.cli.answer import Answer, note, output_options
from kvcore.conformance.check import all_checks
from kvcore.conformance.config import read_config
from kvcore.conformance.records import Record
from kvcore.conformance.report import report_data, sections, write_report
from kvcore.conformance.run import PlatformRun
from kvcore.conformance.setting import built_in
from kvcore.errors import InputError
from kvcore.registry import default_registry

NO_PLATFORM = 3


@click.command("conformance")
@click.argument("platforms", metavar="[NAME]...", nargs=-1)
@click.option("--check", "wanted", multiple=True, metavar="ID", help="Only this check, or all whose ids start so.")
@click.option("--list", "listing", is_flag=True, help="List the checks: what holds, why, and how to fix.")
@click.option(
    "--kvcore-report", "--report", type=click.Path(dir_okay=False, path_type=Path), help="Also write to FILE."
)
@output_options
def command(platforms: tuple[str, ...], wanted: tuple[str, ...], listing: bool, kvcore_report: Path | None) -> Answer:
    """Prove a platform's plugin: every check of the suite, each with what was called, got and expected.

    Without NAME, the platforms that pyproject.toml names in [tool.kvcore.conformance], else all that are installed. A
    check may fill a device: run it on idle ones.
    """
    checks = [check for id_, check in all_checks().items() if not wanted or id_.startswith(wanted)]
    if not checks:
        raise InputError("no such check", code="KV-IN-024", got=", ".join(wanted), expected=", ".join(all_checks()))
    if listing:
        data = report_data(checks)
        return Answer(data, lambda: sections(data))
    config = read_config(Path.cwd())
    registry = default_registry()
    names = platforms or config.platforms or tuple(r.name for r in registry.records)
    known = {record.name for record in registry.records}
    for name in names:
        if name not in known:
            registry.platform(name)  # the error says what became of it
    records: list[Record] = []
    about = {}
    for name in names:
        with PlatformRun(built_in(name), config.expected_of(name)) as suite:
            records += [suite.run(check) for check in checks]
            about[name] = suite.about
        note(f"{name}: {len(checks)} checks ran")
    data = report_data(checks, records, about)
    if kvcore_report is not None:
        write_report(kvcore_report, data)
    return Answer(data, lambda: sections(data), exit_code=_exit_code(data["platforms"]))


def _exit_code(platforms: list[dict[str, Any]]) -> int:
    """1 if one does not conform; 3 if one could not be tried, since its devices are not here."""
    if any(not p["conforms"] and p["complete"] for p in platforms):
        return 1
    if any(p["counts"].get("failed") or p["counts"].get("unexpected pass") for p in platforms):
        return 1
    return 0 if all(p["complete"] for p in platforms) else NO_PLATFORM
