"""Platforms that each tell one lie, and the checks that find it.

Every mutant is the replay platform but for what its docstring says. ``kills`` names the checks that must fail on it,
all of them and no other; docs/conformance/index.md shows the whole as a table.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from kvcore.contract import (
    FULL,
    AllocationLimits,
    AllocationRequest,
    Buffer,
    Capability,
    Detection,
    DetectionState,
    Device,
    DeviceFacts,
    Limit,
    LimitKind,
    LimitUnit,
    MemoryStats,
    PlatformInfo,
    Reading,
    Scope,
    TensorView,
    hookimpl,
    unsupported,
)
from kvcore.contract.capabilities import Supported
from kvcore.errors import BufferMisuse, CapabilityMissing, OutOfMemory
from kvcore.platforms.replay import ReplayBlockSizer

KIB, MIB = 1024, 1024**2
MUTANTS: dict[str, type[Honest]] = {}


class Honest(ReplayBlockSizer):
    """No lie; numpy alone, so that a run does not import the frameworks."""

    kills: ClassVar[set[str]] = set()
    capabilities: ClassVar[dict[Capability, Supported]] = {
        **dict.fromkeys(Capability, FULL),
        Capability.TENSOR_PADDLE: unsupported("left out here"),
        Capability.TENSOR_TORCH: unsupported("left out here"),
    }

    def __init_subclass__(cls) -> None:
        MUTANTS[cls.__name__] = cls

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        return replace(super().kvcore_platform(), capabilities=self.capabilities)

    @hookimpl
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> object:
        if framework != "numpy":
            raise CapabilityMissing(f"no tensors of {framework} here")
        return super().kvcore_tensor(buffer, view, framework)


def without(capability: Capability, reason: str = "not here") -> dict[Capability, Supported]:
    return {**Honest.capabilities, capability: unsupported(reason)}


# Readings.


class Readings(Honest):
    """A mutant whose lie is in each of its readings."""

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        return [self.lie(reading) for reading in super().kvcore_read_memory(device)]

    def lie(self, reading: Reading) -> Reading:
        raise NotImplementedError


class More(Honest):
    """A mutant that lies in a further reading."""

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        readings = super().kvcore_read_memory(device)
        return [*readings, self.lie(readings[0])]

    def lie(self, reading: Reading) -> Reading:
        raise NotImplementedError


def scaled(reading: Reading, unit: int) -> Reading:
    figures = {name: getattr(reading, name) for name in ("total", "free", "used", "reserved", "own")}
    return replace(reading, **{name: value // unit for name, value in figures.items() if value is not None})


class KibForBytes(Readings):
    """Every figure in KiB."""

    kills: ClassVar = {
        "ALC-004",
        "ALC-006",
        "ALC-007",
        "ALC-008",
        "CON-001",
        "MEM-008",
        "MEM-009",
        "MEM-010",
        "MEM-011",
        "MEM-012",
    }

    def lie(self, reading: Reading) -> Reading:
        return scaled(reading, KIB)


class SecondSourceInMib(More):
    """A second source, whose MiB are not converted."""

    kills: ClassVar = {"CON-001", "MEM-007", "MEM-008"}

    def lie(self, reading: Reading) -> Reading:
        return replace(
            reading, source="tool", total=reading.total // MIB, free=None, used=None, reserved=None, own=None
        )


class UsedOfV2AsV1(Readings):
    """`used` with what is reserved in it, beside `reserved`."""

    kills: ClassVar = {"MEM-006"}

    def lie(self, reading: Reading) -> Reading:
        return replace(reading, used=reading.used + reading.reserved)


class ZeroForUnknown(More):
    """A total of 0 from a runtime that does not know."""

    kills: ClassVar = {"CON-001", "MEM-004"}

    def lie(self, reading: Reading) -> Reading:
        return Reading("runtime", Scope.PROCESS, total=0)


class SkippedWithFigures(More):
    """A source that was skipped, and has a figure all the same."""

    kills: ClassVar = {"CON-001", "MEM-004"}

    def lie(self, reading: Reading) -> Reading:
        return Reading("runtime", Scope.DEVICE, total=reading.total, skipped="no context")


class FreeAboveTotal(More):
    """A slicer's reading whose free is the whole card's."""

    kills: ClassVar = {"CON-001", "MEM-003"}

    def lie(self, reading: Reading) -> Reading:
        return Reading("slicer", Scope.SOFT, total=reading.free // 2, free=reading.free)


class NegativeUsed(More):
    """A difference that went below zero."""

    kills: ClassVar = {"CON-001", "MEM-002"}

    def lie(self, reading: Reading) -> Reading:
        return Reading("slicer", Scope.SOFT, total=reading.total, used=-1)


class WrappedUsed(More):
    """An unsigned counter below zero."""

    kills: ClassVar = {"CON-001", "MEM-002", "MEM-003"}

    def lie(self, reading: Reading) -> Reading:
        return Reading("slicer", Scope.SOFT, total=reading.total, used=2**64 - 4096)


class FloatBytes(More):
    """A total that went through a division."""

    kills: ClassVar = {"CON-001", "MEM-001"}

    def lie(self, reading: Reading) -> Reading:
        return Reading("tool", Scope.SOFT, total=reading.total / 1.0)


class NumpyBytes(More):
    """A total that is a numpy integer."""

    kills: ClassVar = {"CON-001", "MEM-001"}

    def lie(self, reading: Reading) -> Reading:
        import numpy as np

        return Reading("tool", Scope.SOFT, total=np.int64(reading.total))


class ScopeIsText(Readings):
    """A scope that is a word and not a Scope."""

    kills: ClassVar = {"MEM-001", "MEM-007"}

    def lie(self, reading: Reading) -> Reading:
        return replace(reading, scope="device")


class NoTotal(Readings):
    """No reading says how much there is."""

    kills: ClassVar = {"MEM-005", "CON-001"}

    def lie(self, reading: Reading) -> Reading:
        return replace(reading, total=None)


class OwnIsEveryones(Readings):
    """`own` never moves: what everyone used at the start."""

    kills: ClassVar = {"MEM-009"}

    def lie(self, reading: Reading) -> Reading:
        return replace(reading, own=reading.total // 2)


class HiddenCap(Readings):
    """Never more free than 40000 blocks of 1 KiB."""

    kills: ClassVar = {"ALC-004", "ALC-008", "MEM-006", "MEM-010", "MEM-011", "MEM-012", "MEM-013"}

    def lie(self, reading: Reading) -> Reading:
        return replace(reading, free=min(reading.free, 40000 * KIB))


class OptimisticFree(Readings):
    """A quarter more free than there is."""

    kills: ClassVar = {"MEM-006", "MEM-013"}

    def lie(self, reading: Reading) -> Reading:
        return replace(reading, free=reading.free * 5 // 4)


class StaleReadings(Honest):
    """Readings are kept from the first call on."""

    kills: ClassVar = {"MEM-009", "MEM-010", "MEM-011", "MEM-012", "ALC-004", "ALC-008"}

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        kept = self.__dict__.setdefault("kept", {})
        if device.key not in kept:
            kept[device.key] = super().kvcore_read_memory(device)
        return kept[device.key]


class OtherDevicesMemory(Honest):
    """Readings are the first device's, whichever is asked for."""

    kills: ClassVar = {"MEM-012"}

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        self._of(device)
        return super().kvcore_read_memory(self.kvcore_devices()[0])


