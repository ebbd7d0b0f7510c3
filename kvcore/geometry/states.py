"""What the recurrent layers of each kind keep for one request: arrays, and how tensor parallelism divides them.

``model`` arrays have the model's dtype, ``state`` arrays the dtype that the engine keeps states in
(``--mamba-ssm-cache-dtype`` in vLLM; its default is the config's ``mamba_ssm_dtype``, else the model's dtype).
Shapes: vllm/model_executor/layers/mamba/mamba_utils.py.
"""

from __future__ import annotations

from kvcore.geometry.keys import Keys
from kvcore.geometry.model import State, StateArray

__all__ = ["gated_delta_net", "kimi_delta_attention", "lightning", "mamba1", "mamba2", "sambay", "short_convolution"]


def mamba1(keys: Keys) -> State:
    """Mamba: the last inputs of the convolution and ``d_state`` values a channel (ai21labs/Jamba)."""
    inner = keys.integer("mamba_expand", "expand") * keys.integer("hidden_size")
    conv = keys.integer("mamba_d_conv", "conv_kernel") - 1
    return State(
        (
            StateArray("conv", inner, conv, "model"),
            StateArray("ssm", inner, keys.integer("mamba_d_state", "state_size"), "state"),
        )
    )


def sambay(keys: Keys) -> State:
    """Phi-4-mini-flash: Mamba, whose sizes its published config leaves to the class (configuration_phi4flash.py)."""
    inner = (keys.optional_integer("mamba_expand") or 2) * keys.integer("hidden_size")
    return State(
        (
            StateArray("conv", inner, (keys.optional_integer("mamba_d_conv", low=2) or 4) - 1, "model"),
            StateArray("ssm", inner, keys.optional_integer("mamba_d_state") or 16, "state"),
        )
    )


def mamba2(keys: Keys) -> State:
    """Mamba 2: heads of a matrix each, and a convolution over channels and group projections."""
    count = keys.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    width = keys.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    size = keys.integer("mamba_d_state", "ssm_state_size")
    groups = keys.integer("mamba_n_groups", "n_groups", "mamba_ngroups")
    conv = keys.integer("mamba_d_conv", "conv_kernel") - 1
    return State(
        (
            StateArray("conv", count * width, conv, "model", groups=groups, group_width=2 * size),
            StateArray("ssm", count, width * size, "state"),
        )
    )


def gated_delta_net(keys: Keys) -> State:
    """Gated delta net (Qwen3-Next): a matrix of key by value a value head, a convolution over queries, keys, values."""
    key_width, value_width = keys.integer("linear_key_head_dim"), keys.integer("linear_value_head_dim")
    key_heads, value_heads = keys.integer("linear_num_key_heads"), keys.integer("linear_num_value_heads")
    channels = 2 * key_width * key_heads + value_width * value_heads
    return State(
        (
            StateArray("conv", channels, keys.integer("linear_conv_kernel_dim") - 1, "model"),
            StateArray("recurrent", value_heads, key_width * value_width, "state"),
        )
    )


def kimi_delta_attention(keys: Keys) -> State:
    """Kimi delta attention: three short convolutions, and a matrix a head that is always kept in float32."""
    inner = keys.inner("linear_attn_config")
    count, width = inner.integer("num_heads"), inner.integer("head_dim")
    conv = inner.integer("short_conv_kernel_size") - 1
    return State(
        (
            StateArray("conv", 3 * count * width, conv, "model"),
            StateArray("recurrent", count, width * width, "float32"),
        )
    )


def lightning(keys: Keys) -> State:
    """Lightning attention (MiniMax-Text-01): a matrix of head by head width a head."""
    width = keys.integer("head_dim")
    return State((StateArray("recurrent", keys.integer("num_attention_heads"), width * width, "state"),))


def short_convolution(keys: Keys) -> State:
    """LFM2: the last inputs of a short convolution over the hidden channels."""
    channels = keys.optional_integer("conv_dim") or keys.integer("hidden_size")
    return State((StateArray("conv", channels, keys.integer("conv_L_cache") - 1, "model"),))
