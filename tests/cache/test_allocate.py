"""All or nothing, as planned, and given back to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.cache.allocate import allocate_cache
from kvcore.contract import AllocationRequest, Buffer, Device, hookimpl
from kvcore.errors import BufferMisuse, OutOfMemory, PluginError, VerificationFailed
from kvcore.handle import PlatformHandle
from kvcore.platforms.replay import ReplayBlockSizer

from .conftest import MIB, card, handle_of, small_layout


def free(platform: PlatformHandle) -> int | None:
    return platform.read_memory(platform.device())[0].free


def test_the_cache_is_the_layout(platform: PlatformHandle) -> None:
    layout = small_layout()
    with allocate_cache(platform, platform.device(), layout, 5) as cache:
        assert list(cache.tensors) == [f"layers.{i}.{s}" for i in range(3) for s in ("k", "v")]
        assert cache.nbytes == layout.bytes(5) == cache.committed_bytes
        assert free(platform) == 64 * MIB - layout.bytes(5)
        tensor: Any = cache.tensor("layers.1.v")
        assert tensor.shape == (5, 2, 16, 8)
        assert not tensor.any()
        cache.write_block("layers.1.v", 4, b"\xff" * 2, offset=510)
        assert tensor.view("uint16")[4, 1, 15, 7] == 0xFFFF
        del tensor
    assert free(platform) == 64 * MIB


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    blocks=st.integers(1, 9),
    granularity=st.sampled_from([1, 256, 4096]),
)
def test_sizes_agree_for_every_shape(layers: int, heads: int, blocks: int, granularity: int) -> None:
    platform = handle_of(ReplayBlockSizer([card(granularity=granularity)]))
    layout = small_layout(layers=layers, heads=heads, alignment=granularity)
    cache = allocate_cache(platform, platform.device(), layout, blocks)
    assert cache.nbytes == layout.bytes(blocks)
    assert cache.release() == layout.bytes(blocks)
    assert free(platform) == 64 * MIB


@pytest.mark.parametrize("failing", [1, 2, 4, 6])
@pytest.mark.parametrize("error", [OutOfMemory("full"), RuntimeError("driver"), KeyboardInterrupt(), MemoryError()])
def test_whatever_fails_nothing_stays(failing: int, error: BaseException) -> None:
    released: list[str] = []

    class Failing(ReplayBlockSizer):
        count = 0

        @hookimpl
        def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
            self.count += 1
            if self.count == failing:
                raise error
            return super().kvcore_allocate(device, request)

        @hookimpl
        def kvcore_release(self, buffer: Buffer) -> int:
            released.append(buffer.name)
            return super().kvcore_release(buffer)

    platform = handle_of(Failing([card()]))
    with pytest.raises((type(error), PluginError)) as caught:
        allocate_cache(platform, platform.device(), small_layout(), 5)
    assert caught.value is error or caught.value.__cause__ is error
    assert free(platform) == 64 * MIB
    names = [t.name for t in small_layout().tensors(5)][: failing - 1]
    assert released == names[::-1]


def test_a_device_that_is_too_small_keeps_nothing() -> None:
    layout = small_layout()
    platform = handle_of(ReplayBlockSizer([card(free=layout.bytes(5) - 1)]))
    with pytest.raises(OutOfMemory):
        allocate_cache(platform, platform.device(), layout, 5)
    assert free(platform) == layout.bytes(5) - 1


def test_progress_is_told_after_each_tensor(platform: PlatformHandle) -> None:
    told: list[tuple[int, int]] = []
    layout = small_layout()
    allocate_cache(
        platform, platform.device(), layout, 5, progress=lambda done, total: told.append((done, total))
    ).release()
    assert len(told) == 6
    assert told[-1] == (layout.bytes(5), layout.bytes(5))


def test_a_layout_with_another_alignment_than_the_device_is_found_out() -> None:
    platform = handle_of(ReplayBlockSizer([card(granularity=4096)]))
    with pytest.raises(VerificationFailed) as caught:
        allocate_cache(platform, platform.device(), small_layout(alignment=1), 5)
    assert caught.value.code == "KV-VER-002"
    assert free(platform) == 64 * MIB


def test_lazy_pages_are_found_out(lying: Callable[[type[ReplayBlockSizer]], PlatformHandle]) -> None:
    class Lazy(ReplayBlockSizer):
        @hookimpl
        def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
            return replace(super().kvcore_allocate(device, request), committed_bytes=0)

    platform = lying(Lazy)
    with pytest.raises(VerificationFailed) as caught:
        allocate_cache(platform, platform.device(), small_layout(), 5)
    assert caught.value.code == "KV-VER-004"


def test_a_release_that_frees_nothing_is_found_out(lying: Callable[[type[ReplayBlockSizer]], PlatformHandle]) -> None:
    class Keeps(ReplayBlockSizer):
        @hookimpl
        def kvcore_release(self, buffer: Buffer) -> int:
            super().kvcore_release(buffer)
            return 0

    platform = lying(Keeps)
    cache = allocate_cache(platform, platform.device(), small_layout(), 5)
    with pytest.raises(VerificationFailed) as caught:
        cache.release()
    assert caught.value.code == "KV-VER-003"


def test_a_rollback_that_fails_gives_back_the_rest_and_says_so() -> None:
    class Sticky(ReplayBlockSizer):
        @hookimpl
        def kvcore_allocate(self, device: Device, request: AllocationRequest) -> Buffer:
            if request.name == "layers.2.k":
                raise OutOfMemory("full")
            return super().kvcore_allocate(device, request)

        @hookimpl
        def kvcore_release(self, buffer: Buffer) -> int:
            if buffer.name == "layers.1.k":
                raise BufferMisuse("stuck")
            return super().kvcore_release(buffer)

    platform = handle_of(Sticky([card()]))
    with pytest.raises(VerificationFailed) as caught:
        allocate_cache(platform, platform.device(), small_layout(), 5)
    assert caught.value.got == "layers.1.k: stuck"
    assert isinstance(caught.value.__cause__, OutOfMemory)
    assert free(platform) == 64 * MIB - small_layout().tensors(5)[0].nbytes


def test_use_after_release_and_outside(platform: PlatformHandle) -> None:
    cache = allocate_cache(platform, platform.device(), small_layout(), 5)
    for name, block, offset, nbytes in (
        ("layers.9.k", 0, 0, 1),
        ("layers.0.k", 5, 0, 1),
        ("layers.0.k", -1, 0, 1),
        ("layers.0.k", 0, 512, 1),
        ("layers.0.k", 0, -1, 1),
    ):
        with pytest.raises(BufferMisuse):
            cache.read_block(name, block, nbytes, offset)
    cache.release()
    for call in (cache.release, lambda: cache.read_block("layers.0.k", 0), lambda: cache.tensor("layers.0.k")):
        with pytest.raises(BufferMisuse):
            call()


def test_a_release_refused_for_a_living_tensor_can_be_tried_again(platform: PlatformHandle) -> None:
    cache = allocate_cache(platform, platform.device(), small_layout(), 5)
    tensor = cache.tensor("layers.0.k")
    with pytest.raises(BufferMisuse, match="alive"):
        cache.release()
    del tensor
    cache.release()
    assert free(platform) == 64 * MIB
