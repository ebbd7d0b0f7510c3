"""Small builders for the tests of the sum."""

from __future__ import annotations

import collections.abc
from dataclasses import replace
from typing import Any

from kvcore.contract import (
    AllocationLimits,
    Basis,
    CacheLayout,
    Device,
    DeviceFacts,
    Group,
    Growth,
    Layer,
    Mapping,
    MemoryKind,
    RankPlace,
    Reading,
    Reserve,
    ReserveKind,
    Scope,
    Store,
)
from kvcore.conventions import GENERIC
from kvcore.sizing.plan import Inputs
from kvcore.sizing.policy import Policy

GIB = 1024**3


def uniform(
    *,
    layers: int = 2,
    heads: int = 1,
    width: int = 4,
    itemsize: int = 2,
    block_size: int = 16,
    alignment: int = 1,
    place: RankPlace | None = None,
) -> CacheLayout:
    """Full attention: K and V of ``heads`` heads of ``width`` values in each of ``layers`` layers."""
    stores = tuple(Store(name, heads, width, "bfloat16", itemsize) for name in ("k", "v"))
    group = Group("full", "full", Growth.TOKEN, tuple(Layer(i, stores) for i in range(layers)))
    return CacheLayout("test", block_size, (group,), place or RankPlace(), alignment)


def device(name: str = "test") -> Device:
    return Device("replay", 0, name, name, MemoryKind.DISCRETE, Mapping.SELF)


def reading(total: int | None, free: int | None, own: int | None = 0, **more: Any) -> Reading:
    return Reading(more.pop("source", "test"), more.pop("scope", Scope.DEVICE), total=total, free=free, own=own, **more)


def facts(*readings: Reading, **more: Any) -> DeviceFacts:
    return DeviceFacts(device(), tuple(readings), more.pop("allocation", AllocationLimits()), **more)


def reserve(name: str, nbytes: int, *, transient: bool = False, basis: Basis = Basis.DECLARED) -> Reserve:
    kind = ReserveKind.TRANSIENT if transient else ReserveKind.PERSISTENT
    return Reserve(name, nbytes, kind, basis, "test", f"{name} for the test")


def inputs(
    layouts: CacheLayout | collections.abc.Sequence[CacheLayout],
    device_facts: DeviceFacts | collections.abc.Sequence[DeviceFacts | None] | None,
    **more: Any,
) -> Inputs:
    """Inputs for one or several ranks; keywords that :class:`Inputs` does not know go into the policy."""
    ranks = (layouts,) if isinstance(layouts, CacheLayout) else tuple(layouts)
    each: tuple[DeviceFacts | None, ...]
    each = tuple(device_facts) if isinstance(device_facts, collections.abc.Sequence) else (device_facts,) * len(ranks)
    known = set(Inputs.__dataclass_fields__)
    own = {name: more.pop(name) for name in list(more) if name in known}
    if "reserved_blocks" in more:
        own["engine"] = replace(GENERIC, null_blocks=more.pop("reserved_blocks"))
    return Inputs(ranks, each, Policy(**more), **own)
