"""The ``toy`` platform: Toy devices."""

from __future__ import annotations

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
    Evidence,
    Mapping,
    MemoryKind,
    MemoryStats,
    PlatformInfo,
    Reading,
    Scope,
    Supported,
    hookimpl,
    not_implemented,
)
from kvcore.contract.base import PlatformBase
from kvcore.contract.buffers import BufferHooks
from kvcore.errors import KvcoreError
from kvcore_toy.cards import PAGE, VARIABLE, Block, Driver

__all__ = ["ToyBlockSizer", "plugin"]

__version__ = "0.1.0"
#: The version of kvcore's contract that this is written for.
CONTRACT = 1

#: Every capability is declared: FULL, unsupported("why the hardware cannot"), or
#: not_implemented("what is missing"). kvcore refuses a plugin that leaves one out.
CAPABILITIES: dict[Capability, Supported] = {
    Capability.DETECT: FULL,
    Capability.DEVICES: FULL,
    Capability.READ_MEMORY: FULL,
    Capability.OWN_MEMORY: FULL,
    Capability.MEMORY_STATS: FULL,
    Capability.RESET_PEAK: FULL,
    Capability.ALLOCATION_LIMITS: FULL,
    Capability.ALLOCATE: FULL,
    Capability.COMMIT: FULL,
    Capability.RAW_ACCESS: FULL,
    Capability.TENSOR_NUMPY: FULL,
    Capability.TENSOR_PADDLE: not_implemented("the toy shows its memory to numpy only"),
    Capability.TENSOR_TORCH: not_implemented("the toy shows its memory to numpy only"),
    Capability.THREADS: FULL,
    Capability.FORK: FULL,
}


class ToyBlockSizer(BufferHooks, PlatformBase):
    """BufferHooks has release, write, read, fill and tensor, for handles that are a BufferMemory."""

    def __init__(self) -> None:
        self._driver = Driver()

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """Who this is and what it can do; loads no driver, imports no framework."""
        return PlatformInfo(
            name="toy",
            vendor="Toy",
            version=__version__,
            contract=CONTRACT,
            capabilities=CAPABILITIES,
        )

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """By the description of cards; that is all there is of a driver."""
        hint = f"describe cards in {VARIABLE}, such as TOY-5f3a:1GiB:96MiB"
        try:
            found = self._driver.cards()
        except KvcoreError as error:
            return Detection(DetectionState.UNUSABLE, f"{error.what}: {error.got}", hint=hint)
        if not found:
            return Detection(DetectionState.ABSENT, f"{VARIABLE} describes no card", hint=hint)
        evidence = tuple(Evidence("card", card.serial) for card in found)
        return Detection(DetectionState.AVAILABLE, f"{len(found)} card(s)", evidence)

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        """The key is the serial number; the index is the place in the list, which may change."""
        return [
            Device("toy", index, card.serial, "toy card", MemoryKind.DISCRETE, Mapping.RUNTIME)
            for index, card in enumerate(self._driver.cards())
        ]

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """One source, all figures from one look, all in bytes."""
        card = self._driver.card(device.key)
        own, free = card.held, card.free
        return [Reading("toy", Scope.DEVICE, total=card.total, free=free, used=card.total - free, own=own)]

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """What this process has allocated."""
        card = self._driver.card(device.key)
        return MemoryStats("toy", current=card.held, peak=card.peak)

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        """The peak starts again at what is held."""
        self._driver.card(device.key).reset_peak()

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """Whole pages, and no bound but the card itself."""
        return AllocationLimits(granularity=PAGE, alignment=PAGE)

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """Rounded up to whole pages, never down."""
        nbytes = -(-request.nbytes // PAGE) * PAGE
        block = Block(self._driver.card(device.key), request.name, nbytes)
        return Buffer(request.name, device, nbytes, committed_bytes=nbytes, handle=block)


# mypy compares every signature with the contract here.
plugin: BlockSizer = ToyBlockSizer()
