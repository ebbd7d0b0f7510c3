"""Published configs give the bytes per token that their engines allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.contract import Role
from kvcore.errors import ConfigError
from kvcore.geometry import layouts, read_config
from kvcore.geometry.families import FAMILIES

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"

#: Bytes per token of the whole model in 16 bits, as their public logs and papers have it:
#: layers x 2 x KV heads x head size x 2, or layers x 576 x 2 for MLA.
BYTES_PER_TOKEN = {
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2,
    "qwen3-8b": 36 * 2 * 8 * 128 * 2,
    "qwen2.5-7b-instruct": 28 * 2 * 4 * 128 * 2,
    "qwen2.5-vl-7b-instruct": 28 * 2 * 4 * 128 * 2,
    "qwen3-vl-8b-instruct": 36 * 2 * 8 * 128 * 2,
    "llama-3.1-8b-instruct": 32 * 2 * 8 * 128 * 2,
    "llama-3.3-70b-instruct": 80 * 2 * 8 * 128 * 2,
    "codellama-7b": 32 * 2 * 32 * 128 * 2,
    "tinyllama-1.1b-chat-v1.0": 22 * 2 * 4 * 64 * 2,
    "phi-2": 32 * 2 * 32 * 80 * 2,
    "gemma-7b": 28 * 2 * 16 * 256 * 2,
    "granite-3.1-2b-instruct": 40 * 2 * 8 * 64 * 2,
    "mistral-small-3.1-24b": 40 * 2 * 8 * 128 * 2,
    "pixtral-12b": 40 * 2 * 8 * 128 * 2,
    "minimax-m2.7": 62 * 2 * 8 * 128 * 2,
    "deepseek-v2-lite": 27 * 576 * 2,
    "kimi-vl-a3b-instruct": 27 * 576 * 2,
    "kimi-k2.5-nvfp4": 61 * 576 * 2,
}


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token(name: str) -> None:
    model = read_config(CONFIGS / f"{name}.json")
    (layout,) = layouts(model, block_size=64)
    assert layout.bytes_per_token == BYTES_PER_TOKEN[name]
    assert layout.bytes_per_block == BYTES_PER_TOKEN[name] * 64
    assert layout.max_model_len == model.max_model_len is not None


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_example_plans(path: Path) -> None:
    assert layouts(read_config(path), block_size=16)[0].num_layers > 0


def test_seed_cases() -> None:
    """FastDeploy's two end-to-end baselines: PaddlePaddle/FastDeploy#7241."""
    qwen = layouts(read_config(EXAMPLES / "qwen3-30b-a3b.json"), tp=4, block_size=64)
    assert len(qwen) == 4
    assert {rank.bytes_per_block for rank in qwen} == {1_572_864}
    assert qwen[0].bytes(74_000) == 116_391_936_000
    ernie = {
        "model_type": "ernie4_5_moe_vl",
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 2560,
        "torch_dtype": "bfloat16",
    }
    assert layouts(read_config(ernie), tp=2, block_size=64)[0].bytes_per_block == 1_835_008


def config(**keys: object) -> dict[str, object]:
    """A small Llama with ``keys`` changed; None removes a key."""
    whole = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
        **keys,
    }
    return {name: value for name, value in whole.items() if value is not None}


def test_gpt2_key_names() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "dtype": "float16"}
    model = read_config(gpt2)
    (layout,) = layouts(model, block_size=16)
    assert layout.bytes_per_token == 12 * 2 * 12 * 64 * 2
    assert model.max_model_len == 1024
    assert any("head_dim 64 derived" in note for note in model.notes)
    assert any("KV heads derived" in note for note in model.notes)


def test_multi_query_flags() -> None:
    bigcode = {"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 8, "n_embd": 512, "multi_query": True}
    assert layouts(read_config(bigcode), block_size=1, dtype="bf16")[0].bytes_per_token == 2 * 2 * 1 * 64 * 2
    falcon = {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544}
    assert layouts(read_config(falcon), block_size=1, dtype="bf16")[0].bytes_per_token == 2 * 2 * 1 * 64 * 2
    new = {
        **falcon,
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
        "num_attention_heads": 128,
        "hidden_size": 8192,
    }
    assert layouts(read_config(new), block_size=1, dtype="bf16")[0].bytes_per_token == 2 * 2 * 8 * 64 * 2


def test_a_given_head_size_beats_a_derived_one() -> None:
    """Qwen3-30B-A3B has 32 heads of 128 at hidden size 2048: deriving 64 would halve the cache."""
    given = read_config(config(head_dim=128))
    assert layouts(given, block_size=1)[0].bytes_per_token == 4 * 2 * 2 * 128 * 2
    assert not given.notes
    derived = read_config(config())
    assert layouts(derived, block_size=1)[0].bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert derived.notes == ("head_dim 64 derived: 512 / 8 heads",)


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_nested_language_models(name: str) -> None:
    outer = {"model_type": "llava", "torch_dtype": "float16", name: config(torch_dtype=None)}
    model = read_config(outer)
    assert model.dtype == "float16"
    assert len(model.layers) == 4


def test_draft_layers_are_layers_of_the_last_stage() -> None:
    model = read_config(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "num_nextn_predict_layers": 1,
            "torch_dtype": "bfloat16",
        }
    )
    without = layouts(model, pp=2, block_size=64)
    with_draft = layouts(model, pp=2, block_size=64, draft_layers=1)
    assert with_draft[0] == without[0]
    assert with_draft[1].bytes_per_token == without[1].bytes_per_token + 576 * 2
    drafts = [layer for group in with_draft[1].groups for layer in group.layers if layer.role is Role.DRAFT]
    assert [layer.index for layer in drafts] == [6]
    assert [t.name for t in with_draft[1].tensors(1) if t.role is Role.DRAFT] == ["draft.6.kv"]


