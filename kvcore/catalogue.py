"""Devices that are planned for without being here: their total memory, as drivers report it, each with its source.

The data is ``catalogue.json`` beside this module. A catalogue's device is idle and whole: all of it is free.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvcore.contract.facts import AllocationLimits, Basis, Device, DeviceFacts, Mapping, MemoryKind, Reading, Scope
from kvcore.documents import load_device_profile
from kvcore.errors import DocumentError

__all__ = ["Entry", "catalogue", "device_profile"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One device: ``total`` bytes, measured by a driver or declared by a data sheet, and who says so."""

    name: str
    device: str
    total: int
    basis: Basis
    source: str

    def facts(self) -> DeviceFacts:
        """The device as a profile: idle, so all of it is free."""
        note = f"idle; total from {self.source}"
        reading = Reading(
            "catalogue", Scope.DEVICE, total=self.total, free=self.total, own=0, basis=self.basis, note=note
        )
        device = Device("replay", 0, self.name, self.device, MemoryKind.DISCRETE, Mapping.SELF)
        return DeviceFacts(device, (reading,), AllocationLimits())


def catalogue() -> dict[str, Entry]:
    """Every device by its name, in alphabetical order."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["devices"]
    return {row["name"]: Entry(**{**row, "basis": Basis(row["basis"])}) for row in rows}


def device_profile(name: str) -> DeviceFacts:
    """The profile in file ``name``, or the catalogue's device of that name; raises :class:`DocumentError`."""
    if os.path.exists(name):
        return load_device_profile(name)
    entries = catalogue()
    if name.lower() in entries:
        return entries[name.lower()].facts()
    near = difflib.get_close_matches(name.lower(), entries, n=3)
    raise DocumentError(
        "no such device profile",
        code="KV-DOC-001",
        where=name,
        got="neither a file nor a device of the catalogue",
        expected=", ".join(entries),
        hint=f"did you mean {' or '.join(near)}?" if near else None,
    )
