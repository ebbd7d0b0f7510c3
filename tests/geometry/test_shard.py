"""Dividing a model among ranks: shares add up to the whole, what cannot be divided is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.contract import Growth
from kvcore.conventions import convention
from kvcore.errors import ConfigError, PolicyError
from kvcore.geometry import layouts, read_config, stage_layers
from kvcore.geometry.formats import CACHE_FORMATS, DTYPES
from kvcore.geometry.model import ModelConfig
from kvcore.sizing.limits import largest_fitting


def model(layers: int = 12, query_heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> ModelConfig:
    keys = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
    }
    return read_config(keys)


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_stages_add_up_and_differ_by_one(layers: int, pp: int) -> None:
    counts = stage_layers(layers, pp)
    assert sum(counts) == layers
    assert len(counts) == pp
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_what_is_left_over_goes_to_the_last_but_one() -> None:
    assert stage_layers(10, 4) == [2, 3, 3, 2]
    assert stage_layers(9, 4) == [2, 2, 3, 2]
    assert stage_layers(61, 2) == [31, 30]


@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 12), st.sampled_from(sorted(CACHE_FORMATS)), st.sampled_from([1, 16])
)
def test_ranks_add_up_to_the_whole(tp: int, pp: int, cache_dtype: str, block_size: int) -> None:
    whole = layouts(model(), block_size=block_size, cache_dtype=cache_dtype)[0]
    ranks = layouts(model(), tp=tp, pp=pp, block_size=block_size, cache_dtype=cache_dtype)
    assert [rank.place.rank for rank in ranks] == list(range(tp * pp))
    assert sum(rank.bytes_per_token for rank in ranks) == whole.bytes_per_token
    indices = [layer.index for rank in ranks[::tp] for group in rank.groups for layer in group.layers]
    assert indices == list(range(12))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 5000), st.sampled_from([1, 256, 4096]))
def test_tensors_are_the_bytes(tp: int, blocks: int, alignment: int) -> None:
    from dataclasses import replace

    layout = replace(layouts(model(), tp=tp, block_size=16, cache_dtype="int4")[0], alignment=alignment)
    tensors = layout.tensors(blocks)
    assert sum(-(-t.nbytes // alignment) * alignment for t in tensors) == layout.bytes(blocks)
    assert layout.bytes(blocks) >= blocks * layout.bytes_per_block
    for tensor in tensors:
        extent = tensor.shape[0] * tensor.shape[1] * tensor.shape[2] * tensor.shape[3]
        assert extent == tensor.elements == tensor.block_elements * blocks
        assert tensor.nbytes == tensor.elements * DTYPES[tensor.dtype]
    assert len({t.name for t in tensors}) == len(tensors)


def test_heads_are_replicated_beyond_their_number_and_said_so() -> None:
    """B25: 8 heads on 32 ranks are one head a rank, held four times; never 0."""
    rank = layouts(model(query_heads=64), tp=32, block_size=16)[5]
    assert {store.heads for group in rank.groups for layer in group.layers for store in layer.stores} == {1}
    assert any("replicated on 4" in note for note in rank.notes)


def test_the_latent_vector_does_not_shrink() -> None:
    keys = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    one, eight = (layouts(read_config(keys), tp=tp, block_size=64)[0] for tp in (1, 8))
    assert one.bytes_per_block == eight.bytes_per_block == 4_497_408
    assert any("replicated on all 8" in note for note in eight.notes)


def test_ranks_that_replicate_a_head_can_share_its_tokens() -> None:
    """Decode context parallelism: the same bytes a rank hold dcp times the tokens of a request."""
    one, two = (layouts(model(query_heads=32, kv_heads=4), tp=8, dcp=dcp, block_size=16)[0] for dcp in (1, 2))
    assert one.bytes_per_block == two.bytes_per_block
    assert (one.request_blocks(1000), two.request_blocks(1000)) == (63, 32)
    assert two.block_tokens == 32
    plans = [kvcore.plan(layout, kv_cache_memory="1GiB", max_model_len=1000) for layout in (one, two)]
    assert plans[1].tokens == 2 * (plans[0].tokens or 0)
    mla = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_attention_heads": 8, "kv_lora_rank": 512}
    latent = read_config({**mla, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"})
    assert layouts(latent, tp=8, dcp=8, block_size=64)[0].request_blocks(1024) == 2


@pytest.mark.parametrize(("kv_heads", "tp", "dcp"), [(8, 8, 2), (4, 8, 4), (4, 8, 3), (2, 8, 8)])
def test_tokens_that_cannot_be_shared_are_refused(kv_heads: int, tp: int, dcp: int) -> None:
    with pytest.raises(PolicyError) as caught:
        layouts(model(query_heads=32, kv_heads=kv_heads), tp=tp, dcp=dcp, block_size=16)
    assert caught.value.code == "KV-POL-061"


GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}


@given(st.integers(0, 2**34), st.sampled_from([1, 16, 64]))
def test_groups_apart_have_their_share_and_fill_the_memory(memory: int, block_size: int) -> None:
    """SGLang: windows have 0.8 tokens for each token of full layers (swa_full_tokens_ratio)."""
    (layout,) = layouts(read_config(GEMMA), block_size=block_size, engine=convention("sglang"), step_tokens=64)
    assert not layout.pooled
    blocks = largest_fitting(layout, memory)
    assert layout.bytes(blocks) <= memory < layout.bytes(blocks + 1) or blocks == 0
    tensors = layout.tensors(blocks)
    assert sum(tensor.nbytes for tensor in tensors) == layout.bytes(blocks)
    sizes = {tensor.shape[0] for tensor in tensors}
    assert sizes == {blocks, blocks * 4 // 5}
    if blocks:
        for tokens in (1, 500, 5000):
            need = layout.request_blocks(tokens)
            windows = next(group for group in layout.groups if group.window)
            assert need * 4 // 5 >= windows.request_blocks(tokens, 64)


def test_layers_that_an_engine_has_no_ratio_for_are_refused() -> None:
    crossed = read_config(Path(__file__).parents[1] / "data" / "configs" / "whisper-large-v3.json")
    with pytest.raises(PolicyError) as caught:
        layouts(crossed, engine=convention("sglang"))
    assert caught.value.code == "KV-POL-062"


@given(available=st.integers(2**32, 2**38), tp=st.sampled_from([1, 2, 4, 8]))
def test_states_get_their_ratio_of_the_memory(available: int, tp: int) -> None:
    """SGLang takes floor(rest * 0.9 / 1.9 / state) slots and fills the rest (model_runner_kv_cache_mixin.py).

    The layout grows with its tokens, so that it may hold a slot more, and as many tokens fewer as that takes.
    """
    hybrid = read_config(Path(__file__).parents[1] / "data" / "configs" / "qwen3-next-80b-a3b.json")
    layout = layouts(hybrid, tp=tp, engine=convention("sglang"))[0]
    state, full = (next(g for g in layout.groups if (g.growth is Growth.REQUEST) is states) for states in (True, False))
    assert {store.dtype for layer in state.layers for store in layer.stores} == {"bfloat16", "float32"}
    slot, cell = state.bytes_per_request, full.bytes_per_token
    slots = available * 9 // (19 * slot)
    tokens = (available - slots * slot) // cell
    held = largest_fitting(layout, available)
    assert tokens - slot // cell - 1 <= held <= tokens


def test_a_pool_block_and_a_kernel_block_are_two_numbers() -> None:
    hybrid = read_config(Path(__file__).parents[1] / "data" / "configs" / "qwen3-next-80b-a3b.json")
    (layout, *_) = layouts(hybrid, tp=2, engine=convention("vllm"))
    assert (layout.block_size, layout.kernel_block) == (544, 16)
    assert layouts(model(), engine=convention("vllm"))[0].kernel_block is None


@pytest.mark.parametrize(("query_heads", "kv_heads", "tp"), [(28, 4, 8), (24, 6, 4), (24, 6, 8)])
def test_heads_that_cannot_be_divided_are_refused(query_heads: int, kv_heads: int, tp: int) -> None:
    with pytest.raises(ConfigError) as caught:
        layouts(model(query_heads=query_heads, kv_heads=kv_heads), tp=tp, block_size=16)
    assert caught.value.code == "KV-CFG-030"


def test_four_bit_blocks_hold_their_parameters() -> None:
    """B27, InternLM/lmdeploy: 24 layers of 8 heads of 64 at 4 bits and 4 parameter bytes: 884,736, not 786,432."""
    twenty = model(layers=24, query_heads=64, kv_heads=8, head_dim=64)
    layout = layouts(twenty, block_size=64, cache_dtype="int4")[0]
    assert layout.bytes_per_block == 884_736
    assert 1740 * layout.block_size == 111_360


@pytest.mark.parametrize(
    ("asked", "bytes_per_value"), [("fp32", 4), ("fp16", 2), ("auto", 2), (None, 2), ("fp8", 1), ("fp8_e5m2", 1)]
)
def test_cache_dtypes(asked: str | None, bytes_per_value: int) -> None:
    layout = layouts(model(), block_size=1, cache_dtype=asked)[0]
    assert layout.bytes_per_token == 12 * 2 * 8 * 128 * bytes_per_value


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tp": 0}, "KV-POL-032"),
        ({"tp": True}, "KV-POL-032"),
        ({"pp": -1}, "KV-POL-032"),
        ({"pp": 13}, "KV-POL-034"),
        ({"pp": 2, "pp_layers": [6, 5]}, "KV-POL-034"),
        ({"pp": 2, "pp_layers": [12, 0]}, "KV-POL-034"),
        ({"pp": 3, "pp_layers": [6, 6]}, "KV-POL-034"),
        ({"block_size": 0}, "KV-POL-032"),
        ({"block_size": 24, "engine": convention("vllm")}, "KV-POL-038"),
        ({"cache_dtype": "fp8_ds_mla"}, "KV-POL-050"),
        ({"state_dtype": "int8"}, "KV-POL-030"),
        ({"dtype": "int8"}, "KV-POL-030"),
        ({"cache_dtype": "fp7"}, "KV-POL-031"),
        ({"draft_layers": 1}, "KV-POL-035"),
        ({"tp": 2**19, "pp": 4}, "KV-POL-032"),
    ],
)
def test_wrong_options_are_typed_errors(options: dict[str, object], code: str) -> None:
    with pytest.raises(PolicyError) as caught:
        layouts(model(), **{"block_size": 16, **options})  # type: ignore[arg-type]
    assert caught.value.code == code


def test_a_config_without_a_dtype_needs_one() -> None:
    keys = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
    with pytest.raises(PolicyError, match="names no dtype"):
        layouts(read_config(keys), block_size=16)
    with pytest.raises(ConfigError, match="whole elements"):
        layouts(read_config({**keys, "hidden_size": 7}), block_size=16, dtype="bf16", cache_dtype="int4")
