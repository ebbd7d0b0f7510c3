"""kvcore's documents: device profiles in, every answer out. The only place that knows msgspec.

A document names its schema and version. Reading is strict: an unknown key, a wrong type or an impossible figure is a
:class:`DocumentError` that says where; nothing is coerced, nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing
from pathlib import Path
from typing import Any, Final, TypeVar

from kvcore.contract.facts import DeviceFacts
from kvcore.contract.validate import reading_faults
from kvcore.errors import DocumentError

__all__ = ["PROFILE_SCHEMA", "dump_device_profile", "load_device_profile", "parse_device_profile", "to_builtins"]

PROFILE_SCHEMA: Final = "kvcore.device-profile"
PROFILE_VERSION: Final = 1
#: A profile has a few KiB.
LARGEST_DOCUMENT: Final = 1024**2

T = TypeVar("T")


def to_builtins(value: object) -> Any:
    """A dataclass as JSON-ready dicts, lists, strings and ints; enums by their value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f.name for f in dataclasses.fields(value) if not f.name.startswith("_"))
        return {name: to_builtins(getattr(value, name)) for name in fields}
    if isinstance(value, (list, tuple)):
        return [to_builtins(item) for item in value]
    return getattr(value, "value", value)


def dump_device_profile(facts: DeviceFacts) -> str:
    """A device profile as JSON text. Notes are left out: they can hold paths, which are nobody's business."""
    readings = tuple(dataclasses.replace(reading, note=None) for reading in facts.readings)
    body = to_builtins(dataclasses.replace(facts, readings=readings))
    body["versions"] = dict(facts.versions)
    document = {"schema": PROFILE_SCHEMA, "schema_version": PROFILE_VERSION, **body}
    return json.dumps(document, indent=2) + "\n"


def load_device_profile(path: str | os.PathLike[str]) -> DeviceFacts:
    """The device profile in the file at ``path``; raises :class:`DocumentError` that names the file and key."""
    try:
        with Path(path).open("rb") as stream:
            raw = stream.read(LARGEST_DOCUMENT + 1)
    except OSError as error:
        raise DocumentError(
            "cannot read the device profile", code="KV-DOC-001", where=str(path), got=error.strerror
        ) from error
    return parse_device_profile(raw, where=str(path))


def parse_device_profile(raw: bytes, *, where: str) -> DeviceFacts:
    """The device profile in ``raw``; ``where`` names it in errors."""
    body = _object(raw, where)
    schema, version = body.pop("schema", None), body.pop("schema_version", None)
    if schema != PROFILE_SCHEMA or type(version) is not int or version != PROFILE_VERSION:
        raise DocumentError(
            "not a device profile that this kvcore reads",
            code="KV-DOC-004",
            where=where,
            got=f"schema {schema!r}, version {version!r}",
            expected=f"schema {PROFILE_SCHEMA!r}, version {PROFILE_VERSION}",
        )
    versions = body.pop("versions", {})
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise DocumentError(
            "versions are texts", code="KV-DOC-006", where=f"{where}: versions", got=repr(versions)[:80]
        )
    _refuse_unknown(body, DeviceFacts, where, "")
    facts = dataclasses.replace(_convert(body, DeviceFacts, where), versions=tuple(versions.items()))
    for number, reading in enumerate(facts.readings):
        faults = reading_faults(reading)
        if faults:
            raise DocumentError(
                "a reading of the device profile is impossible",
                code="KV-DOC-007",
                where=f"{where}: readings[{number}]",
                got="; ".join(faults),
                expected="figures in bytes, free and used within total, null for unknown",
            )
    allocation = facts.allocation
    if min(allocation.granularity, allocation.alignment) < 1:
        raise DocumentError(
            "the allocation limits of the device profile are impossible",
            code="KV-DOC-007",
            where=f"{where}: allocation",
            got=f"granularity {allocation.granularity}, alignment {allocation.alignment}",
            expected="at least 1",
        )
    return facts


def _object(raw: bytes, where: str) -> dict[str, Any]:
    if len(raw) > LARGEST_DOCUMENT:
        raise DocumentError(
            "the document is too large", code="KV-DOC-002", where=where, expected=f"at most {LARGEST_DOCUMENT:,} bytes"
        )
    import msgspec

    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DocumentError(
            "the document is not valid JSON", code="KV-DOC-003", where=where, got=error, expected="JSON"
        ) from error
    if not isinstance(value, dict):
        raise DocumentError(
            "the document is not an object", code="KV-DOC-005", where=where, got=type(value).__name__, expected="object"
        )
    return value


def _convert(body: object, kind: type[T], where: str) -> T:
    import msgspec

    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        place = path.rstrip("`").lstrip(".")
        raise DocumentError(
            "the document does not match its schema",
            code="KV-DOC-006",
            where=f"{where}: {place}" if place else where,
            got=text,
            expected=f"see the schema of {kind.__name__}",
        ) from error


def _refuse_unknown(value: object, kind: Any, where: str, path: str) -> None:
    """msgspec lets unknown keys of dataclasses pass; a slip of the pen must not be ignored."""
    for option in typing.get_args(kind):
        items = value if isinstance(value, list) else [value]
        for number, item in enumerate(items):
            _refuse_unknown(item, option, where, f"{path}[{number}]" if isinstance(value, list) else path)
    if not dataclasses.is_dataclass(kind) or not isinstance(value, dict):
        return
    types = typing.get_type_hints(kind)
    for name, inner in value.items():
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            raise DocumentError(
                "unknown key",
                code="KV-DOC-008",
                where=f"{where}: {path}{'.' if path else ''}{name}",
                expected=", ".join(types),
                hint=f"did you mean {near[0]}?" if near else None,
            )
        _refuse_unknown(inner, types[name], where, f"{path}{'.' if path else ''}{name}")
