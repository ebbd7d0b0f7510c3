"""MetaX's management library, libmxsml.so, by ctypes.

Functions, structures and error numbers are those of the public header MxSml.h (version 2.3.1). A device's memory is in
KiB there ("unit: KB"), a process's in bytes: each is turned into bytes here and nowhere else. There is no figure for
what is free. gpustack (gpustack_runtime/detector/metax.py), FastDeploy (fa503fb) and nvtop multiply by 1024 too; the
header says nothing of a shutdown, and a second mxSmlInit keeps what the first found.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcore.contract.probes import find_library
from kvcore.units import KIB

__all__ = [
    "FOLDERS",
    "GONE",
    "LIBRARY",
    "Card",
    "Held",
    "Memory",
    "Mxsml",
    "MxsmlFault",
    "own_bytes",
    "runtime_is_loaded",
]

LIBRARY = "libmxsml.so"
#: Where MetaX's own Python binding looks: driver, MACA, and the driver of N-class cards.
FOLDERS = ("/opt/mxdriver/lib", "/opt/maca/lib", "/opt/mxn100/lib")
SUCCESS, NO_DEVICE, NOT_SUPPORTED, INVALID_ID, NO_PERMISSION = 0, 2, 3, 6, 8
#: The device is not there any more, or not yet again: its number is out of range, or its function is being reset.
GONE = frozenset({INVALID_ID, 20})
PHYSICAL = 1  #: the mode of a card that was divided: processes run on its virtual functions only


class _Info(ctypes.Structure):
    _fields_ = (
        ("device_id", ctypes.c_uint),
        ("type", ctypes.c_uint),
        ("bdf", ctypes.c_char * 32),
        ("gpu_id", ctypes.c_uint),
        ("node", ctypes.c_uint),
        ("uuid", ctypes.c_char * 96),
        ("brand", ctypes.c_uint),
        ("mode", ctypes.c_uint),
        ("name", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    """All of it in KiB: the part that the host can map, all of it, and the table of host pages."""

    _fields_ = (
        ("visible_total", ctypes.c_long),
        ("visible_used", ctypes.c_long),
        ("total", ctypes.c_long),
        ("used", ctypes.c_long),
        ("xtt_total", ctypes.c_long),
        ("xtt_used", ctypes.c_long),
    )


class _Use(ctypes.Structure):
    _fields_ = (("bdf", ctypes.c_char * 32), ("gpu_id", ctypes.c_uint), ("nbytes", ctypes.c_ulong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("name", ctypes.c_char * 64),
        ("count", ctypes.c_uint),
        ("uses", _Use * 64),
    )


class MxsmlFault(Exception):
    """A call of the library failed with ``number``; None if it could not be made."""

    def __init__(self, number: int | None, call: str, text: str) -> None:
        super().__init__(f"{call}: {text}" if number is None else f"{call}: {text} ({number})")
        self.number = number

    @property
    def says_nothing(self) -> bool:
        """Whether the library cannot answer this question here, rather than that something is wrong."""
        return self.number is None or self.number in (NOT_SUPPORTED, NO_PERMISSION)


@dataclass(frozen=True, slots=True)
class Card:
    """A card, or a virtual function of one, by the library's number. ``dies`` is None where a build does not say."""

    number: int
    key: str
    name: str
    pci: str
    virtual: bool
    dies: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device's own memory, as the library gave them."""

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds on one card, in bytes."""

    pid: int
    pci: str
    nbytes: int


class Mxsml:
    """The loaded library. Making one loads and initializes it; every method raises :class:`MxsmlFault`."""

    def __init__(self) -> None:
        path = find_library(LIBRARY, FOLDERS)
        if path is None:
            raise MxsmlFault(None, "dlopen", f"no {LIBRARY} on the loader's path or in {', '.join(FOLDERS)}")
        try:
            self._library: Any = ctypes.CDLL(path)
        except OSError as error:
            raise MxsmlFault(None, "dlopen", str(error)) from error
        number = self._function("mxSmlInit")()
        # "No devices were discovered" is an answer: there are none.
        if number not in (SUCCESS, NO_DEVICE):
            raise self._fault("mxSmlInit", number)
        self._empty = number == NO_DEVICE

    def cards(self) -> list[Card]:
        """All that processes can run on, in the library's order; MACA_VISIBLE_DEVICES does not matter to it."""
        if self._empty:
            return []
        found = [self._card(number) for number in range(self._function("mxSmlGetDeviceCount")())]
        return [card for card in found if card is not None]

    def memory(self, number: int) -> Memory:
        """The memory of a card: KiB there, bytes here."""
        memory = _Memory()
        self._call("mxSmlGetMemoryInfo", ctypes.c_uint(number), ctypes.byref(memory))
        return Memory(memory.total * KIB, memory.used * KIB)

    def processes(self) -> list[Held]:
        """What every process holds, a line for each card: bytes already."""
        count = ctypes.c_uint()
        self._call("mxSmlGetNumberOfProcess", ctypes.byref(count))
        room = count.value + 16  # more may have come since; the library fills as many as it is told
        found = (_Process * room)()
        self._call("mxSmlGetProcessInfo", ctypes.c_uint(room), found)
        return [
            Held(process.pid, _text(use.bdf), int(use.nbytes))
            for process in found
            if process.pid
            for use in process.uses[: min(process.count, 64)]
        ]

    def _card(self, number: int) -> Card | None:
        info = _Info()
        self._call("mxSmlGetDeviceInfo", ctypes.c_uint(number), ctypes.byref(info))
        if info.mode == PHYSICAL:
            return None
        pci, uuid = _text(info.bdf), _text(info.uuid)
        return Card(number, uuid or pci, _text(info.name), pci, info.mode != 0, self._dies(number))

    def _dies(self, number: int) -> int | None:
        count = ctypes.c_uint()
        try:
            self._call("mxSmlGetDeviceDieCount", ctypes.c_uint(number), ctypes.byref(count))
        except MxsmlFault as fault:
            if not fault.says_nothing:
                raise
            return None
        return count.value

    def _function(self, name: str) -> Callable[..., int]:
        function: Any = getattr(self._library, name, None)
        if function is None:
            raise MxsmlFault(None, name, "this build of the library has no such function")
        function.restype = ctypes.c_uint
        return function  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: object) -> None:
        number = self._function(name)(*arguments)
        if number != SUCCESS:
            raise self._fault(name, number)

    def _fault(self, name: str, number: int) -> MxsmlFault:
        describe = getattr(self._library, "mxSmlGetErrorString", None)
        if describe is None:
            return MxsmlFault(number, name, "failed")
        describe.restype = ctypes.c_char_p
        said: bytes | None = describe(ctypes.c_uint(number))
        return MxsmlFault(number, name, (said or b"failed").decode(errors="replace"))


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").strip()


def runtime_is_loaded() -> bool:
    """Whether a MACA runtime is mapped into this process; without one it can hold nothing on a device."""
    names = ("/libmcruntime.", "/libmxc-runtime", "/libruntime_cu.")
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any(name in line for line in maps for name in names)
    except OSError:
        return True


def own_bytes(library: Mxsml, pci: str) -> int | None:
    """What this process holds on the card at ``pci``; None if nobody can say.

    A process that the library does not list holds nothing, or lives in a container whose process ids the driver does
    not know: only without a runtime it is known to hold nothing.
    """
    try:
        mine = [held.nbytes for held in library.processes() if (held.pid, held.pci) == (os.getpid(), pci)]
    except MxsmlFault as fault:
        if not fault.says_nothing:
            raise
        mine = []
    if mine:
        return sum(mine)
    return None if runtime_is_loaded() else 0
