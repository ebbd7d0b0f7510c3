"""An audit as text and as data."""

from __future__ import annotations

from kvcore.audit import Audit
from kvcore.report.schema import AuditData
from kvcore.report.text import Section
from kvcore.units import format_bytes, format_count

__all__ = ["audit_data", "audit_sections"]


def audit_data(audit: Audit) -> AuditData:
    """An audit, JSON-ready."""
    return {
        "lines": [
            {
                "name": line.name,
                "promised_bytes": line.promised_bytes,
                "outcome_bytes": line.outcome_bytes,
                "measured": line.measured,
            }
            for line in audit.lines
        ],
        "held_bytes": audit.held_bytes,
        "promised_bytes": audit.promised_bytes,
        "free_bytes": audit.free_bytes,
        "transient_bytes": audit.transient_bytes,
        "margin_bytes": audit.margin_bytes,
        "headroom_bytes": audit.headroom_bytes,
        "unaccounted_bytes": audit.unaccounted_bytes,
        "could_grow_blocks": audit.blocks,
    }


def audit_sections(audit: Audit) -> list[Section]:
    """Promise and outcome line by line, and what the rest is worth in blocks."""
    rows = [
        (
            "",
            line.name,
            "-" if line.promised_bytes is None else format_bytes(line.promised_bytes),
            format_bytes(line.outcome_bytes),
            format_bytes(line.moved_bytes),
            "measured" if line.measured else "as promised",
        )
        for line in audit.lines
    ]
    held = (format_bytes(audit.promised_bytes), format_bytes(audit.held_bytes), "", "the process, at its peak and now")
    rows.append(("=", "held", *held))
    headers = ("", "term", "promised", "outcome", "moved", "")
    return [Section("Promise and outcome", headers, tuple(rows), right=(2, 3, 4)), Section(lines=(_verdict(audit),))]


def _verdict(audit: Audit) -> str:
    if audit.blocks is None:
        return "Neither what is free nor what this process holds is known: nothing can be said."
    step = f"{format_bytes(audit.transient_bytes)} for a step and {format_bytes(audit.margin_bytes)} of margin"
    rest = f"{format_bytes(audit.headroom_bytes)} left beside {step}"
    if audit.blocks < 0:
        return (
            f"{rest}: the plan must shrink by {format_count(-audit.blocks)} of {format_count(audit.num_blocks)} blocks."
        )
    return f"{rest}: the plan could grow by {format_count(audit.blocks)} blocks."
