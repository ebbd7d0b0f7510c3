"""CAP: what a platform says that it can do, and whether it is so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import EntryPoint

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import CheckFailed, check
from kvcore.contract.capabilities import Capability, Support
from kvcore.contract.facts import AllocationRequest, Buffer, Device, Mapping, MemoryKind, Reading, TensorView
from kvcore.errors import BufferMisuse, CapabilityMissing, KvcoreError

TENSORS = {
    Capability.TENSOR_NUMPY: "numpy",
    Capability.TENSOR_PADDLE: "paddle",
    Capability.TENSOR_TORCH: "torch",
}


@check("CAP-001")
def every_capability_is_declared(bench: Bench) -> None:
    """Every capability is declared, by FULL, UNSUPPORTED or NOT_IMPLEMENTED.

    Why: an undeclared capability would be a guess, and a new one would pass unseen.
    Fix: add the missing ones to the capabilities of kvcore_platform; there is no default.
    """
    missing = [c.value for c in Capability if c not in bench.info().capabilities]
    bench.expect(
        not missing, "kvcore_platform().capabilities", got=f"undeclared: {missing}", expected="every Capability"
    )


@check("CAP-002")
def what_is_not_offered_has_a_reason(bench: Bench) -> None:
    """Whatever is UNSUPPORTED or NOT_IMPLEMENTED says why.

    Why: the reason is all that an operator sees of a missing capability.
    Fix: use unsupported("...") or not_implemented("...") of kvcore.contract with a sentence.
    """
    for capability, declared in bench.info().capabilities.items():
        bench.expect(
            declared.support is Support.FULL or bool(declared.reason),
            "kvcore_platform().capabilities",
            got=f"{capability.value}: {declared.support.value} without a reason",
            expected="a reason",
        )


@check("CAP-003")
def what_is_not_offered_is_refused(bench: Bench) -> None:
    """A capability that is not FULL raises CapabilityMissing, and gives no figure.

    Why: a caller that tries it must be told no in a form that it can handle; an answer would be an undeclared one.
    Fix: raise CapabilityMissing (PlatformBase does), leave Reading.own None, and Buffer.committed_bytes below nbytes.
    """
    for capability, declared in bench.info().capabilities.items():
        if declared.support is not Support.FULL:
            _refused(bench, capability)


@check("CAP-004")
def what_is_offered_is_there(bench: Bench) -> None:
    """A capability that is FULL does not raise CapabilityMissing.

    Why: kvcore and engines choose their way by the declaration, before they call.
    Fix: declare what is so on this machine; a declaration may depend on what is installed.
    """
    for capability, declared in bench.info().capabilities.items():
        if declared.support is Support.FULL:
            _offered(bench, capability)


@check("CAP-005")
def the_registry_loads_it(bench: Bench) -> None:
    """The registry loads the plugin: its name, contract version, hooks and arguments are right.

    Why: a plugin that is refused does not exist for anyone.
    Fix: do what the reason says; `kvcore plugins` shows it too.
    """
    from kvcore.registry import PluginState, Registry

    value = bench.setting.plugin
    entries = _installed(bench.name) if value is None else [EntryPoint(bench.name, value, "kvcore")]
    record = Registry(entries, {}).records[0]
    bench.expect(
        record.state is PluginState.LOADED,
        "Registry",
        got=f"{record.state.value}: {record.reason}",
        expected=PluginState.LOADED.value,
    )


def _installed(name: str) -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return list(entry_points(group="kvcore", name=name))[:1]


def _refused(bench: Bench, capability: Capability) -> None:
    """The inverse check of one capability."""
    if capability is Capability.OWN_MEMORY:
        for reading in _readings(bench):
            got = f"{reading.own} from {reading.source}"
            bench.expect(reading.own is None, "kvcore_read_memory(device).own", got=got, expected=None)
        return
    if capability is Capability.COMMIT:
        if bench.supports(Capability.ALLOCATE):
            buffer = bench.allocate(bench.chunk(bench.device()))
            got = f"{buffer.committed_bytes} of {buffer.nbytes}"
            bench.expect(
                buffer.committed_bytes < buffer.nbytes,
                "kvcore_allocate().committed_bytes",
                got=got,
                expected="fewer",
                unit="bytes",
            )
        return
    if capability in (Capability.THREADS, Capability.FORK):
        return  # no hook of their own: THR-002 looks at what a fork does
    errors: tuple[type[KvcoreError], ...] = (CapabilityMissing,)
    nobody: Device | None = _nobody(bench)
    if capability is Capability.RAW_ACCESS or capability in TENSORS:
        if bench.supports(Capability.ALLOCATE):
            nobody = None
        else:
            errors = (CapabilityMissing, BufferMisuse)  # there can be no buffer: either says no
    for call, action in _calls(bench, capability, nobody):
        bench.refuses(f"{call}, declared {capability.value} not FULL", action, *errors)


def _offered(bench: Bench, capability: Capability) -> None:
    if capability in (Capability.THREADS, Capability.FORK):
        return
    framework = TENSORS.get(capability)
    if framework is not None and importlib.util.find_spec(framework) is None:
        return  # a platform may offer what an installation has not chosen
    if capability is Capability.OWN_MEMORY:
        own = [reading.own for reading in _readings(bench)]
        got = f"own is {own}"
        bench.expect(any(o is not None for o in own), "kvcore_read_memory(device)", got=got, expected="a figure of own")
        return
    if capability is Capability.COMMIT:
        buffer = bench.allocate(bench.chunk(bench.device()))
        got = f"{buffer.committed_bytes} of {buffer.nbytes}"
        expected = "all of it"
        bench.expect(
            buffer.committed_bytes == buffer.nbytes, "kvcore_allocate()", got=got, expected=expected, unit="bytes"
        )
        return
    for call, action in _calls(bench, capability, None):
        try:
            action()
        except CapabilityMissing as error:
            raise CheckFailed(
                call, got=f"CapabilityMissing: {error.what}", expected="what was declared FULL"
            ) from error
        except KvcoreError:
            continue  # it is offered, and something else is wrong: that has checks of its own


def _readings(bench: Bench) -> list[Reading]:
    return bench.readings(bench.device()) if bench.supports(Capability.READ_MEMORY) else []


def _nobody(bench: Bench) -> Device:
    """A device that is not there: what is not offered is refused before anyone looks for it."""
    return Device(bench.name, 0, "nobody", "no device", MemoryKind.DISCRETE, Mapping.ORDER)


def _calls(bench: Bench, capability: Capability, nobody: Device | None) -> list[tuple[str, Callable[[], object]]]:
    """The calls of a capability: with a real device and buffer, or with ``nobody``'s."""
    if capability is Capability.DETECT:
        return [("kvcore_detect()", bench.detection)]
    if capability is Capability.DEVICES:
        return [("kvcore_devices()", lambda: bench.call("kvcore_devices"))]
    device = bench.device() if nobody is None else nobody
    plain: dict[Capability, tuple[str, Callable[[], object]]] = {
        Capability.READ_MEMORY: ("kvcore_read_memory(device)", lambda: bench.readings(device)),
        Capability.MEMORY_STATS: ("kvcore_memory_stats(device)", lambda: bench.stats(device)),
        Capability.RESET_PEAK: (
            "kvcore_reset_peak(device)",
            lambda: bench.perform("kvcore_reset_peak", device=device),
        ),
        Capability.ALLOCATION_LIMITS: ("kvcore_allocation_limits(device)", lambda: bench.limits(device)),
    }
    if capability in plain:
        return [plain[capability]]
    request = AllocationRequest("conformance", 4096, 1, 4096)
    if capability is Capability.ALLOCATE:
        if nobody is None:
            return [("kvcore_allocate(device, request)", lambda: bench.allocate(4096, device))]
        buffer = Buffer("conformance", device, 4096, 0, None)
        return [
            ("kvcore_allocate(device, request)", lambda: bench.call("kvcore_allocate", device=device, request=request)),
            ("kvcore_release(buffer)", lambda: bench.call("kvcore_release", buffer=buffer)),
        ]
    if nobody is not None:
        buffer = Buffer("conformance", device, 4096, 0, None)
    elif bench.supports(Capability.ALLOCATE):
        buffer = bench.allocate(4096, device)
    else:
        return []
    if capability is Capability.RAW_ACCESS:
        return [
            ("kvcore_write(buffer, 0, data)", lambda: bench.write(buffer, 0, b"x")),
            ("kvcore_read(buffer, 0, 1)", lambda: bench.read(buffer, 0, 1)),
            ("kvcore_fill(buffer, 0, 1, 0)", lambda: bench.fill(buffer, 0, 1, 0)),
        ]
    framework = TENSORS[capability]
    view = TensorView((1,), "uint8")
    return [(f"kvcore_tensor(buffer, view, {framework!r})", lambda: bench.tensor(buffer, view, framework))]
