"""The ``replay`` platform: devices from profiles, so that everything runs without the hardware.

``KVCORE_REPLAY`` names one or more profile files, separated as in PATH. The devices have exactly the memory that the
profiles say: what is allocated is taken from what was free, and what does not fit is refused. By default buffers are
real host memory; with ``KVCORE_REPLAY_BACKING=address_space`` they are address space alone, whose pages come into
being when written, so that a large card can be rehearsed on a small machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

from kvcore.contract import (
    FULL,
    AllocationLimits,
    AllocationRequest,
    BlockSizer,
    Buffer,
    Capability,
    Detection,
    DetectionState,
    Device,
    DeviceFacts,
    Evidence,
    Limit,
    MemoryStats,
    Phase,
    PlatformInfo,
    Reading,
    Reserve,
    hookimpl,
    unsupported,
)
from kvcore.contract.buffers import BufferHooks
from kvcore.contract.capabilities import CONTRACT_VERSION, Supported
from kvcore.contract.hostmem import committable_room, host_room
from kvcore.contract.layout import CacheLayout
from kvcore.errors import DeviceError, OutOfMemory, PolicyError
from kvcore.platforms.hostbuf import HostBlock, Room
from kvcore.units import format_bytes

__all__ = ["ReplayBlockSizer", "plugin"]

BACKINGS = ("memory", "address_space")


class ReplayBlockSizer(BufferHooks):
    """Devices that are given, or else named by KVCORE_REPLAY, with an allocator of exactly their capacity."""

    def __init__(self, profiles: Sequence[DeviceFacts] | None = None, backing: str | None = None) -> None:
        self._given = profiles
        self._backing = backing
        self._loaded: dict[str, DeviceFacts] | None = None
        self._held: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._counting = threading.Lock()
        self._room = Room(host_room, committable_room)

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """All but commitment in address space alone."""
        from kvcore import __version__

        capabilities: dict[Capability, Supported] = dict.fromkeys(Capability, FULL)
        if self._in_address_space():
            capabilities[Capability.COMMIT] = unsupported("address space alone: pages come into being when written")
        return PlatformInfo("replay", "replay", __version__, CONTRACT_VERSION, capabilities, accelerator=False)

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """Available if there is a profile to replay."""
        if self._given is None and not _profile_paths():
            return Detection(DetectionState.ABSENT, "KVCORE_REPLAY names no device profile")
        devices = self._facts()
        evidence = tuple(Evidence("device", key) for key in devices)
        return Detection(DetectionState.AVAILABLE, f"{len(devices)} replayed device(s)", evidence)

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        """The profiles' devices, in the order given."""
        return [facts.device for facts in self._facts().values()]

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """The profile's readings, less what has been allocated here since."""
        return self._readings(device)

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """What was allocated here."""
        held = self._held.get(device.key, 0)
        return MemoryStats("replay", current=held, peak=self._peak.get(device.key, 0), reserved=held)

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        """The peak starts again at what is held now."""
        self._peak[device.key] = self._held.get(device.key, 0)

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """As the profile says."""
        return self._of(device).allocation

    @hookimpl
    def kvcore_limits(self, device: Device, layout: CacheLayout) -> list[Limit]:
        """The limits that were recorded with the device."""
        return list(self._of(device).limits) if self._holds(device) else []

    @hookimpl
    def kvcore_reserves(self, device: Device, phase: Phase) -> list[Reserve]:
        """The reserves that were recorded with the device."""
        return list(self._of(device).reserves) if self._holds(device) else []

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """Within what the profile leaves free, and within its largest allocation."""
        limits = self._of(device).allocation
        nbytes = -(-request.nbytes // limits.granularity) * limits.granularity
        self._check_largest(device, request, limits)
        with self._counting:
            self._check_free(device, request, nbytes)
            block = HostBlock(request.name, nbytes, commit=not self._in_address_space(), room=self._room)
            held = self._held.get(device.key, 0) + nbytes
            self._held[device.key] = held
            self._peak[device.key] = max(held, self._peak.get(device.key, 0))
        return Buffer(request.name, device, nbytes, block.committed, block)

    @hookimpl
    def kvcore_release(self, buffer: Buffer) -> int:
        """Give back what the buffer held."""
        freed = super().kvcore_release(buffer)
        with self._counting:
            self._held[buffer.device.key] -= freed
        return freed

    def _in_address_space(self) -> bool:
        backing = self._backing or os.environ.get("KVCORE_REPLAY_BACKING") or BACKINGS[0]
        if backing not in BACKINGS:
            raise PolicyError(
                "unknown backing of replayed devices",
                code="KV-POL-040",
                where="KVCORE_REPLAY_BACKING",
                got=backing,
                expected=" or ".join(BACKINGS),
            )
        return backing == "address_space"

    def _facts(self) -> dict[str, DeviceFacts]:
        """The devices by key, loaded on first use."""
        if self._loaded is None:
            from kvcore.documents import load_device_profile

            profiles = self._given if self._given is not None else [load_device_profile(p) for p in _profile_paths()]
            devices = [
                replace(facts, device=replace(facts.device, platform="replay", index=index))
                for index, facts in enumerate(profiles)
            ]
            self._loaded = {facts.device.key: facts for facts in devices}
            if len(self._loaded) != len(devices):
                raise DeviceError(
                    "two replayed devices have one key",
                    code="KV-DEV-011",
                    where="KVCORE_REPLAY",
                    got=", ".join(facts.device.key for facts in devices),
                    expected="a key of its own for each device",
                )
        return self._loaded

    def _holds(self, device: Device) -> bool:
        """Whether the device is one that is replayed here: a profile recorded of a replayed one names this platform."""
        return device.platform == "replay" and device.key in self._facts()

    def _of(self, device: Device) -> DeviceFacts:
        facts = self._facts().get(device.key)
        if facts is None:
            raise DeviceError(
                "no such replayed device",
                code="KV-DEV-002",
                got=device.key,
                expected=", ".join(self._facts()) or "a profile in KVCORE_REPLAY",
            )
        return facts

    def _readings(self, device: Device) -> list[Reading]:
        held = self._held.get(device.key, 0)
        return [_after(reading, held) for reading in self._of(device).readings]

    def _check_largest(self, device: Device, request: AllocationRequest, limits: AllocationLimits) -> None:
        for unit, asked, most in (
            ("bytes", request.nbytes, limits.max_bytes),
            ("elements", request.elements, limits.max_elements),
        ):
            if most is not None and asked > most:
                raise OutOfMemory(
                    "larger than one allocation on this device can be",
                    code="KV-OOM-002",
                    where=f"{request.name} on {device.key}",
                    got=f"{asked:,} {unit}",
                    expected=f"at most {most:,} {unit}",
                )

    def _check_free(self, device: Device, request: AllocationRequest, nbytes: int) -> None:
        readings = self._readings(device)
        free = min((r.free for r in readings if r.free is not None), default=None)
        if free is None:
            raise DeviceError(
                "the profile does not say how much is free, so nothing can be allocated from it",
                code="KV-DEV-012",
                where=device.key,
                expected="a reading with 'free'",
            )
        if nbytes > free:
            raise OutOfMemory(
                "the replayed device has no room for an allocation",
                code="KV-OOM-001",
                where=f"{request.name} on {device.key}",
                got=f"{free:,} bytes ({format_bytes(free)}) free",
                expected=f"{nbytes:,} bytes ({format_bytes(nbytes)})",
            )


def _after(reading: Reading, held: int) -> Reading:
    """A reading as it would be with ``held`` bytes more in this process's hands."""
    if reading.skipped is not None or not held:
        return reading
    return replace(
        reading,
        free=None if reading.free is None else max(0, reading.free - held),
        used=None if reading.used is None else reading.used + held,
        own=None if reading.own is None else reading.own + held,
    )


def _profile_paths() -> list[str]:
    return [path for path in os.environ.get("KVCORE_REPLAY", "").split(os.pathsep) if path]


plugin: BlockSizer = ReplayBlockSizer()
