"""The hooks that platforms with a CUDA-compatible runtime share: identity, readings, allocation."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcore.contract.base import PlatformBase
from kvcore.contract.buffers import BufferHooks
from kvcore.contract.capabilities import FULL, Capability, Supported, unsupported
from kvcore.contract.facts import (
    AllocationLimits,
    AllocationRequest,
    Basis,
    Buffer,
    Detection,
    DetectionState,
    Device,
    Evidence,
    MemoryKind,
    MemoryStats,
    Phase,
    Reading,
    Reserve,
    ReserveKind,
    Scope,
)
from kvcore.contract.hookspecs import hookimpl
from kvcore.contract.probes import find_library, pci_devices
from kvcore.contract.runtimes.choose import CONTEXT_VARIABLE, RUNTIME_VARIABLE, Runtimes
from kvcore.contract.runtimes.deadline import SECONDS, within
from kvcore.contract.runtimes.detect import Found, concluded
from kvcore.contract.runtimes.identity import (
    Located,
    located_by_environment,
    located_by_runtime,
    pci_vendor,
    with_entries,
)
from kvcore.contract.runtimes.interface import Runtime, RuntimeUnavailable
from kvcore.contract.runtimes.management import (
    ASK_ANOTHER,
    Card,
    Management,
    ManagementFault,
    memory_readings,
    refusal,
)
from kvcore.contract.runtimes.softlimit import paddle_limit_reading, soft_limit_reading
from kvcore.contract.runtimes.unified import unified_readings, unified_reserve
from kvcore.contract.validate import reading_faults
from kvcore.errors import CapabilityMissing, DeviceError, KvcoreError, OutOfMemory, PolicyError

__all__ = ["AcceleratorPlatform", "Surroundings"]

#: Devices hand out memory in pages of 2 MiB (cuMemGetAllocationGranularity); a smaller tensor takes one all the same.
GRANULE = 2 * 1024**2
#: Declared for a context that does not exist yet; once it does, readings contain it and nothing is reserved.
CONTEXT = 512 * 1024**2
#: cudaMalloc aligns to at least 256 bytes (CUDA C++ programming guide, device memory accesses).
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plugin says of its vendor: names and numbers, no code.

    ``nodes`` is a pattern of the kernel driver's device nodes: where PCI is hidden they show that hardware is here.
    """

    name: str
    distribution: str
    pci_vendor: int
    library: str
    hint: str
    visibility: str = "CUDA_VISIBLE_DEVICES"
    nodes: str = ""
    root: Path = field(default=Path("/"))
    seconds: float = SECONDS


