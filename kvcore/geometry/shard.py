"""From a model to one cache layout a rank: heads divided by tensor parallelism, layers by pipeline stages."""

from __future__ import annotations

import collections.abc
from dataclasses import replace

from kvcore.contract.layout import CacheLayout, Group, Growth, Layer, RankPlace, Store
from kvcore.errors import ConfigError, PolicyError
from kvcore.geometry.formats import DTYPES, ElementFormat, cache_format, model_dtype
from kvcore.geometry.model import Heads, Latent, LayerShape, ModelConfig

__all__ = ["layouts", "stage_layers"]

#: More ranks than the largest deployments by an order of magnitude.
MOST_RANKS = 2**20


def layouts(
    model: ModelConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_layers: collections.abc.Sequence[int] | None = None,
    block_size: int,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    draft_layers: int = 0,
) -> tuple[CacheLayout, ...]:
    """One layout a rank, the tensor-parallel ranks of a stage together.

    ``pp_layers`` gives each stage's number of layers; without it they are divided evenly. ``dtype`` replaces the
    model's own, ``cache_dtype`` is ``auto`` or a format of :data:`kvcore.geometry.formats.CACHE_FORMATS`.
    ``draft_layers`` of the checkpoint's layers for multi-token prediction are added to the last stage.

    Raises :class:`ConfigError` if the heads cannot be divided by ``tp``, :class:`PolicyError` for the rest.
    """
    _check_counts(tp, pp, block_size)
    computed = _dtype(model, dtype)
    stored = cache_format(cache_dtype, computed)
    stages = _stages(model, pp, pp_layers, draft_layers)
    result = []
    for stage, shapes in enumerate(stages):
        groups, notes = _groups(model, shapes, tp, stored, computed)
        # Ranks of one stage are alike: they share the groups, and differ in their place alone.
        first = CacheLayout(
            model=model.name,
            block_size=block_size,
            groups=groups,
            place=RankPlace(tp, 0, pp, stage),
            max_model_len=model.max_model_len,
            notes=(*model.notes, *notes),
        )
        result.append(first)
        result.extend(replace(first, place=RankPlace(tp, rank, pp, stage)) for rank in range(1, tp))
    return tuple(result)


def stage_layers(layers: int, pp: int) -> list[int]:
    """How many layers each stage gets when they are divided evenly.

    What is left over goes one layer each to the stages from the last but one backwards, so that the last stage, which
    also has the output head, has no more than the others (vLLM divides this way: vllm/distributed/utils.py).
    """
    each, left = divmod(layers, pp)
    counts = [each] * pp
    for step in range(left):
        counts[-2 - step if pp > 1 else -1] += 1
    return counts


def _check_counts(tp: int, pp: int, block_size: int) -> None:
    for name, value, most in (("tp", tp, MOST_RANKS), ("pp", pp, MOST_RANKS), ("block_size", block_size, MOST_RANKS)):
        if type(value) is not int or not 1 <= value <= most:
            raise PolicyError(
                f"{name} is out of range", code="KV-POL-032", where=name, got=value, expected=f"1 to {most:,}"
            )
    if tp * pp > MOST_RANKS:
        raise PolicyError(
            "too many ranks", code="KV-POL-032", where="tp * pp", got=tp * pp, expected=f"at most {MOST_RANKS:,}"
        )


def _dtype(model: ModelConfig, dtype: str | None) -> str:
    if dtype is not None and dtype != "auto":
        return model_dtype(dtype, "dtype")
    if model.dtype is None:
        raise PolicyError(
            "the model's config names no dtype",
            code="KV-POL-033",
            where=model.name,
            expected="torch_dtype or dtype in the config",
            hint="give --dtype bfloat16, or the dtype that the engine will use",
        )
    return model_dtype(model.dtype, f"{model.name}: torch_dtype")


