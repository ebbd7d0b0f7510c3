"""Model families: how a published config.json spells its layers. One entry a family, over shared building blocks.

A family is found by ``model_type``, because equal keys mean different caches in different families; everything else
is read from the config's own keys. Which layer is of which kind: :mod:`kvcore.geometry.kinds`. What a state holds:
:mod:`kvcore.geometry.states`. Key names and defaults are those of each family's published configs and of its
configuration class in huggingface/transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcore.contract.layout import Growth, Role
from kvcore.errors import ConfigError
from kvcore.geometry import states
from kvcore.geometry.keys import Keys
from kvcore.geometry.kinds import CHUNKED, CROSS, FULL, NONE, SLIDING, STATE, Kinds, all_full, every, kinds_of, required
from kvcore.geometry.model import Attention, Heads, Latent, LayerShape, State, unknown_architecture

__all__ = ["FAMILIES", "Family", "Shapes", "family_of"]

#: More layers than any model has by two orders of magnitude: a larger number would only fill memory with layers.
MOST_LAYERS = 10_000
#: The same for one head's width and for the number of heads.
WIDEST = 2**20


@dataclass(frozen=True, slots=True)
class Shapes:
    """The layers of a model that have a cache, and what had to be derived to find them."""

    num_layers: int
    layers: tuple[LayerShape, ...]
    draft_layers: tuple[LayerShape, ...]
    notes: tuple[str, ...]


AttentionOf = Callable[[Keys, str, list[str]], Attention]


def heads(keys: Keys, kind: str, notes: list[str]) -> Heads:
    """MHA, GQA or MQA, by the key names of Llama and of GPT-2; full layers may have heads of their own (Gemma 4)."""
    query_heads = keys.integer("num_attention_heads", "n_head", "num_heads", high=WIDEST)
    kv_heads = _kv_heads(keys, query_heads, notes)
    width = _head_dim(keys, query_heads, notes)
    if kind == FULL:
        kv_heads = keys.optional_integer("num_global_key_value_heads", high=WIDEST) or kv_heads
        width = keys.optional_integer("global_head_dim", high=WIDEST) or width
    return Heads(query_heads, kv_heads, width, width)


def heads_of_two_widths(keys: Keys, kind: str, notes: list[str]) -> Heads:
    """MiMo-V2: values narrower than keys, and windows with heads of their own (XiaomiMiMo/MiMo-V2-Flash)."""
    prefix = "swa_" if kind == SLIDING else ""
    base = heads(keys, SLIDING, notes)
    kv_heads = keys.optional_integer(f"{prefix}num_key_value_heads", high=WIDEST) or base.kv_heads
    k_width = keys.optional_integer(f"{prefix}head_dim", high=WIDEST) or base.k_width
    v_width = keys.optional_integer(f"{prefix}v_head_dim", "v_head_dim", high=WIDEST) or k_width
    return Heads(base.query_heads, kv_heads, k_width, v_width)


def falcon_heads(keys: Keys, kind: str, notes: list[str]) -> Heads:
    """Falcon: MQA by ``multi_query`` unless ``new_decoder_architecture``, which has ``num_kv_heads``."""
    query_heads = keys.integer("num_attention_heads", "n_head", high=WIDEST)
    if keys.flag("new_decoder_architecture", default=False):
        kv_heads = keys.integer("num_kv_heads", "n_head_kv", high=WIDEST)
    else:
        kv_heads = 1 if keys.flag("multi_query", default=True) else query_heads
    width = _head_dim(keys, query_heads, notes)
    return Heads(query_heads, kv_heads, width, width)


def latent(keys: Keys, kind: str, notes: list[str]) -> Latent:
    """Multi-head latent attention (deepseek-ai/DeepSeek-V2), with the keys of an indexer beside it (DeepSeek-V3.2)."""
    return Latent(
        keys.integer("num_attention_heads", high=WIDEST),
        keys.integer("kv_lora_rank", high=WIDEST),
        keys.integer("qk_rope_head_dim", high=WIDEST),
        keys.optional_integer("index_head_dim", high=WIDEST),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the ``model_type`` values it covers, and how its layers are read.

    ``attention`` gives a layer's keys and values, ``state`` what its recurrent layers keep, ``kinds`` which layer is
    which where the config does not say, ``encoder`` the positions that cross attention keeps, ``count`` the keys that
    count layers, ``drafts`` those that count draft layers.
    """

    name: str
    model_types: tuple[str, ...]
    attention: AttentionOf = heads
    state: Callable[[Keys], State] | None = None
    kinds: Callable[[Keys, int], Kinds] = all_full
    encoder: Callable[[Keys], int] | None = None
    count: tuple[str, ...] = ("num_hidden_layers", "n_layer", "num_layers")
    drafts: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")

    def build(self, keys: Keys) -> Shapes:
        """The layers that ``keys`` describe."""
        count = keys.integer(*self.count, high=MOST_LAYERS)
        notes: list[str] = []
        shapes: dict[str, LayerShape] = {}
        layers = []
        kinds = kinds_of(keys, count, self.kinds)
        # The last layers may read the cache of earlier ones, and have none of their own (Gemma 3n).
        shared = keys.optional_integer("num_kv_shared_layers", low=0, high=count - 1) or 0
        for index, kept in enumerate(kinds[: count - shared]):
            for kind in kept:
                if kind == NONE:
                    continue
                if kind not in shapes:
                    shapes[kind] = self._shape(keys, kind, notes)
                layers.append(replace(shapes[kind], index=index))
        if shared:
            notes.append(f"the last {shared} layers share the cache of earlier ones")
        if not layers:
            raise keys.contradiction(
                "no layer has a cache", got=f"{count} layers", expected="at least one with a cache"
            )
        return Shapes(count, tuple(layers), self._drafts(keys, count, shapes), tuple(dict.fromkeys(notes)))

    def _shape(self, keys: Keys, kind: str, notes: list[str]) -> LayerShape:
        if kind == STATE:
            if self.state is None:
                raise ConfigError(
                    "the family has no layers with a state, and the config says so",
                    code="KV-CFG-021",
                    where=f"{keys.where}: {keys.prefix}model_type",
                    got=self.name,
                    expected="a family whose recurrent layers kvcore knows",
                )
            return LayerShape(0, kind, self.state(keys), Growth.REQUEST)
        attention = self.attention(keys, kind, notes)
        if kind == SLIDING:
            window = keys.integer("sliding_window", "sliding_window_size", "window_size")
            return LayerShape(0, kind, attention, Growth.WINDOW, window)
        if kind == CROSS:
            assert self.encoder is not None
            return LayerShape(0, kind, attention, Growth.ENCODER, self.encoder(keys))
        if kind == CHUNKED:
            return LayerShape(0, kind, attention, Growth.CHUNK, keys.integer("attention_chunk_size"))
        return LayerShape(0, "latent" if isinstance(attention, Latent) else kind, attention)

    def _drafts(self, keys: Keys, count: int, shapes: dict[str, LayerShape]) -> tuple[LayerShape, ...]:
        """Layers for multi-token prediction: full attention like the target's, numbered after it."""
        drafts = keys.optional_integer(*self.drafts, low=0, high=MOST_LAYERS) or 0
        if not drafts:
            return ()
        like = shapes.get(FULL) or self._shape(keys, FULL, [])
        return tuple(replace(like, index=count + index, role=Role.DRAFT) for index in range(drafts))


