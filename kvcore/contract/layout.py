"""The geometry of the cache on one rank: the one object behind sizing, allocation, verification and reports.

A :class:`CacheLayout` is groups of layers; a layer is stores (its K, its V, its scales, a latent vector...); a
store says how many bytes one token adds. From that follow the bytes of ``n`` blocks and the tensors of ``n``
blocks, so that what is sized is what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["CacheLayout", "Group", "Growth", "Layer", "RankPlace", "Role", "Store", "TensorSpec"]


class Growth(str, Enum):
    """How a store grows with a request."""

    TOKEN = "token"  #: with every token  # noqa: S105 - the unit of text, not a secret
    WINDOW = "window"  #: with every token up to a window


class Role(str, Enum):
    """What a layer is there for."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Store:
    """One array of one layer on one rank.

    ``heads`` and ``width`` are per token on this rank; ``dtype`` is the stored element type, ``width`` counts its
    elements (int4 packs two values into one uint8). ``bytes_per_token`` is ``heads * width * itemsize``.
    """

    name: str
    heads: int
    width: int
    dtype: str
    itemsize: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to this store."""
        return self.heads * self.width * self.itemsize

    @property
    def elements_per_token(self) -> int:
        """Stored elements that one token adds to this store."""
        return self.heads * self.width


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model as far as its cache is concerned. ``index`` counts over the whole model."""

    index: int
    stores: tuple[Store, ...]
    role: Role = Role.TARGET


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table: the same block numbers mean the same tokens in each of them.

    ``window`` is the number of tokens kept for Growth.WINDOW, else None.
    """

    name: str
    kind: str
    growth: Growth
    layers: tuple[Layer, ...]
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to all layers of the group."""
        return sum(store.bytes_per_token for layer in self.layers for store in layer.stores)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands: ``tp_rank`` of ``tp``, pipeline stage ``pp_rank`` of ``pp``. All count from 0."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0

    @property
    def rank(self) -> int:
        """The rank's number, tensor-parallel ranks of one stage together."""
        return self.pp_rank * self.tp + self.tp_rank


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to allocate: the blocks of one store of one layer. ``shape`` is (blocks, heads, block_size, width)."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: str
    nbytes: int
    elements: int
    block_bytes: int
    block_elements: int
    layer: int
    store: str
    role: Role


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of one rank: ``groups`` of layers in blocks of ``block_size`` tokens.

    ``alignment`` is the multiple to which every tensor's size is rounded up by the device that will hold it.
    ``max_model_len`` is the longest context that the model was made for, None if its config does not say.
    ``notes`` say what was derived rather than given (a head size, replicated heads).
    """

    model: str
    block_size: int
    groups: tuple[Group, ...]
    place: RankPlace = RankPlace()
    alignment: int = 1
    max_model_len: int | None = None
    notes: tuple[str, ...] = ()
    # Distinct tensor sizes of one block and how often each occurs: bytes(n) is called many times for one plan.
    _block_sizes: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    _bytes_per_token: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts: dict[int, int] = {}
        for group in self.groups:
            for layer in group.layers:
                for store in layer.stores:
                    size = store.bytes_per_token * self.block_size
                    counts[size] = counts.get(size, 0) + 1
        object.__setattr__(self, "_block_sizes", tuple(counts.items()))
        object.__setattr__(self, "_bytes_per_token", sum(group.bytes_per_token for group in self.groups))

    @property
    def num_layers(self) -> int:
        """Layers with a cache on this rank, draft layers included."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of context adds on this rank, all groups together."""
        return self._bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on this rank, before the device's rounding of whole tensors."""
        return self._bytes_per_token * self.block_size

    def bytes(self, num_blocks: int) -> int:
        """Bytes that ``num_blocks`` blocks take on the device, each tensor rounded up to ``alignment``."""
        total = 0
        for block_bytes, count in self._block_sizes:
            nbytes = block_bytes * num_blocks
            total += count * (-(-nbytes // self.alignment) * self.alignment)
        return total

    def request_blocks(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` tokens holds."""
        return -(-num_tokens // self.block_size)

    def tensors(self, num_blocks: int) -> tuple[TensorSpec, ...]:
        """The tensors of ``num_blocks`` blocks, in layer order; their sizes, rounded up, sum to ``bytes(n)``."""
        return tuple(
            self._tensor(layer, store, num_blocks)
            for group in self.groups
            for layer in group.layers
            for store in layer.stores
        )

    def _tensor(self, layer: Layer, store: Store, num_blocks: int) -> TensorSpec:
        block_elements = store.elements_per_token * self.block_size
        block_bytes = store.bytes_per_token * self.block_size
        prefix = "layers" if layer.role is Role.TARGET else layer.role.value
        return TensorSpec(
            name=f"{prefix}.{layer.index}.{store.name}",
            shape=(num_blocks, store.heads, self.block_size, store.width),
            dtype=store.dtype,
            nbytes=block_bytes * num_blocks,
            elements=block_elements * num_blocks,
            block_bytes=block_bytes,
            block_elements=block_elements,
            layer=layer.index,
            store=store.name,
            role=layer.role,
        )
