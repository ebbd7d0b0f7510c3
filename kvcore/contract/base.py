"""A start for plugins: every hook there, and each says honestly that it is not offered.

A platform overrides what it can do and declares the rest UNSUPPORTED or NOT_IMPLEMENTED with a reason. kvcore checks
the declaration before it calls, so these bodies speak only to those who call a plugin by hand.
"""

from __future__ import annotations

from typing import NoReturn

from kvcore.contract.capabilities import Capability, PlatformInfo
from kvcore.contract.facts import (
    AllocationLimits,
    AllocationRequest,
    Buffer,
    Detection,
    Device,
    MemoryStats,
    Reading,
    TensorView,
)
from kvcore.contract.hookspecs import hookimpl
from kvcore.errors import CapabilityMissing

__all__ = ["PlatformBase", "not_offered"]


def not_offered(info: PlatformInfo, capability: Capability) -> CapabilityMissing:
    """The error of a hook whose ``capability`` is declared UNSUPPORTED or NOT_IMPLEMENTED."""
    declared = info.capabilities[capability]
    return CapabilityMissing(
        f"platform {info.name} does not offer {capability.value}",
        where=f"platform {info.name}",
        got=f"{declared.support.value}: {declared.reason}",
        expected="full",
    )


class PlatformBase:
    """Implements every hook of :class:`~kvcore.contract.hookspecs.BlockSizer` but ``kvcore_platform``."""

    def kvcore_platform(self) -> PlatformInfo:
        """Each platform says for itself who it is; decorate the override with ``@hookimpl``."""
        raise NotImplementedError(type(self).__name__)

    def _not_offered(self, capability: Capability) -> NoReturn:
        raise not_offered(self.kvcore_platform(), capability)

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """Not offered."""
        self._not_offered(Capability.DETECT)

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        """Not offered."""
        self._not_offered(Capability.DEVICES)

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """Not offered."""
        self._not_offered(Capability.READ_MEMORY)

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """Not offered."""
        self._not_offered(Capability.MEMORY_STATS)

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        """Not offered."""
        self._not_offered(Capability.RESET_PEAK)

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """Not offered."""
        self._not_offered(Capability.ALLOCATION_LIMITS)

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """Not offered."""
        self._not_offered(Capability.ALLOCATE)

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        """Not offered."""
        self._not_offered(Capability.ALLOCATE)

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        """Not offered."""
        self._not_offered(Capability.RAW_ACCESS)

    @hookimpl
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """Not offered."""
        self._not_offered(Capability.RAW_ACCESS)

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        """Not offered."""
        self._not_offered(Capability.RAW_ACCESS)

    @hookimpl
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> object:
        """Not offered."""
        names = {"paddle": Capability.TENSOR_PADDLE, "torch": Capability.TENSOR_TORCH}
        self._not_offered(names.get(framework, Capability.TENSOR_NUMPY))
