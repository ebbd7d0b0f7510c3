"""The driver's memory for frameworks: what the interfaces say, and that the real ones take it without a copy.

A build of torch or Paddle for the CPU cannot take a device's memory, so the exporter is given host memory to be taken
by them, and the device's own is read back through the structures that it would hand to a build with CUDA.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.contract.runtimes.sharing import CPU, CUDA, SharedBytes

from .conftest import GIB, Machine
from .test_paddle import has

Make = Callable[..., Machine]


def by_numpy(shared: SharedBytes) -> Any:
    import numpy as np

    return np.from_dlpack(shared)


def by_torch(shared: SharedBytes) -> Any:
    import torch

    return torch.from_dlpack(shared)


def by_paddle(shared: SharedBytes) -> Any:
    import paddle

    return paddle.utils.dlpack.from_dlpack(shared)


TAKERS = [
    pytest.param(by_numpy, id="numpy"),
    pytest.param(by_torch, marks=pytest.mark.skipif(not has("torch"), reason="torch is not installed"), id="torch"),
    pytest.param(by_paddle, marks=pytest.mark.skipif(not has("paddle"), reason="Paddle is not installed"), id="paddle"),
]


@pytest.mark.parametrize("take", TAKERS)
def test_a_framework_sees_the_memory_and_holds_it_until_its_last_tensor_is_gone(
    take: Callable[[SharedBytes], Any],
) -> None:
    memory = (ctypes.c_uint8 * 4096)(*range(16))
    shared = SharedBytes(ctypes.addressof(memory), 4096, (CPU, 0))
    alive = weakref.ref(shared)
    tensor = take(shared)
    del shared
    assert list(tensor.shape) == [4096]
    assert [int(tensor[i]) for i in range(16)] == list(range(16))
    memory[5] = 99
    assert int(tensor[5]) == 99  # no copy
    view = tensor[4:8]
    del tensor
    gc.collect()
    assert alive() is not None
    assert int(view[1]) == 99
    del view
    gc.collect()
    assert alive() is None


def test_a_capsule_that_nobody_takes_holds_nothing() -> None:
    shared = SharedBytes(4096, 1, (CPU, 0))
    alive = weakref.ref(shared)
    capsule = shared.__dlpack__()
    del shared
    assert alive() is not None
    del capsule
    assert alive() is None


@pytest.mark.parametrize("framework", ["numpy", "torch", "paddle"])
def test_a_tensor_that_is_alive_when_the_interpreter_ends_is_no_crash(framework: str) -> None:
    if not has(framework):
        pytest.skip(f"{framework} is not installed")
    take = {"numpy": "np.from_dlpack", "torch": "torch.from_dlpack", "paddle": "paddle.utils.dlpack.from_dlpack"}
    name = "numpy as np" if framework == "numpy" else framework
    script = (
        f"import ctypes, {name}\nfrom kvcore.contract.runtimes.sharing import CPU, SharedBytes\n"
        "memory = (ctypes.c_uint8 * 4096)()\n"
        f"tensor = {take[framework]}(SharedBytes(ctypes.addressof(memory), 4096, (CPU, 0)))\n"
        "cycle = [tensor]; cycle.append(cycle)\nctypes.kept = tensor\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "Exception" not in ran.stderr


def test_host_memory_has_no_cuda_array_interface() -> None:
    assert not hasattr(SharedBytes(4096, 1, (CPU, 0)), "__cuda_array_interface__")
    assert hasattr(SharedBytes(4096, 1, (CUDA, 0)), "__cuda_array_interface__")


#: A framework that takes device memory, in a process with the simulated driver: what torch and Paddle with CUDA do.
FRAMEWORK = """
import ctypes, gc, importlib.machinery, sys, types
from kvcore.contract.runtimes.sharing import _Managed, _pointer
taken = {}
class Raw:
    def __init__(self, kept, address, nbytes):
        self.kept, self.address, self.nbytes = kept, address, nbytes
    def view(self, dtype): return self
    def reshape(self, shape): return self
def by_array(shared, device):
    taken.update(interface=dict(shared.__cuda_array_interface__), device=device)
    return Raw(shared, shared.__cuda_array_interface__["data"][0], shared.__cuda_array_interface__["shape"][0])
def by_dlpack(shared):
    capsule = shared.__dlpack__(stream=1, max_version=(1, 2))
    managed = _Managed.from_address(_pointer(id(capsule), b"dltensor"))
    t = managed.tensor
    taken.update(device=shared.__dlpack_device__(), type=(t.code, t.bits, t.lanes), dims=(t.ndim, t.shape[0]),
                 both=(t.device_type, t.device_id), strides=bool(t.strides), offset=t.byte_offset)
    return Raw(capsule, t.data, t.shape[0])
def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module
part = types.SimpleNamespace
stand_in("torch", cuda=part(is_available=lambda: True, is_initialized=lambda: False), as_tensor=by_array, uint8="u1")
stand_in("paddle", is_compiled_with_cuda=lambda: True, utils=part(dlpack=part(from_dlpack=by_dlpack)))
from kvcore_cuda.platform import plugin
device = plugin.kvcore_devices()[1]
buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 22, 256, 1 << 22))
plugin.kvcore_write(buffer, 4096, b"kvcore")
tensor = plugin.kvcore_tensor(buffer, TensorView((2, 8), "uint8", 4096), {framework!r})
seen = ctypes.string_at(tensor.address, 6).decode()
try:
    plugin.kvcore_release(buffer)
except KvcoreError as error:
    refused = error.code
del tensor
gc.collect()
taken.pop("interface", {}).pop("data", None)
answer = [seen, refused, plugin.kvcore_release(buffer), taken]
"""


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("torch", {"device": "cuda:1"}),
        (
            "paddle",
            {
                "device": [CUDA, 1],
                "type": [1, 8, 1],
                "dims": [1, 16],
                "both": [CUDA, 1],
                "strides": False,
                "offset": 0,
            },
        ),
    ],
)
def test_the_drivers_memory_is_described_as_it_is(machine: Make, framework: str, expected: dict[str, object]) -> None:
    """What a build with CUDA is given: the right device, address, size and type, and release waits for its tensor."""
    host = machine("nvml", "cuda").card(0).card(1, free=GIB)
    seen, refused, freed, taken = host.ask(FRAMEWORK.replace("{framework!r}", repr(framework)), KVCORE_RUNTIME="driver")
    assert (seen, refused, freed) == ("kvcore", "KV-BUF-004", 1 << 22)
    assert taken == expected


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_build_for_the_cpu_says_that_it_cannot(machine: Make, framework: str) -> None:
    if not has(framework):
        pytest.skip(f"{framework} is not installed")
    answer = (
        machine("nvml", "cuda")
        .card(0)
        .ask(
            f"""
        from kvcore_cuda.platform import plugin
        device = plugin.kvcore_devices()[0]
        buffer = plugin.kvcore_allocate(device, AllocationRequest("t", 1 << 21, 256, 1 << 21))
        declared = plugin.kvcore_platform().capabilities[Capability("tensor_{framework}")]
        try:
            plugin.kvcore_tensor(buffer, TensorView((2, 8), "uint8"), "{framework}")
        except KvcoreError as error:
            answer = [declared.support.value, declared.reason, error.code, error.hint]
        """,
            KVCORE_RUNTIME="driver",
        )
    )
    assert answer[0] == "unsupported"
    assert framework in answer[1]
    assert answer[2:] == ["KV-CAP-011", f"allocate with KVCORE_RUNTIME={framework}"]
