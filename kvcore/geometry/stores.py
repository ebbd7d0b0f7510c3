"""What one layer keeps on one tensor-parallel rank: its attention or state, in the formats asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.contract.layout import Store
from kvcore.conventions import Convention, IndexFormat
from kvcore.errors import ConfigError, PolicyError
from kvcore.geometry.formats import DTYPES, PACKED_RECORDS, ElementFormat, PackedRecord
from kvcore.geometry.model import Attention, Heads, Latent, State, StateArray

__all__ = ["Formats", "stores_of"]

#: A sparse indexer's fp8 keys have one scale of 4 bytes for each 128 values (DeepSeek-V3.2).
INDEX_GROUP, INDEX_SCALE = 128, 4


@dataclass(slots=True)
class Formats:
    """The dtypes that hold for a cache, and what was noted while stores were made with them."""

    dtype: str
    state_dtype: str
    cache: ElementFormat
    record: PackedRecord | None
    engine: Convention
    notes: list[str] = field(default_factory=list)


def stores_of(model: str, attention: Attention, tp: int, formats: Formats) -> tuple[Store, ...]:
    """The stores of one layer on one of ``tp`` ranks; raises :class:`ConfigError` if it cannot be divided."""
    if isinstance(attention, State):
        return tuple(_state(model, array, tp, formats) for array in attention.arrays)
    if attention.query_heads % tp:
        raise _indivisible(model, "attention heads", attention.query_heads, tp)
    if isinstance(attention, Latent):
        return _latent(model, attention, tp, formats)
    return _heads(model, attention, tp, formats)


def _heads(model: str, attention: Heads, tp: int, formats: Formats) -> tuple[Store, ...]:
    if formats.record is not None:
        raise _no_format(model, formats.record.name, "keys and values")
    heads = _heads_per_rank(model, attention.kv_heads, tp, formats.notes)
    return (
        *_vectors(model, "k", heads, attention.k_width, formats),
        *_vectors(model, "v", heads, attention.v_width, formats),
    )


def _latent(model: str, attention: Latent, tp: int, formats: Formats) -> tuple[Store, ...]:
    if tp > 1:
        formats.notes.append(f"the latent vector is replicated on all {tp} tensor-parallel ranks")
    record = formats.record
    sparse = attention.index_width is not None
    if record is None and sparse and formats.engine.packs_sparse_fp8 and formats.cache.name == "fp8_e4m3":
        # The kernels of sparse latent attention take fp8 as packed records alone.
        record = PACKED_RECORDS["fp8_ds_mla"]
        formats.notes.append(f"fp8 with a sparse indexer is stored as {record.name} records")
    if record is not None:
        stores: tuple[Store, ...] = (
            Store("kv", 1, record.nbytes(attention.lora_width, attention.rope_width), "uint8", 1),
        )
    else:
        stores = _vectors(model, "kv", 1, attention.lora_width + attention.rope_width, formats)
    return stores if attention.index_width is None else (*stores, _index(attention.index_width, formats))


def _index(width: int, formats: Formats) -> Store:
    """The keys of a sparse indexer: one head, the same on every rank."""
    if formats.engine.index_format is IndexFormat.MODEL:
        return Store("index", 1, width, formats.dtype, DTYPES[formats.dtype])
    return Store("index", 1, width + -(-width // INDEX_GROUP) * INDEX_SCALE, "uint8", 1)


def _state(model: str, array: StateArray, tp: int, formats: Formats) -> Store:
    # Mamba 2's groups that do not divide are held by every rank, one each.
    groups = array.groups if array.groups % tp == 0 else array.groups + tp - array.groups % tp
    divided = array.divided + groups * array.group_width
    if array.divided % tp or divided % tp:
        raise _indivisible(model, "channels of a state", array.divided, tp)
    names = {"model": formats.dtype, "state": formats.state_dtype}
    dtype = names.get(array.dtype, array.dtype)
    return Store(array.name, divided // tp, array.fixed, dtype, DTYPES[dtype])


def _heads_per_rank(model: str, kv_heads: int, tp: int, notes: list[str]) -> int:
    """KV heads on one rank; with more ranks than heads each head is held by several."""
    if kv_heads % tp == 0:
        return kv_heads // tp
    if tp % kv_heads == 0:
        notes.append(f"each of {kv_heads} KV heads is replicated on {tp // kv_heads} tensor-parallel ranks")
        return 1
    raise _indivisible(model, "KV heads", kv_heads, tp)


def _vectors(model: str, name: str, heads: int, width: int, formats: Formats) -> tuple[Store, ...]:
    """The store of one vector a head and token, and the store of its parameters if the format has any."""
    cache = formats.cache
    elements = cache.elements(width)
    if elements is None:
        raise ConfigError(
            f"a vector of {width} values does not fill whole elements of {cache.name}",
            code="KV-CFG-031",
            where=model,
            got=f"{width} values",
            expected=f"a multiple of {cache.values_per_element}",
        )
    store = Store(name, heads, elements, cache.dtype, DTYPES[cache.dtype])
    if not cache.parameters:
        return (store,)
    return (store, Store(f"{name}_scale", heads, cache.parameters, formats.dtype, DTYPES[formats.dtype]))


def _indivisible(model: str, what: str, count: int, tp: int) -> ConfigError:
    return ConfigError(
        f"{what} cannot be divided among the tensor-parallel ranks",
        code="KV-CFG-030",
        where=model,
        got=f"{count} {what}, tp {tp}",
        expected="one divides the other" if what == "KV heads" else f"tp divides {count}",
    )


def _no_format(model: str, name: str, what: str) -> PolicyError:
    return PolicyError(
        f"{name} is a format of latent vectors, not of {what}",
        code="KV-POL-050",
        where=model,
        got=name,
        expected="a format for keys and values, such as fp8",
    )
