"""What a vendor's pyproject.toml says to the suite: ``[tool.kvcore.conformance]``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.conformance.check import all_checks
from kvcore.errors import InputError

__all__ = ["Config", "read_config"]


@dataclass(frozen=True, slots=True)
class Config:
    """``platforms`` are those to test where nothing else is said; ``expected`` are known failures, id -> reason."""

    platforms: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)

    def expected_of(self, platform: str) -> dict[str, str]:
        """The known failures of one platform: ``MEM-003`` is every platform's, ``acme/MEM-003`` that of acme."""
        found = {key: reason for key, reason in self.expected.items() if "/" not in key}
        prefix = f"{platform}/"
        found.update({k.removeprefix(prefix): reason for k, reason in self.expected.items() if k.startswith(prefix)})
        return found


def read_config(folder: Path) -> Config:
    """The table of ``folder``'s pyproject.toml; empty if there is none.

    Raises :class:`InputError` for a name that is not known, an id that no check has, or a failure without a reason.
    """
    path = folder / "pyproject.toml"
    if not path.is_file():
        return Config()
    # Typing knows tomllib from 3.11 on, and its backport of the same interface before.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("pyproject.toml cannot be read", code="KV-IN-020", where=str(path), got=str(error)) from error
    table: dict[str, Any] = document.get("tool", {}).get("kvcore", {}).get("conformance", {})
    unknown = sorted(set(table) - {"platforms", "expected-failures"})
    platforms, expected = table.get("platforms", []), table.get("expected-failures", {})
    if unknown or not _texts(platforms) or not isinstance(expected, dict):
        raise InputError(
            "[tool.kvcore.conformance] is not as it should be",
            code="KV-IN-021",
            where=str(path),
            got=", ".join(unknown) or f"platforms={platforms!r}, expected-failures={expected!r}",
            expected='platforms = ["name"] and a table expected-failures of check = "reason"',
        )
    for key, reason in expected.items():
        _check_expected(path, key, reason)
    return Config(tuple(platforms), expected)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_expected(path: Path, key: str, reason: object) -> None:
    if key.rpartition("/")[2] not in all_checks():
        raise InputError(
            "an expected failure of a check that does not exist",
            code="KV-IN-022",
            where=str(path),
            got=key,
            expected="the id of a check, or platform/id",
            hint="`kvcore conformance --list` shows them; an id that is gone would hide nothing and be believed to",
        )
    if not isinstance(reason, str) or not reason.strip():
        raise InputError(
            "an expected failure without a reason",
            code="KV-IN-023",
            where=f"{path}, {key}",
            got=reason,
            expected="a text",
        )