def test_every_family_has_one_entry_for_each_model_type() -> None:
    named = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(set(named)) == len(named)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("changed", "code", "place"),
    [
        ({"model_type": "mamba9"}, "KV-CFG-020", "model_type"),
        ({"model_type": None}, "KV-CFG-020", "model_type"),
        ({"model_type": 7}, "KV-CFG-011", "model_type"),
        ({"num_hidden_layers": None}, "KV-CFG-010", "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_hidden_layers": -4}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_hidden_layers": 4.0}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_hidden_layers": True}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_hidden_layers": [4]}, "KV-CFG-011", "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "KV-CFG-012", "KV heads"),
        ({"num_key_value_heads": 16}, "KV-CFG-012", "KV heads"),
        ({"num_attention_heads": None}, "KV-CFG-010", "num_attention_heads"),
        ({"hidden_size": 511}, "KV-CFG-012", "hidden size"),
        ({"hidden_size": None}, "KV-CFG-010", "hidden_size"),
        ({"max_position_embeddings": float("nan")}, "KV-CFG-011", "max_position_embeddings"),
        ({"torch_dtype": ["bfloat16"]}, "KV-CFG-011", "dtype"),
        ({"sliding_window": 0}, "KV-CFG-011", "sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "KV-CFG-012", "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "KV-CFG-021", "state"),
        ({"layer_types": ["full_attention"] * 3 + ["quantum_attention"]}, "KV-CFG-023", "layer_types"),
        ({"layer_types": ["full_attention"] * 3 + [None]}, "KV-CFG-023", "layer_types"),
        ({"layer_types": "full_attention"}, "KV-CFG-011", "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "KV-CFG-010", "sliding_window"),
        ({"layer_types": ["moe"] * 4}, "KV-CFG-012", "no layer has a cache"),
        ({"hybrid_override_pattern": "MM*Q"}, "KV-CFG-023", "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "MM*"}, "KV-CFG-012", "hybrid_override_pattern"),
        ({"hybrid_override_pattern": 7}, "KV-CFG-011", "hybrid_override_pattern"),
        ({"attn_type_list": [1, 1, 1, 2]}, "KV-CFG-023", "attn_type_list"),
        ({"attn_layer_indices": [0, 4]}, "KV-CFG-011", "attn_layer_indices"),
        ({"sliding_window": 8, "sliding_window_pattern": "LLXG"}, "KV-CFG-023", "sliding_window_pattern"),
        ({"num_kv_shared_layers": 4}, "KV-CFG-011", "num_kv_shared_layers"),
        ({"model_type": "bert"}, "KV-CFG-022", "no KV cache"),
        ({"use_sliding_window": "no", "sliding_window": 4096}, "KV-CFG-011", "use_sliding_window"),
        ({"text_config": 5}, "KV-CFG-011", "text_config"),
        ({"text_config": {}, "llm_config": {}}, "KV-CFG-012", "several"),
    ],
)
def test_bad_configs_are_typed_errors(changed: dict[str, object], code: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layouts(read_config(config(**changed), name="bad"), block_size=16)
    assert caught.value.code == code
    assert place in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("changed", [{"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}])
def test_a_window_that_is_off_is_full_attention(changed: dict[str, object]) -> None:
    assert read_config(config(**changed)).layers[0].kind == "full"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "KV-CFG-003"),
        ('{"model_type": "llama"', "KV-CFG-003"),
        ("[1, 2]", "KV-CFG-005"),
        ("null", "KV-CFG-005"),
        ('{"a": NaN}', "KV-CFG-003"),
        ('{"a": Infinity}', "KV-CFG-003"),
        ('{"a": 1, "a": 2}', "KV-CFG-003"),
        ('{"a": ' + "9" * 5000 + "}", "KV-CFG-003"),
        ('{"a":' * 200_000, "KV-CFG-004"),
        ("\udcff", "KV-CFG-003"),
        (" " * (5 * 1024**2), "KV-CFG-002"),
    ],
    ids=["empty", "cut", "list", "null", "nan", "infinity", "twice", "digits", "deep", "encoding", "huge"],
)
def test_bad_files_are_typed_errors(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert caught.value.code == code
    assert str(path) in str(caught.value)


def test_a_directory_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read_config(tmp_path).name == tmp_path.name
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "nowhere.json")


def test_phi_4_mini_flash_shares_one_layers_cache() -> None:
    """microsoft/Phi-4-mini-flash-reasoning: 18 of 32 layers keep something, and 7 read the one full layer's cache."""
    (layout,) = layouts(read_config(CONFIGS / "phi-4-mini-flash-reasoning.json"), block_size=16)
    held = {layer.index: group.kind for group in layout.groups for layer in group.layers}
    assert sorted(held) == list(range(18))
    assert [held[index] for index in range(16)] == ["state", "sliding"] * 8
    assert (held[16], held[17]) == ("state", "full")
    state = next(g.layers[0] for g in layout.groups if g.kind == "state")
    # Mamba of 2 x 2560 channels: 3 inputs of the convolution, 16 values a channel.
    assert state.bytes_per_token == 5120 * (3 + 16) * 2


@pytest.mark.parametrize("change", [{"num_hidden_layers": 30}, {"mb_per_layer": 3}])
def test_a_pattern_of_sharing_that_does_not_fit_is_refused(change: dict[str, int]) -> None:
    config = json.loads((CONFIGS / "phi-4-mini-flash-reasoning.json").read_text())
    with pytest.raises(ConfigError, match="do not fit its pattern"):
        read_config({**config, **change})
