"""DEV: which device is which."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import CheckFailed, check
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import Mapping, MemoryKind
from kvcore.errors import KvcoreError


@check("DEV-001", Capability.DEVICES)
def keys_are_unique(bench: Bench) -> None:
    """Every device has a key of its own.

    Why: a key that two devices share makes one of them unreachable, and locks the wrong one.
    Fix: use the UUID or the PCI address, or for slices the slice's own.
    """
    keys: list[object] = [device.key for device in bench.devices()]
    bench.expect(
        len(set(keys)) == len(keys) and all(isinstance(key, str) and key for key in keys),
        "kvcore_devices()",
        got=keys,
        expected="a text of its own for each",
    )


@check("DEV-002", Capability.DEVICES)
def keys_stay_from_call_to_call(bench: Bench) -> None:
    """The same devices come in the same order with the same keys at every call.

    Why: a plan holds the key, and the allocation that follows finds the device by it.
    Fix: read the identity from the device; make nothing up.
    """
    first, second = ([device.key for device in bench.devices()] for _ in range(2))
    bench.expect(first == second, "kvcore_devices() twice", got=second, expected=first)


@check("DEV-003", Capability.DEVICES, fresh=True)
def keys_stay_from_process_to_process(bench: Bench) -> None:
    """Another process sees the same keys.

    Why: ranks, locks and records of different processes speak of one device by its key.
    Fix: no process id, address or random number in a key.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps([device.key for device in bench.devices()]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    if not said:
        bench.devices()  # says why there are none, if it is the same here
        raise CheckFailed("kvcore_devices() in another process", got="no answer", expected="its devices")
    here = [device.key for device in bench.devices()]
    bench.expect(json.loads(said) == here, "kvcore_devices() in two processes", got=json.loads(said), expected=here)


@check("DEV-004", Capability.DEVICES)
def a_key_is_no_index(bench: Bench) -> None:
    """A key is an identity: not a number of an order, nor one that holds such a number alone.

    Why: CUDA_VISIBLE_DEVICES and a restart renumber devices; the figures of one would be taken for another's.
    Fix: use the UUID or PCI address; where there is neither, refuse the device with a DeviceError.
    """
    for device in bench.devices():
        last = device.key.rsplit(":", 1)[-1]
        numbered = device.key.isdigit() or (last.isdigit() and len(last) < 3 and "." not in device.key)
        bench.expect(not numbered, "kvcore_devices()", got=device.key, expected="a UUID or PCI address")


@check("DEV-005", Capability.DEVICES)
def indices_count_from_zero(bench: Bench) -> None:
    """Logical indices are 0, 1, 2... in order, and every device names its platform, kind and mapping.

    Why: the index is how a framework in the same process addresses the device.
    Fix: number what is visible to this process; physical numbers belong in `visible` or nowhere.
    """
    devices = bench.devices()
    indices = [device.index for device in devices]
    bench.expect(indices == list(range(len(devices))), "kvcore_devices()", got=indices, expected="0, 1, 2...")
    for device in devices:
        said: tuple[object, ...] = (device.platform, device.kind, device.mapping)
        right = said[0] == bench.name and isinstance(said[1], MemoryKind) and isinstance(said[2], Mapping)
        expected = f"{bench.name}, a MemoryKind and a Mapping"
        bench.expect(right, "kvcore_devices()", got=said, expected=expected)


@check("DEV-006", Capability.DEVICES, Capability.READ_MEMORY)
def an_unknown_device_is_refused(bench: Bench) -> None:
    """A device whose key is not here is refused, whatever its index.

    Why: a device taken by its index is another one after a restart, and its memory another's.
    Fix: find the device by its key; raise DeviceError if it is gone.
    """
    stranger = replace(bench.device(), key="GPU-00000000-dead-beef-0000-000000000000")
    bench.refuses("kvcore_read_memory(a device of another key)", lambda: bench.readings(stranger), KvcoreError)
