"""An estimate of a checkpoint's bytes from its config alone: matrices of attention, feed-forward layers and embeddings.

Norms, biases and scales are left out (a thousandth). Where the config does not say enough, or the model has layers
whose matrices are not known here, the answer is None: an estimate is never of half a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from kvcore.geometry.formats import DTYPES
from kvcore.geometry.keys import Keys
from kvcore.geometry.model import Heads, Latent, LayerShape

__all__ = ["count_parameters", "weight_bits"]

#: Bits of one weight by ``quant_method``, where the config does not give ``bits``.
QUANTISED = {"fp8": Fraction(8), "mxfp4": Fraction(17, 4)}


def count_parameters(layers: Sequence[LayerShape], num_layers: int, keys: Keys) -> int | None:
    """Parameters of a model with ``layers``, all experts included; None if the config does not say enough.

    ``layers`` are those with a cache of their own: where others of the ``num_layers`` share it, theirs are unknown.
    """
    if len({shape.index for shape in layers}) != num_layers:
        return None
    hidden, vocabulary = keys.optional_integer("hidden_size"), keys.optional_integer("vocab_size")
    if hidden is None or vocabulary is None:
        return None
    total = hidden * vocabulary * (1 if keys.flag("tie_word_embeddings", default=False) else 2)
    first_dense = keys.optional_integer("first_k_dense_replace", low=0) or 0
    for attention, count in Counter(shape.attention for shape in layers).items():
        matrices = _attention(attention, keys, hidden)
        if matrices is None:
            return None
        total += count * matrices
    for is_dense, count in Counter(shape.index < first_dense for shape in layers).items():
        matrices = _feed_forward(keys, hidden, dense=is_dense)
        if matrices is None:
            return None
        total += count * matrices
    return total


def weight_bits(dtype: str | None, keys: Keys) -> Fraction | None:
    """Bits of one weight: as quantised, else of the dtype; None if the config does not say."""
    for part in (keys, keys.outer):
        if "quantization_config" in part:
            quantised = part.inner("quantization_config")
            bits = quantised.optional_integer("bits", high=64)
            return Fraction(bits) if bits is not None else QUANTISED.get(quantised.optional_text("quant_method") or "")
    return None if dtype not in DTYPES else Fraction(8 * DTYPES[dtype])


def _attention(attention: object, keys: Keys, hidden: int) -> int | None:
    """Projections of queries, keys, values and output; None for layers with a state."""
    if isinstance(attention, Heads):
        queries = attention.query_heads * attention.k_width
        stored = attention.kv_heads * (attention.k_width + attention.v_width)
        return hidden * (queries + stored + attention.query_heads * attention.v_width)
    nope, values = keys.optional_integer("qk_nope_head_dim"), keys.optional_integer("v_head_dim")
    if not isinstance(attention, Latent) or nope is None or values is None:
        return None
    queries = attention.query_heads * (nope + attention.rope_width)
    compressed = keys.optional_integer("q_lora_rank")
    into_queries = hidden * queries if compressed is None else compressed * (hidden + queries)
    into_latent = hidden * (attention.lora_width + attention.rope_width)
    out_of_latent = attention.lora_width * attention.query_heads * (nope + values)
    return into_queries + into_latent + out_of_latent + attention.query_heads * values * hidden


def _feed_forward(keys: Keys, hidden: int, *, dense: bool) -> int | None:
    """A gated feed-forward layer, or experts with the shared ones and their router."""
    inner = keys.optional_integer("intermediate_size")
    experts = keys.optional_integer("n_routed_experts", "num_experts", "num_local_experts")
    if experts is None or dense:
        return None if inner is None else 3 * hidden * inner
    width = keys.optional_integer("moe_intermediate_size", "intermediate_size")
    if width is None:
        return None
    shared = (keys.optional_integer("n_shared_experts", low=0) or 0) * width
    shared = keys.optional_integer("shared_expert_intermediate_size", low=0) or shared
    return 3 * hidden * (experts * width + shared) + hidden * experts
