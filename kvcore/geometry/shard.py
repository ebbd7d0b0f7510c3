"""From a model to one cache layout a rank: heads divided by tensor parallelism, layers by pipeline stages."""

from __future__ import annotations

import collections.abc
from dataclasses import replace

from kvcore.contract.layout import CacheLayout, Group, Growth, Layer, Paging, RankPlace, Role, Store
from kvcore.conventions import GENERIC, Convention
from kvcore.errors import PolicyError
from kvcore.geometry.formats import PACKED_RECORDS, cache_format, model_dtype
from kvcore.geometry.model import Attention, Heads, LayerShape, ModelConfig, State
from kvcore.geometry.paging import group_kinds, groups_apart, grown_block_size, kinds_of_layers, stage_groups
from kvcore.geometry.stores import Formats, stores_of

__all__ = ["layouts", "stage_layers"]

#: More ranks than the largest deployments by an order of magnitude.
MOST_RANKS = 2**20


def layouts(
    model: ModelConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_layers: collections.abc.Sequence[int] | None = None,
    dcp: int = 1,
    block_size: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
    draft_layers: int = 0,
    draft: ModelConfig | None = None,
    step_tokens: int | None = None,
    engine: Convention = GENERIC,
) -> tuple[CacheLayout, ...]:
    """One layout a rank, the tensor-parallel ranks of a stage together.

    ``pp_layers`` gives each stage's number of layers; without it they are divided evenly. ``dcp`` ranks that would hold
    the same heads share the tokens instead (decode context parallelism). ``dtype`` replaces the
    model's own, ``cache_dtype`` is ``auto`` or a format of :mod:`kvcore.geometry.formats`, ``state_dtype`` the dtype of
    recurrent states. ``draft_layers`` of the checkpoint's layers for multi-token prediction, and all layers of a
    ``draft`` model (an EAGLE head, a small model of the same tokens), are added to the last stage: one cache holds
    both. ``step_tokens`` are the most tokens of one step; ``engine`` pages the cache and gives the block size that is
    not asked for.

    Raises :class:`ConfigError` if the heads cannot be divided by ``tp``, :class:`PolicyError` for the rest.
    """
    block_size = engine.block_size if block_size is None else block_size
    _check_counts(tp, pp, block_size, engine)
    formats = _formats(model, dtype, cache_dtype, state_dtype, engine)
    stages = _stages(model, pp, pp_layers, draft_layers)
    if draft is not None:
        stages[-1] = (*stages[-1], *_companion(model, draft))
        formats.notes.append(f"with the {len(draft.layers)} layers of draft model {draft.name}")
    shapes = [shape for stage in stages for shape in stage]
    _check_context_parallel(shapes, tp, dcp)
    distinct = dict.fromkeys(shape.attention for shape in shapes)
    stores = {attention: stores_of(model.name, attention, tp, formats) for attention in distinct}
    groups, block_size = _groups(shapes, stores, block_size, engine)
    notes = (*model.notes, *dict.fromkeys(formats.notes))
    result = []
    for number, stage in enumerate(stages):
        # Ranks of one stage are alike: they share the groups, and differ in their place alone.
        first = CacheLayout(
            model=model.name,
            block_size=block_size,
            groups=groups if pp == 1 else stage_groups(groups, frozenset(shape.index for shape in stage)),
            place=RankPlace(tp, 0, pp, number),
            max_model_len=model.max_model_len,
            step_tokens=step_tokens,
            paging=Paging.POOL if engine.window_share is None else Paging.APART,
            dcp=dcp,
            kernel_block=_kernel_block(block_size, engine),
            notes=notes,
        )
        result.append(first)
        result.extend(first.at(RankPlace(tp, rank, pp, number)) for rank in range(1, tp))
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


