"""Reading a config.json: one place where text from outside becomes checked values, or a typed error."""

from __future__ import annotations

import collections.abc
import json
import os
from pathlib import Path
from typing import Any, Final

from kvcore.errors import ConfigError

__all__ = ["Keys", "read_json_object"]

#: A published config.json has a few KiB; the largest known, with a table a layer, stay far below this.
LARGEST_FILE: Final = 4 * 1024**2
#: No model has a dimension or a length above this: beyond it a number is a slip of the keyboard.
LARGEST_NUMBER: Final = 2**40


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in the file at ``path``. Raises :class:`ConfigError` if there is none."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            raw = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(
            "cannot read the model's config",
            code="KV-CFG-001",
            where=str(path),
            got=error.strerror,
            expected="a config.json as published with the model",
        ) from error
    if len(raw) > LARGEST_FILE:
        raise ConfigError(
            "the model's config is too large",
            code="KV-CFG-002",
            where=str(path),
            got=f"more than {LARGEST_FILE:,} bytes",
            expected="a config.json of a few KiB",
        )
    try:
        value = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise ConfigError(
            "the model's config is nested too deeply", code="KV-CFG-004", where=str(path), expected="a JSON object"
        ) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, and the limit on digits of an int
        raise ConfigError(
            "the model's config is not valid JSON", code="KV-CFG-003", where=str(path), got=error, expected="JSON"
        ) from error
    return _object(value, str(path))


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            "the model's config is not an object",
            code="KV-CFG-005",
            where=where,
            got=type(value).__name__,
            expected="a JSON object with the model's keys",
        )
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class Keys:
    """Typed access to the keys of one config, remembering where it came from for the errors.

    A key whose value is null counts as absent, as it does for the engines that wrote these files. Where several
    names are given, the first that is present is taken: families spell the same thing differently.
    """

    def __init__(
        self, values: collections.abc.Mapping[str, Any], where: str, prefix: str = "", outer: Keys | None = None
    ) -> None:
        self._values = values
        self.where = where
        self.prefix = prefix
        #: The keys that these are a part of; themselves, if they are the whole.
        self.outer = self if outer is None else outer

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def inner(self, name: str) -> Keys:
        """The object under ``name``, as keys of its own."""
        values = self._values.get(name)
        if not isinstance(values, dict):
            raise self.wrong(name, values, "an object")
        return Keys(values, self.where, f"{self.prefix}{name}.", self)

    def raw(self, name: str) -> Any:
        """The unchecked value under ``name``, or None."""
        return self._values.get(name)

    def integer(self, *names: str, low: int = 1, high: int = LARGEST_NUMBER) -> int:
        """The integer under the first of ``names`` that is present; a missing one is an error."""
        value = self.optional_integer(*names, low=low, high=high)
        if value is None:
            raise self.missing(*names)
        return value

    def optional_integer(self, *names: str, low: int = 1, high: int = LARGEST_NUMBER) -> int | None:
        """As :meth:`integer`, but None if none of ``names`` is present."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise self.wrong(name, value, f"an integer from {low:,} to {high:,}")
            return value
        return None

    def flag(self, name: str, *, default: bool) -> bool:
        """The boolean under ``name``; ``default`` if it is absent, where the family's code says so."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def optional_text(self, *names: str) -> str | None:
        """The string under the first of ``names`` that is present, or None."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if not isinstance(value, str) or not value or len(value) > 200:
                raise self.wrong(name, value, "a short string")
            return value
        return None

    def missing(self, *names: str) -> ConfigError:
        """The error for a key that is needed and not there."""
        wanted = " or ".join(f"{self.prefix}{name}" for name in names)
        return ConfigError(
            "the model's config lacks a key",
            code="KV-CFG-010",
            where=self.where,
            got=f"keys {_listed(self._values)}",
            expected=wanted,
            hint="kvcore does not guess a model's geometry: complete the config",
        )

    def wrong(self, name: str, value: object, expected: str) -> ConfigError:
        """The error for a key whose value has the wrong type or range."""
        return ConfigError(
            "a key of the model's config has a wrong value",
            code="KV-CFG-011",
            where=f"{self.where}: {self.prefix}{name}",
            got=_shown(value),
            expected=expected,
        )

    def contradiction(self, what: str, got: str, expected: str) -> ConfigError:
        """The error for keys that do not agree with each other."""
        return ConfigError(what, code="KV-CFG-012", where=self.where, got=got, expected=expected)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _listed(values: collections.abc.Iterable[str], most: int = 24) -> str:
    names = sorted(str(name) for name in values)
    shown = ", ".join(names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown or "none"
