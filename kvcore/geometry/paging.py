"""Several kinds of layers in one pool: groups of equal size, and blocks whose pages are equal.

vLLM's hybrid cache manager is the model (vllm/v1/core/kv_cache_utils.py, vllm/model_executor/models/config.py). A pool
has as many slots as a group has layers; every page of the pool has the size of the largest. What is smaller is given
more tokens a block if that divides, and is padded otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvcore.contract.layout import Group, Growth, Layer, Role, Store
from kvcore.conventions import Convention
from kvcore.errors import PolicyError
from kvcore.geometry.model import Attention, Latent, LayerShape

__all__ = ["Kind", "group_kinds", "groups_apart", "grown_block_size", "kinds_of_layers", "stage_groups"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that are alike: the same growth, window and stores. ``members`` are (index, role) in the model's order."""

    name: str
    growth: Growth
    window: int | None
    latent: bool
    stores: tuple[Store, ...]
    members: tuple[tuple[int, Role], ...]

    @property
    def unit_bytes(self) -> int:
        """Bytes that one token adds to one layer; of one request for a state."""
        return sum(store.bytes_per_token for store in self.stores)


def kinds_of_layers(shapes: Sequence[LayerShape], stores: dict[Attention, tuple[Store, ...]]) -> list[Kind]:
    """The distinct kinds among ``shapes``, in order of appearance."""
    found: dict[object, Kind] = {}
    for shape in shapes:
        held = stores[shape.attention]
        key = (shape.growth, shape.window, held)
        kind = found.get(key)
        if kind is None:
            latent = isinstance(shape.attention, Latent)
            kind = Kind(shape.kind, shape.growth, shape.window, latent, held, ())
        found[key] = replace(kind, members=(*kind.members, (shape.index, shape.role)))
    return list(found.values())


def grown_block_size(kinds: Sequence[Kind], block_size: int, engine: Convention) -> int:
    """Tokens per block: ``block_size``, or the smallest allowed multiple whose page holds the largest state."""
    state = max((kind.unit_bytes for kind in kinds if kind.growth is Growth.REQUEST), default=0)
    tokens = [kind for kind in kinds if kind.growth is not Growth.REQUEST]
    if not state or not tokens:
        return block_size
    per_token = max(kind.unit_bytes for kind in tokens)
    step = engine.latent_multiple if any(kind.latent for kind in tokens) else engine.state_multiple
    grown = -(-state // (per_token * step)) * step
    return max(grown, -(-block_size // step) * step)


def group_kinds(kinds: Sequence[Kind], block_size: int, engine: Convention) -> list[Group]:
    """The groups of the whole model: every kind split into groups of equal size, in order."""
    size = _group_size([len(kind.members) for kind in kinds], engine)
    page = max(kind.unit_bytes * (1 if kind.growth is Growth.REQUEST else block_size) for kind in kinds)
    groups = []
    for kind in kinds:
        count = -(-len(kind.members) // size)
        tokens = 1 if kind.growth is Growth.REQUEST else _block_size(kind, block_size, page)
        for number in range(count):
            layers = tuple(Layer(index, kind.stores, role) for index, role in kind.members[number::count])
            name = kind.name if count == 1 else f"{kind.name}.{number}"
            groups.append(Group(name, kind.name, kind.growth, layers, kind.window, tokens))
    return groups


def groups_apart(kinds: Sequence[Kind], block_size: int, engine: Convention) -> list[Group]:
    """One group a kind, each with tensors of its own: windows have ``engine.window_share`` of the blocks of the rest,
    and states so many slots that they take ``engine.state_ratio`` of its bytes.

    The engine takes a whole number of slots first and fills the rest with tokens, so it may come out one slot apart.
    Raises :class:`PolicyError` for kinds whose share of memory the engine derives from neither ratio.
    """
    shares = _shares(kinds, block_size, engine)
    groups = []
    for kind in kinds:
        share = shares.get(kind.growth)
        if share is None:
            raise PolicyError(
                f"how {engine.name} divides memory between {kind.name} layers and others is not known",
                code="KV-POL-062",
                where="engine",
                got=engine.name,
                expected="an engine that pages them in one pool, such as vllm",
            )
        layers = tuple(Layer(index, kind.stores, role) for index, role in kind.members)
        tokens = 1 if kind.growth is Growth.REQUEST else block_size
        groups.append(Group(kind.name, kind.name, kind.growth, layers, kind.window, tokens, share))
    return groups


def _shares(kinds: Sequence[Kind], block_size: int, engine: Convention) -> dict[Growth, Fraction | None]:
    """Blocks of each growth for one block of full attention; None for those that the engine has no ratio for."""
    shares = {Growth.TOKEN: Fraction(1), Growth.WINDOW: engine.window_share, Growth.CHUNK: engine.window_share}
    states = sum(kind.unit_bytes * len(kind.members) for kind in kinds if kind.growth is Growth.REQUEST)
    if states and engine.state_ratio is not None:
        tokens = sum(
            kind.unit_bytes * len(kind.members) * block_size * (shares.get(kind.growth) or 0)
            for kind in kinds
            if kind.growth is not Growth.REQUEST
        )
        shares[Growth.REQUEST] = engine.state_ratio * tokens / states
    return shares


def stage_groups(groups: Sequence[Group], indices: frozenset[int]) -> tuple[Group, ...]:
    """The groups as one pipeline stage holds them: the same block tables, its own layers."""
    return tuple(
        replace(group, layers=tuple(layer for layer in group.layers if layer.index in indices)) for group in groups
    )


def _group_size(counts: Sequence[int], engine: Convention) -> int:
    """Layers of a group: as many as the smallest kind has, or the largest if that pads little."""
    least, most = min(counts), max(counts)
    return most if most < least * engine.pool_ratio else least


def _block_size(kind: Kind, block_size: int, page: int) -> int:
    """Tokens per block of a kind whose page is smaller: more of them, as far as the pages come out equal."""
    own = kind.unit_bytes * block_size
    return block_size * (page // own) if page % own == 0 else block_size