def _check_counts(tp: int, pp: int, block_size: int, engine: Convention) -> None:
    for name, value, most in (("tp", tp, MOST_RANKS), ("pp", pp, MOST_RANKS), ("block_size", block_size, MOST_RANKS)):
        if type(value) is not int or not 1 <= value <= most:
            raise PolicyError(
                f"{name} is out of range", code="KV-POL-032", where=name, got=value, expected=f"1 to {most:,}"
            )
    if tp * pp > MOST_RANKS:
        raise PolicyError(
            "too many ranks", code="KV-POL-032", where="tp * pp", got=tp * pp, expected=f"at most {MOST_RANKS:,}"
        )
    if block_size % engine.block_multiple:
        lower = max(1, block_size // engine.block_multiple) * engine.block_multiple
        raise PolicyError(
            f"{engine.name}'s kernels do not take this block size",
            code="KV-POL-038",
            where="block_size",
            got=block_size,
            expected=f"a multiple of {engine.block_multiple}",
            hint=f"the nearest are {lower} and {lower + engine.block_multiple}",
        )


def _check_context_parallel(shapes: collections.abc.Sequence[LayerShape], tp: int, dcp: int) -> None:
    """Tokens are shared among ranks that would hold the same heads: as many as replicate them, or a part of those.

    Windows cannot be shared so, and states are not (vllm: decode context parallelism).
    """
    if type(dcp) is not int or dcp < 1:
        raise PolicyError("dcp is out of range", code="KV-POL-032", where="dcp", got=dcp, expected="1 or more")
    if dcp == 1:
        return
    for shape in shapes:
        attention = shape.attention
        if isinstance(attention, State):
            continue
        replicas = tp // attention.kv_heads if isinstance(attention, Heads) else tp
        if shape.growth is not Growth.TOKEN or replicas < dcp or replicas % dcp:
            raise PolicyError(
                "the tokens of a layer cannot be shared among that many ranks",
                code="KV-POL-061",
                where="dcp",
                got=f"dcp {dcp}, {shape.kind} layers held {max(1, replicas)} times by tp {tp}",
                expected="full or latent attention, replicated a multiple of dcp times",
            )


def _kernel_block(block_size: int, engine: Convention) -> int | None:
    """The tokens that kernels take at once, where a block is several of them."""
    size = engine.kernel_block
    return size if size is not None and block_size != size and block_size % size == 0 else None


def _formats(
    model: ModelConfig, dtype: str | None, cache_dtype: str | None, state_dtype: str | None, engine: Convention
) -> Formats:
    computed = _dtype(model, dtype)
    states = state_dtype if state_dtype not in (None, "auto") else engine.state_dtype or model.state_dtype
    record = PACKED_RECORDS.get(cache_dtype or "")
    return Formats(
        dtype=computed,
        state_dtype=computed if states is None else model_dtype(states, "state_dtype"),
        cache=cache_format(None if record is not None else cache_dtype, computed),
        record=record,
        engine=engine,
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
    """The layers of each stage. Stages are divided by the model's layers, those without a cache included."""
    total = model.num_layers
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
        stages.append(tuple(shape for shape in model.layers if start <= shape.index < start + count))
        start += count
    stages[-1] = (*stages[-1], *model.draft_layers[:draft_layers])
    if not all(stages):
        raise PolicyError(
            "a stage has no layer with a cache",
            code="KV-POL-039",
            where="pp_layers" if pp_layers is not None else "pp",
            got=", ".join(str(len(stage)) for stage in stages),
            expected="at least one layer with a cache in each stage",
        )
    return stages


def _companion(model: ModelConfig, draft: ModelConfig) -> tuple[LayerShape, ...]:
    """The draft model's layers, numbered after the target's and its own draft layers."""
    first = model.num_layers + len(model.draft_layers)
    return tuple(replace(shape, index=first + shape.index, role=Role.DRAFT) for shape in draft.layers)


def _groups(
    shapes: collections.abc.Sequence[LayerShape],
    stores: dict[Attention, tuple[Store, ...]],
    block_size: int,
    engine: Convention,
) -> tuple[tuple[Group, ...], int]:
    """The groups of the whole model, and the block size that they ask for."""
    kinds = kinds_of_layers(shapes, stores)
    if len(kinds) > 1 and engine.window_share is not None:
        return tuple(groups_apart(kinds, block_size, engine)), block_size
    if len(kinds) > 1:
        block_size = grown_block_size(kinds, block_size, engine)
        return tuple(group_kinds(kinds, block_size, engine)), block_size
    (kind,) = kinds
    layers = tuple(Layer(index, kind.stores, role) for index, role in kind.members)
    unit = 1 if kind.growth is Growth.REQUEST else block_size
    return (Group(kind.name, kind.name, kind.growth, layers, kind.window, unit),), block_size
