"""Public bug reports about bytes per block, block sizes and reporting, with their right values.

The numbers are from the threads that are named; each once came out wrong because a second formula knew less than the
allocator.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.contract import CacheLayout, Group, Growth, Layer, Role, Store
from kvcore.conventions import CONVENTIONS, GENERIC, convention
from kvcore.errors import KvcoreError, PolicyError
from kvcore.geometry import layouts, read_config
from kvcore.geometry.formats import PACKED_RECORDS
from kvcore.geometry.model import ModelConfig
from kvcore.geometry.paging import Kind, group_kinds, grown_block_size

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
GIB = 2**30


def config(name: str) -> ModelConfig:
    return read_config(CONFIGS / f"{name}.json")


def llama(layers: int, kv_heads: int, head_dim: int, **more: object) -> ModelConfig:
    keys = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * 4,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **more,
    }
    return read_config(keys)


def test_index_keys_are_counted() -> None:
    """sgl-project/sglang#11309: 61 layers of 656 + 132 bytes, and not of 656."""
    (layout,) = layouts(config("deepseek-v3.2"), cache_dtype="fp8", block_size=64)
    assert layout.bytes_per_token == 48_068
    assert round(Fraction(975_424 * layout.bytes_per_token, GIB), 2) == Fraction("43.67")


def test_target_and_draft_share_one_budget() -> None:
    """NVIDIA/TensorRT-LLM#12188: 40 GiB hold 317,750 tokens of both, where each had claimed all of it."""
    target, draft = llama(32, 8, 128), llama(1, 8, 128)
    (layout,) = layouts(target, draft=draft, block_size=1)
    assert layout.bytes_per_token == 131_072 + 4_096
    assert kvcore.plan(layout, kv_cache_memory="40GiB").tokens == 317_750
    drafts = [layer for group in layout.groups for layer in group.layers if layer.role is Role.DRAFT]
    assert [layer.index for layer in drafts] == [32]


def test_windows_are_not_paid_for_the_whole_context() -> None:
    """sgl-project/sglang#39310: 9 full and 27 window layers; a name list had made all of them full."""
    keys = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 4,
        "torch_dtype": "bfloat16",
    }
    (layout,) = layouts(read_config(keys), cache_dtype="fp8", block_size=16, step_tokens=1)
    by_growth = {g: sum(group.bytes_per_token for group in layout.groups if group.growth is g) for g in Growth}
    assert layout.bytes_per_token == 73_728
    assert by_growth[Growth.TOKEN] == 18_432
    assert by_growth[Growth.WINDOW] == 55_296
    long, longer = layout.request_blocks(100_000), layout.request_blocks(200_000)
    assert longer - long == 100_000 // 16


@pytest.mark.parametrize(("record", "total"), [("fp8_ds_mla", 54_728), ("nvfp4_ds_mla", 37_032)])
def test_a_packed_record_is_not_dimension_times_width(record: str, total: int) -> None:
    """local-inference-lab/vllm#82: 79 latent records and 22 index records a token."""
    assert 79 * PACKED_RECORDS[record].nbytes(512, 64) + 22 * 132 == total
    (layout,) = layouts(config("deepseek-v3"), cache_dtype=record, block_size=1)
    assert layout.bytes_per_token == 61 * PACKED_RECORDS[record].nbytes(512, 64)


def test_what_is_planned_is_every_layer() -> None:
    """mudler/vllm.cpp#357: one layer's bytes had been taken for all 28."""
    plan = kvcore.plan(layouts(config("qwen3-1.7b"), block_size=16), kv_cache_memory="1GiB", on_shortage="warn")
    assert plan.bytes_per_block == 1_835_008
    assert plan.num_blocks == 585
    assert sum(tensor.nbytes for tensor in plan.layout.tensors(585)) == 585 * 1_835_008


def test_cross_attention_has_the_encoders_length() -> None:
    """NVIDIA/TensorRT-LLM#19514: 1500 positions are 47 blocks of 32, whatever the limit on text."""
    (layout,) = layouts(config("whisper-large-v3"), block_size=32)
    (cross,) = [group for group in layout.groups if group.growth is Growth.ENCODER]
    assert cross.request_blocks(7, None) == 47
    assert cross.window == 1500
    assert cross.bytes_per_token * cross.window == 245_760_000


def test_shape_and_bytes_come_from_one_object() -> None:
    """vllm-project/vllm#24513: a backend saw K and V where the latent vector is one."""
    (layout,) = layouts(config("deepseek-v3"), block_size=16)
    tensor = layout.tensors(84_738)[0]
    assert tensor.shape == (84_738, 1, 16, 576)
    assert tensor.elements == 780_945_408


def kind(name: str, growth: Growth, nbytes: int, count: int) -> Kind:
    stores = (Store(name, 1, nbytes, "uint8", 1),)
    return Kind(name, growth, None, False, stores, tuple((index, Role.TARGET) for index in range(count)))


def pool(kinds: list[Kind], block_size: int) -> CacheLayout:
    grown = grown_block_size(kinds, block_size, GENERIC)
    return CacheLayout("pool", grown, tuple(group_kinds(kinds, grown, GENERIC)))


def test_a_state_that_does_not_divide_is_padded_and_the_waste_is_shown() -> None:
    """vllm-project/vllm#37467: 540,672 bytes are 16.5 pages of 64 tokens; 557,056 allocated would be 3.0 % empty."""
    layout = pool([kind("state", Growth.REQUEST, 540_672, 4), kind("full", Growth.TOKEN, 512, 4)], 64)
    assert layout.page_bytes % 512 == 0
    assert layout.page_bytes >= 540_672
    assert layout.padding_bytes == 4 * (layout.page_bytes - 540_672)
    assert layout.page_bytes == 540_672  # 1056 tokens: the block grows to where it divides


