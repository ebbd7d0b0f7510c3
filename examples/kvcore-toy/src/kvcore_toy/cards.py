"""Toy cards: what a vendor's driver would be. Replace this module by your library's binding.

A machine's cards are those that TOY_CARDS describes, such as ``TOY-5f3a:1GiB:96MiB,TOY-81c0:1GiB:96MiB``: serial
number, size, and what the neighbours leave of it. A card's memory is memory of this process.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

from kvcore.contract import TensorView
from kvcore.contract.buffers import BufferMemory, check_span
from kvcore.errors import BufferMisuse, CapabilityMissing, DeviceError, OutOfMemory
from kvcore.units import parse_size

__all__ = ["PAGE", "VARIABLE", "Block", "Card", "Driver"]

VARIABLE = "TOY_CARDS"
PAGE = mmap.PAGESIZE
#: numpy has no bfloat16 and no fp8: their bits are shown as unsigned integers of the same size.
NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class Card:
    """One card: its size, and what this process holds of it."""

    def __init__(self, serial: str, total: int, room: int) -> None:
        self.serial = serial
        self.total = total
        self.room = room
        self.held = self.peak = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """What the neighbours and this process leave."""
        return self.room - self.held

    def take(self, nbytes: int, name: str) -> None:
        """Count ``nbytes`` as held; the card is asked and counted in one step, whoever else allocates."""
        with self._lock:
            if nbytes > self.free:
                raise OutOfMemory(
                    "the card has no room for an allocation",
                    code="KV-OOM-001",
                    where=f"{name} on {self.serial}",
                    got=f"{self.free:,} bytes are free",
                    expected=f"{nbytes:,} bytes",
                )
            self.held += nbytes
            self.peak = max(self.peak, self.held)

    def give_back(self, nbytes: int) -> None:
        """Undo :meth:`take`."""
        with self._lock:
            self.held -= nbytes

    def reset_peak(self) -> None:
        """The peak starts again at what is held."""
        with self._lock:
            self.peak = self.held


class Block(BufferMemory):
    """The memory of one buffer: pages that are there, and zero, when this is made."""

    def __init__(self, card: Card, name: str, nbytes: int) -> None:
        card.take(nbytes, name)
        self.name = name
        self.nbytes = nbytes
        self._card = card
        self._lock = threading.Lock()
        try:
            self._pages: mmap.mmap | None = mmap.mmap(-1, nbytes)
            self.fill(0, nbytes, 0)  # until it is written, a page is only a promise
        except BaseException:
            card.give_back(nbytes)
            raise

    def release(self) -> int:
        """Give the pages back; refused twice, and while a tensor over them is alive."""
        with self._lock:
            pages = self._alive("KV-BUF-001", "a buffer released twice")
            try:
                pages.close()
            except BufferError:
                raise BufferMisuse(
                    "a buffer released while a tensor over it is alive", code="KV-BUF-004", where=self.name
                ) from None
            self._pages = None
        self._card.give_back(self.nbytes)
        return self.nbytes

    def write(self, offset: int, data: bytes) -> None:
        """Copy ``data`` to ``offset``."""
        self._span(offset, len(data))[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of ``nbytes`` bytes from ``offset``."""
        return self._span(offset, nbytes)[offset : offset + nbytes]

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes from ``offset`` to ``value``."""
        pages = self._span(offset, nbytes)
        for start in range(offset, offset + nbytes, 1 << 20):
            end = min(start + (1 << 20), offset + nbytes)
            pages[start:end] = bytes([value]) * (end - start)

    def tensor(self, view: TensorView, framework: str) -> object:
        """numpy's, over the pages."""
        if framework != "numpy":
            raise CapabilityMissing("a toy card shows its memory to numpy only", code="KV-CAP-011", got=framework)
        import numpy as np

        dtype = np.dtype(NUMPY.get(view.dtype, view.dtype))
        count = 1
        for extent in view.shape:
            count *= extent
        pages = self._span(view.offset, count * dtype.itemsize)
        return np.frombuffer(pages, dtype, count, view.offset).reshape(view.shape)

    def _span(self, offset: int, nbytes: int) -> mmap.mmap:
        check_span(self.name, self.nbytes, offset, nbytes)
        return self._alive("KV-BUF-002", "a buffer used after its release")

    def _alive(self, code: str, what: str) -> mmap.mmap:
        if self._pages is None:
            raise BufferMisuse(what, code=code, where=self.name)
        return self._pages


class Driver:
    """The cards of this machine."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Card, ...]] = {}

    def cards(self) -> Sequence[Card]:
        """The same objects for the same description: they know what is held."""
        text = os.environ.get(VARIABLE, "")
        if text not in self._known:
            self._known[text] = tuple(_card(entry) for entry in text.split(",") if entry)
        return self._known[text]

    def card(self, serial: str) -> Card:
        """By its serial number: the place of a card in the list may be another's by now."""
        for card in self.cards():
            if card.serial == serial:
                return card
        raise DeviceError(
            "the card is not here any more",
            code="KV-DEV-027",
            where=f"toy device {serial}",
            got=", ".join(card.serial for card in self.cards()) or "no card",
            expected=serial,
        )


def _card(entry: str) -> Card:
    serial, *sizes = entry.split(":")
    if len(sizes) != 2:
        raise DeviceError(
            "a card that is not described as cards are",
            code="KV-DEV-020",
            where=VARIABLE,
            got=repr(entry[:80]),
            expected="SERIAL:SIZE:FREE",
        )
    total, room = (parse_size(size, where=VARIABLE) for size in sizes)
    return Card(serial, total, min(room, total))
