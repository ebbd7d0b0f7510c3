"""Which of the library's cards this process sees, and under which number: MACA_VISIBLE_DEVICES.

MetaX documents a list of the cards' numbers and no more: what its runtime makes of a number twice, one that is out of
range, or a UUID, is not public. Such a list is an error here, because the wrong card's memory would be worse.
"""

from __future__ import annotations

import collections.abc
import re

from kvcore.errors import DeviceError
from kvcore_metax.mxsml import Card

__all__ = ["VARIABLES", "named", "visible_cards"]

#: Ray and vLLM-metax set the second (vllm_metax/platform.py, device_control_env_var); the runtime reads both.
VARIABLES = ("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_LIST = re.compile(r"\s*[0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*")


def named(environ: collections.abc.Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that decides and its value; None if neither is set."""
    found = [(name, environ[name]) for name in VARIABLES if name in environ]
    if len({value.strip() for _, value in found}) > 1:
        raise DeviceError(
            "two variables name different devices",
            code="KV-DEV-026",
            where=" and ".join(VARIABLES),
            got="; ".join(f"{name}={value!a}" for name, value in found),
            expected="one of them, or the same devices in both",
            hint=f"unset {VARIABLES[1]}",
        )
    return found[0] if found else None


def visible_cards(cards: list[Card], environ: collections.abc.Mapping[str, str]) -> list[tuple[str | None, Card]]:
    """The visible cards in the runtime's order, each with the entry that named it; an empty value hides all."""
    setting = named(environ)
    if setting is None:
        return [(None, card) for card in cards]
    variable, text = setting
    if not text.strip():
        return []
    entries = [entry.strip() for entry in text.split(",")]
    numbers = [int(entry) for entry in entries] if _LIST.fullmatch(text) else []
    if not numbers or len(set(numbers)) < len(numbers) or max(numbers) >= len(cards):
        raise DeviceError(
            "what the runtime makes of this list of devices is not documented",
            code="KV-DEV-026",
            where=variable,
            got=f"{text[:80]!a}",
            expected=f"numbers from 0 to {len(cards) - 1}, each once",
            hint=f"correct {variable}",
        )
    return [(entry, cards[number]) for entry, number in zip(entries, numbers, strict=True)]
