"""Memory through torch: one tensor of bytes a buffer, from its caching allocator."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from kvcore.contract.facts import MemoryStats, TensorView
from kvcore.contract.runtimes.driver import normal_pci
from kvcore.contract.runtimes.interface import (
    Allocation,
    Runtime,
    RuntimeDevice,
    RuntimeUnavailable,
    import_framework,
    view_bytes,
)
from kvcore.errors import CapabilityMissing, DeviceError, OutOfMemory
from kvcore.units import format_bytes

__all__ = ["TorchRuntime", "built_for_cuda"]


def built_for_cuda() -> bool:
    """Whether the torch that is installed is built for CUDA; it is not imported.

    ``torch/version.py`` is written when torch is built, with a line ``cuda: Optional[str] = None`` or a version. A
    torch without such a line is taken for one that is: then its import says.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    said = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    return said is None or said[1].strip() != "None"


class TorchRuntime(Runtime):
    """``torch.empty`` on ``cuda`` (CoreX's torch has the same name for its devices), or on ``cpu``."""

    name = "torch"

    def __init__(self, kind: str = "cuda") -> None:
        self._kind = kind
        self._module: Any = None

    def installed(self) -> bool:
        """Whether a torch for this kind of device is here; it is not imported."""
        return importlib.util.find_spec("torch") is not None if self._kind == "cpu" else built_for_cuda()

    def imported(self) -> bool:
        """Whether this process uses torch."""
        return "torch" in sys.modules

    def start(self) -> None:
        """Import torch and see whether it has devices."""
        if self._module is not None:
            self.check_process()
            return
        try:
            torch: Any = importlib.import_module("torch")
        except Exception as error:  # an import of native code fails in many ways
            raise RuntimeUnavailable(f"importing torch failed: {type(error).__name__}: {error}") from error
        if self._kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeUnavailable("this torch is not built for CUDA, or sees no device")
        self._module = torch
        self.mark_started()

    def devices(self) -> list[RuntimeDevice] | None:
        """Its devices, once this process has initialized torch's CUDA; before that, asking would."""
        if self._kind != "cuda" or not self.imported() or not sys.modules["torch"].cuda.is_initialized():
            return None
        self.start()
        return [self._device(index) for index in range(self._module.cuda.device_count())]

    def _device(self, index: int) -> RuntimeDevice:
        found = self._module.cuda.get_device_properties(index)
        uuid = getattr(found, "uuid", None)
        parts = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        address = None if None in parts else normal_pci(":".join(f"{int(part or 0):x}" for part in parts))
        integrated = getattr(found, "is_integrated", None)
        return RuntimeDevice(
            index,
            found.name,
            None if uuid is None else str(uuid).replace("-", "").lower(),
            address,
            None if integrated is None else bool(integrated),
        )

    def memory(self, index: int) -> tuple[int | None, int | None]:
        """cudaMemGetInfo."""
        self.start()
        if self._kind != "cuda":
            return None, None
        free, total = self._module.cuda.mem_get_info(index)
        return int(free), int(total)

    def stats(self, index: int) -> MemoryStats:
        """The counters of torch's allocator for this process."""
        self.start()
        if self._kind != "cuda":
            raise CapabilityMissing("torch does not count host memory", code="KV-CAP-001", where="torch")
        cuda = self._module.cuda
        return MemoryStats(
            "torch",
            current=int(cuda.memory_allocated(index)),
            peak=int(cuda.max_memory_allocated(index)),
            reserved=int(cuda.memory_reserved(index)),
            peak_reserved=int(cuda.max_memory_reserved(index)),
        )

    def reset_peak(self, index: int) -> None:
        """torch's own reset."""
        self.start()
        if self._kind != "cuda":
            raise CapabilityMissing("torch does not count host memory", code="KV-CAP-001", where="torch")
        self._module.cuda.reset_peak_memory_stats(index)

    def allocate(self, index: int, name: str, nbytes: int, itemsize: int) -> Allocation:
        """One tensor of ``nbytes`` bytes."""
        self.start()
        return _TorchAllocation(self, "cpu" if self._kind == "cpu" else f"{self._kind}:{index}", name, nbytes)

    @property
    def module(self) -> Any:
        """The package, once started."""
        return self._module

    def empty_cache(self) -> None:
        """Give idle segments back to the device."""
        if self._kind == "cuda":
            self._module.cuda.empty_cache()


class _TorchAllocation(Allocation):
    """One tensor of bytes."""

    def __init__(self, runtime: TorchRuntime, place: str, name: str, nbytes: int) -> None:
        super().__init__(name, nbytes)
        self._runtime = runtime
        torch = runtime.module
        try:
            self._tensor: Any = torch.empty(nbytes, dtype=torch.uint8, device=place)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "alloc" in str(error)
            kind: type[DeviceError] = OutOfMemory if full else DeviceError
            raise kind(
                "torch could not allocate",
                code="KV-OOM-001" if full else "KV-DEV-028",
                where=f"{name} on {place}",
                got=str(error).strip().splitlines()[0][:300],
                expected=f"{nbytes:,} bytes ({format_bytes(nbytes)})",
            ) from error
        try:
            self._tensor.zero_()
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        self._tensor = None
        self._runtime.empty_cache()

    def write(self, offset: int, data: bytes) -> None:
        """A tensor of the data, copied into a slice."""
        self.span(offset, len(data))
        if data:
            torch = self._runtime.module
            self._tensor[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def read(self, offset: int, nbytes: int) -> bytes:
        """The slice, copied to the host."""
        self.span(offset, nbytes)
        return bytes(self._tensor[offset : offset + nbytes].cpu().numpy().tobytes()) if nbytes else b""

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """``fill_`` of the slice."""
        self.span(offset, nbytes)
        self._tensor[offset : offset + nbytes].fill_(value)

    def tensor(self, view: TensorView, framework: str) -> object:
        """A view for torch; for Paddle the same memory through DLPack."""
        nbytes = view_bytes(self, view)
        raw = self._tensor[view.offset : view.offset + nbytes]
        if framework == "torch":
            torch = self._runtime.module
            return self.keep(raw.view(getattr(torch, view.dtype)).reshape(view.shape))
        if framework == "paddle":
            paddle = import_framework("paddle")
            if raw.is_cuda and not paddle.is_compiled_with_cuda():
                raise self.no_tensor(framework, "torch, which this Paddle cannot use")
            return self.keep(paddle.utils.dlpack.from_dlpack(raw).view(view.dtype).reshape(list(view.shape)))
        raise self.no_tensor(framework, "torch")
