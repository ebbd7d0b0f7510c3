"""The envelope of every answer: schema, version, verb, status, data or error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvcore import __version__

__all__ = ["NO_VERB", "SCHEMA_VERSION", "answer_text"]

SCHEMA_VERSION = 1
#: The schema of a failure before a verb is known.
NO_VERB = "error"


def answer_text(
    verb: str | None,
    status: str,
    *,
    data: Mapping[str, object] | None,
    error: Mapping[str, object] | None = None,
    diagnostics: Sequence[str] = (),
) -> str:
    """An answer as JSON text."""
    document = {
        "schema": f"kvcore.{verb or NO_VERB}",
        "schema_version": SCHEMA_VERSION,
        "kvcore": __version__,
        "command": verb,
        "status": status,
        "data": data,
        "error": error,
        "diagnostics": list(diagnostics),
    }
    return json.dumps(document, indent=2, allow_nan=False)
