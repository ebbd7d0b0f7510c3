"""Handles over replayed devices, honest and lying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcore.contract import (
    AllocationLimits,
    CacheLayout,
    Device,
    DeviceFacts,
    Group,
    Growth,
    Layer,
    Mapping,
    MemoryKind,
    Reading,
    Scope,
    Store,
)
from kvcore.contract.hookspecs import plugin_manager
from kvcore.handle import PlatformHandle
from kvcore.platforms.replay import ReplayBlockSizer

MIB = 1024**2


def card(free: int = 64 * MIB, granularity: int = 512) -> DeviceFacts:
    device = Device("replay", 0, "card", "A card", MemoryKind.DISCRETE, Mapping.RUNTIME)
    reading = Reading("test", Scope.DEVICE, total=max(free, 64 * MIB), free=free, own=0)
    return DeviceFacts(device, (reading,), AllocationLimits(granularity=granularity, alignment=256))


def handle_of(plugin: ReplayBlockSizer) -> PlatformHandle:
    """A handle as the registry makes it."""
    manager = plugin_manager()
    manager.register(plugin, "replay")
    return PlatformHandle(manager, "replay", plugin.kvcore_platform(), (), "1.0")


def small_layout(layers: int = 3, heads: int = 2, width: int = 8, alignment: int = 512) -> CacheLayout:
    stores = tuple(Store(name, heads, width, "float16", 2) for name in ("k", "v"))
    group = Group("full", "full", Growth.TOKEN, tuple(Layer(i, stores) for i in range(layers)))
    return replace(CacheLayout("small", 16, (group,)), alignment=alignment)


@pytest.fixture
def platform() -> PlatformHandle:
    return handle_of(ReplayBlockSizer([card()]))


@pytest.fixture
def lying() -> Callable[[type[ReplayBlockSizer]], PlatformHandle]:
    """A handle over a platform class that tells one lie."""
    return lambda kind: handle_of(kind([card()]))