# Devices.


class Rekeyed(Honest):
    """A mutant whose devices have other keys."""

    def _facts(self) -> dict[str, DeviceFacts]:
        facts = [replace(f, device=replace(f.device, key=self.key(f.device))) for f in super()._facts().values()]
        return {f.device.key: f for f in facts}

    def key(self, device: Device) -> str:
        raise NotImplementedError


class IndexAsKey(Rekeyed):
    """The key is the index."""

    kills: ClassVar = {"DEV-004"}

    def key(self, device: Device) -> str:
        return str(device.index)


class NumberedKey(Rekeyed):
    """The key is a name and the index."""

    kills: ClassVar = {"DEV-004"}

    def key(self, device: Device) -> str:
        return f"gpu:{device.index}"


class KeyOfProcess(Rekeyed):
    """The key holds the process's id."""

    kills: ClassVar = {"DEV-003"}

    def key(self, device: Device) -> str:
        return f"{device.key}-{os.getpid()}"


class KeyNoTextCanCarry(Rekeyed):
    """The key holds half of a character."""

    kills: ClassVar = {"CON-001"}

    def key(self, device: Device) -> str:
        return f"{device.key}\ud800"


class KeyChanges(Honest):
    """The key is another one at every call, and any key is taken."""

    kills: ClassVar = {"DEV-002", "DEV-003", "DEV-006"}

    def _facts(self) -> dict[str, DeviceFacts]:
        return super()._facts()

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        return [replace(d, key=f"GPU-{time.monotonic_ns()}-{os.getpid()}") for d in super().kvcore_devices()]

    def _real(self, device: Device) -> Device:
        return list(super()._facts().values())[device.index].device

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        return super().kvcore_read_memory(self._real(device))

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        return super().kvcore_memory_stats(self._real(device))

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        super().kvcore_reset_peak(self._real(device))

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        return super().kvcore_allocation_limits(self._real(device))

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        return replace(super().kvcore_allocate(self._real(device), request), device=device)

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        return super().kvcore_release(replace(buffer, device=self._real(buffer.device)))


