"""Memory through Paddle: one tensor a buffer, on a GPU, a custom device such as ``iluvatar_gpu``, or the CPU.

Raw access goes through ``copy_`` alone. On a custom device whose plug-in lacks a kernel Paddle computes on the CPU and
copies back, and an in-place kernel (``fill_``, ``assign`` into a slice) then changes a copy: the write is lost without
an error (seen with PaddlePaddle 3.3.1).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.contract.facts import MemoryStats, TensorView
from kvcore.contract.runtimes.interface import Allocation, Runtime, RuntimeUnavailable, import_framework, view_bytes
from kvcore.errors import CapabilityMissing, DeviceError, OutOfMemory
from kvcore.units import format_bytes

__all__ = ["PaddleRuntime"]

#: Bytes that come from the host when a buffer is filled; the rest is copied from them on the device, which may be full.
CHUNK = 64 * 1024
#: The integer type that stands for elements of a size: it counts as many elements as the engine's own type.
DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class PaddleRuntime(Runtime):
    """``paddle.empty`` on one kind of place: ``gpu``, a custom device's type, or ``cpu``."""

    name = "paddle"
    max_elements = 2**31 - 2**21
    limit_reason = (
        "kernels of Paddle were given 64-bit indices one by one (Paddle#43506, #74211, #79810): "
        "a tensor stays below 2**31 elements, with a granule to spare"
    )

    def __init__(self, kind: str, distributions: tuple[str, ...]) -> None:
        self._kind = kind
        self._distributions = distributions
        self._module: Any = None
        self._starting = threading.Lock()

    def installed(self) -> bool:
        """Whether a build for this kind of device is installed: the package alone may be a build for the CPU."""
        if importlib.util.find_spec("paddle") is None:
            return False
        if self._kind not in ("cpu", "gpu") and _has_custom_devices():
            return True
        found = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
        return any(name in found for name in self._distributions)

    @property
    def shares(self) -> bool:
        """Whether other frameworks can see its memory, and it theirs: DLPack has no name for a custom device."""
        return self._kind in ("cpu", "gpu")

    def imported(self) -> bool:
        """Whether this process uses Paddle."""
        return "paddle" in sys.modules

    def start(self) -> None:
        """Import Paddle and look whether it sees such a device; a call for one that is not there ends the process."""
        if self._module is not None:
            self.check_process()
            return
        with self._starting:  # a second thread would find a Paddle that is half imported
            if self._module is None:
                self._module = self._load()
                self.mark_started()

    def _load(self) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                paddle: Any = importlib.import_module("paddle")
        except Exception as error:  # an import of native code fails in many ways
            raise RuntimeUnavailable(f"importing paddle failed: {type(error).__name__}: {error}") from error
        reason = self._missing(paddle)
        if reason is not None:
            raise RuntimeUnavailable(reason)
        return paddle

    def _missing(self, paddle: Any) -> str | None:
        if self._kind == "cpu":
            return None
        if self._kind == "gpu":
            if not paddle.is_compiled_with_cuda() or paddle.is_compiled_with_rocm():
                return "this Paddle is not built for CUDA"
            count = paddle.device.cuda.device_count()
        else:
            kinds = list(paddle.device.get_all_custom_device_type())
            if self._kind not in kinds:
                return f"this Paddle has no custom device {self._kind}"
            if kinds[0] != self._kind:  # its counters take the first kind, whatever the place says
                return f"this Paddle has several custom devices and counts the first one's memory: {', '.join(kinds)}"
            count = paddle.device.device_count(self._kind)
        strategy = paddle.get_flags(["FLAGS_allocator_strategy"])["FLAGS_allocator_strategy"]
        if strategy == "naive_best_fit":
            return "FLAGS_allocator_strategy=naive_best_fit takes most of the device at the first use"
        return None if count else f"this Paddle sees no {self._kind} device"

    def devices(self) -> None:
        """Paddle does not name the identity of a device."""
        return

    def memory(self, index: int) -> tuple[int | None, int | None]:
        """For a GPU, cudaMemGetInfo; for a custom device its size at most, where 0 means unknown."""
        self.start()
        if self._kind == "gpu" and hasattr(getattr(self._module, "cuda", None), "mem_get_info"):
            free, total = self._module.cuda.mem_get_info(index)
            return int(free), int(total)
        if self._kind in ("cpu", "gpu"):
            return None, None
        try:
            total = int(self._module.device.get_device_properties(self._place(index)).total_memory)
        except (RuntimeError, NameError, ValueError):
            return None, None  # offered for some custom devices only
        return None, total or None

    def stats(self, index: int) -> MemoryStats:
        """The counters of Paddle's allocator for this process."""
        self.start()
        if self._kind == "cpu":
            core: Any = importlib.import_module("paddle.base.core")
            current, peak = (
                int(getattr(core, f"host_memory_stat_{which}_value")("Allocated", 0)) for which in ("current", "peak")
            )
            return MemoryStats("paddle", current=current, peak=peak)
        device, place = self._module.device, self._place(index)
        return MemoryStats(
            "paddle",
            current=int(device.memory_allocated(place)),
            peak=int(device.max_memory_allocated(place)),
            reserved=int(device.memory_reserved(place)),
            peak_reserved=int(device.max_memory_reserved(place)),
        )

    def reset_peak(self, index: int) -> None:
        """Paddle's own reset."""
        self.start()
        if self._kind == "cpu":
            raise CapabilityMissing("Paddle does not reset the peak of host memory", code="KV-CAP-001", where="paddle")
        self._module.device.reset_max_memory_allocated(self._place(index))

    def allocate(self, index: int, name: str, nbytes: int, itemsize: int) -> Allocation:
        """One tensor of ``nbytes // itemsize`` elements, written with zeros."""
        self.start()
        return _PaddleAllocation(self, self._place(index), name, nbytes, itemsize)

    @property
    def module(self) -> Any:
        """The package, once started."""
        return self._module

    def empty_cache(self) -> None:
        """Give idle chunks back to the device. The name is missing in builds that have no device."""
        if self._kind != "cpu":
            self._module.device.empty_cache()

    def _place(self, index: int) -> str:
        return "cpu" if self._kind == "cpu" else f"{self._kind}:{index}"


