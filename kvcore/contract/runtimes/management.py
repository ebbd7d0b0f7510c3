"""Management libraries of NVML's shape: cards and slices, memory, processes, and what each of their errors means.

NVIDIA's NVML and Iluvatar's IXML number their errors alike. An error either means that this library cannot say (the
next source is asked, and the reason recorded) or that the device is not fit to be used (a typed error).
"""

from __future__ import annotations

import collections.abc
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvcore.contract.facts import Reading, Scope
from kvcore.errors import DeviceError

__all__ = ["ASK_ANOTHER", "ERRORS", "Card", "Figures", "Management", "ManagementFault", "memory_readings", "refusal"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """An error's name, and what to do about it where something can be done."""

    name: str
    remedy: str | None = None
    code: str = "KV-DEV-020"


#: Return codes of NVML (nvml.h, nvmlReturn_t) and, with the same numbers, of IXML.
ERRORS = {
    1: Meaning("uninitialized"),
    2: Meaning("invalid argument"),
    3: Meaning("not supported"),
    4: Meaning("no permission", "a slice's container may not ask about the whole card"),
    5: Meaning("already initialized"),
    6: Meaning("not found", "the device has gone, or is hidden from this process", "KV-DEV-027"),
    7: Meaning("insufficient size"),
    8: Meaning("insufficient power", "check the card's power cables"),
    9: Meaning("driver not loaded", "load the vendor's kernel driver"),
    10: Meaning("timeout"),
    11: Meaning("interrupt request issue"),
    12: Meaning("library not found", "in a container, the utility driver capability mounts the management library"),
    13: Meaning("function not found", "the driver is older than this function"),
    14: Meaning("corrupted infoROM"),
    15: Meaning("the device is lost", "it fell off the bus: restart the machine", "KV-DEV-021"),
    16: Meaning("the device must be reset", "reset the device, or restart the machine", "KV-DEV-022"),
    17: Meaning("blocked by the operating system", "check the container's device control group", "KV-DEV-023"),
    18: Meaning(
        "library and kernel driver differ in version",
        "the driver was upgraded under a running system: restart the container, or the machine",
        "KV-DEV-024",
    ),
    19: Meaning("in use"),
    20: Meaning("insufficient memory"),
    21: Meaning("no data"),
    22: Meaning("ECC is not available with vGPU"),
    23: Meaning("insufficient resources"),
    24: Meaning("frequency not supported"),
    25: Meaning("argument version mismatch"),
    26: Meaning("deprecated"),
    27: Meaning("not ready"),
    28: Meaning("device not found", "the device has gone, or is hidden from this process", "KV-DEV-027"),
    29: Meaning("invalid state"),
    30: Meaning("reset type not supported"),
    999: Meaning("unknown"),
}

#: Errors that mean "this version of the query is not offered": another version may be.
NOT_THIS_VERSION = frozenset({2, 3, 13, 25, 999})
#: Errors that mean "this library cannot say": another source may.
ASK_ANOTHER = NOT_THIS_VERSION | {4, 9, 12}


class ManagementFault(Exception):
    """A call of a management library failed with ``number``; ``text`` says more than the number's name would."""

    def __init__(self, number: int, call: str, text: str | None = None) -> None:
        super().__init__(f"{call}: {described(number) if text is None else text}")
        self.number = number
        self.call = call


@dataclass(frozen=True, slots=True)
class Card:
    """A card, or a slice of one (``instance`` is its GPU and compute instance), as a management library knows it.

    ``pci`` is the address as ``0000:3b:00``, a slice's being its card's; ``vendor`` the PCI vendor, e.g. 0x10de.
    ``unified``: the library says that the device shares the host's memory. ``slices`` is None unless the card is in MIG
    mode; its memory then is its slices', also where this process may list none of them.
    """

    uuid: str
    name: str
    pci: str | None = None
    vendor: int | None = None
    parent: str | None = None
    instance: tuple[int, int] | None = None
    slices: tuple[Card, ...] | None = None
    unified: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """One answer to a memory query, in bytes, as the library gave it."""

    total: int
    free: int
    used: int
    reserved: int | None = None


class Management(Protocol):
    """A management library. All but ``session`` is called within a session; all raise :class:`ManagementFault`."""

    @property
    def name(self) -> str:
        """The first part of a reading's source."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the memory query, best first."""

    def session(self) -> AbstractContextManager[None]:
        """Initialize, and shut down in any case."""

    def cards(self) -> list[Card]:
        """All cards, in the library's order, with their slices."""

    def memory(self, uuid: str, version: int) -> Figures:
        """A memory query on a card or slice."""

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """Process ids on the device, and the bytes of each where the driver gives them."""


def described(number: int) -> str:
    """``15`` as ``"the device is lost (15)"``."""
    meaning = ERRORS.get(number)
    return f"{'undocumented error' if meaning is None else meaning.name} ({number})"


def refusal(fault: ManagementFault, where: str) -> DeviceError:
    """The typed error of a fault that no other source can make good."""
    meaning = ERRORS.get(fault.number, Meaning("undocumented error"))
    return DeviceError(
        f"the management library failed: {meaning.name}",
        code=meaning.code,
        where=where,
        got=str(fault),
        expected="success",
        hint=meaning.remedy,
    )


def memory_readings(
    library: Management, card: Card, own: collections.abc.Callable[[int | None, bool], int | None]
) -> list[Reading]:
    """The first version of the memory query that answers, after a skipped reading for each that did not.

    ``own`` gets this process's bytes and whether the library lists this process. Raises :class:`ManagementFault` for
    an error that is not about the version. A total of 0 is no answer: it is what libraries give for unified memory.
    """
    scope = Scope.DEVICE if card.instance is None else Scope.PARTITION
    readings = []
    for version in library.versions:
        source = f"{library.name}_v{version}"
        try:
            figures = library.memory(card.uuid, version)
        except ManagementFault as fault:
            if fault.number not in NOT_THIS_VERSION:
                raise
            readings.append(Reading(source, scope, skipped=str(fault)))
            continue
        if figures.total == 0:
            readings.append(Reading(source, scope, skipped="a total of 0, which is no device's size"))
            continue
        readings.append(
            Reading(
                source,
                scope,
                total=figures.total,
                free=figures.free,
                used=figures.used,
                reserved=figures.reserved,
                own=own(*_process_bytes(library, card)),
            )
        )
        break
    return readings


def _process_bytes(library: Management, card: Card) -> tuple[int | None, bool]:
    """What the library says that this process holds, and whether it lists this process at all.

    It does not in a container whose process ids the driver does not know; some drivers list a process without bytes.
    """
    try:
        processes = library.processes(card.uuid)
    except ManagementFault as fault:
        if fault.number in ASK_ANOTHER:
            return None, False
        raise
    mine = [held for pid, held in processes if pid == os.getpid()]
    known = [held for held in mine if held is not None]
    return (sum(known) if known else None), bool(mine)