def test_what_does_not_grow_with_tokens_is_not_scaled() -> None:
    """vllm-project/vllm#43626: pages of 2 MiB and 1 MiB divide, yet a state is not more tokens: it is padded."""
    layout = pool([kind("state", Growth.REQUEST, 2**20, 2), kind("draft", Growth.TOKEN, 2**21 // 16, 2)], 16)
    assert layout.block_size == 16
    assert layout.page_bytes == 2**21
    assert layout.padding_bytes == 2 * 2**20


@pytest.mark.parametrize(("scale", "ratio"), [(0, Fraction(2)), (4, Fraction("2.0155"))])
def test_scales_break_a_ratio_of_pages_and_the_waste_is_shown(scale: int, ratio: Fraction) -> None:
    """vllm-project/vllm#40388: 4096 and 2048 bytes a token divide; with scales of 4 bytes a head they do not."""
    sliding, full = 8 * 2 * (256 + scale), 2 * 2 * (512 + scale)
    assert round(Fraction(sliding, full), 4) == ratio
    layout = pool([kind("sliding", Growth.TOKEN, sliding, 25), kind("full", Growth.TOKEN, full, 5)], 16)
    (group,) = [group for group in layout.groups if group.kind == "full"]
    assert (group.block_size, layout.padding_bytes > 0) == ((32, False) if scale == 0 else (16, True))


def test_a_block_size_is_solved_once_from_what_kernels_take() -> None:
    """vllm-project/vllm-ascend#7528: a state had grown the block to 1024, and a later hook set it to 16 again."""
    (layout, *_) = layouts(config("qwen3-next-80b-a3b"), tp=2, engine=convention("vllm-ascend"))
    assert layout.block_size % 128 == 0
    assert layout.page_bytes == max(group.page_bytes for group in layout.groups)
    with pytest.raises(PolicyError) as caught:
        layouts(config("qwen3-8b"), block_size=16, engine=convention("vllm-ascend"))
    assert caught.value.hint == "the nearest are 128 and 256"


def test_a_request_costs_a_fixed_part_and_a_part_for_each_token() -> None:
    """vllm-project/vllm#51041: dividing the pool by one number of tokens gives any cost one likes."""
    (layout,) = layouts(config("qwen3-next-80b-a3b"), step_tokens=8192)
    for tokens in (10**5, 10**6):
        blocks = layout.request_blocks(tokens) * layout.bytes_per_block
        slope = layout.marginal_bytes_per_token * tokens
        assert (
            abs(layout.fixed_bytes_per_request + slope - blocks) <= layout.bytes_per_block * len(layout.groups) + tokens
        )
    plan = kvcore.plan(layout, kv_cache_memory="20GiB", max_model_len=32_768, engine="vllm")
    assert plan.tokens is None
    assert plan.engine_concurrency is not None
    assert plan.engine_tokens == plan.engine_concurrency.numerator * 32_768 // plan.engine_concurrency.denominator


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_public_config_plans_or_says_why_not(path: Path, tp: int) -> None:
    shapes = [shape.attention for shape in read_config(path).layers]
    heads = {count for a in shapes for count in (getattr(a, "query_heads", tp), getattr(a, "kv_heads", tp))}
    if any(count % tp and tp % count for count in heads) or any(getattr(a, "query_heads", tp) % tp for a in shapes):
        with pytest.raises(KvcoreError, match="cannot be divided"):
            layouts(read_config(path), tp=tp, dtype="bf16")
        return
    layout = layouts(read_config(path), tp=tp, dtype="bf16", step_tokens=2048)[0]
    assert layout.bytes(7) == sum(tensor.nbytes for tensor in layout.tensors(7)) == 7 * layout.bytes_per_block
    assert layout.request_blocks(1) >= len(layout.groups)
    assert 0 <= layout.padding_bytes < layout.bytes_per_block * len(layout.groups)
    indices = sorted(layer.index for group in layout.groups for layer in group.layers)
    assert indices == sorted(shape.index for shape in read_config(path).layers)


def test_there_are_enough_public_configs() -> None:
    assert len(list(CONFIGS.glob("*.json"))) >= 60


@given(
    st.lists(st.tuples(st.sampled_from(Growth), st.integers(1, 4096), st.integers(1, 40)), min_size=2, max_size=4),
    st.sampled_from([1, 16, 64]),
)
def test_a_pool_has_room_for_every_layer(parts: list[tuple[Growth, int, int]], block_size: int) -> None:
    kinds = [kind(f"k{n}", growth, nbytes, count) for n, (growth, nbytes, count) in enumerate(parts)]
    kinds = [replace(k, window=100) if k.growth in (Growth.WINDOW, Growth.CHUNK, Growth.ENCODER) else k for k in kinds]
    layout = pool(kinds, block_size)
    assert layout.num_layers == sum(count for _, _, count in parts)
    for group in layout.groups:
        assert group.page_bytes <= layout.page_bytes
        assert len(group.layers) <= layout.slots
        assert isinstance(group, Group)
        assert all(isinstance(layer, Layer) for layer in group.layers)
    blocks = [layout.request_blocks(tokens) for tokens in (1, 10, 100, 1000, 10_000)]
    assert blocks == sorted(blocks)


def test_conventions_are_found_by_version() -> None:
    assert convention("vllm").since > convention("vllm@0.19.1").since
    assert convention("vllm@0.20") is convention("vllm@1.0rc1") is convention("vllm")
    names = {(entry.name, entry.since) for entry in CONVENTIONS}
    assert len(names) == len(CONVENTIONS)
    assert all(entry.source for entry in CONVENTIONS)