class OneKeyForTwo(Honest):
    """Both devices have the first one's key."""

    kills: ClassVar = {"DEV-001", "MEM-012"}

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        first, *others = super().kvcore_devices()
        return [first, *(replace(other, key=first.key) for other in others)]


class PhysicalIndices(Honest):
    """Indices are those of the machine, and not of this process."""

    kills: ClassVar = {"DEV-005"}

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        return [replace(device, index=device.index + 4) for device in super().kvcore_devices()]


class TakenByIndex(Honest):
    """A device is found by its index, whatever its key."""

    kills: ClassVar = {"DEV-006"}

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        return super().kvcore_read_memory(self.kvcore_devices()[device.index])


# Allocation.


class CapInAllocate(Honest):
    """Allocation ends at 40000 blocks of 1 KiB, whatever is free."""

    kills: ClassVar = {"MEM-013"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        if self._held.get(device.key, 0) + request.nbytes > 40000 * KIB:
            raise OutOfMemory("no more")
        return super().kvcore_allocate(device, request)


class RoundsDown(Honest):
    """A size is rounded down to whole pages."""

    kills: ClassVar = {"ALC-002", "CON-005", "THR-001"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        granule = self.kvcore_allocation_limits(device).granularity
        down = max(granule, request.nbytes // granule * granule)
        return super().kvcore_allocate(device, replace(request, nbytes=down))


class RoundsUpFurther(Honest):
    """A size is rounded up to more than the granularity that is stated."""

    kills: ClassVar = {"ALC-002"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        return super().kvcore_allocate(device, replace(request, nbytes=-(-request.nbytes // MIB) * MIB))


class NotZeroed(Honest):
    """Memory comes with what was in it."""

    kills: ClassVar = {"ALC-003", "RAW-003"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        buffer = super().kvcore_allocate(device, request)
        super().kvcore_fill(buffer, 0, buffer.nbytes, 0x5A)
        return buffer


class LazyPages(Honest):
    """Memory is taken when it is first written, and said to be committed before."""

    capabilities: ClassVar = without(Capability.THREADS)
    kills: ClassVar = {"ALC-004", "ALC-008", "MEM-013"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        buffer = super().kvcore_allocate(device, request)
        self._held[device.key] -= buffer.nbytes
        self.__dict__.setdefault("lazy", {})[id(buffer.handle)] = buffer
        return buffer

    def _touch(self, buffer: Buffer) -> None:
        if self.__dict__.setdefault("lazy", {}).pop(id(buffer.handle), None) is not None:
            self._held[buffer.device.key] += buffer.nbytes

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        super().kvcore_write(buffer, offset, data)
        self._touch(buffer)

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        super().kvcore_fill(buffer, offset, nbytes, value)
        self._touch(buffer)

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        self._touch(buffer)
        return super().kvcore_release(buffer)


class NotCommitted(Honest):
    """Committed bytes are half of the buffer, and COMMIT is declared FULL."""

    kills: ClassVar = {"ALC-004", "CAP-004", "CON-005"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        buffer = super().kvcore_allocate(device, request)
        return replace(buffer, committed_bytes=buffer.nbytes // 2)


class SwallowedOutOfMemory(Honest):
    """Where there is no room, a small buffer is given that says it is large."""

    kills: ClassVar = {"ALC-005", "ALC-006", "MEM-013"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        try:
            return super().kvcore_allocate(device, request)
        except OutOfMemory:
            small = super().kvcore_allocate(device, replace(request, nbytes=1, elements=1))
            return replace(small, nbytes=request.nbytes, committed_bytes=request.nbytes)


class AnotherError(Honest):
    """Out of memory is a MemoryError."""

    kills: ClassVar = {"ALC-005", "ALC-006", "ALC-007", "MEM-013"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        try:
            return super().kvcore_allocate(device, request)
        except OutOfMemory as error:
            raise MemoryError(error.what) from error


class LeavesParts(Honest):
    """A refusal leaves an eighth of the free memory taken."""

    kills: ClassVar = {"ALC-006"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        try:
            return super().kvcore_allocate(device, request)
        except OutOfMemory:
            free = min(r.free for r in self._readings(device))
            self._held[device.key] = self._held.get(device.key, 0) + free // 8
            raise


class BoundIgnored(Honest):
    """The largest number of elements is stated, and not looked at."""

    kills: ClassVar = {"ALC-005"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        return super().kvcore_allocate(device, replace(request, elements=1))


class BoundWithoutReason(Honest):
    """A largest number of elements, and no word why."""

    kills: ClassVar = {"ALC-001"}

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        return replace(super().kvcore_allocation_limits(device), reason=None)


class MisalignedBuffers(Honest):
    """An alignment is stated that the allocator does not have."""

    kills: ClassVar = {"TEN-004"}

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        return replace(super().kvcore_allocation_limits(device), alignment=2**46)


class AnotherDevicesBuffer(Honest):
    """A buffer says that it is on another device."""

    kills: ClassVar = {"ALC-002"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        buffer = super().kvcore_allocate(device, request)
        self.__dict__.setdefault("real", {})[id(buffer.handle)] = device
        return replace(buffer, device=self.kvcore_devices()[-1])

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        return super().kvcore_release(replace(buffer, device=self.real[id(buffer.handle)]))


class Overlapping(Honest):
    """Buffers of one size share one memory."""

    capabilities: ClassVar = without(Capability.THREADS)
    kills: ClassVar = {"ALC-012", "CON-005", "RAW-005"}

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        super().kvcore_write(self._shared(buffer), offset, data)

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        super().kvcore_fill(self._shared(buffer), offset, nbytes, value)

    @hookimpl
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        return super().kvcore_read(self._shared(buffer), offset, nbytes)

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        buffer = super().kvcore_allocate(device, request)
        self.__dict__.setdefault("alive", []).append(buffer)
        return buffer

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        freed = super().kvcore_release(buffer)
        self.alive = [other for other in self.alive if other is not buffer]
        return freed

    def _shared(self, buffer: Buffer) -> Buffer:
        return next((b for b in self.alive if b.nbytes == buffer.nbytes), buffer) if buffer in self.alive else buffer


# Release.


class Leaks256(Honest):
    """Each release leaves 256 bytes."""

    kills: ClassVar = {"ALC-011"}

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        freed = super().kvcore_release(buffer)
        self._held[buffer.device.key] += 256
        return freed


class LeaksDescriptors(Honest):
    """Every tenth allocation leaves a file open."""

    kills: ClassVar = {"ALC-011"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        if self.count % 10 == 0:
            os.open(os.devnull, os.O_RDONLY)
        return super().kvcore_allocate(device, request)


class ReleasesLater(Honest):
    """What is released comes back with the next allocation."""

    capabilities: ClassVar = without(Capability.THREADS)
    kills: ClassVar = {"ALC-004", "ALC-007", "ALC-008", "MEM-009", "MEM-011", "STA-001"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        pending = self.__dict__.setdefault("pending", {}).pop(device.key, 0)
        self._held[device.key] = self._held.get(device.key, 0) - pending
        return super().kvcore_allocate(device, request)

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        freed = super().kvcore_release(buffer)
        key = buffer.device.key
        self._held[key] += freed
        self.pending[key] = self.pending.get(key, 0) + freed
        return freed


class FreedNothingSaid(Honest):
    """The bytes freed are said to be 0."""

    kills: ClassVar = {"ALC-008", "CON-005"}

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        super().kvcore_release(buffer)
        return 0


class SecondReleaseAccepted(Honest):
    """A second release is answered as the first was."""

    kills: ClassVar = {"ALC-009"}

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        try:
            return super().kvcore_release(buffer)
        except BufferMisuse:
            return buffer.nbytes


class UseAfterRelease(Honest):
    """A released buffer reads as zeros."""

    kills: ClassVar = {"ALC-010"}

    @hookimpl
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        try:
            return super().kvcore_read(buffer, offset, nbytes)
        except BufferMisuse as error:
            if error.code == "KV-BUF-002":
                return bytes(nbytes)
            raise


# Access.


class OffsetsOf16Bits(Honest):
    """Offsets of a write are cut to 16 bits."""

    kills: ClassVar = {"CON-005", "RAW-001"}

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        super().kvcore_write(buffer, offset % 2**16 if 0 <= offset < buffer.nbytes - len(data) else offset, data)


class WritesWords(Honest):
    """A write ends at a multiple of eight bytes."""

    kills: ClassVar = {"RAW-002"}

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        more = min(-len(data) % 8, max(0, buffer.nbytes - offset - len(data)))
        super().kvcore_write(buffer, offset, data + bytes(more))


class FillsFurther(Honest):
    """A fill ends at a multiple of 64 bytes."""

    kills: ClassVar = {"RAW-003"}

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        end = offset + nbytes
        super().kvcore_fill(buffer, offset, nbytes if end > buffer.nbytes else -(-end // 64) * 64 - offset, value)


class OutsideAccepted(Honest):
    """A read past the end gives zeros."""

    kills: ClassVar = {"RAW-004"}

    @hookimpl
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        if offset + nbytes > buffer.nbytes:
            return bytes(nbytes)
        return super().kvcore_read(buffer, offset, nbytes)


class WrongDeviceWrite(Honest):
    """What is written goes to the device that was used last."""

    kills: ClassVar = {"RAW-005"}

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        self.last = super().kvcore_allocate(device, request)
        return self.last

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        self.last = None
        return super().kvcore_release(buffer)

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        super().kvcore_write(self._target(buffer), offset, data)

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        super().kvcore_fill(self._target(buffer), offset, nbytes, value)

    def _target(self, buffer: Buffer) -> Buffer:
        return buffer if self.last is None or self.last.device == buffer.device else self.last


# Tensors.


class TensorIsACopy(Honest):
    """A tensor is a copy of the memory."""

    kills: ClassVar = {"TEN-001"}

    @hookimpl
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> Any:
        tensor: Any = super().kvcore_tensor(buffer, view, framework)
        return tensor if view.shape == (1,) else tensor.copy()


class TensorOfAnotherType(Honest):
    """A half-precision tensor comes as integers."""

    kills: ClassVar = {"TEN-002"}

    @hookimpl
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> Any:
        tensor: Any = super().kvcore_tensor(buffer, view, framework)
        return tensor.view("uint16") if view.dtype == "float16" else tensor


class TensorCutToFit(Honest):
    """A tensor that does not fit is cut to what does."""

    kills: ClassVar = {"TEN-003"}

    @hookimpl
    def kvcore_tensor(self, buffer: Buffer, view: TensorView, framework: str) -> object:
        try:
            return super().kvcore_tensor(buffer, view, framework)
        except BufferMisuse as error:
            if error.code != "KV-BUF-003":
                raise
            return super().kvcore_tensor(buffer, TensorView((1,), view.dtype), framework)


# The allocator's figures.


class StatsInKib(Honest):
    """The allocator's figures are in KiB."""

    kills: ClassVar = {"STA-001"}

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        stats = super().kvcore_memory_stats(device)
        return replace(stats, current=stats.current // KIB, peak=stats.peak // KIB)


class PeakForgets(Honest):
    """The peak is what is held now."""

    kills: ClassVar = {"STA-002"}

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        stats = super().kvcore_memory_stats(device)
        return replace(stats, peak=stats.current)


class PeakStays(Honest):
    """Resetting the peak does nothing."""

    kills: ClassVar = {"STA-003"}

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        pass


# Declarations.


class Undeclared(Honest):
    """A capability is left out."""

    capabilities: ClassVar = {c: s for c, s in Honest.capabilities.items() if c is not Capability.FORK}
    kills: ClassVar = {"CAP-001", "CAP-005"}


class NoReason(Honest):
    """A capability is unsupported, and nobody says why."""

    capabilities: ClassVar = without(Capability.TENSOR_TORCH, "")
    kills: ClassVar = {"CAP-002", "CAP-005"}


class ClaimedButAbsent(Honest):
    """RESET_PEAK is declared FULL, and the hook is not there."""

    kills: ClassVar = {"CAP-004", "STA-003"}

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        raise CapabilityMissing("not here")


class UnsupportedButAnswers(Honest):
    """MEMORY_STATS is declared UNSUPPORTED, and answers."""

    capabilities: ClassVar = without(Capability.MEMORY_STATS)
    kills: ClassVar = {"CAP-003"}

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        return MemoryStats("nobody", current=1, peak=1)


class OwnUndeclared(Honest):
    """OWN_MEMORY is declared UNSUPPORTED, and `own` is given."""

    capabilities: ClassVar = without(Capability.OWN_MEMORY)
    kills: ClassVar = {"CAP-003"}


class AnotherContract(Honest):
    """It was written for another version of the contract."""

    kills: ClassVar = {"CAP-005"}

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        return replace(super().kvcore_platform(), contract=99)


class AnotherName(Honest):
    """It calls itself otherwise than its entry point does."""

    kills: ClassVar = {"CAP-005", "RUN-001"}

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        return replace(super().kvcore_platform(), name="other")


# Conduct.


class LoadsADriver(Honest):
    """Naming itself loads a library."""

    kills: ClassVar = {"RUN-002"}

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        import ctypes

        ctypes.CDLL("libresolv.so.2")
        return super().kvcore_platform()


class InDetect(Honest):
    """A mutant that does something when it detects."""

    @hookimpl
    def kvcore_detect(self) -> Detection:
        found = super().kvcore_detect()
        self.do()
        return found

    def do(self) -> None:
        raise NotImplementedError


class ImportsAFramework(InDetect):
    """Detection imports a framework."""

    kills: ClassVar = {"RUN-003"}

    def do(self) -> None:
        sys.modules.setdefault("mindspore", types.ModuleType("mindspore"))


class ChangesTheEnvironment(InDetect):
    """Detection sets a visibility variable."""

    kills: ClassVar = {"RUN-004"}

    def do(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"


class LeavesAThread(InDetect):
    """Detection starts a thread that stays."""

    kills: ClassVar = {"RUN-005"}

    def do(self) -> None:
        if threading.active_count() == 1:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class CreatesAContext(InDetect):
    """Detection takes memory of the device for a context."""

    kills: ClassVar = {"RUN-006"}

    def do(self) -> None:
        for key in self._facts():
            self._held.setdefault(key, 24 * MIB)


class NoEvidence(Honest):
    """Detection says yes, and not why."""

    kills: ClassVar = {"RUN-007"}

    @hookimpl
    def kvcore_detect(self) -> Detection:
        return replace(super().kvcore_detect(), evidence=())


class Prints(InDetect):
    """Detection greets on standard output."""

    kills: ClassVar = {"RUN-008"}

    def do(self) -> None:
        print("Simulated driver 1.0")


class AbsentWithDevices(Honest):
    """Detection says that nothing is here, and devices lists two."""

    kills: ClassVar = {"RUN-009"}

    @hookimpl
    def kvcore_detect(self) -> Detection:
        return Detection(DetectionState.ABSENT, "nothing is here")


class MainThreadOnly(Honest):
    """What another thread than the first releases is not counted."""

    kills: ClassVar = {"THR-001"}

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        freed = super().kvcore_release(buffer)
        if threading.current_thread() is not threading.main_thread():
            self._held[buffer.device.key] += freed
        return freed


class LostInAFork(Honest):
    """In a forked child it fails with an error of its own."""

    kills: ClassVar = {"THR-002"}

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        if self.__dict__.setdefault("pid", os.getpid()) != os.getpid():
            raise RuntimeError("driver shut down")
        return super().kvcore_read_memory(device)


class Hangs(Honest):
    """Resetting the peak does not return."""

    kills: ClassVar = {"CAP-004", "STA-003"}

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        time.sleep(600)


class Exits(Honest):
    """Resetting the peak ends the process."""

    kills: ClassVar = {"CAP-004", "STA-003"}

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        sys.exit(3)


class Crashes(Honest):
    """A fill of odd length kills the process."""

    kills: ClassVar = {"RAW-003"}

    @hookimpl
    def kvcore_fill(self, buffer: Buffer, offset: int, nbytes: int, value: int) -> None:
        if nbytes % 2 and nbytes < 256 and nbytes > 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().kvcore_fill(buffer, offset, nbytes, value)


# Consistency.


class CapAsALimit(Honest):
    """A limit of 40000 blocks, whatever a block is."""

    kills: ClassVar = {"CON-003"}

    @hookimpl
    def kvcore_limits(self, device: Device, layout: object) -> list[Limit]:
        reason = "illegal memory access with too many blocks"
        return [Limit(LimitKind.CAP, LimitUnit.BLOCKS, 40000, reason, "mutant")]


class WatchesPlans(Honest):
    """It watches plans, and so learns the number of blocks."""

    kills: ClassVar = {"CON-002"}

    @hookimpl
    def kvcore_planned(self, plan: object) -> None:
        self.plan = plan


class WrapsOthers(Honest):
    """It answers as a wrapper, in the place of every other platform."""

    kills: ClassVar = {"CON-004"}

    @hookimpl(wrapper=True)
    def kvcore_reserves(self, device: Device, phase: object) -> Iterator[None]:
        yield
        return []


honest = Honest()
globals().update({f"mutant_{name}": mutant() for name, mutant in MUTANTS.items()})