class AcceleratorPlatform(BufferHooks, PlatformBase):
    """Everything but detection. A subclass gives its management libraries and its sources of last resort."""

    def __init__(self, surroundings: Surroundings, runtimes: Runtimes) -> None:
        self.surroundings = surroundings
        self.runtimes = runtimes

    # What a vendor adds.

    def managements(self) -> list[Management]:
        """The management libraries to ask, best first."""
        raise NotImplementedError

    def library_folders(self) -> tuple[str, ...]:
        """Where the vendor's libraries are, beside the loader's own folders."""
        return ()

    def hardware_without_pci(self) -> str | None:
        """What device of this vendor is here that is no PCI function of this host, if one is."""
        return None

    def visible_cards(self, cards: list[Card]) -> list[Card]:
        """The cards that a container's own variables leave."""
        return cards

    def last_readings(self, device: Device, card: Card | None, *, measured: bool) -> list[Reading]:
        """Further sources; ``measured`` says whether one before them gave what is free."""
        return []

    # What both share.

    def detection(self) -> Detection:
        """By the management library; only if that gives nothing, by the runtime, which then is initialized.

        Initializing the driver fixes what this process sees and must not happen before a fork, so it waits until
        someone asks for the devices.
        """
        around = self.surroundings
        pci = tuple(pci_devices(f"{around.pci_vendor:#06x}", around.root))
        library = find_library(around.library, self.library_folders())
        runtime = find_library("libcuda.so.1", self.library_folders())
        vendor = f"{around.pci_vendor:#06x}"
        nothing = Found(pci, vendor, around.library, library, runtime, beside_pci=self._beside_pci())
        if not self.traces(nothing):
            return concluded(nothing, around.hint)
        try:
            found, cards, skipped = self.survey()
            source, devices = None if found is None else found.name, self._count_visible(cards)
            if not cards and runtime is not None and (pci or nothing.beside_pci is not None):
                source, devices, skipped = self._by_runtime_alone(skipped)
        except KvcoreError as error:
            evidence = Evidence("pci", ", ".join(pci) or "none"), Evidence("library", library or "none")
            return Detection(DetectionState.UNUSABLE, f"{error.what}: {error.got}", evidence, error.hint)
        seen = replace(
            nothing,
            source=source if cards or devices else None,
            cards=len(cards),
            devices=devices,
            hidden_by=around.visibility,
            skipped=tuple(skipped),
        )
        return concluded(seen, around.hint)

    def traces(self, found: Found) -> bool:
        """Whether anything of the vendor is here, so that libraries are worth loading."""
        return bool(found.pci or found.beside_pci or found.library or found.runtime)

    def _beside_pci(self) -> str | None:
        without = self.hardware_without_pci()
        if without is not None or not self.surroundings.nodes:
            return without
        nodes = sorted(self.surroundings.root.glob(self.surroundings.nodes))
        return f"{len(nodes)} device node(s) of {self.surroundings.name}, {nodes[0]}" if nodes else None

    def _by_runtime_alone(self, skipped: list[Reading]) -> tuple[str, int, list[Reading]]:
        """Devices where no management library knows a card: only the driver names them without a context."""
        if self.runtimes.named("driver") is None:
            missing = f"its bindings are not installed: pip install '{self.surroundings.distribution}[driver]'"
            return "the runtime", 0, [*skipped, Reading("driver", Scope.DEVICE, skipped=missing)]
        _, located, tried = self.locate()
        return "the runtime", len(located), tried

    def _count_visible(self, cards: list[Card]) -> int:
        """How many devices the variable leaves; all, where only the runtime could tell which they are."""
        try:
            return len(self._by_environment(cards))
        except DeviceError:
            return len(cards)

    def _by_environment(self, cards: list[Card]) -> list[Located]:
        variable = self.surroundings.visibility
        ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        return located_by_environment(
            self.surroundings.name, cards, os.environ.get(variable), variable=variable, ordered=ordered
        )

    def capabilities(self) -> dict[Capability, Supported]:
        """Declared by what is installed; nothing is imported for it."""
        installed = self.runtimes.installed()
        capabilities: dict[Capability, Supported] = dict.fromkeys(Capability, FULL)
        host = unsupported("numpy cannot see a device's memory")
        capabilities[Capability.TENSOR_NUMPY] = host
        capabilities[Capability.FORK] = unsupported("a driver's context does not survive a fork")
        if not installed:
            missing = unsupported(f"no runtime is installed: pip install '{self.surroundings.distribution}[driver]'")
            for capability in (
                Capability.MEMORY_STATS,
                Capability.RESET_PEAK,
                Capability.ALLOCATE,
                Capability.COMMIT,
                Capability.RAW_ACCESS,
            ):
                capabilities[capability] = missing
        capabilities[Capability.TENSOR_PADDLE] = self._tensors("paddle")
        capabilities[Capability.TENSOR_TORCH] = self._tensors("torch")
        return capabilities

    def _tensors(self, framework: str) -> Supported:
        """Whether a framework can see what will be allocated: its own, or another's where both know the device."""
        own = self.runtimes.named(framework)
        if own is None:
            return unsupported(f"no {framework} for this platform's devices is installed")
        first = next(iter(self._candidates()), own)
        if first.name == framework or (own.shares and first.shares):
            return FULL
        return unsupported(f"{framework} takes no memory of {first.name}: {RUNTIME_VARIABLE}={framework} gives its own")

    def _candidates(self) -> list[Runtime]:
        try:
            return self.runtimes.candidates()
        except PolicyError:
            return []  # a runtime that does not exist: whoever allocates is told

    def survey(self) -> tuple[Management | None, list[Card], list[Reading]]:
        """The first management library that answers, its cards of this vendor, and a reading for each that did not.

        Raises :class:`DeviceError` for a device or driver that is not fit to be used.
        """
        skipped = []
        for library in self.managements():
            try:
                cards = within(self.surroundings.seconds, library.name, lambda library=library: _cards(library))  # type: ignore[misc]
            except ManagementFault as fault:
                if fault.number not in ASK_ANOTHER:
                    raise refusal(fault, library.name) from fault
                skipped.append(Reading(library.name, Scope.DEVICE, skipped=str(fault)))
                continue
            vendors_of = [self._vendor_of(card) for card in cards]
            ours = [c for c, v in zip(cards, vendors_of, strict=True) if v in (None, self.surroundings.pci_vendor)]
            if len(ours) < len(cards) and not ours:
                vendors = ", ".join(sorted({f"{vendor:#06x}" for vendor in vendors_of if vendor is not None}))
                skipped.append(Reading(library.name, Scope.DEVICE, skipped=f"its cards are of PCI vendor {vendors}"))
                continue
            return library, self.visible_cards(ours), skipped
        return None, [], skipped

    def _vendor_of(self, card: Card) -> int | None:
        """By the library, else by the kernel: a UUID proves nothing."""
        if card.vendor is not None or card.pci is None:
            return card.vendor
        return pci_vendor(card.pci, self.surroundings.root)

    def locate(self) -> tuple[Management | None, list[Located], list[Reading]]:
        """The visible devices, each with its card."""
        library, cards, skipped = self.survey()
        for runtime in self._naming():
            try:
                found = within(self.surroundings.seconds, runtime.name, runtime.devices)
            except RuntimeUnavailable as unavailable:
                skipped.append(Reading(runtime.name, Scope.DEVICE, skipped=str(unavailable)))
                continue
            if found is None:
                continue
            located = located_by_runtime(
                self.surroundings.name,
                self.surroundings.pci_vendor,
                found,
                cards,
                self.surroundings.root,
                without_pci=self.hardware_without_pci() is not None,
            )
            if located or not found:
                visible = os.environ.get(self.surroundings.visibility)
                return library, with_entries(located, visible), skipped
            skipped.append(Reading(runtime.name, Scope.DEVICE, skipped="its devices are another vendor's"))
        return library, self._by_environment(cards), skipped

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        """In the order of the runtime's ordinals, by what the runtime says, else by the rules of visibility."""
        return [located.device for located in self.locate()[1]]

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """The management library, the runtime, a slicer's limit; for unified memory the host."""
        library, located, skipped = self.locate()
        here = self._find(device, located)
        readings: list[Reading] = []
        own: int | None = None
        if library is not None and here.card is not None:
            readings += self._by_managements(library, here)
            own = next((reading.own for reading in readings if reading.own is not None), None)
        readings += skipped
        if here.device.kind is MemoryKind.UNIFIED:
            return [*_set_aside(readings), *unified_readings(own, self.surroundings.root)]
        failed = {reading.source for reading in skipped}
        usable = [name for name in self.runtimes.installed() if name not in failed]
        readings += self._from_runtime(here, usable, measured=_measured(readings))
        limits = [soft_limit_reading(device.index, os.environ)]
        limits += [paddle_limit_reading(os.environ)] if "paddle" in usable else []
        readings += [limit for limit in limits if limit is not None]
        return [*readings, *self.last_readings(here.device, here.card, measured=_measured(readings))]

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """The counters of the runtime that allocates."""
        return self.runtimes.chosen().stats(device.index)

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        """The runtime's own reset."""
        self.runtimes.chosen().reset_peak(device.index)

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """Whole pages of the device; what one tensor can have is the runtime's to say."""
        try:
            runtime = self.runtimes.to_plan_for()
        except CapabilityMissing as missing:
            # A plan needs no runtime; the machine that allocates will say what its own allows.
            return AllocationLimits(granularity=GRANULE, alignment=ALIGNMENT, reason=f"{missing.what}: {missing.got}")
        return AllocationLimits(
            granularity=GRANULE,
            alignment=ALIGNMENT,
            max_elements=runtime.max_elements,
            reason=runtime.limit_reason,
        )

    @hookimpl
    def kvcore_reserves(self, device: Device, phase: Phase) -> list[Reserve]:
        """A part of unified memory, and the context that this process will create before it allocates."""
        if device.platform != self.surroundings.name:
            return []
        reserves = self._context_reserve(device)
        if device.kind is MemoryKind.UNIFIED:
            reserves += unified_reserve(self.surroundings.name, self.surroundings.root)
        return reserves

    def _context_reserve(self, device: Device) -> list[Reserve]:
        """Nothing if a context is here, since readings then contain it, or if it is unknown whether one is."""
        if self._own_without_a_list(device.index) != 0:
            return []
        reason = "the context that a process creates on a device takes some hundred MiB (llama.cpp#23604, kaito#1374)"
        source = self.surroundings.name
        return [Reserve("context", CONTEXT, ReserveKind.PERSISTENT, Basis.DECLARED, source, reason, Phase.CONTEXT)]

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """One allocation of the runtime."""
        runtime = self.runtimes.chosen()
        self._check_identity(runtime, device)
        limit = runtime.max_elements
        if limit is not None and request.elements > limit:
            raise OutOfMemory(
                "one tensor is larger than this runtime's can be",
                code="KV-OOM-002",
                where=request.name,
                got=f"{request.elements:,} elements",
                expected=f"at most {limit:,}: {runtime.limit_reason}",
            )
        nbytes = -(-request.nbytes // GRANULE) * GRANULE
        itemsize = request.nbytes // request.elements if request.elements else 1
        if itemsize not in (1, 2, 4, 8) or itemsize * request.elements != request.nbytes:
            itemsize = 1
        allocation = runtime.allocate(device.index, request.name, nbytes, itemsize)
        return Buffer(request.name, device, nbytes, nbytes, allocation)

    def _naming(self) -> list[Runtime]:
        """Runtimes that can name their devices without a context, the driver first."""
        runtimes = (self.runtimes.named("driver"), self.runtimes.named("torch"))
        return [runtime for runtime in runtimes if runtime is not None]

    def _find(self, device: Device, located: list[Located]) -> Located:
        for here in located:
            if here.device.key == device.key:
                return here
        raise DeviceError(
            "the device is not here any more",
            code="KV-DEV-027",
            where=f"{self.surroundings.name} device {device.key}",
            got=", ".join(here.device.key for here in located) or "no device",
            expected=device.key,
            hint="it was lost, reset, or hidden from this process since it was listed",
        )

    def _by_managements(self, first: Management, here: Located) -> list[Reading]:
        """The library that listed the device, then those after it, until one says what is free."""
        readings: list[Reading] = []
        libraries = self.managements()
        names = [library.name for library in libraries]
        for library in libraries[names.index(first.name) :]:
            readings += self._managed(library, here)
            if _measured(readings):
                break
        return readings

    def _managed(self, library: Management, here: Located) -> list[Reading]:
        card = here.card
        assert card is not None

        def own(known: int | None, listed: bool) -> int | None:
            return known if known is not None or listed else self._own_without_a_list(here.device.index)

        def ask() -> list[Reading]:
            with library.session():
                return memory_readings(library, card, own)

        try:
            return within(self.surroundings.seconds, library.name, ask)
        except ManagementFault as fault:
            if fault.number not in ASK_ANOTHER:
                raise refusal(fault, f"{self.surroundings.name} device {card.uuid}") from fault
            return [Reading(library.name, Scope.DEVICE, skipped=str(fault))]

    def _own_without_a_list(self, index: int) -> int | None:
        """0 if this process cannot hold anything on the device: it has no driver, or no context there; else None."""
        if not _driver_is_loaded():
            return 0
        driver = self.runtimes.named("driver")
        try:
            return 0 if driver is not None and driver.active(index) is False else None
        except (RuntimeUnavailable, DeviceError):
            return None

    def _from_runtime(self, here: Located, usable: list[str], *, measured: bool) -> list[Reading]:
        """What the runtime says, if asking it makes no context, or if one may be made.

        A slice's first compute instance shares its memory with the others: the runtime's figures are the slice's.
        """
        index = here.device.index
        scope = Scope.PARTITION if here.device.kind is MemoryKind.PARTITION else Scope.DEVICE
        allowed = os.environ.get(CONTEXT_VARIABLE) == "1" and not measured
        if not usable:
            none = not self.runtimes.installed() and not measured
            return [Reading("runtime", scope, skipped="no runtime is installed")] if none else []
        names = [name for name in usable if self._has_context(name, index)] or (usable if allowed else [])
        if not names:
            reason = f"asking it would create a context; {CONTEXT_VARIABLE}=1 allows that"
            return [Reading("runtime", scope, skipped=reason)]
        readings = []
        for name in names:
            reading = self._runtime_reading(name, index, scope)
            readings.append(reading)
            if reading.skipped is None:
                break
        return readings

    def _has_context(self, name: str, index: int) -> bool:
        """Whether a runtime is at work on the device in this process already."""
        runtime = self.runtimes.named(name)
        if runtime is None or not runtime.imported():
            return False
        try:
            runtime.start()
            active = runtime.active(index)
            return active if active is not None else (runtime.stats(index).reserved or 0) > 0
        except (RuntimeUnavailable, DeviceError):
            return False

    def _runtime_reading(self, name: str, index: int, scope: Scope) -> Reading:
        runtime = self.runtimes.named(name)
        assert runtime is not None
        try:
            free, total = within(self.surroundings.seconds, name, lambda: runtime.memory(index))
        except (RuntimeUnavailable, OutOfMemory) as refused:
            return Reading(name, scope, skipped=str(refused).splitlines()[0])
        except DeviceError as error:
            return Reading(name, scope, skipped=f"{error.what}: {error.got}")
        if free is None and total is None:
            return Reading(name, scope, skipped="it does not say how much memory the device has")
        if total == 0:
            return Reading(name, scope, skipped="a total of 0, which is no device's size")
        return Reading(name, scope, total=total, free=free)

    def _check_identity(self, runtime: Runtime, device: Device) -> None:
        """The runtime's ordinal is the device that was planned for, as far as the runtime names its devices."""
        found = runtime.devices()
        if found is None:
            return
        here = next((d for d in found if d.index == device.index), None)
        key = device.key.split("-", 1)[-1].replace("-", "").lower()
        if here is not None and (key == here.uuid or device.key == here.pci or here.uuid is None):
            return
        raise DeviceError(
            "the runtime's device is not the one that was planned for",
            code="KV-DEV-029",
            where=f"{self.surroundings.name} ordinal {device.index}",
            got="no device" if here is None else f"{here.uuid} at {here.pci}",
            expected=device.key,
            hint="devices were hidden or renumbered since the plan: plan again in this process",
        )


def _cards(library: Management) -> list[Card]:
    with library.session():
        return library.cards()


def _measured(readings: list[Reading]) -> bool:
    """Whether a source said what is free, in figures that can be used: else the next one is asked."""
    return any(reading.free is not None and not reading_faults(reading) for reading in readings)


def _set_aside(readings: list[Reading]) -> list[Reading]:
    """A driver's figures of unified memory are not what can be had: recorded as skipped."""
    return [
        reading
        if reading.skipped is not None
        else Reading(reading.source, reading.scope, skipped="unified memory: the host says what can be had")
        for reading in readings
    ]


def _driver_is_loaded() -> bool:
    """Whether a libcuda is mapped into this process; without one it can have no context."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any("/libcuda.so" in line for line in maps)
    except OSError:
        return True
