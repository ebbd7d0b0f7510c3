"""A vendor's PCI functions as a source of last resort: it knows which cards are here, and nothing of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcore.contract.probes import pci_devices
from kvcore.contract.runtimes.management import Card, Figures, ManagementFault

__all__ = ["PciFunctions"]

NOT_SUPPORTED = 3


class PciFunctions:
    """Cards whose key is their PCI address, from sysfs."""

    name = "pci"
    versions = (1,)

    def __init__(self, vendor: int, root: Path) -> None:
        self._vendor = vendor
        self._root = root

    @contextmanager
    def session(self) -> Iterator[None]:
        """Nothing to open."""
        yield

    def cards(self) -> list[Card]:
        """In the order of their addresses; raises :class:`ManagementFault` if there is none."""
        addresses = pci_devices(f"{self._vendor:#06x}", self._root)
        if not addresses:
            raise ManagementFault(NOT_SUPPORTED, self.name, f"no PCI function of vendor {self._vendor:#06x}")
        short = [address.split(".")[0] for address in addresses]
        return [Card(address, f"PCI {self._vendor:04x}", address, self._vendor) for address in short]

    def memory(self, uuid: str, version: int) -> Figures:
        """PCI says nothing of it."""
        raise ManagementFault(NOT_SUPPORTED, self.name, "a PCI function does not say how much memory it has")

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """PCI says nothing of them."""
        raise ManagementFault(NOT_SUPPORTED, self.name)
