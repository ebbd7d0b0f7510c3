"""Management libraries through a vendor's Python module of NVML's shape: NVIDIA's pynvml, Iluvatar's ixsmi.

The module is imported when needed, with warnings set aside, and looked at: the ``pynvml`` distribution only redirects
to nvidia-ml-py, with a warning at import, and its old versions (to 11.5.3) bring a package that hides it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.contract.runtimes.management import Card, Figures, ManagementFault

__all__ = ["PythonBinding"]

LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 12, 13
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
ATS = 2  #: NVML_DEVICE_ADDRESSING_MODE_ATS: the device and the host share page tables
NEEDED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo", "NVMLError")


class PythonBinding:
    """One module. ``versions`` of the memory query, best first; version 2 tells reserved memory apart."""

    def __init__(self, name: str, module: str, versions: tuple[int, ...], vendor: str) -> None:
        self.name = name
        self.versions = versions
        self._module_name = module
        self._vendor = vendor
        self._module: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """nvmlInit and nvmlShutdown count references, so others' sessions are not ended."""
        self._module = self._binding()
        self._call("nvmlInit")
        try:
            yield
        finally:
            self._call("nvmlShutdown")

    def cards(self) -> list[Card]:
        """All that this process may ask about: NVML counts those of other containers too."""
        cards = []
        for index in range(self._call("nvmlDeviceGetCount")):
            try:
                cards.append(self._card(self._call("nvmlDeviceGetHandleByIndex", index)))
            except ManagementFault as fault:
                if fault.number != NO_PERMISSION:
                    raise
        return cards

    def memory(self, uuid: str, version: int) -> Figures:
        """The memory of a card or slice."""
        return self._memory(self._call("nvmlDeviceGetHandleByUUID", uuid), version)

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """Compute processes; the driver gives no bytes on WSL and in hidden process namespaces."""
        handle = self._call("nvmlDeviceGetHandleByUUID", uuid)
        try:
            found = self._call("nvmlDeviceGetComputeRunningProcesses", handle)
        except ManagementFault as fault:
            if fault.number != FUNCTION_NOT_FOUND:
                raise
            found = self._call("nvmlDeviceGetComputeRunningProcesses_v2", handle)  # drivers before R510
        return [(int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found]

    def _card(self, handle: Any) -> Card:
        uuid, name = _text(self._call("nvmlDeviceGetUUID", handle)), _text(self._call("nvmlDeviceGetName", handle))
        pci, vendor = self._pci(handle)
        return Card(uuid, name, pci, vendor, slices=self._slices(handle, uuid, pci), unified=self._unified(handle))

    def _pci(self, handle: Any) -> tuple[str | None, int | None]:
        try:
            found = self._call("nvmlDeviceGetPciInfo", handle)
        except ManagementFault as fault:
            if fault.number not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                raise
            return None, None
        return f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}", int(found.pciDeviceId) & 0xFFFF

    def _slices(self, handle: Any, parent: str, pci: str | None) -> tuple[Card, ...] | None:
        """The slices of a card in MIG mode that this process may ask about; None for a card that is not."""
        try:
            current, _ = self._call("nvmlDeviceGetMigMode", handle)
        except ManagementFault as fault:
            if fault.number in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None
            raise
        if not current:
            return None
        slices = []
        for index in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle)):
            try:
                piece = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            except ManagementFault as fault:
                if fault.number in (NOT_FOUND, NO_PERMISSION):
                    continue
                raise
            instance = (
                self._call("nvmlDeviceGetGpuInstanceId", piece),
                self._call("nvmlDeviceGetComputeInstanceId", piece),
            )
            uuid, name = _text(self._call("nvmlDeviceGetUUID", piece)), _text(self._call("nvmlDeviceGetName", piece))
            slices.append(Card(uuid, name, pci, parent=parent, instance=instance))
        return tuple(slices)

    def _unified(self, handle: Any) -> bool:
        """No memory of its own, and page tables shared with the host."""
        try:
            if self._memory(handle, 1).total > 0:
                return False
        except ManagementFault as fault:
            if fault.number != NOT_SUPPORTED:
                return False
        try:
            return bool(self._call("nvmlDeviceGetAddressingMode", handle) == ATS)
        except ManagementFault:
            return False  # the driver does not say; the runtime may

    def _memory(self, handle: Any, version: int) -> Figures:
        if version == 1:
            found = self._call("nvmlDeviceGetMemoryInfo", handle)
            return Figures(int(found.total), int(found.free), int(found.used))
        second = getattr(self._module, "nvmlMemory_v2", None)
        if second is None:
            raise ManagementFault(FUNCTION_NOT_FOUND, "nvmlMemory_v2")
        found = self._call("nvmlDeviceGetMemoryInfo", handle, version=second)
        return Figures(int(found.total), int(found.free), int(found.used), int(found.reserved))

    def _binding(self) -> Any:
        """The module; raises :class:`ManagementFault` if it is not there or is something else of that name."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(self._module_name)
        except Exception as error:  # a redirecting distribution can raise anything under -W error
            reason = f"import {self._module_name} ({type(error).__name__}: {error})"
            raise ManagementFault(LIBRARY_NOT_FOUND, reason) from error
        missing = [name for name in NEEDED if not hasattr(module, name)]
        if missing:
            where = getattr(module, "__file__", self._module_name)
            raise ManagementFault(FUNCTION_NOT_FOUND, f"{where} is not {self._vendor}: it lacks {', '.join(missing)}")
        return module

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        try:
            function = getattr(self._module, name)
        except AttributeError:
            raise ManagementFault(FUNCTION_NOT_FOUND, name) from None
        try:
            return function(*arguments, **named)
        except self._module.NVMLError as error:
            raise ManagementFault(int(error.value), name) from error
        except getattr(self._module, "NVMLLibraryMismatchError", ()) as error:
            # nvidia-ml-py's own: the driver is older than the function that the binding calls by this name.
            raise ManagementFault(FUNCTION_NOT_FOUND, name) from error


def _text(value: Any) -> str:
    """Older bindings answer with bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
