"""Iluvatar's command ``ixsmi``, where no library answers. It prints MiB, and its exit status proves nothing.

A wrong field makes it print a sentence in place of figures, so each line must have every column, and figures must be
whole numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.contract.runtimes.management import Card, Figures, ManagementFault
from kvcore.units import MIB
from kvcore_iluvatar.ixml import corex_folders

__all__ = ["IxsmiCommand", "find_command", "parse_query"]

FIELDS = ("name", "uuid", "pci.bus_id", "memory.total", "memory.used", "memory.free")
SECONDS = 10.0
NOT_SUPPORTED, GONE = 3, 6


class IxsmiCommand:
    """One run a query."""

    name = "ixsmi"
    versions = (1,)

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds

    @contextmanager
    def session(self) -> Iterator[None]:
        """Nothing to open."""
        yield

    def cards(self) -> list[Card]:
        """Every line."""
        return [card for card, _ in parse_query(self._query())]

    def memory(self, uuid: str, version: int) -> Figures:
        """The line of that UUID."""
        for card, figures in parse_query(self._query()):
            if card.uuid == uuid:
                return figures
        raise ManagementFault(GONE, f"ixsmi: {uuid}")

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """The command's list of processes has no bytes that could be trusted."""
        raise ManagementFault(NOT_SUPPORTED, "ixsmi")

    def _query(self) -> str:
        lib64, lib = corex_folders()
        path = find_command()
        if path is None:
            raise ManagementFault(NOT_SUPPORTED, "ixsmi", "no such command on PATH or in CoreX's bin")
        libraries = os.pathsep.join(filter(None, (lib64, lib, os.environ.get("LD_LIBRARY_PATH"))))
        command = [path, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            ran = subprocess.run(
                command,
                env={**os.environ, "LD_LIBRARY_PATH": libraries, "LC_ALL": "C"},
                capture_output=True,
                timeout=self._seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ManagementFault(NOT_SUPPORTED, path, f"no answer within {self._seconds:g} s") from None
        except OSError as error:
            raise ManagementFault(NOT_SUPPORTED, path, str(error)) from error
        output = ran.stdout.decode(errors="replace")
        if ran.returncode:
            said = (output.strip() or ran.stderr.decode(errors="replace").strip()).splitlines()
            raise ManagementFault(NOT_SUPPORTED, path, f"exit status {ran.returncode}: {' '.join(said)[:200]!a}")
        return output


def find_command() -> str | None:
    """The command on PATH, else in CoreX's bin, which often is not on PATH."""
    return shutil.which("ixsmi") or shutil.which(os.path.join(os.path.dirname(corex_folders()[0]), "bin", "ixsmi"))


def parse_query(text: str) -> list[tuple[Card, Figures]]:
    """The answer to a query for FIELDS; raises :class:`ManagementFault` for anything that is not exactly that."""
    rows = []
    for line in text.splitlines():
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != len(FIELDS):
            raise ManagementFault(NOT_SUPPORTED, "ixsmi", f"{line[:80]!a} has not the {len(FIELDS)} columns asked")
        name, uuid, address, *memory = columns
        if not uuid.startswith("GPU-"):
            raise ManagementFault(NOT_SUPPORTED, "ixsmi", f"{uuid[:40]!a} is no UUID")
        total, used, free = (_mebibytes(figure) for figure in memory)
        rows.append((Card(uuid, name, _address(address)), Figures(total, free, used)))
    if not rows or len({card.uuid for card, _ in rows}) != len(rows):
        raise ManagementFault(NOT_SUPPORTED, "ixsmi", "no device, or one twice")
    return rows


def _mebibytes(text: str) -> int:
    digits = text.removesuffix("MiB").strip()
    # isdigit alone would take digits of other scripts; a point or a comma is another country's thousand.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise ManagementFault(NOT_SUPPORTED, "ixsmi", f"{text[:40]!a} is no whole number of MiB")
    return int(digits) * MIB


def _address(text: str) -> str:
    parts = text.split(".")[0].split(":")
    try:
        domain, bus, device = (int(part, 16) for part in parts)
    except ValueError:
        raise ManagementFault(NOT_SUPPORTED, "ixsmi", f"{text[:40]!a} is no PCI address") from None
    return f"{domain:04x}:{bus:02x}:{device:02x}"
