"""Which devices a process sees: the rules of CUDA_VISIBLE_DEVICES, without a runtime to ask.

The rules are those of the CUDA programming guide (environment variables), with the corner cases that PyTorch checked
against a driver (pytorch#92315): numbers are read as by ``atoi``, the first entry that names no device ends the list,
a device named twice empties it, and the form of the first entry holds for all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcore.contract.runtimes.management import Card
from kvcore.errors import DeviceError

__all__ = ["select_visible"]

_NUMBER = re.compile(r"[+-]?\d+")
_INSTANCE = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")


def select_visible(text: str | None, cards: Sequence[Card]) -> list[tuple[str | None, Card]]:
    """The visible cards and slices in the runtime's order, each with the entry that named it (None if unset).

    ``text`` is the variable's value, None if it is not set: an empty value hides every device. ``cards`` are in the
    order of the runtime's ordinals. Raises :class:`DeviceError` where a card with several slices is named by number,
    since drivers differ in what they then show.
    """
    if text is None:
        return [(None, _whole(card)) for card in cards]
    entries = text.split(",")
    form = entries[0].strip()
    if form.startswith(("GPU-", "MIG-")):
        return _by_uuid(entries, form[:4], cards)
    return _by_number(entries, cards)


def _by_number(entries: Sequence[str], cards: Sequence[Card]) -> list[tuple[str | None, Card]]:
    numbers: list[int] = []
    for entry in entries:
        match = _NUMBER.match(entry.strip())
        number = -1 if match is None else int(match.group())
        if number in numbers:
            return []
        if number < 0:
            break
        numbers.append(number)
    selected: list[tuple[str | None, Card]] = []
    for entry, number in zip(entries, numbers, strict=False):
        if number >= len(cards):
            break
        selected.append((entry.strip(), _whole(cards[number])))
    return selected


def _by_uuid(entries: Sequence[str], form: str, cards: Sequence[Card]) -> list[tuple[str | None, Card]]:
    selected: list[tuple[str | None, Card]] = []
    for entry in entries:
        wanted = entry.strip()
        if not wanted.startswith(form):
            break
        card = _slice_named(wanted, cards) if form == "MIG-" else _card_named(wanted, cards)
        if card is None:
            break
        if any(card.uuid == other.uuid for _, other in selected):
            return []
        selected.append((wanted, card))
    return selected


def _card_named(prefix: str, cards: Sequence[Card]) -> Card | None:
    """The one card whose UUID starts with ``prefix``; None if there is none, or more than one."""
    found = [card for card in cards if card.uuid.lower().startswith(prefix.lower())]
    return _whole(found[0]) if len(found) == 1 else None


def _slice_named(name: str, cards: Sequence[Card]) -> Card | None:
    """The slice of that UUID, or of the older form ``MIG-GPU-<uuid>/<gpu instance>/<compute instance>``."""
    match = _INSTANCE.fullmatch(name)
    for card in cards:
        for piece in card.slices or ():
            if match is None and piece.uuid.lower() == name.lower():
                return piece
            if match is not None and (card.uuid.lower(), piece.instance) == (
                match[1].lower(),
                (int(match[2]), int(match[3])),
            ):
                return piece
    return None


def _whole(card: Card) -> Card:
    """The card, or its slice if it has exactly one."""
    if card.slices is None:
        return card
    if len(card.slices) != 1:
        raise DeviceError(
            "a card in MIG mode is named as a whole, and has not exactly one slice that this process may list",
            code="KV-DEV-026",
            where=f"{card.uuid} ({card.name})",
            got=", ".join(piece.uuid for piece in card.slices) or "no slice",
            expected="one slice, named by its UUID",
            hint="name the slice in CUDA_VISIBLE_DEVICES, or install the driver bindings so that the runtime can say",
        )
    return card.slices[0]
