"""The ``metax`` platform: MetaX devices, read through libmxsml, allocated through MACA's runtime or Paddle."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.contract import (
    FULL,
    AllocationLimits,
    AllocationRequest,
    Basis,
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
    Phase,
    PlatformInfo,
    Reading,
    Reserve,
    ReserveKind,
    Scope,
    Supported,
    hookimpl,
    not_implemented,
    unsupported,
)
from kvcore.contract.base import PlatformBase
from kvcore.contract.buffers import BufferHooks
from kvcore.contract.probes import find_library, pci_devices
from kvcore.contract.runtimes.choose import RUNTIME_VARIABLE, Runtimes
from kvcore.contract.runtimes.deadline import SECONDS, within
from kvcore.contract.runtimes.driver import normal_pci
from kvcore.contract.runtimes.interface import Runtime, RuntimeUnavailable
from kvcore.contract.runtimes.on_paddle import PaddleRuntime
from kvcore.errors import CapabilityMissing, DeviceError, OutOfMemory
from kvcore.units import KIB, MIB
from kvcore_metax.maca import MacaRuntime
from kvcore_metax.mxsml import FOLDERS, GONE, LIBRARY, Card, Mxsml, MxsmlFault, own_bytes, runtime_is_loaded
from kvcore_metax.visible import VARIABLES, visible_cards

__all__ = ["MetaxBlockSizer", "plugin"]

__version__ = "0.1.0"
CONTRACT = 1
#: PCI-SIG's number of MetaX (gpustack_runtime/detector/metax.py).
PCI_VENDOR = "0x9999"
HINT = "install MetaX's driver, or start the container with its devices and /opt/mxdriver"
RUNTIME_HINT = "install MACA (libmcruntime.so), or paddle-metax-gpu from Paddle's own index"
#: The page of a device's memory is not public: CUDA's is taken, which can only count too much.
GRANULE = 2 * MIB
#: paddle_custom_device, backends/metax_gpu/runtime/runtime.cc: DeviceMinChunkSize.
ALIGNMENT = 256
#: What a context takes is not public either: declared as for CUDA, and reserved only where none can be there yet.
CONTEXT = 512 * MIB


#: A reading's source by the runtime's name.
_SOURCES = {"driver": "mcruntime", "paddle": "paddle"}


class MetaxBlockSizer(BufferHooks, PlatformBase):
    """MXSML for what is here, MACA's runtime or Paddle for what is taken."""

    def __init__(self, root: Path = Path("/"), seconds: float = SECONDS) -> None:
        self._root = root
        self._seconds = seconds
        self._maca = MacaRuntime()
        self._paddle = PaddleRuntime("metax_gpu", ("paddle-metax-gpu",))
        self._runtimes = Runtimes("kvcore-metax", (self._maca, self._paddle), hint=RUNTIME_HINT)

    @hookimpl
    def kvcore_platform(self) -> PlatformInfo:
        """By what is installed beside the plugin."""
        return PlatformInfo("metax", "MetaX", __version__, CONTRACT, self._capabilities())

    @hookimpl
    def kvcore_detect(self) -> Detection:
        """By PCI and by the library, which makes no context."""
        pci = pci_devices(PCI_VENDOR, self._root)
        path = find_library(LIBRARY, FOLDERS)
        evidence = [Evidence(f"pci {PCI_VENDOR}", address) for address in pci]
        evidence += [Evidence("library", path)] if path is not None else []
        here = (
            f"{len(pci)} PCI function(s) of vendor {PCI_VENDOR}" if pci else f"no PCI function of vendor {PCI_VENDOR}"
        )
        if path is None:
            state = DetectionState.UNUSABLE if pci else DetectionState.ABSENT
            return Detection(state, f"{here}, and no {LIBRARY}", tuple(evidence), HINT)
        try:
            cards = self._cards()
        except DeviceError as error:
            # Images carry the library to machines that have no such card.
            state = DetectionState.UNUSABLE if pci else DetectionState.ABSENT
            return Detection(state, f"{here}; {error.what}: {error.got}", tuple(evidence), error.hint)
        evidence.append(Evidence("devices by mxsml", str(len(cards))))
        try:
            devices = self._located(cards)
        except DeviceError as error:
            reason = f"{here}; {error.what}: {error.got}"
            return Detection(DetectionState.UNUSABLE, reason, tuple(evidence), error.hint)
        if devices:
            return Detection(DetectionState.AVAILABLE, f"{len(devices)} device(s) by mxsml", tuple(evidence))
        if cards:
            reason = f"{' or '.join(VARIABLES)} hides every one of {len(cards)} device(s)"
            return Detection(DetectionState.UNUSABLE, reason, tuple(evidence), f"name a device in {VARIABLES[0]}")
        state = DetectionState.UNUSABLE if pci else DetectionState.ABSENT
        return Detection(state, f"{here}; {path} finds no device", tuple(evidence), HINT)

    @hookimpl
    def kvcore_devices(self) -> list[Device]:
        """Those that MACA_VISIBLE_DEVICES leaves, in its order."""
        return [device for device, _ in self._located(self._cards())]

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        """MXSML, and the runtimes that this process uses already: asking another would create a context."""
        _, card = self._card_of(device)
        used: list[Runtime] = [self._maca] if self._maca.active(device.index) else []
        used += [self._paddle] if self._paddle.imported() and self._paddle.installed() else []
        return [self._by_library(device, card), *(self._by_runtime(runtime, device, card) for runtime in used)]

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        """The counters of the runtime that allocates."""
        return self._runtimes.chosen().stats(device.index)

    @hookimpl
    def kvcore_reset_peak(self, device: Device) -> None:
        """The runtime's own reset."""
        self._runtimes.chosen().reset_peak(device.index)

    @hookimpl
    def kvcore_allocation_limits(self, device: Device) -> AllocationLimits:
        """Pages as large as CUDA's, and what one tensor of the runtime can have."""
        try:
            runtime = self._runtimes.to_plan_for()
        except CapabilityMissing as missing:
            # A plan needs no runtime; the machine that allocates will say what its own allows.
            return AllocationLimits(GRANULE, ALIGNMENT, reason=f"{missing.what}: {missing.got}")
        return AllocationLimits(GRANULE, ALIGNMENT, max_elements=runtime.max_elements, reason=runtime.limit_reason)

    @hookimpl
    def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
        """One allocation of the runtime, zeroed."""
        runtime = self._runtimes.chosen()
        limit = runtime.max_elements
        if limit is not None and request.elements > limit:
            raise OutOfMemory(
                "one tensor is larger than this runtime's can be",
                code="KV-OOM-002",
                where=request.name,
                got=f"{request.elements:,} elements",
                expected=f"at most {limit:,}: {runtime.limit_reason}",
            )
        self._check_number(runtime, device)
        nbytes = -(-request.nbytes // GRANULE) * GRANULE
        memory = runtime.allocate(device.index, request.name, nbytes, _itemsize(request))
        return Buffer(request.name, device, nbytes, nbytes, memory)

    @hookimpl
    def kvcore_reserves(self, device: Device, phase: Phase) -> list[Reserve]:
        """The context that this process will create before it allocates, if it can have none yet."""
        if device.platform != "metax" or runtime_is_loaded():
            return []
        reason = "the context that a process creates on a device: as declared for CUDA, not measured on MACA"
        return [Reserve("context", CONTEXT, ReserveKind.PERSISTENT, Basis.DECLARED, "metax", reason, Phase.CONTEXT)]

    def _capabilities(self) -> dict[Capability, Supported]:
        capabilities = dict.fromkeys(Capability, FULL)
        capabilities[Capability.TENSOR_NUMPY] = unsupported("numpy cannot see a device's memory")
        capabilities[Capability.TENSOR_TORCH] = not_implemented(
            "MetaX's own torch shows its devices as cuda; this plugin does not allocate through it yet"
        )
        capabilities[Capability.FORK] = unsupported("a runtime's context does not survive a fork")
        if not self._runtimes.installed():
            missing = unsupported(f"no runtime is installed: {RUNTIME_HINT}")
            for capability in (
                Capability.MEMORY_STATS,
                Capability.RESET_PEAK,
                Capability.ALLOCATE,
                Capability.COMMIT,
                Capability.RAW_ACCESS,
            ):
                capabilities[capability] = missing
        if not self._paddle_allocates():
            capabilities[Capability.TENSOR_PADDLE] = unsupported(
                "Paddle's tensors need Paddle's own memory: KVCORE_RUNTIME=paddle, with paddle-metax-gpu installed"
            )
        return capabilities

    def _paddle_allocates(self) -> bool:
        """Whether it will be Paddle that is chosen, by the same rule and without starting anything."""
        if not self._paddle.installed():
            return False
        # A name that is no runtime here is refused when it is used: the plugin itself is loaded all the same.
        return os.environ.get(RUNTIME_VARIABLE) == "paddle" or self._paddle.imported() or not self._maca.installed()

    def _cards(self) -> list[Card]:
        try:
            return within(self._seconds, "mxsml", lambda: Mxsml().cards())
        except MxsmlFault as fault:
            raise _refusal(fault, "mxsml") from fault

    def _located(self, cards: list[Card]) -> list[tuple[Device, Card]]:
        several = [card for card in cards if card.dies is not None and card.dies > 1]
        if several:
            raise DeviceError(
                "a card of several dies, and how the runtime numbers dies is not documented",
                code="KV-DEV-026",
                where="metax",
                got=", ".join(f"{card.key} ({card.name}): {card.dies} dies" for card in several),
                expected="cards of one die",
            )
        located = []
        for index, (entry, card) in enumerate(visible_cards(cards, os.environ)):
            kind = MemoryKind.PARTITION if card.virtual else MemoryKind.DISCRETE
            how = Mapping.ORDER if entry is None else Mapping.ENVIRONMENT
            located.append((Device("metax", index, card.key, card.name, kind, how, entry), card))
        return located

    def _card_of(self, device: Device) -> tuple[Device, Card]:
        """The device of the same key as it is now, with its card."""
        located = self._located(self._cards())
        for here, card in located:
            if here.key == device.key:
                return here, card
        raise DeviceError(
            "the device is not here any more",
            code="KV-DEV-027",
            where=f"metax device {device.key}",
            got=", ".join(here.key for here, _ in located) or "no device",
            expected=device.key,
            hint="it was lost, reset, or hidden from this process since it was listed",
        )

    def _check_number(self, runtime: Runtime, device: Device) -> None:
        """A runtime allocates by number: it must still be this device's, and the runtime's own as far as it says."""
        here, card = self._card_of(device)
        found = runtime.devices()
        named = None if found is None else {each.index: each.pci for each in found}.get(device.index, "no device")
        if here.index == device.index and named in (None, normal_pci(card.pci)):
            return
        raise DeviceError(
            "the runtime's device under this number is not the one that was planned for",
            code="KV-DEV-029",
            where=f"metax device {device.key}",
            got=f"number {here.index}, and the runtime's number {device.index} is {named or 'not named'}",
            expected=f"number {device.index} at {card.pci}",
            hint="devices were hidden or renumbered since the plan: plan again in this process",
        )

    def _by_library(self, device: Device, card: Card) -> Reading:
        scope = Scope.PARTITION if card.virtual else Scope.DEVICE

        def ask() -> Reading:
            library = Mxsml()
            memory = library.memory(card.number)
            if not 0 <= memory.used <= memory.total or memory.total == 0:
                said = f"{memory.used // KIB} of {memory.total // KIB} KiB in use, which is no answer"
                return Reading("mxsml", scope, skipped=said)
            return Reading(
                "mxsml",
                scope,
                total=memory.total,
                free=memory.total - memory.used,
                used=memory.used,
                own=own_bytes(library, card.pci),
                note="free is what is not in use: the library has no figure of its own for it",
            )

        try:
            return within(self._seconds, "mxsml", ask)
        except MxsmlFault as fault:
            if fault.says_nothing:
                return Reading("mxsml", scope, skipped=str(fault))
            raise _refusal(fault, f"metax device {device.key}") from fault

    def _by_runtime(self, runtime: Runtime, device: Device, card: Card) -> Reading:
        """Its figures, in bytes. Paddle's plug-in has no statistics, so it never says what is free."""
        scope, source = (Scope.PARTITION if card.virtual else Scope.DEVICE), _SOURCES[runtime.name]
        try:
            runtime.start()
            free, total = within(self._seconds, source, lambda: runtime.memory(device.index))
        except (RuntimeUnavailable, DeviceError) as error:
            return Reading(source, scope, skipped=str(error).splitlines()[0])
        if total is None or total == 0:
            return Reading(source, scope, skipped="it does not say how much memory the device has")
        return Reading(source, scope, total=total, free=free)


def _itemsize(request: AllocationRequest) -> int:
    """Bytes of one element, where Paddle has an integer type of that size."""
    size = request.nbytes // request.elements if request.elements else 1
    return size if size in (1, 2, 4, 8) and size * request.elements == request.nbytes else 1


def _refusal(fault: MxsmlFault, where: str) -> DeviceError:
    """The typed error of a fault that no other source can make good."""
    gone = fault.number in GONE
    return DeviceError(
        "the device has gone, or is being reset" if gone else "the management library failed",
        code="KV-DEV-027" if gone else "KV-DEV-020",
        where=where,
        got=str(fault),
        expected="success",
        hint="look at `mx-smi` and the kernel's log" if fault.number is not None else HINT,
    )


plugin: BlockSizer = MetaxBlockSizer()
