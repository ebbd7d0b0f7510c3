"""Which device is which: the runtime's ordinals tied to the cards and slices of the management library."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from pathlib import Path

from kvcore.contract.facts import Device, Mapping, MemoryKind
from kvcore.contract.runtimes.interface import RuntimeDevice
from kvcore.contract.runtimes.management import Card
from kvcore.contract.runtimes.visibility import select_visible
from kvcore.errors import DeviceError

__all__ = ["Located", "located_by_environment", "located_by_runtime", "pci_vendor"]


@dataclass(frozen=True, slots=True)
class Located:
    """A device with what the management library (None if it does not know it) and the runtime say of it."""

    device: Device
    card: Card | None
    integrated: bool | None = None


def pci_vendor(address: str, root: Path = Path("/")) -> int | None:
    """The PCI vendor of function 0 of ``0000:3b:00``, from sysfs; None if it is not a PCI function of this host."""
    try:
        text = (root / f"sys/bus/pci/devices/{address}.0/vendor").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text, 16)


def located_by_runtime(
    platform: str, vendor: int, found: collections.abc.Sequence[RuntimeDevice], cards: list[Card], root: Path
) -> list[Located]:
    """The runtime's devices that are this vendor's, by UUID, then by PCI address.

    A libcuda.so.1 may be another vendor's, so a device counts only if a card has its identity, if its PCI vendor is
    the right one, or if it is integrated, since those are no PCI functions. Raises :class:`DeviceError` if a PCI
    address stands for several slices.
    """
    located = []
    for device in found:
        card = _by_uuid(device, cards) or _by_pci(device, cards)
        ours = card is not None or device.integrated or _vendor_of(device, root) == vendor
        if ours:
            located.append(_located(platform, device, card))
    return located


def located_by_environment(
    platform: str, cards: list[Card], visible: str | None, *, variable: str, ordered: bool
) -> list[Located]:
    """The devices that ``visible`` names, by the rules of the runtime.

    ``ordered``: the runtime was told to number cards by PCI address, as the management library does. Else it numbers
    the fastest first: with cards of several models and entries by number nobody can say which is which, and
    :class:`DeviceError` is raised.
    """
    numbered = visible is None or not visible.strip().startswith(("GPU-", "MIG-"))
    if numbered and not ordered and len({card.name for card in cards}) > 1 and visible != "":
        raise DeviceError(
            "cards of several models, numbered fastest first by the runtime",
            code="KV-DEV-026",
            where=platform,
            got=", ".join(f"{card.uuid} ({card.name})" for card in cards),
            expected="an order that is known",
            hint=f"set CUDA_DEVICE_ORDER=PCI_BUS_ID, name UUIDs in {variable}, or install the driver bindings",
        )
    how = Mapping.ORDER if visible is None else Mapping.ENVIRONMENT
    return [
        Located(_device(platform, index, card, how, entry), card)
        for index, (entry, card) in enumerate(select_visible(visible, cards))
    ]


def _by_uuid(device: RuntimeDevice, cards: list[Card]) -> Card | None:
    if device.uuid is None:
        return None
    for card in cards:
        for candidate in (*card.slices, card):
            if candidate.uuid.split("-", 1)[-1].replace("-", "").lower() == device.uuid:
                return candidate
    return None


def _by_pci(device: RuntimeDevice, cards: list[Card]) -> Card | None:
    card = next((card for card in cards if device.pci is not None and card.pci == device.pci), None)
    if card is None or not card.slices:
        return card
    if len(card.slices) == 1:
        return card.slices[0]
    raise DeviceError(
        "the runtime's device is one of several slices of a card, and nothing says which",
        code="KV-DEV-026",
        where=f"ordinal {device.index}, {device.pci}",
        got=", ".join(piece.uuid for piece in card.slices),
        expected="one slice, named by its UUID",
        hint="name the slice by its UUID in CUDA_VISIBLE_DEVICES",
    )


def _vendor_of(device: RuntimeDevice, root: Path) -> int | None:
    return None if device.pci is None else pci_vendor(device.pci, root)


def _located(platform: str, found: RuntimeDevice, card: Card | None) -> Located:
    if card is not None:
        device = _device(platform, found.index, card, Mapping.RUNTIME, None, integrated=bool(found.integrated))
        return Located(device, card, found.integrated)
    if found.uuid is None and found.pci is None:
        raise DeviceError(
            "the runtime names neither UUID nor PCI address of a device",
            code="KV-DEV-026",
            where=f"{platform} ordinal {found.index}",
            got=found.name,
            expected="an identity",
        )
    key = f"GPU-{_dashed(found.uuid)}" if found.uuid is not None else str(found.pci)
    kind = MemoryKind.UNIFIED if found.integrated else MemoryKind.DISCRETE
    return Located(Device(platform, found.index, key, found.name, kind, Mapping.RUNTIME, None), None, found.integrated)


def _device(
    platform: str, index: int, card: Card, how: Mapping, entry: str | None, *, integrated: bool = False
) -> Device:
    kind = MemoryKind.DISCRETE
    if card.instance is not None:
        kind = MemoryKind.PARTITION
    elif integrated or card.unified:
        kind = MemoryKind.UNIFIED
    return Device(platform, index, card.uuid, card.name, kind, how, entry, card.parent)


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
