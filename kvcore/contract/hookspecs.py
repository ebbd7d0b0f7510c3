"""The hooks. A vendor implements :class:`BlockSizer` and nothing else.

::

    # kvcore_acme/plugin.py
    from kvcore.contract import BlockSizer, hookimpl

    class AcmeBlockSizer:
        @hookimpl
        def kvcore_platform(self) -> PlatformInfo: ...

    plugin: BlockSizer = AcmeBlockSizer()      # mypy compares every signature

    # pyproject.toml
    [project.entry-points.kvcore]
    acme = "kvcore_acme.plugin:plugin"

A vendor states facts and moves memory. No hook of :class:`BlockSizer` sees, returns or changes a number of blocks.
kvcore calls exactly one platform's hooks at a time, and checks every answer at the border.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pluggy

from kvcore.contract.capabilities import PlatformInfo
from kvcore.contract.facts import (
    AllocationLimits,
    AllocationRequest,
    Buffer,
    Detection,
    Device,
    Limit,
    MemoryStats,
    Phase,
    Reading,
    Reserve,
    TensorView,
)
from kvcore.contract.layout import CacheLayout

if TYPE_CHECKING:
    from kvcore.cache.allocate import Cache
    from kvcore.sizing.plan import Plan

__all__ = ["BlockSizer", "Contributor", "Observer", "hookimpl", "plugin_manager"]

hookspec = pluggy.HookspecMarker("kvcore")
hookimpl = pluggy.HookimplMarker("kvcore")


class BlockSizer(Protocol):
    """What one platform answers. Sizes are ``int`` bytes, unknown is None."""

    @hookspec
    def kvcore_platform(self) -> PlatformInfo:
        """Who this platform is and what it can do; called once, right after the plugin is loaded.

        Declare every :class:`Capability`. Must not load a driver or import a framework.
        """

    @hookspec
    def kvcore_detect(self) -> Detection:
        """Whether this vendor's hardware can be used by this process.

        ABSENT means that no hardware is here, and lets kvcore use the CPU; UNUSABLE that it is here but does not work.
        Evidence names library paths, PCI vendors and counts. Must not create a context, allocate, change the
        environment or import a framework.
        """

    @hookspec
    def kvcore_devices(self) -> list[Device]:
        """The devices that this process can see, in the runtime's order, each with its key.

        Raises :class:`DeviceError` if an identity cannot be established: it must not guess one.
        """

    @hookspec
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """What each source says of the device's memory now, best source first.

        One :class:`Reading` a source, also for a source that was tried and gave nothing (``skipped``). Raises
        :class:`DeviceError` if the device, found by its key, is gone or not fit to be used. Must not return 0 for
        unknown, mix figures of two pools in one reading, or return a budget.
        """

    @hookspec
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """The framework allocator's figures for this process; peak counts from ``kvcore_reset_peak``."""

    @hookspec
    def kvcore_reset_peak(self, device: Device) -> None:
        """Start a new peak in the figures of ``kvcore_memory_stats``."""

    @hookspec
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """Granularity and alignment of allocations, and the largest one in bytes and in elements, with the reason."""

    @hookspec
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """All of ``request.nbytes``, rounded up to the granularity, zeroed and committed.

        Raises :class:`OutOfMemory` and leaves nothing behind if there is no room. Must not round down.
        """

    @hookspec
    def kvcore_release(self, buffer: Buffer) -> int:
        """Give the buffer back; returns the bytes freed. Raises :class:`BufferMisuse` the second time."""

    @hookspec
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        """Copy ``data`` to ``offset``. Raises :class:`BufferMisuse` outside the buffer or after its release."""

    @hookspec
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset``. Raises :class:`BufferMisuse` outside the buffer or after its release."""

    @hookspec
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes from ``offset`` to ``value`` (0 to 255). Raises :class:`BufferMisuse` as above."""

    @hookspec
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> object:
        """A tensor of ``framework`` ("numpy", "paddle" or "torch") that shares the buffer's memory; never a copy.

        Raises :class:`CapabilityMissing` for a framework that this platform does not serve.
        """


class Contributor(Protocol):
    """Hooks that any plugin may answer; all answers are collected."""

    @hookspec
    def kvcore_limits(self, device: Device, layout: CacheLayout) -> list[Limit]:
        """Upper bounds on blocks that the answering party knows of, each with its reason."""

    @hookspec
    def kvcore_reserves(self, device: Device, phase: Phase) -> list[Reserve]:
        """Memory that will still be taken on the device after ``phase``. Must not subtract anything itself."""


class Observer(Protocol):
    """Hooks for those who watch; answers are ignored, and a failure is reported without stopping the work."""

    @hookspec
    def kvcore_planned(self, plan: Plan) -> None:
        """A plan was made."""

    @hookspec
    def kvcore_allocated(self, cache: Cache) -> None:
        """A cache was allocated and checked against its plan."""

    @hookspec
    def kvcore_released(self, cache: Cache, freed_bytes: int) -> None:
        """A cache was released."""


def plugin_manager() -> pluggy.PluginManager:
    """A plugin manager that knows all of kvcore's hooks and has no plugins yet."""
    manager = pluggy.PluginManager("kvcore")
    for specification in (BlockSizer, Contributor, Observer):
        manager.add_hookspecs(specification)
    return manager