def family_of(keys: Keys, outer: Keys) -> Family:
    """The family of the config ``keys``, which may be a part of ``outer``."""
    model_type = keys.optional_text("model_type") or outer.optional_text("model_type") or ""
    if model_type in ENCODERS:
        raise ConfigError(
            "an encoder has no KV cache",
            code="KV-CFG-022",
            where=f"{keys.where}: {keys.prefix}model_type",
            got=model_type,
            expected="a model that decodes token by token",
        )
    family = _BY_TYPE.get(model_type)
    if family is None:
        raise unknown_architecture(keys, outer, sorted(_BY_TYPE))
    return family


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
    width = keys.optional_integer("head_dim", "kv_channels", "attention_head_dim", high=WIDEST)
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


def whisper_heads(keys: Keys, kind: str, notes: list[str]) -> Heads:
    """Whisper's decoder: as many KV heads as heads, in its own attention and in that to the encoder."""
    count = keys.integer("decoder_attention_heads", high=WIDEST)
    width = keys.integer("d_model") // count
    return Heads(count, count, width, width)


def whisper_positions(keys: Keys) -> int:
    """The encoder's declared positions; no limit on text shortens them (TensorRT-LLM#19514)."""
    return keys.integer("max_source_positions")


def mllama_positions(keys: Keys) -> int:
    """Llama 3.2 vision: patches and a class token of each tile of one image (modeling_mllama.py)."""
    vision = keys.outer.inner("vision_config")
    side = vision.integer("image_size") // vision.integer("patch_size")
    return (side * side + 1) * vision.integer("max_num_tiles")


def llama4_kinds(keys: Keys, count: int) -> Kinds:
    """Llama 4: layers with rotary embedding are chunked, every fourth is not (modeling_llama4.py)."""
    if "attention_chunk_size" not in keys:
        return [(FULL,)] * count
    interval = keys.optional_integer("no_rope_layer_interval") or 4
    return every(interval, CHUNKED)(keys, count)


def exaone4_kinds(keys: Keys, count: int) -> Kinds:
    """EXAONE 4: full attention everywhere without a window, else in every fourth layer (configuration_exaone4.py)."""
    return (every(4, SLIDING) if "sliding_window" in keys else all_full)(keys, count)


