"""A model as far as its cache is concerned: layers before they are divided among ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.contract.layout import Growth, Role
from kvcore.errors import ConfigError
from kvcore.geometry.keys import Keys, read_json_object

__all__ = ["Attention", "Heads", "Latent", "LayerShape", "ModelConfig", "State", "StateArray", "read_config"]

#: Where multimodal models keep the config of the part that has the cache.
NESTED = ("text_config", "language_config", "llm_config")
#: Names of the longest context that the model was made for.
LENGTHS = (
    "max_position_embeddings",
    "max_target_positions",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)


@dataclass(frozen=True, slots=True)
class Heads:
    """Keys and values of ``kv_heads`` heads, ``k_width`` and ``v_width`` values each; divided by tensor parallelism.

    ``query_heads`` must divide by the number of ranks too: the heads of a rank are whole.
    """

    query_heads: int
    kv_heads: int
    k_width: int
    v_width: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: one compressed vector for all heads and its rotary part, the same on every rank.

    ``index_width`` is the width of the keys of a sparse-attention indexer beside it, None without one.
    """

    query_heads: int
    lora_width: int
    rope_width: int
    index_width: int | None = None


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a state: ``(divided + 2 x groups x group_width) x fixed`` values in all.

    The first factor is divided by tensor parallelism; groups that do not divide are held by every rank (Mamba 2).
    ``dtype`` is ``model``, ``state`` (the dtype asked for states) or a dtype's name.
    """

    name: str
    divided: int
    fixed: int
    dtype: str
    groups: int = 0
    group_width: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What a recurrent layer keeps for one request, whatever its length."""

    arrays: tuple[StateArray, ...]


Attention = Heads | Latent | State


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of the whole model. ``kind`` names it in reports; layers that are alike in all else share a group."""

    index: int
    kind: str
    attention: Attention
    growth: Growth = Growth.TOKEN
    window: int | None = None
    role: Role = Role.TARGET


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a config.json says of the cache.

    ``num_layers`` counts the model's layers, ``layers`` are those that have a cache of their own. ``dtype`` is the one
    of the published weights, None if the config names none; ``weight_bytes`` estimates the whole checkpoint,
    None if the config does not say enough (:mod:`kvcore.geometry.parameters`). ``state_dtype`` is the one for states.
    ``max_model_len`` is the longest context the model was made for, None if unknown. ``draft_layers`` are those that
    the checkpoint holds for multi-token prediction. ``notes`` say what was derived rather than given.
    """

    name: str
    family: str
    num_layers: int
    layers: tuple[LayerShape, ...]
    draft_layers: tuple[LayerShape, ...]
    dtype: str | None
    weight_bytes: int | None
    state_dtype: str | None
    max_model_len: int | None
    notes: tuple[str, ...]


def read_config(source: str | os.PathLike[str] | Mapping[str, Any], *, name: str | None = None) -> ModelConfig:
    """The model whose config.json is ``source``: a file, a directory that holds one, or the parsed object.

    Raises :class:`ConfigError` for a config that is unreadable or contradictory, or whose architecture is unknown:
    a geometry is never guessed.
    """
    from kvcore.geometry.families import family_of
    from kvcore.geometry.parameters import count_parameters, weight_bits

    if isinstance(source, Mapping):
        outer = Keys(source, name or "config")
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        outer = Keys(read_json_object(path), str(source))
        name = name or (path.parent.name if path.name == "config.json" else path.stem)
    keys = _language_model(outer)
    family = family_of(keys, outer)
    shapes = family.build(keys)
    dtype = _dtype(keys, outer)
    parameters, bits = count_parameters(shapes.layers, shapes.num_layers, keys), weight_bits(dtype, keys)
    return ModelConfig(
        name=name or family.name,
        family=family.name,
        num_layers=shapes.num_layers,
        layers=shapes.layers,
        draft_layers=shapes.draft_layers,
        dtype=dtype,
        weight_bytes=None if parameters is None or bits is None else int(parameters * bits / 8),
        state_dtype=keys.optional_text("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
        max_model_len=keys.optional_integer(*LENGTHS),
        notes=shapes.notes,
    )


def _language_model(outer: Keys) -> Keys:
    """The part of a multimodal config that has the cache; the config itself otherwise."""
    nested = [name for name in NESTED if name in outer]
    if len(nested) > 1:
        raise outer.contradiction(
            "the model's config holds several language models", got=", ".join(nested), expected="one of them"
        )
    return outer.inner(nested[0]) if nested else outer


def _dtype(keys: Keys, outer: Keys) -> str | None:
    """The dtype of the weights, as the part or the whole says it."""
    for part in (keys, outer):
        name = part.optional_text("dtype", "torch_dtype")
        if name is not None:
            return name.removeprefix("torch.")
    return None


def unknown_architecture(keys: Keys, outer: Keys, known: list[str]) -> ConfigError:
    """The error for a model that no family covers."""
    return ConfigError(
        "unknown architecture",
        code="KV-CFG-020",
        where=f"{keys.where}: {keys.prefix}model_type",
        got=f"model_type {keys.raw('model_type') or outer.raw('model_type')!r}, "
        f"architectures {outer.raw('architectures')!r}",
        expected=f"one of {', '.join(known)}",
        hint="looked for model_type in the config and in " + ", ".join(NESTED),
    )
