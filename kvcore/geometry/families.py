"""Model families: how a published config.json spells its layers. One entry a family, over two building blocks.

A family is found by ``model_type``, because equal keys mean different caches in different families; everything else
is read from the config's own keys. The key names are those of each family's published configs and of its
configuration class in huggingface/transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcore.contract.layout import Role
from kvcore.errors import ConfigError
from kvcore.geometry.keys import Keys
from kvcore.geometry.model import Heads, Latent, LayerShape, unknown_architecture

__all__ = ["FAMILIES", "Family", "Shapes", "family_of"]

#: More layers than any model has by two orders of magnitude: a larger number would only fill memory with layers.
MOST_LAYERS = 10_000
#: The same for one head's width and for the number of heads.
WIDEST = 2**20


@dataclass(frozen=True, slots=True)
class Shapes:
    """The layers of a model, and what had to be derived to find them."""

    layers: tuple[LayerShape, ...]
    draft_layers: tuple[LayerShape, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One family: its name, the ``model_type`` values it covers, and how its layers are read."""

    name: str
    model_types: tuple[str, ...]
    build: Callable[[Keys], Shapes]


def family_of(keys: Keys, outer: Keys) -> Family:
    """The family of the config ``keys``, which may be a part of ``outer``."""
    model_type = keys.optional_text("model_type") or outer.optional_text("model_type")
    family = _BY_TYPE.get(model_type or "")
    if family is None:
        raise unknown_architecture(keys, outer, sorted(_BY_TYPE))
    return family


def uniform_heads(keys: Keys) -> Shapes:
    """The same heads in every layer: MHA, GQA or MQA, by the key names of Llama and of GPT-2."""
    _refuse_windows(keys)
    notes: list[str] = []
    query_heads = keys.integer("num_attention_heads", "n_head", "num_heads", high=WIDEST)
    kv_heads = _kv_heads(keys, query_heads, notes)
    width = _head_dim(keys, query_heads, notes)
    return _repeat(keys, "full", Heads(query_heads, kv_heads, width, width), notes)


def latent(keys: Keys) -> Shapes:
    """Multi-head latent attention: one compressed vector with its rotary part a token (deepseek-ai/DeepSeek-V2)."""
    _refuse_windows(keys)
    if "index_head_dim" in keys:
        raise _not_supported(keys, "index_head_dim", "a sparse attention indexer")
    query_heads = keys.integer("num_attention_heads", high=WIDEST)
    width = keys.integer("kv_lora_rank", high=WIDEST) + keys.integer("qk_rope_head_dim", high=WIDEST)
    return _repeat(keys, "latent", Latent(query_heads, width), [])


def falcon(keys: Keys) -> Shapes:
    """Falcon: MQA by ``multi_query`` unless ``new_decoder_architecture``, which has ``num_kv_heads``."""
    notes: list[str] = []
    query_heads = keys.integer("num_attention_heads", "n_head", high=WIDEST)
    if keys.flag("new_decoder_architecture", default=False):
        kv_heads = keys.integer("num_kv_heads", "n_head_kv", high=WIDEST)
    else:
        kv_heads = 1 if keys.flag("multi_query", default=True) else query_heads
    width = _head_dim(keys, query_heads, notes)
    return _repeat(keys, "full", Heads(query_heads, kv_heads, width, width), notes)


def _repeat(keys: Keys, kind: str, attention: Heads | Latent, notes: list[str]) -> Shapes:
    """As many equal layers as the config counts, and as many draft layers as the checkpoint holds."""
    count = keys.integer("num_hidden_layers", "n_layer", "num_layers", high=MOST_LAYERS)
    drafts = keys.optional_integer("num_nextn_predict_layers", "num_mtp_modules", low=0, high=MOST_LAYERS) or 0
    layers = tuple(LayerShape(index, kind, attention) for index in range(count))
    draft_layers = tuple(LayerShape(count + index, kind, attention, Role.DRAFT) for index in range(drafts))
    return Shapes(layers, draft_layers, tuple(notes))


def _kv_heads(keys: Keys, query_heads: int, notes: list[str]) -> int:
    kv_heads = keys.optional_integer("num_key_value_heads", "num_kv_heads", "n_head_kv", high=WIDEST)
    if kv_heads is None:
        # Configs from before grouped queries name no KV heads, and GPT-BigCode says one head by a flag.
        kv_heads = 1 if keys.flag("multi_query", default=False) else query_heads
        notes.append(f"{kv_heads} KV heads derived: the config names none")
    if query_heads % kv_heads:
        raise keys.contradiction(
            "KV heads do not divide the attention heads",
            got=f"{query_heads} attention heads, {kv_heads} KV heads",
            expected="a multiple",
        )
    return kv_heads


def _head_dim(keys: Keys, query_heads: int, notes: list[str]) -> int:
    """Given, else derived and marked as such."""
    width = keys.optional_integer("head_dim", "kv_channels", high=WIDEST)
    if width is not None:
        return width
    hidden = keys.integer("hidden_size", "n_embd", "d_model")
    if hidden % query_heads:
        raise keys.contradiction(
            "the heads do not divide the hidden size",
            got=f"hidden size {hidden}, {query_heads} attention heads",
            expected="a multiple, or head_dim",
        )
    width = hidden // query_heads
    notes.append(f"head_dim {width} derived: {hidden} / {query_heads} heads")
    return width


def _refuse_windows(keys: Keys) -> None:
    """A window changes what a layer keeps; sizing it as full attention would be a silent guess."""
    if "sliding_window" in keys and keys.flag("use_sliding_window", default=True):
        raise _not_supported(keys, "sliding_window", "sliding window attention")
    for name, what in (
        ("layer_types", "layers of different types"),
        ("attention_chunk_size", "chunked attention"),
        ("full_attention_interval", "layers of different types"),
    ):
        value = keys.raw(name)
        if value is not None and not (isinstance(value, list) and set(map(str, value)) == {"full_attention"}):
            raise _not_supported(keys, name, what)


def _not_supported(keys: Keys, name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{what} is not supported yet",
        code="KV-CFG-021",
        where=f"{keys.where}: {keys.prefix}{name}",
        got=str(keys.raw(name))[:80],
        expected="a model in which every layer keeps every token",
    )


FAMILIES = (
    Family("llama", ("llama", "mistral", "mixtral", "internlm2", "internlm3", "baichuan", "yi"), uniform_heads),
    Family(
        "qwen2", ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"), uniform_heads
    ),
    Family("qwen3", ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), uniform_heads),
    Family("phi", ("phi", "phi3", "phi4", "phimoe"), uniform_heads),
    Family("gemma", ("gemma",), uniform_heads),
    Family("granite", ("granite", "granitemoe"), uniform_heads),
    Family("glm", ("glm", "glm4", "glm4_moe"), uniform_heads),
    Family("ernie-4.5", ("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe_text"), uniform_heads),
    Family("minimax-m2", ("minimax_m2",), uniform_heads),
    Family("starcoder", ("starcoder2", "gpt_bigcode"), uniform_heads),
    Family("gpt", ("gpt2", "gptj", "gpt_neox", "opt", "bloom"), uniform_heads),
    Family("falcon", ("falcon",), falcon),
    Family("deepseek", ("deepseek_v2", "deepseek_v3", "kimi_k2"), latent),
)

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