def _has_custom_devices() -> bool:
    """Whether Paddle will find plug-ins of custom devices: where it is told to, or beside itself.

    Paddle sets the variable to nothing where it finds none (paddle/base/core.py), and child processes inherit it.
    """
    root = os.environ.get("CUSTOM_DEVICE_ROOT")
    here = root is not None and os.path.isdir(root)
    return here or importlib.util.find_spec("paddle_custom_device") is not None


class _PaddleAllocation(Allocation):
    """One tensor."""

    def __init__(self, runtime: PaddleRuntime, place: str, name: str, nbytes: int, itemsize: int) -> None:
        super().__init__(name, nbytes)
        self._runtime = runtime
        self._place = place
        self._tensor: Any = self._empty(nbytes // itemsize, DTYPES[itemsize])
        try:
            self.fill(0, nbytes, 0)
        except BaseException:
            self._give_back()
            raise

    def _empty(self, count: int, dtype: str) -> Any:
        with self._refusals("Paddle could not allocate", self.nbytes):
            return self._runtime.module.empty([count], dtype=dtype, device=self._place)

    @contextmanager
    def _refusals(self, what: str, nbytes: int) -> Iterator[None]:
        """Paddle's refusals as kvcore's: MemoryError from the host and the GPU, OSError from a custom device."""
        try:
            yield
        except (MemoryError, OSError, RuntimeError) as error:
            text = str(error)
            full = isinstance(error, (MemoryError, OSError)) or "ResourceExhausted" in text or "ut of memory" in text
            kind: type[DeviceError] = OutOfMemory if full else DeviceError
            raise kind(
                what,
                code="KV-OOM-001" if full else "KV-DEV-028",
                where=f"{self.name} on {self._place}",
                got=text.strip().splitlines()[-1][:300] if text.strip() else type(error).__name__,
                expected=f"{nbytes:,} bytes ({format_bytes(nbytes)})",
            ) from error

    def _give_back(self) -> None:
        self._tensor = None
        self._runtime.empty_cache()

    def _bytes(self, offset: int, nbytes: int) -> Any:
        return self._tensor.view("uint8")[offset : offset + nbytes]

    def _copy(self, offset: int, source: Any) -> None:
        with self._refusals("Paddle could not copy to the device", source.size):
            moved = self._runtime.module.to_tensor(source, place=self._place)
            self._bytes(offset, source.size).copy_(moved, True)

    def write(self, offset: int, data: bytes) -> None:
        """A tensor of the data, copied into a slice."""
        import numpy as np

        self.span(offset, len(data))
        if data:
            self._copy(offset, np.frombuffer(data, dtype=np.uint8).copy())

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of the slice: reading a view of it would copy the whole tensor to the host."""
        self.span(offset, nbytes)
        if not nbytes:
            return b""
        with self._refusals("Paddle could not copy from the device", nbytes):
            return bytes(self._bytes(offset, nbytes).clone().numpy().tobytes())

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """A small piece from the host, then what is filled is copied to what is not, twice as much each time."""
        self.span(offset, nbytes)
        if not nbytes:
            return
        import numpy as np

        done = min(CHUNK, nbytes)
        self._copy(offset, np.full(done, value, dtype=np.uint8))
        with self._refusals("Paddle could not copy on the device", nbytes):
            while done < nbytes:
                part = min(done, nbytes - done)
                self._bytes(offset + done, part).copy_(self._bytes(offset, part), True)
                done += part

    def tensor(self, view: TensorView, framework: str) -> object:
        """A view for Paddle; for torch the same memory through DLPack."""
        nbytes = view_bytes(self, view)
        raw = self._bytes(view.offset, nbytes)
        if framework == "paddle":
            return self.keep(raw.view(view.dtype).reshape(list(view.shape)))
        if framework == "torch" and not self._runtime.shares:
            raise self.no_tensor(framework, f"Paddle's {self._place}")
        if framework == "torch":
            torch = import_framework("torch")
            return self.keep(torch.from_dlpack(raw).view(getattr(torch, view.dtype)).reshape(view.shape))
        raise self.no_tensor(framework, "Paddle")
