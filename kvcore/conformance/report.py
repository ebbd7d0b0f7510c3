"""The records of a run as text, as JSON and as a page that a vendor can publish."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.conformance.check import Check, all_checks
from kvcore.conformance.records import Outcome, Record, tally
from kvcore.contract.capabilities import CONTRACT_VERSION
from kvcore.report.text import Section

__all__ = ["capability_rows", "distribution", "page", "report_data", "sections", "write_report"]


#: Checks that are named in a row before the rest are counted.
FEW = 4


def distribution(platform: str) -> str | None:
    """The distribution that the platform's plugin is installed from; None for one that is not installed."""
    from importlib.metadata import entry_points

    found = [entry.dist.name for entry in entry_points(group="kvcore", name=platform) if entry.dist is not None]
    return found[0] if found else None


def report_data(
    checks: Iterable[Check], records: Sequence[Record] = (), about: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """All of it, JSON-ready; ``about`` holds what each platform said of itself."""
    from kvcore import __version__

    platforms = [
        {
            "platform": found.platform,
            "conforms": found.conforms,
            "complete": found.complete,
            "counts": {outcome.value: count for outcome, count in found.counts},
            "distribution": distribution(found.platform),
            **(about or {})[found.platform],
        }
        for found in tally(records)
    ]
    return {
        "versions": {"kvcore": __version__, "contract": str(CONTRACT_VERSION)},
        "checks": [_about(check) for check in checks],
        "platforms": platforms,
        "records": [_record(record) for record in records],
    }


def write_report(path: Path, data: Mapping[str, Any]) -> None:
    """``path`` as JSON, or as a page if its name ends in ``.html``."""
    from kvcore.report.document import answer_text

    text = page(data) if path.suffix == ".html" else answer_text("conformance", _status(data), data=data) + "\n"
    path.write_text(text, encoding="utf-8")


def sections(data: Mapping[str, Any]) -> list[Section]:
    """For the command line: counts, capabilities, and whatever did not pass; the checks, if none ran."""
    if not data["platforms"]:
        listed = tuple((c["check"], c["level"], c["title"]) for c in data["checks"])
        return [Section("Checks", ("check", "level", "what holds"), listed)]
    shown = [
        Section(
            "Conformance",
            ("platform", "conforms", "counts"),
            tuple((p["platform"], _verdict(p), _counts(p)) for p in data["platforms"]),
        )
    ]
    columns, *matrix = capability_rows({p["platform"]: p for p in data["platforms"]})
    shown.append(Section("Capabilities", columns, tuple(matrix)))
    rows = _not_passed(data["records"])
    if rows:
        shown.append(Section("Not passed", ("platform", "outcome", "why", "checks"), rows))
    failed = [r for r in data["records"] if r["explained"] is not None]
    shown += [Section(lines=("", *r["explained"].splitlines())) for r in failed]
    return shown


def capability_rows(about: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The matrix of capabilities: a row of titles, then a row for each."""
    names = sorted({name for said in about.values() for name in said["capabilities"]})
    rows = [(name, *(said["capabilities"].get(name, "undeclared") for said in about.values())) for name in names]
    return [("capability", *about), *rows]


def page(data: Mapping[str, Any]) -> str:
    """A page of HTML that needs nothing else."""
    parts = [_HEAD, f"<h1>kvcore conformance</h1><p>kvcore {html.escape(data['versions']['kvcore'])}, contract "]
    parts.append(f"{html.escape(data['versions']['contract'])}</p>")
    parts += [
        _platform_html(about, [r for r in data["records"] if r["platform"] == about["platform"]])
        for about in data["platforms"]
    ]
    return "".join([*parts, "</html>\n"])


def _not_passed(records: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """A row for each outcome and reason, with the checks that it is about."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for r in records:
        if r["outcome"] != Outcome.PASSED.value:
            key = (r["platform"], r["outcome"], r["reason"] or r["got"] or "")
            found.setdefault(key, []).append(r["check"])
    return tuple((*key, _few(checks)) for key, checks in found.items())


def _few(checks: Sequence[str]) -> str:
    more = f" and {len(checks) - FEW} more" if len(checks) > FEW else ""
    return f"{', '.join(checks[:FEW])}{more}"


def _status(data: Mapping[str, Any]) -> str:
    return "ok" if all(p["conforms"] and p["complete"] for p in data["platforms"]) else "no"


def _verdict(about: Mapping[str, Any]) -> str:
    if not about["complete"]:
        return "not proved: no device here"
    return "yes" if about["conforms"] else "no"


def _counts(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in about["counts"].items())


def _about(check: Check) -> dict[str, Any]:
    return {
        "check": check.id,
        "name": check.name,
        "level": check.level.value,
        "since": check.since,
        "needs": [capability.value for capability in check.needs],
        "title": check.title,
        "why": check.why,
        "fix": check.fix,
    }


def _record(record: Record) -> dict[str, Any]:
    check = all_checks().get(record.check)
    told = record.outcome in (Outcome.FAILED, Outcome.UNEXPECTED, Outcome.ADVISORY)
    return {
        "check": record.check,
        "name": record.name,
        "platform": record.platform,
        "level": record.level,
        "since": record.since,
        "outcome": record.outcome.value,
        "seconds": round(record.seconds, 4),
        "reason": record.reason,
        "device": record.device,
        "call": record.call,
        "got": record.got,
        "expected": record.expected,
        "unit": record.unit,
        "explained": record.explained(check) if told and check is not None else None,
    }


def _platform_html(about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    who = " ".join(str(about[k]) for k in ("distribution", "version") if about.get(k))
    rows = [("capability", "declared")]
    rows += [(name, support) for name, support in about.get("capabilities", {}).items()]
    checks = all_checks()
    body = "".join(
        f'<tr class="{html.escape(r["outcome"].replace(" ", "-"))}"><td>{html.escape(r["check"])}</td>'
        f"<td>{html.escape(checks[r['check']].title if r['check'] in checks else r['name'])}</td>"
        f"<td>{html.escape(r['outcome'])}</td>"
        f"<td><pre>{html.escape(r['explained'] or r['reason'] or '')}</pre></td></tr>"
        for r in records
    )
    capabilities = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return (
        f"<h2>{html.escape(about['platform'])}: {html.escape(_verdict(about))}</h2>"
        f"<p>{html.escape(who)} &middot; {html.escape(_counts(about))}</p><table>{capabilities}</table>"
        f"<table><tr><th>check</th><th>what holds</th><th>outcome</th><th>why</th></tr>{body}</table>"
    )


_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvcore conformance</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; max-width: 75rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .6rem; text-align: left; vertical-align: top }
tr { border-bottom: 1px solid #ddd } pre { margin: 0; white-space: pre-wrap }
.failed td, .unexpected-pass td { background: #fdd } .passed td:nth-child(3) { color: #060 }
</style>
"""
