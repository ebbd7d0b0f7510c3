"""RUN: what a plugin does to the process that it is in, and what it says of itself."""

from __future__ import annotations

import os
import time

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import Level, check
from kvcore.conformance.surroundings import frameworks, look_around, printed
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import DetectionState
from kvcore.errors import KvcoreError

#: Memory that another tenant may take between two readings without it being a context of ours.
NOISE = 16 * 1024**2


def _ask(bench: Bench) -> None:
    """Everything that kvcore asks before it allocates."""
    if bench.supports(Capability.DETECT) and bench.detection().state is not DetectionState.AVAILABLE:
        return
    if bench.supports(Capability.DEVICES) and bench.supports(Capability.READ_MEMORY):
        for device in bench.devices():
            bench.readings(device)


@check("RUN-001")
def the_platform_says_who_it_is(bench: Bench) -> None:
    """kvcore_platform gives the entry point's name, a vendor and a version, and the same each time.

    Why: plans, records and errors name the platform; a name that changes cannot be compared.
    Fix: return constants (the version is the distribution's).
    """
    info = bench.info()
    said: tuple[object, ...] = (info.name, info.vendor, info.version)
    bench.expect(info.name == bench.name, "kvcore_platform().name", got=info.name, expected=bench.name)
    bench.expect(
        all(isinstance(text, str) and text for text in said), "kvcore_platform()", got=said, expected="three texts"
    )
    again = bench.info()
    bench.expect(said == (again.name, again.vendor, again.version), "kvcore_platform() again", got=again, expected=said)


@check("RUN-002", fresh=True)
def naming_itself_loads_no_driver(bench: Bench) -> None:
    """Importing the plugin and kvcore_platform load no shared library.

    Why: `kvcore plugins` must work on a machine with a broken driver, and no one must pay for all vendors.
    Fix: load libraries in kvcore_detect or later, inside the function that needs them.
    """
    bench.info()
    loaded = look_around().libraries - bench.before.libraries
    bench.expect(not loaded, "kvcore_platform()", got=f"loaded {sorted(loaded)}", expected="no library")


@check("RUN-003", Capability.DETECT, fresh=True)
def looking_imports_no_framework(bench: Bench) -> None:
    """Detection imports no framework (paddle, torch, jax, tensorflow, mindspore).

    Why: it takes seconds, and a framework of one vendor may take the device from another.
    Fix: ask the driver's own library; import the framework when memory is allocated through it.
    """
    bench.detection()
    bench.expect(not frameworks(), "kvcore_detect()", got=f"imported {frameworks()}", expected="none")


@check("RUN-004", fresh=True)
def the_environment_is_not_changed(bench: Bench) -> None:
    """Detection, devices and readings leave os.environ as it was.

    Why: a visibility variable changed here renumbers the devices of everything that starts later.
    Fix: pass what a library needs as an argument; do not set variables.
    """
    _ask(bench)
    after, before = dict(os.environ), bench.before.environ
    changed = sorted(name for name in {*after, *before} if after.get(name) != before.get(name))
    bench.expect(not changed, "detect, devices, read_memory", got=f"changed {changed}", expected="the same environment")


@check("RUN-005", level=Level.CONDUCT, fresh=True)
def no_thread_is_left(bench: Bench) -> None:
    """Detection, devices and readings leave no thread behind.

    Why: a process with threads cannot be forked safely, and engines fork their workers.
    Fix: join what is started, within the call.
    """
    _ask(bench)
    until = time.monotonic() + 1.0
    while (now := len(os.listdir("/proc/self/task"))) > bench.before.threads and time.monotonic() < until:
        time.sleep(0.01)
    bench.expect(
        now <= bench.before.threads, "detect, devices, read_memory", got=f"{now} threads", expected=bench.before.threads
    )


@check("RUN-006", Capability.DETECT, Capability.DEVICES, Capability.READ_MEMORY, fresh=True)
def looking_takes_no_memory(bench: Bench) -> None:
    """Detection takes no memory of the device: it creates no context.

    Why: a context takes hundreds of MiB for as long as the process lives, and the cache has them to spare.
    Fix: detect through the management library or the PCI bus, never through the runtime.
    """
    try:
        device = bench.call("kvcore_devices")[0]  # not bench.device(), which detects first
    except (KvcoreError, IndexError):
        device = bench.device()
    before = bench.free(device)
    bench.detection()
    taken = before - max(bench.free(device) for _ in range(3))  # a neighbour may move meanwhile, and come back
    got = f"{taken} less free"
    bench.expect(taken <= NOISE, "kvcore_detect()", got=got, expected="no less", unit="bytes", device=device)


@check("RUN-007", Capability.DETECT)
def detection_explains_itself(bench: Bench) -> None:
    """Detection gives a reason, evidence if the platform is available, and a hint if it is not.

    Why: "not available" without a reason is what operators call about.
    Fix: fill reason always, evidence (library, counts, PCI) and hint (what would change it).
    """
    found = bench.detection()
    bench.expect(bool(found.reason), "kvcore_detect().reason", got=found.reason, expected="a sentence")
    if found.state is DetectionState.AVAILABLE:
        bench.expect(bool(found.evidence), "kvcore_detect().evidence", got=found.evidence, expected="what was seen")
    elif bench.info().accelerator:
        bench.expect(bool(found.hint), "kvcore_detect().hint", got=found.hint, expected="what would change it")


@check("RUN-008", level=Level.CONDUCT, fresh=True)
def nothing_is_printed(bench: Bench) -> None:
    """Nothing is written to standard output.

    Why: standard output is the answer's, often JSON; a library's greeting in it breaks the reader.
    Fix: use logging, or say it in a reading's note.
    """
    with printed() as text:
        bench.info()
        _ask(bench)
    bench.expect(not text[0], "platform, detect, devices, read_memory", got=repr(text[0][:200]), expected="nothing")


@check("RUN-009", Capability.DETECT, fresh=True)
def detection_and_devices_agree(bench: Bench) -> None:
    """A platform that is not available lists no devices, and one that is available lists at least one.

    Why: the rule of choice goes by detection; what it chooses must then be there.
    Fix: let both ask the same source.
    """
    found = bench.detection()
    if not bench.supports(Capability.DEVICES):
        return
    try:
        devices = bench.call("kvcore_devices")
    except KvcoreError as error:
        devices = []
        got = f"{found.state.value}, and {error.what}"
    else:
        got = f"{found.state.value}, and {len(devices)} devices"
    here = found.state is DetectionState.AVAILABLE
    bench.expect(here == bool(devices), "kvcore_detect() and kvcore_devices()", got=got, expected="one answer")
