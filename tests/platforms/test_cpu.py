"""The cpu platform: buffers are there when they are handed out, and gone when they are given back."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from kvcore.contract import AllocationRequest, Buffer, TensorView, hostmem
from kvcore.errors import BufferMisuse, CapabilityMissing, OutOfMemory
from kvcore.handle import PlatformHandle
from kvcore.platforms import hostbuf
from kvcore.registry import default_registry

MIB = 1024**2


@pytest.fixture
def cpu() -> PlatformHandle:
    return default_registry().platform("cpu")


def allocate(cpu: PlatformHandle, nbytes: int, name: str = "test") -> Buffer:
    return cpu.allocate(cpu.device(), AllocationRequest(name, nbytes, 4096, nbytes))


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_buffer_is_committed_and_zero(cpu: PlatformHandle) -> None:
    before = resident()
    buffer = allocate(cpu, 96 * MIB)
    try:
        assert buffer.committed_bytes == buffer.nbytes == 96 * MIB
        assert resident() - before >= 95 * MIB
        assert cpu.read(buffer, 0, 4096) == bytes(4096)
        assert cpu.read(buffer, 96 * MIB - 10, 10) == bytes(10)
    finally:
        assert cpu.release(buffer) == 96 * MIB
    assert resident() - before < 8 * MIB


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB + 1, 7 * MIB + 123])
def test_every_size_is_rounded_to_pages_and_usable_to_its_end(cpu: PlatformHandle, nbytes: int) -> None:
    buffer = allocate(cpu, nbytes)
    assert buffer.nbytes == -(-nbytes // 4096) * 4096 == buffer.committed_bytes
    cpu.write(buffer, nbytes - 1, b"\x7f")
    assert cpu.read(buffer, nbytes - 1, 1) == b"\x7f"
    cpu.fill(buffer, 0, buffer.nbytes, 0xAB)
    assert cpu.read(buffer, 0, buffer.nbytes) == b"\xab" * buffer.nbytes
    assert cpu.release(buffer) == buffer.nbytes


def test_misuse_is_refused(cpu: PlatformHandle) -> None:
    buffer = allocate(cpu, 4096)
    for offset, nbytes in ((-1, 1), (4096, 1), (4000, 97), (0, 4097), (0, -1)):
        with pytest.raises(BufferMisuse):
            cpu.read(buffer, offset, nbytes)
    with pytest.raises(BufferMisuse):
        cpu.write(buffer, 4090, bytes(7))
    cpu.release(buffer)
    for call in (
        lambda: cpu.release(buffer),
        lambda: cpu.read(buffer, 0, 1),
        lambda: cpu.write(buffer, 0, b"x"),
        lambda: cpu.fill(buffer, 0, 1, 0),
        lambda: cpu.tensor(buffer, TensorView((1,), "uint8"), "numpy"),
    ):
        with pytest.raises(BufferMisuse):
            call()


def test_a_living_tensor_keeps_its_memory(cpu: PlatformHandle) -> None:
    """Unmapping under a tensor would be a crash at its next use: release is refused and can be tried again."""
    buffer = allocate(cpu, 4096)
    tensor = cpu.tensor(buffer, TensorView((8, 4), "float32"), "numpy")
    with pytest.raises(BufferMisuse, match="while a tensor over it is alive"):
        cpu.release(buffer)
    del tensor
    gc.collect()
    assert cpu.release(buffer) == 4096


@pytest.mark.parametrize("framework", ["numpy", "torch", "paddle"])
@pytest.mark.parametrize("dtype", sorted(hostbuf.NUMPY_DTYPES))
def test_tensors_share_memory(cpu: PlatformHandle, framework: str, dtype: str) -> None:
    if framework != "numpy":
        pytest.importorskip(
            framework, reason=f"{framework} is not installed (an extra of kvcore)", exc_type=ImportError
        )
    buffer = allocate(cpu, 8192)
    tensor = cpu.tensor(buffer, TensorView((2, 3, 4), dtype, offset=256), framework)
    assert list(tensor.shape) == [2, 3, 4]  # type: ignore[attr-defined]
    cpu.write(buffer, 256, b"\x01" * 24 * 4)
    # A value that the raw bytes give shows that no copy stands between.
    if framework == "numpy":
        assert tensor.tobytes() == b"\x01" * tensor.nbytes  # type: ignore[attr-defined]
    elif dtype in ("int8", "uint8"):
        assert int(tensor.sum()) == 24  # type: ignore[attr-defined]
    del tensor
    gc.collect()
    assert cpu.release(buffer) == 8192


def test_a_tensor_outside_the_buffer_is_refused(cpu: PlatformHandle) -> None:
    buffer = allocate(cpu, 4096)
    for view in (TensorView((1025,), "float32"), TensorView((1,), "uint8", 4096), TensorView((1,), "uint8", -1)):
        with pytest.raises(BufferMisuse):
            cpu.tensor(buffer, view, "numpy")
    with pytest.raises(CapabilityMissing):
        cpu.tensor(buffer, TensorView((1,), "uint8"), "jax")
    cpu.release(buffer)


def test_more_than_the_host_has_is_refused_before_anything_is_touched(cpu: PlatformHandle) -> None:
    room = hostmem.host_room()
    assert room is not None
    before = resident()
    with pytest.raises(OutOfMemory) as caught:
        allocate(cpu, room * 2)
    assert caught.value.exit_code == 1
    assert resident() - before < 4 * MIB


def test_room_that_shrinks_while_committing_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour takes the memory between two rounds: nothing of the buffer stays."""
    answers = iter([8 * MIB])
    room = hostbuf.Room(lambda: 330 * MIB, lambda: next(answers))
    monkeypatch.setattr(room, "AGE", 0.0)
    before = resident()
    with pytest.raises(OutOfMemory, match="no room"):
        hostbuf.HostBlock("test", 320 * MIB, commit=True, room=room)
    gc.collect()
    assert resident() - before < 8 * MIB


def test_a_thousand_cycles_do_not_leak(cpu: PlatformHandle) -> None:
    for _ in range(50):
        cpu.release(allocate(cpu, 3 * MIB))
    before, files = resident(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(1000):
        cpu.release(allocate(cpu, 3 * MIB))
    assert resident() - before < 2 * MIB
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_the_peak_of_this_process(cpu: PlatformHandle) -> None:
    device = cpu.device()
    cpu.reset_peak(device)
    cpu.release(allocate(cpu, 128 * MIB))
    stats = cpu.memory_stats(device)
    assert stats.peak is not None
    assert stats.current is not None
    assert stats.peak - stats.current > 100 * MIB