def sambay_kinds(keys: Keys, count: int) -> Kinds:
    """Phi-4-mini-flash: states and windows in turns, then one state and one full layer, which all others share.

    The rest are gated memory units and cross attention: they read the cache of that one layer and keep nothing
    (configuration_phi4flash.py, layers_block_type).
    """
    if keys.integer("mb_per_layer") != 2 or count % 4:
        raise keys.contradiction(
            "the layers of a decoder-hybrid-decoder do not fit its pattern",
            got=f"{count} layers, mb_per_layer {keys.raw('mb_per_layer')}",
            expected="a multiple of 4 layers, every second of them a state",
        )
    half = count // 2
    own: Kinds = [(SLIDING,) if index % 2 else (STATE,) for index in range(half)]
    return [*own, (STATE,), (FULL,), *[(NONE,)] * (half - 2)]


#: Encoder-only architectures: nothing is kept from one call to the next.
ENCODERS = frozenset(
    ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta")
)

FAMILIES = (
    Family("llama", ("llama", "internlm2", "internlm3", "baichuan", "yi", "olmo", "olmo2", "seed_oss", "exaone")),
    Family("mistral", ("mistral", "mixtral", "ministral", "ministral3")),
    Family("qwen2", ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text")),
    Family("qwen3", ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")),
    Family("phi", ("phi", "phi3", "phi4", "phimoe")),
    Family("phi-4-flash", ("phi4flash",), state=states.sambay, kinds=sambay_kinds),
    Family("gemma", ("gemma",)),
    Family("gemma-2", ("gemma2",), kinds=every(2, SLIDING)),
    Family("gemma-3", ("gemma3", "gemma3_text", "gemma3n_text"), kinds=every(6, SLIDING)),
    Family("gemma-4", ("gemma4_text",), kinds=required("layer_types")),
    Family("cohere", ("cohere",)),
    Family("cohere-2", ("cohere2",), kinds=every(4, SLIDING)),
    Family("olmo-3", ("olmo3",), kinds=every(4, SLIDING)),
    Family("exaone-4", ("exaone4",), kinds=exaone4_kinds),
    Family("gpt-oss", ("gpt_oss",), kinds=every(2, SLIDING)),
    Family("llama-4", ("llama4_text",), kinds=llama4_kinds),
    Family("granite", ("granite", "granitemoe")),
    Family("glm", ("glm", "glm4", "glm4_moe", "glm4v_text", "glm4v_moe_text")),
    Family("ernie-4.5", ("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl", "ernie4_5_vl_moe_text")),
    Family("minimax-m2", ("minimax_m2",)),
    Family("mimo-v2", ("mimo_v2", "mimo_v2_flash"), heads_of_two_widths),
    Family("starcoder", ("starcoder2", "gpt_bigcode")),
    Family("gpt", ("gpt2", "gptj", "gpt_neox", "opt", "bloom")),
    Family("falcon", ("falcon",), falcon_heads),
    Family("deepseek", ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), latent),
    Family(
        "minimax-01",
        ("minimax", "minimax_text_01", "minimax_m1"),
        state=states.lightning,
        kinds=required("attn_type_list", "layer_types"),
    ),
    Family("qwen3-next", ("qwen3_next",), state=states.gated_delta_net, kinds=required("layer_types")),
    Family(
        "qwen3.5", ("qwen3_5_text", "qwen3_5_moe_text"), state=states.gated_delta_net, kinds=required("layer_types")
    ),
    Family("kimi-linear", ("kimi_linear",), latent, states.kimi_delta_attention, required("linear_attn_config")),
    Family("jamba", ("jamba",), state=states.mamba1, kinds=every(8, STATE, at=4)),
    Family("bamba", ("bamba",), state=states.mamba2, kinds=required("attn_layer_indices")),
    Family("granite-4-hybrid", ("granitemoehybrid",), state=states.mamba2, kinds=required("layer_types")),
    Family("falcon-h1", ("falcon_h1",), state=states.mamba2, kinds=lambda _, count: [(STATE, FULL)] * count),
    Family("nemotron-h", ("nemotron_h",), state=states.mamba2, kinds=required("hybrid_override_pattern")),
    Family("zamba-2", ("zamba2",), state=states.mamba2, kinds=required("layers_block_type")),
    Family(
        "lfm2", ("lfm2", "lfm2_moe"), state=states.short_convolution, kinds=required("layer_types", "full_attn_idxs")
    ),
    Family(
        "whisper",
        ("whisper",),
        whisper_heads,
        kinds=lambda _, count: [(FULL, CROSS)] * count,
        encoder=whisper_positions,
        count=("decoder_layers",),
    ),
    Family("mllama", ("mllama_text_model",), encoder=mllama_positions, kinds=required("cross_attention_layers")),
)

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
