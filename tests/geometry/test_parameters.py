"""The estimate of a checkpoint's bytes, beside what published checkpoints have."""

from __future__ import annotations

import pytest

from kvcore.geometry import read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "published"),
    [(LLAMA, 8_030_261_248), (QWEN, 30_532_122_624), (DEEPSEEK, 671_026_419_200)],
    ids=["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3"],
)
def test_within_a_thousandth_of_published_checkpoints(config: dict[str, object], published: int) -> None:
    """The parameters that the model cards and the indices of these checkpoints state."""
    counted = read_config(config).weight_bytes
    assert counted is not None
    assert abs(counted - 2 * published) < 2 * published / 1000


@pytest.mark.parametrize(
    ("quantised", "share"),
    [
        ({"quant_method": "fp8"}, 1 / 2),
        ({"quant_method": "awq", "bits": 4}, 1 / 4),
        ({"quant_method": "mxfp4"}, 17 / 64),
    ],
)
def test_quantised_weights_are_smaller(quantised: dict[str, object], share: float) -> None:
    whole = read_config(LLAMA).weight_bytes
    assert whole is not None
    assert read_config({**LLAMA, "quantization_config": quantised}).weight_bytes == whole * share


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": None},
        {"intermediate_size": None},
        {"torch_dtype": None},
        {"quantization_config": {"quant_method": "nobody knows"}},
    ],
)
def test_what_cannot_be_counted_is_unknown(changed: dict[str, object]) -> None:
    assert read_config({**LLAMA, **changed}).weight_bytes is None


def test_layers_that_share_a_cache_have_weights_that_are_not_known() -> None:
    """Only layers with a cache of their own are listed; the weights of the others would be left out."""
    assert read_config(LLAMA).weight_bytes is not None
    assert read_config({**LLAMA, "num_kv_shared_layers": 10}).weight_bytes is None
