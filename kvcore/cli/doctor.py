"""``kvcore doctor``"""

from __future__ import annotations

import platform as machine
from typing import Any

import click

from kvcore import __version__
from kvcore.cli.answer import Answer, output_options
from kvcore.contract.capabilities import CONTRACT_VERSION
from kvcore.contract.facts import Detection
from kvcore.errors import NoPlatform
from kvcore.registry import Registry, default_registry
from kvcore.report.data import record_data
from kvcore.report.text import Section


@click.command("doctor")
@output_options
def command() -> Answer:
    """Why each platform can or cannot be used here, with evidence, versions and what would change it."""
    registry = default_registry()
    detections = registry.detect()
    plugins = [
        {
            **record_data(record),
            "path": record.path,
            "traceback": record.traceback,
            "detection": _detection(detections.get(record.name)),
        }
        for record in registry.records
    ]
    versions = {"kvcore": __version__, "contract": str(CONTRACT_VERSION), "python": machine.python_version()}
    data = {"versions": versions, "plugins": plugins, "choice": _choice(registry)}
    return Answer(data, lambda: _sections(data))


def _detection(detection: Detection | None) -> dict[str, Any] | None:
    if detection is None:
        return None
    return {
        "state": detection.state.value,
        "reason": detection.reason,
        "evidence": [{"name": e.name, "value": e.value} for e in detection.evidence],
        "hint": detection.hint,
    }


def _choice(registry: Registry) -> dict[str, Any]:
    """What the rule of choice says here: an error is a finding, not a failure of the doctor."""
    try:
        choice = registry.choose()
    except NoPlatform as error:
        return {"platform": None, "reason": error.what, "fallback": None, "hint": error.hint}
    return {"platform": choice.platform.name, "reason": choice.reason, "fallback": choice.fallback, "hint": None}


def _sections(data: dict[str, Any]) -> list[Section]:
    choice = data["choice"]
    rows = []
    for plugin in data["plugins"]:
        detection = plugin["detection"]
        state = plugin["state"] if detection is None else detection["state"]
        reason = plugin["reason"] if detection is None else detection["reason"]
        rows.append((plugin["name"], f"{plugin['distribution']} {plugin['version']}", state, reason or ""))
        if detection is not None:
            rows += [("", "", e["name"], e["value"]) for e in detection["evidence"]]
            rows += [("", "", "to change it", detection["hint"])] if detection["hint"] else []
    versions = tuple(f"{name} {version}" for name, version in data["versions"].items())
    chosen = choice["platform"] or "none"
    return [
        Section(lines=(", ".join(versions),)),
        Section("Platforms", ("plugin", "version", "state", "why"), tuple(rows)),
        Section(lines=(f"Would use: {chosen} ({choice['reason']})", *((choice["hint"],) if choice["hint"] else ()))),
    ]
