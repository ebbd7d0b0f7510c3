"""Kernels whose index into the cache is known, as data with public sources (``kernels.toml`` beside this module).

The limit belongs to a kernel of one engine, version and layout, never to a vendor: fixes arrive kernel by kernel. Third
parties state their own through the hook ``kvcore_limits``.
"""

from __future__ import annotations

import collections.abc
import functools
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.contract.facts import Limit, LimitKind, LimitUnit, Stride
from kvcore.errors import PolicyError

__all__ = ["NO_KERNEL", "Kernel", "default_limits", "kernel", "kernels"]

#: In place of a kernel's name: the engine's default kernels do not hold, and no width is declared.
NO_KERNEL = "none"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's index: ``bits`` wide (its sign included), counting ``unit``; a block adds ``stride`` to it.

    ``published_stride`` and ``published_safe`` are the figures of the public report: the blocks (or slots) that are
    safe with that stride. ``default`` kernels hold for every plan for their engine that declares nothing else.
    """

    name: str
    engine: str
    versions: str
    layout: str
    kind: LimitKind
    bits: int
    signed: bool
    unit: LimitUnit
    stride: Stride | None
    expression: str
    effect: str
    default: bool
    source: str
    published_stride: int | None = None
    published_safe: int | None = None

    @property
    def bound(self) -> int:
        """How many units the index can tell apart without its sign: 2**31 for a signed one of 32 bits."""
        return 1 << (self.bits - 1 if self.signed else self.bits)

    @property
    def limit(self) -> Limit:
        """The kernel as a limit for the sum."""
        sign = "signed" if self.signed else "unsigned"
        reason = f"{self.expression}: {self.bits} bits {sign}, counting {self.unit.value}"
        return Limit(self.kind, self.unit, self.bound, reason, f"kernel {self.name}", self.stride)


@functools.cache
def kernels() -> tuple[Kernel, ...]:
    """All known kernels, in the file's order."""
    # The standard library's parser; before Python 3.11 the package it was made from.
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table = tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))
    return tuple(_kernel(entry) for entry in table["kernel"])


def kernel(name: str, where: str = "kernel") -> Kernel:
    """The kernel called ``name``; raises :class:`PolicyError` if none is."""
    for known in kernels():
        if known.name == name:
            return known
    raise PolicyError(
        "unknown kernel",
        code="KV-POL-053",
        where=where,
        got=name[:80],
        expected=", ".join([*(known.name for known in kernels()), NO_KERNEL]),
        hint="`kvcore kernels` lists them; --index-limit declares any other",
    )


def default_limits(engine: str) -> tuple[Limit, ...]:
    """The limits of an engine's default kernels."""
    return tuple(known.limit for known in kernels() if known.default and known.engine == engine)


def _kernel(entry: collections.abc.Mapping[str, Any]) -> Kernel:
    fields = dict(entry)
    published = fields.pop("published", {})
    stride = fields.pop("stride", None)
    return Kernel(
        kind=LimitKind(fields.pop("kind", LimitKind.INDEX.value)),
        unit=LimitUnit(fields.pop("unit")),
        stride=None if stride is None else Stride(stride),
        default=fields.pop("default", False),
        published_stride=published.get("stride"),
        published_safe=published.get("safe"),
        **fields,
    )
