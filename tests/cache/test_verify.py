"""Verification finds blocks that share memory, lose their bytes or are not there."""

from __future__ import annotations

import pytest

from kvcore.cache.allocate import allocate_cache
from kvcore.cache.verify import blocks_to_check, verify_cache
from kvcore.contract import Buffer, hookimpl
from kvcore.errors import VerificationFailed
from kvcore.handle import PlatformHandle
from kvcore.platforms.replay import ReplayBlockSizer

from .conftest import card, handle_of, small_layout


def test_an_honest_cache_passes_and_is_zero_again(platform: PlatformHandle) -> None:
    with allocate_cache(platform, platform.device(), small_layout(), 50) as cache:
        found = verify_cache(cache, samples=8)
        assert {0, 1, 48, 49} <= set(found.blocks)
        assert found.tensors == 6
        for spec in cache:
            for block in range(50):
                assert not any(cache.read_block(spec.name, block))


class WrapsAt(ReplayBlockSizer):
    """Folds byte offsets as a narrow index would."""

    at = 16 * 512

    @hookimpl
    def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
        super().kvcore_write(buffer, offset % self.at, data)

    @hookimpl
    def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        return super().kvcore_read(buffer, offset % self.at, nbytes)


def test_blocks_that_fold_into_one_are_found_with_both_names() -> None:
    """The wrap is the same for writes and reads, so each block alone reads back well: only the order finds it."""
    platform = handle_of(WrapsAt([card()]))
    with (
        allocate_cache(platform, platform.device(), small_layout(), 17) as cache,
        pytest.raises(VerificationFailed) as caught,
    ):
        verify_cache(cache)
    assert caught.value.where == "layers.0.k, block 0"
    assert caught.value.got == "the pattern of layers.0.k, block 16: the two share memory"
    with allocate_cache(platform, platform.device(), small_layout(), 16) as cache:
        verify_cache(cache)


def test_writes_that_are_lost_are_found() -> None:
    class Loses(ReplayBlockSizer):
        @hookimpl
        def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
            if offset < 5 * 512:
                super().kvcore_write(buffer, offset, data)

    platform = handle_of(Loses([card()]))
    with (
        allocate_cache(platform, platform.device(), small_layout(), 17) as cache,
        pytest.raises(VerificationFailed) as caught,
    ):
        verify_cache(cache)
    assert caught.value.got == "zeros: the write was lost"


def test_tensors_that_share_memory_are_found() -> None:
    class OneForAll(ReplayBlockSizer):
        first: Buffer | None = None

        @hookimpl
        def kvcore_write(self, buffer: Buffer, offset: int, data: bytes) -> None:
            self.first = self.first or buffer
            super().kvcore_write(self.first, offset, data)

        @hookimpl
        def kvcore_read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
            return super().kvcore_read(self.first or buffer, offset, nbytes)

    platform = handle_of(OneForAll([card()]))
    with (
        allocate_cache(platform, platform.device(), small_layout(), 9) as cache,
        pytest.raises(VerificationFailed) as caught,
    ):
        verify_cache(cache)
    assert "layers.0.k, block 0" in str(caught.value.where)
    assert "layers.2.v" in str(caught.value.got)


@pytest.mark.parametrize(("heads", "edges"), [(8, {16_384, 32_768, 65_536}), (1, {131_072, 262_144, 524_288})])
def test_both_sides_of_every_index_boundary_are_checked(heads: int, edges: set[int]) -> None:
    """2 bytes an element: signed bytes, then signed elements (and unsigned bytes), then unsigned elements."""
    layout = small_layout(heads=heads, width=128)
    spec = layout.tensors(10**6)[0]
    assert spec.block_elements == heads * 128 * 16
    scale = 64 // layout.block_size
    chosen = set(blocks_to_check(spec, 10**7, samples=4, seed=0))
    for edge in edges:
        assert {edge * scale - 1, edge * scale, edge * scale + 1} <= chosen


def test_samples_are_repeatable_and_inside() -> None:
    spec = small_layout().tensors(100)[0]
    one = blocks_to_check(spec, 100, samples=30, seed=1)
    assert one == blocks_to_check(spec, 100, samples=30, seed=1)
    assert one != blocks_to_check(spec, 100, samples=30, seed=2)
    assert set(one) <= set(range(100))
    assert blocks_to_check(spec, 1, samples=5, seed=0) == (0,)