def _stages(
    model: ModelConfig, pp: int, pp_layers: collections.abc.Sequence[int] | None, draft_layers: int
) -> list[tuple[LayerShape, ...]]:
    total = len(model.layers)
    counts = stage_layers(total, pp) if pp_layers is None else list(pp_layers)
    if len(counts) != pp or sum(counts) != total or min(counts) < 1:
        raise PolicyError(
            "the stages' layers do not add up to the model's",
            code="KV-POL-034",
            where="pp_layers" if pp_layers is not None else "pp",
            got=f"{', '.join(map(str, counts))} (sum {sum(counts)})",
            expected=f"{pp} counts of at least 1 that add up to {total}",
        )
    if not 0 <= draft_layers <= len(model.draft_layers):
        raise PolicyError(
            "the checkpoint has no such number of draft layers",
            code="KV-POL-035",
            where="draft_layers",
            got=draft_layers,
            expected=f"0 to {len(model.draft_layers)}",
        )
    stages = []
    start = 0
    for count in counts:
        stages.append(model.layers[start : start + count])
        start += count
    stages[-1] = (*stages[-1], *model.draft_layers[:draft_layers])
    return stages


def _groups(
    model: ModelConfig, shapes: collections.abc.Sequence[LayerShape], tp: int, stored: ElementFormat, dtype: str
) -> tuple[tuple[Group, ...], list[str]]:
    """The layers of one stage, grouped by kind, with their stores on one tensor-parallel rank."""
    stores: dict[Heads | Latent, tuple[Store, ...]] = {}
    notes: list[str] = []
    layers: dict[str, list[Layer]] = {}
    for shape in shapes:
        if shape.attention not in stores:
            stores[shape.attention] = _stores(model, shape.attention, tp, stored, dtype, notes)
        layers.setdefault(shape.kind, []).append(Layer(shape.index, stores[shape.attention], shape.role))
    groups = tuple(Group(kind, kind, Growth.TOKEN, tuple(members)) for kind, members in layers.items())
    return groups, notes


def _stores(
    model: ModelConfig, attention: Heads | Latent, tp: int, stored: ElementFormat, dtype: str, notes: list[str]
) -> tuple[Store, ...]:
    if attention.query_heads % tp:
        raise _indivisible(model, "attention heads", attention.query_heads, tp)
    if isinstance(attention, Latent):
        if tp > 1:
            notes.append(f"the latent vector is replicated on all {tp} tensor-parallel ranks")
        return _vectors("kv", 1, attention.width, stored, dtype, model)
    heads = _heads_per_rank(model, attention.kv_heads, tp, notes)
    return (
        *_vectors("k", heads, attention.k_width, stored, dtype, model),
        *_vectors("v", heads, attention.v_width, stored, dtype, model),
    )


def _heads_per_rank(model: ModelConfig, kv_heads: int, tp: int, notes: list[str]) -> int:
    """KV heads on one rank; with more ranks than heads each head is held by several."""
    if kv_heads % tp == 0:
        return kv_heads // tp
    if tp % kv_heads == 0:
        notes.append(f"each of {kv_heads} KV heads is replicated on {tp // kv_heads} tensor-parallel ranks")
        return 1
    raise _indivisible(model, "KV heads", kv_heads, tp)


def _indivisible(model: ModelConfig, what: str, count: int, tp: int) -> ConfigError:
    return ConfigError(
        f"{what} cannot be divided among the tensor-parallel ranks",
        code="KV-CFG-030",
        where=model.name,
        got=f"{count} {what}, tp {tp}",
        expected="one divides the other" if what == "KV heads" else f"tp divides {count}",
    )


def _vectors(
    name: str, heads: int, width: int, stored: ElementFormat, dtype: str, model: ModelConfig
) -> tuple[Store, ...]:
    """The store of one vector a head and token, and the store of its parameters if the format has any."""
    elements = stored.elements(width)
    if elements is None:
        raise ConfigError(
            f"a vector of {width} values does not fill whole elements of {stored.name}",
            code="KV-CFG-031",
            where=model.name,
            got=f"{width} values",
            expected=f"a multiple of {stored.values_per_element}",
        )
    store = Store(name, heads, elements, stored.dtype, DTYPES[stored.dtype])
    if not stored.parameters:
        return (store,)
    return (store, Store(f"{name}_scale", heads, stored.parameters, dtype, DTYPES[dtype]))
