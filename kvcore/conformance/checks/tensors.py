"""TEN: an engine's tensors over a buffer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import NotApplicable, check
from kvcore.conformance.checks.capabilities import TENSORS
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import TensorView
from kvcore.errors import BufferMisuse

ALLOCATE, RAW = Capability.ALLOCATE, Capability.RAW_ACCESS


def _frameworks(bench: Bench) -> Iterator[str]:
    """Those that the platform offers and that are installed; at least one."""
    bench.device()
    offered = [name for capability, name in TENSORS.items() if bench.supports(capability)]
    installed = [name for name in offered if importlib.util.find_spec(name) is not None]
    if not installed:
        raise NotApplicable(f"no framework of {offered or 'any kind'} is offered and installed")
    yield from installed


def _view(bench: Bench) -> tuple[Any, TensorView]:
    return bench.allocate(bench.chunk(bench.device())), TensorView((4, 8), "uint8", offset=256)


@check("TEN-001", ALLOCATE, RAW)
def a_tensor_shares_the_buffers_memory(bench: Bench) -> None:
    """What is written through the tensor is in the buffer, and the other way round.

    Why: an engine writes through its tensors; a copy would be memory taken twice, and verified in vain.
    Fix: give the memory to the framework (DLPack, __cuda_array_interface__), or take it from the framework.
    """
    for framework in _frameworks(bench):
        buffer, view = _view(bench)
        tensor = bench.tensor(buffer, view, framework)
        bench.write(buffer, 256, bytes(range(32)))
        seen = _value(tensor, 3, 7)
        bench.expect(seen == 31, f"{framework} tensor[3, 7] after kvcore_write", got=seen, expected=31)
        tensor[1, 2] = 99
        _finish(framework, tensor)
        data = bench.read(buffer, 256 + 10, 1)[0]
        bench.expect(data == 99, f"kvcore_read after {framework} tensor[1, 2] = 99", got=data, expected=99)
        del tensor


@check("TEN-002", ALLOCATE)
def a_tensor_is_as_asked(bench: Bench) -> None:
    """A tensor has the shape and the element type that were asked for.

    Why: a kernel takes both from the tensor, and indexes by them.
    Fix: view the memory as the type; where a framework has none for it, as unsigned integers of its size.
    """
    for framework in _frameworks(bench):
        buffer = bench.allocate(bench.chunk(bench.device()))
        for dtype, itemsize in (("float16", 2), ("float32", 4), ("uint8", 1)):
            tensor = bench.tensor(buffer, TensorView((3, 2, 5), dtype, offset=512), framework)
            got = f"{tuple(tensor.shape)} of {tensor.dtype}"
            right = tuple(tensor.shape) == (3, 2, 5) and str(tensor.dtype).endswith(dtype)
            bench.expect(right, f"kvcore_tensor(..., {framework!r})", got=got, expected=f"(3, 2, 5) of {dtype}")
            step = tensor.itemsize if framework == "numpy" else tensor.element_size()
            bench.expect(step == itemsize, f"{framework} element size", got=step, expected=itemsize, unit="bytes")
            del tensor


@check("TEN-003", ALLOCATE)
def a_tensor_outside_is_refused(bench: Bench) -> None:
    """A view that does not fit into the buffer raises BufferMisuse.

    Why: its last elements are another buffer's.
    Fix: compare offset, shape and element size with the buffer's size.
    """
    for framework in _frameworks(bench):
        buffer = bench.allocate(bench.chunk(bench.device()))
        view = TensorView((buffer.nbytes,), "uint8", offset=1)
        bench.refuses(
            f"kvcore_tensor(a view past the end, {framework!r})",
            lambda b=buffer, v=view, f=framework: bench.tensor(b, v, f),  # type: ignore[misc]
            BufferMisuse,
        )


@check("TEN-004", ALLOCATE)
def a_tensor_is_aligned(bench: Bench) -> None:
    """A buffer begins at a multiple of the alignment that the platform states.

    Why: kernels load 16 bytes at a time, and fault on, or are slow at, any other address.
    Fix: state the alignment that the allocator has, or allocate with the one stated.
    """
    device = bench.device()
    alignment = bench.limits(device).alignment
    granule = bench.limits(device).granularity
    for framework in _frameworks(bench):
        for nbytes in (granule, granule + 1, 3 * granule):
            buffer = bench.allocate(nbytes, device)
            tensor = bench.tensor(buffer, TensorView((1,), "uint8"), framework)
            address = _address(tensor)
            del tensor
            got = f"{address:#x}"
            bench.expect(
                address % alignment == 0,
                f"address of a buffer ({framework})",
                got=got,
                expected=f"a multiple of {alignment}",
                unit="bytes",
            )


def _value(tensor: Any, *index: int) -> int:
    return int(tensor[index])


def _address(tensor: Any) -> int:
    """Of its first element: numpy, torch and paddle say it in ways of their own."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if hasattr(tensor, "__array_interface__"):
        return int(tensor.__array_interface__["data"][0])
    return int(tensor.ctypes.data)


def _finish(framework: str, tensor: Any) -> None:
    """Until what was written is there: frameworks work behind the caller's back."""
    if framework == "torch" and tensor.is_cuda:
        import torch

        torch.cuda.synchronize(tensor.device)
    if framework == "paddle" and not tensor.place.is_cpu_place():
        import paddle

        paddle.device.synchronize(str(tensor.place)[6:-1])
