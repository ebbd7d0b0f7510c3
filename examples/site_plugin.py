"""A plugin that is no platform: what one site knows of its machines, and a log of what kvcore does there.

Publish it like any other, under the entry-point group ``kvcore``. SITE_LOG names the log's file.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from kvcore.contract import (
    Basis,
    CacheLayout,
    Contributor,
    Device,
    Limit,
    LimitKind,
    LimitUnit,
    MemoryKind,
    Observer,
    Phase,
    Reserve,
    ReserveKind,
    Stride,
    hookimpl,
)

if TYPE_CHECKING:
    from kvcore.cache.allocate import Cache
    from kvcore.sizing.plan import Plan

AGENT = 256 * 1024**2


class SitePlugin:
    """Answers the contributors' hooks and watches."""

    @hookimpl
    def kvcore_limits(self, device: Device, layout: CacheLayout) -> list[Limit]:
        """This site's own attention kernel indexes one layer's keys with a signed 32-bit number of elements."""
        if device.kind is MemoryKind.HOST or not layout.groups:
            return []
        reason = "the index into one layer's keys is an int32 that counts elements"
        return [Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, 2**31, reason, "site kernel 4.1", stride=Stride.LAYER)]

    @hookimpl
    def kvcore_reserves(self, device: Device, phase: Phase) -> list[Reserve]:
        """The telemetry agent starts with the first request, so no reading before that contains it."""
        if device.kind is MemoryKind.HOST:
            return []
        reason = "the agent's buffers on each card, from its manual"
        return [
            Reserve("agent", AGENT, ReserveKind.PERSISTENT, Basis.DECLARED, "site", reason, Phase.FIRST_REQUEST),
        ]

    @hookimpl
    def kvcore_planned(self, plan: Plan) -> None:
        """One line a plan."""
        _log("planned", model=plan.model, blocks=plan.num_blocks, warnings=len(plan.warnings))

    @hookimpl
    def kvcore_allocated(self, cache: Cache) -> None:
        """One line a cache."""
        _log("allocated", device=cache.device.key, blocks=cache.num_blocks)

    @hookimpl
    def kvcore_released(self, cache: Cache, freed_bytes: int) -> None:
        """One line when it is given back."""
        _log("released", device=cache.device.key, freed_bytes=freed_bytes)


def _log(event: str, **facts: object) -> None:
    with open(os.environ["SITE_LOG"], "a", encoding="utf-8") as stream:
        stream.write(json.dumps({"event": event, **facts}) + "\n")


plugin = SitePlugin()
contributor: Contributor = plugin
observer: Observer = plugin
