"""Iluvatar's management library, libixml.so, by ctypes: NVML's functions under NVML's names.

Seen in the public header of go-ixml: return codes are NVML's, handles are pointers, memory is in bytes, there is no
nvmlInitWithFlags, no error text, no MIG. The names are those of NVIDIA's library, so it is opened for itself alone
(RTLD_LOCAL). Debian's libupnp-dev installs another libixml.so, UPnP's XML library: a library counts only if it has
nvmlInit_v2 or nvmlInit.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.contract.runtimes.management import Card, Figures, ManagementFault

__all__ = ["LIBRARY", "Ixml", "corex_folders"]

LIBRARY = "libixml.so"
NOT_FOUND, NOT_SUPPORTED, NO_PERMISSION, SMALL = 12, 3, 4, 7
FUNCTION_NOT_FOUND, WRONG_VERSION = 13, 25
UNKNOWN_BYTES = 2**64 - 1
#: Values of the version field that builds accept: NVML's (size and version), and what the header says.
SECOND_VERSIONS = (0x02000028, 2)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


class _Memory2(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("bytes", ctypes.c_uint64))


def corex_folders() -> tuple[str, ...]:
    """Where CoreX keeps its libraries."""
    home = os.environ.get("COREX_HOME") or "/usr/local/corex"
    return (os.path.join(home, "lib64"), os.path.join(home, "lib"))


class Ixml:
    """Memory version 1 first: which value the second version's field wants differs between builds."""

    name = "ixml"
    versions = (1, 2)

    def __init__(self) -> None:
        self._library: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """nvmlInit_v2, or nvmlInit where a build has no second version; then nvmlShutdown."""
        self._library = _open()
        self._call(("nvmlInit_v2", "nvmlInit"))
        try:
            yield
        finally:
            self._call(("nvmlShutdown",))

    def cards(self) -> list[Card]:
        """All that this process may ask about."""
        count = ctypes.c_uint()
        self._call(("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"), ctypes.byref(count))
        cards = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            names = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
            try:
                self._call(names, ctypes.c_uint(index), ctypes.byref(handle))
                cards.append(self._card(handle))
            except ManagementFault as fault:
                if fault.number != NO_PERMISSION:
                    raise
        return cards

    def memory(self, uuid: str, version: int) -> Figures:
        """The memory of a card."""
        handle = self._by_uuid(uuid)
        if version == 1:
            first = _Memory()
            self._call(("nvmlDeviceGetMemoryInfo",), handle, ctypes.byref(first))
            return Figures(first.total, first.free, first.used)
        return self._second(handle)

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """Compute processes, in the layout of NVML's first version."""
        handle = self._by_uuid(uuid)
        room = 64
        while True:
            count, found = ctypes.c_uint(room), (_Process * room)()
            try:
                self._call(("nvmlDeviceGetComputeRunningProcesses",), handle, ctypes.byref(count), found)
            except ManagementFault as fault:
                if fault.number != SMALL or room > 2**16:
                    raise
                room *= 4
                continue
            listed = list(found)[: count.value]
            return [(p.pid, None if p.bytes == UNKNOWN_BYTES else int(p.bytes)) for p in listed]

    def _second(self, handle: ctypes.c_void_p) -> Figures:
        for version in SECOND_VERSIONS:
            second = _Memory2(version=version)
            try:
                self._call(("nvmlDeviceGetMemoryInfo_v2",), handle, ctypes.byref(second))
            except ManagementFault as fault:
                if fault.number != WRONG_VERSION or version == SECOND_VERSIONS[-1]:
                    raise
                continue
            return Figures(second.total, second.free, second.used, second.reserved)
        raise ManagementFault(WRONG_VERSION, "nvmlDeviceGetMemoryInfo_v2")

    def _by_uuid(self, uuid: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(("nvmlDeviceGetHandleByUUID",), ctypes.c_char_p(uuid.encode()), ctypes.byref(handle))
        return handle

    def _card(self, handle: ctypes.c_void_p) -> Card:
        pci = _Pci()
        address, vendor = None, None
        try:
            self._call(("nvmlDeviceGetPciInfo_v3",), handle, ctypes.byref(pci))
            address, vendor = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}", pci.id & 0xFFFF
        except ManagementFault as fault:
            if fault.number not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                raise
        return Card(self._text("nvmlDeviceGetUUID", handle), self._text("nvmlDeviceGetName", handle), address, vendor)

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(96)
        self._call((name,), handle, text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace")

    def _call(self, names: tuple[str, ...], *arguments: object) -> None:
        """The first of ``names`` that the build has."""
        for name in names:
            function: Callable[..., int] | None = getattr(self._library, name, None)
            if function is None:
                continue
            number = function(*arguments)
            if number:
                raise ManagementFault(int(number), name)
            return
        raise ManagementFault(FUNCTION_NOT_FOUND, names[0])


def _open() -> Any:
    """The first libixml.so that is a management library: the loader's own, then CoreX's folders."""
    others = []
    for path in (LIBRARY, *(os.path.join(folder, LIBRARY) for folder in corex_folders())):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            # The loader's own path is always tried; of CoreX's folders only a file that is there is worth a word.
            others += [str(error)] if os.path.exists(path) else []
            continue
        if hasattr(library, "nvmlInit_v2") or hasattr(library, "nvmlInit"):
            return library
        others.append(f"{path} is another project's: it has no nvmlInit")
    where = f"no {LIBRARY} of CoreX on the loader's path or in {' or '.join(corex_folders())}"
    raise ManagementFault(NOT_FOUND, "dlopen", "; ".join((where, *others)))
