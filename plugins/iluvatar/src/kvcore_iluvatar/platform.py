"""The ``iluvatar`` platform: Iluvatar devices, by whichever of CoreX's sources answers."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.contract import Basis, BlockSizer, Detection, Device, PlatformInfo, Reading, Scope, hookimpl
from kvcore.contract.runtimes.binding import PythonBinding
from kvcore.contract.runtimes.choose import Runtimes
from kvcore.contract.runtimes.detect import Found
from kvcore.contract.runtimes.driver import DriverRuntime
from kvcore.contract.runtimes.management import Card, Management
from kvcore.contract.runtimes.on_paddle import PaddleRuntime
from kvcore.contract.runtimes.on_torch import TorchRuntime
from kvcore.contract.runtimes.pci import PciFunctions
from kvcore.contract.runtimes.platform import AcceleratorPlatform, Surroundings
from kvcore.errors import PolicyError
from kvcore.units import GIB, parse_fraction
from kvcore_iluvatar.ixml import LIBRARY, Ixml, corex_folders
from kvcore_iluvatar.ixsmi import IxsmiCommand, find_command

__all__ = ["IluvatarBlockSizer", "plugin"]

__version__ = "0.1.0"
CONTRACT = 1
PCI_VENDOR = 0x1E3E
#: Set by a container's runtime: the UUIDs of the cards that it was given.
CONTAINER_VARIABLES = ("IX_VISIBLE_DEVICES", "ILUVATAR_COREX_VISIBLE_DEVICES")
#: FastDeploy's constant of GiB for a device that nobody can read.
CONSTANT = "FD_ILUVATAR_KVCACHE_MEM"


class IluvatarBlockSizer(AcceleratorPlatform):
    """CoreX's libraries and names; what it does is shared with other CUDA-compatible vendors."""

    def __init__(self, root: Path = Path("/")) -> None:
        surroundings = Surroundings(
            "iluvatar",
            "kvcore-iluvatar",
            PCI_VENDOR,
            LIBRARY,
            "install the CoreX driver, or point COREX_HOME at it",
            nodes="dev/iluvatar[0-9]*",
            root=root,
        )
        paddle = PaddleRuntime("iluvatar_gpu", ("paddle-iluvatar-gpu",))
        super().__init__(surroundings, Runtimes("kvcore-iluvatar", (DriverRuntime(), paddle, TorchRuntime())))

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """By what is installed beside the plugin."""
        return PlatformInfo("iluvatar", "Iluvatar", __version__, CONTRACT, self.capabilities())

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """By CoreX's sources; a card counts by its PCI vendor, since UUIDs look like NVIDIA's."""
        return self.detection()

    def managements(self) -> list[Management]:
        """The library, the vendor's Python module, the command; last the PCI functions, which say what is here.

        No public source shows a module ``ixsmi``: that one would have NVML's functions is an assumption, and a module
        that lacks them is passed over.
        """
        module = PythonBinding("ixsmi_module", "ixsmi", (1, 2), "a binding of Iluvatar's management library")
        return [Ixml(), module, IxsmiCommand(), PciFunctions(PCI_VENDOR, self.surroundings.root)]

    def library_folders(self) -> tuple[str, ...]:
        """CoreX's own."""
        return corex_folders()

    def traces(self, found: Found) -> bool:
        """A libcuda.so.1 alone is NVIDIA's as well; the command may be all there is of CoreX."""
        return bool(found.pci or found.beside_pci or found.library) or find_command() is not None

    def visible_cards(self, cards: list[Card]) -> list[Card]:
        """Those that a container's variable names by UUID.

        By number it counts the host's cards, of which a container sees only its own: then the library's list is right.
        """
        for variable in CONTAINER_VARIABLES:
            wanted = [entry.strip() for entry in os.environ.get(variable, "").split(",") if entry.strip()]
            if wanted and all(entry.startswith("GPU-") for entry in wanted):
                cards = [card for card in cards if any(card.uuid.startswith(entry) for entry in wanted)]
        return cards

    def last_readings(self, device: Device, card: Card | None, *, measured: bool) -> list[Reading]:
        """The operator's constant, where nothing was measured: it is declared, and the plan says so."""
        text = os.environ.get(CONSTANT)
        if text is None or measured:
            return []
        try:
            size = parse_fraction(text, where=CONSTANT) * GIB
        except PolicyError as error:
            return [Reading(CONSTANT, Scope.DEVICE, skipped=f"{error.what}: {text[:40]!a}")]
        if size.denominator != 1 or size <= 0:
            return [Reading(CONSTANT, Scope.DEVICE, skipped=f"{text[:40]!a} GiB is no size")]
        note = "a constant of the operator's, in GiB; nothing was measured"
        return [Reading(CONSTANT, Scope.DEVICE, free=size.numerator, basis=Basis.DECLARED, note=note)]


plugin: BlockSizer = IluvatarBlockSizer()
