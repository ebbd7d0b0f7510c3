"""Which device is which: the runtime's ordinals tied to the cards and slices of the management library."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, replace
from pathlib import Path

from kvcore.contract.facts import Device, Mapping, MemoryKind
from kvcore.contract.runtimes.interface import RuntimeDevice
from kvcore.contract.runtimes.management import Card
from kvcore.contract.runtimes.visibility import select_visible
from kvcore.errors import DeviceError

__all__ = ["Located", "located_by_environment", "located_by_runtime", "pci_vendor", "with_entries"]


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
    platform: str,
    vendor: int,
    found: collections.abc.Sequence[RuntimeDevice],
    cards: list[Card],
    root: Path,
    *,
    without_pci: bool = False,
) -> list[Located]:
    """The runtime's devices that are this vendor's, by UUID, then by PCI address.

    A libcuda.so.1 may be another vendor's, so a device counts only if a card has its identity, if its PCI vendor is
    the right one, or if it is integrated, since those are no PCI functions; with ``without_pci`` (WSL, whose PCI
    functions are Microsoft's) also if the kernel knows no PCI function at its address. Raises :class:`DeviceError` if
    a PCI address stands for several slices.
    """
    located = []
    for device in found:
        card = _by_uuid(device, cards) or _by_pci(device, cards)
        hidden_in = None
        if card is not None and card.slices is not None:
            card, hidden_in = _slice_of(card, card.slices, device), card
        maker = _vendor_of(device, root)
        if (
            card is not None
            or hidden_in is not None
            or device.integrated
            or maker == vendor
            or (without_pci and maker is None)
        ):
            located.append(_located(platform, device, card, hidden_in))
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
    # An entry by number is an identity only as far as both count in one order.
    assumed = visible is None or (numbered and not ordered and len(cards) > 1)
    how = Mapping.ORDER if assumed else Mapping.ENVIRONMENT
    return [
        Located(_device(platform, index, card, how, entry), card)
        for index, (entry, card) in enumerate(select_visible(visible, cards))
    ]


def with_entries(located: list[Located], visible: str | None) -> list[Located]:
    """Each device with the entry of the variable that named it: the runtime numbers devices as the entries stand."""
    entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
    return [
        replace(here, device=replace(here.device, visible=entries[here.device.index]))
        if here.device.index < len(entries) and _may_name(entries[here.device.index], here.device)
        else here
        for here in located
    ]


def _may_name(entry: str, device: Device) -> bool:
    """Not if it is another's UUID: the variable was then changed after the runtime had read it."""
    if not entry.startswith(("GPU-", "MIG-")):
        return True
    names = (device.key, f"MIG-{device.parent}/")
    return any(name.lower().startswith(entry.lower()) or entry.lower().startswith(name.lower()) for name in names)


def _by_uuid(device: RuntimeDevice, cards: list[Card]) -> Card | None:
    if device.uuid is None:
        return None
    for card in cards:
        for candidate in (*(card.slices or ()), card):
            if _digits(candidate.uuid) == device.uuid:
                return candidate
    return None


def _by_pci(device: RuntimeDevice, cards: list[Card]) -> Card | None:
    return next((card for card in cards if device.pci is not None and card.pci == device.pci), None)


def _slice_of(card: Card, slices: tuple[Card, ...], device: RuntimeDevice) -> Card | None:
    """The slice that the runtime's device is, where it did not name one; None if this process may not list it.

    Drivers without the second version of the UUID's query give the card's.
    """
    if not slices or device.uuid not in (None, _digits(card.uuid)):
        return None
    if len(slices) == 1:
        return slices[0]
    raise DeviceError(
        "the runtime's device is one of several slices of a card, and nothing says which",
        code="KV-DEV-026",
        where=f"ordinal {device.index}, {device.pci}",
        got=", ".join(piece.uuid for piece in slices),
        expected="one slice, named by its UUID",
        hint="name the slice by its UUID in CUDA_VISIBLE_DEVICES",
    )


def _vendor_of(device: RuntimeDevice, root: Path) -> int | None:
    return None if device.pci is None else pci_vendor(device.pci, root)


def _located(platform: str, found: RuntimeDevice, card: Card | None, hidden_in: Card | None) -> Located:
    """``hidden_in`` is the card of a slice that the management library does not list."""
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
    form = "GPU" if hidden_in is None or found.uuid == _digits(hidden_in.uuid) else "MIG"
    key = f"{form}-{_dashed(found.uuid)}" if found.uuid is not None else str(found.pci)
    kind = MemoryKind.UNIFIED if found.integrated else MemoryKind.DISCRETE
    kind = kind if hidden_in is None else MemoryKind.PARTITION
    parent = None if hidden_in is None else hidden_in.uuid
    device = Device(platform, found.index, key, found.name, kind, Mapping.RUNTIME, None, parent)
    return Located(device, None, found.integrated)


def _device(
    platform: str, index: int, card: Card, how: Mapping, entry: str | None, *, integrated: bool = False
) -> Device:
    kind = MemoryKind.DISCRETE
    if card.instance is not None:
        kind = MemoryKind.PARTITION
    elif integrated or card.unified:
        kind = MemoryKind.UNIFIED
    return Device(platform, index, card.uuid, card.name, kind, how, entry, card.parent)


def _digits(uuid: str) -> str:
    return uuid.split("-", 1)[-1].replace("-", "").lower()


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
