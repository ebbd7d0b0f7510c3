"""The geometry of the cache on one rank: the one object behind sizing, allocation, verification and reports.

A :class:`CacheLayout` is groups of layers; a layer is stores (its K, its V, its scales, a latent vector, a state...); a
store says how many bytes one token adds, or one request. From that follow the bytes of ``n`` blocks, the tensors of
``n`` blocks and the blocks of one request, so that what is sized is what is allocated.

With one group, every layer has tensors of its own and a block is a block of each. With several, an engine pages them
in one of two ways. In a pool of equal pages a block belongs to one group at a time, layer ``i`` of every group lives in
slot ``i``, and pages and groups that are smaller than the others are padded (vLLM's hybrid cache manager). Apart, each
group has tensors and block numbers of its own, as many as its share of the layout's blocks (SGLang's window pools).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

__all__ = ["CacheLayout", "Group", "Growth", "Layer", "Paging", "RankPlace", "Role", "Store", "TensorSpec"]


class Growth(str, Enum):
    """How a layer's stores grow with a request."""

    TOKEN = "token"  #: with every token  # noqa: S105 - the unit of text, not a secret
    WINDOW = "window"  #: with every token up to a window that slides
    CHUNK = "chunk"  #: with every token up to the end of a chunk
    REQUEST = "request"  #: not at all: one state for each request
    ENCODER = "encoder"  #: with the encoder's positions, once a request


class Paging(str, Enum):
    """How several groups share the memory of a cache."""

    POOL = "pool"  #: one pool of equal pages
    APART = "apart"  #: tensors of their own, in a given ratio


class Role(str, Enum):
    """What a layer is there for."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Store:
    """One array of one layer on one rank.

    ``heads`` and ``width`` are per token (per request for a state); ``dtype`` is the stored element type and ``width``
    counts its elements (int4 packs two values into one uint8). Packed records whose parts differ in type are uint8.
    """

    name: str
    heads: int
    width: int
    dtype: str
    itemsize: int

    @property
    def elements_per_token(self) -> int:
        """Stored elements that one token (for a state: one request) adds."""
        return self.heads * self.width

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token (for a state: one request) adds."""
        return self.heads * self.width * self.itemsize


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model as far as its cache is concerned. ``index`` counts over the whole model."""

    index: int
    stores: tuple[Store, ...]
    role: Role = Role.TARGET

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token (for a state: one request) adds to all stores."""
        return sum(store.bytes_per_token for store in self.stores)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table: the same block numbers mean the same tokens in each of them.

    ``window`` is the number of tokens kept for WINDOW and CHUNK, the encoder's positions for ENCODER, else None.
    ``block_size`` is the group's own tokens per block: larger than the layout's where a page of it is smaller.
    ``share`` is how many blocks a group that is paged apart has for each block of the layout.
    """

    name: str
    kind: str
    growth: Growth
    layers: tuple[Layer, ...]
    window: int | None = None
    block_size: int = 0
    share: Fraction = Fraction(1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to all layers of the group; 0 for states."""
        return 0 if self.growth is Growth.REQUEST else sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one request's states in all layers of the group; 0 for layers that grow with tokens."""
        return sum(layer.bytes_per_token for layer in self.layers) if self.growth is Growth.REQUEST else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of the largest layer, before padding: a state is one block."""
        tokens = 1 if self.growth is Growth.REQUEST else self.block_size
        return max((layer.bytes_per_token for layer in self.layers), default=0) * tokens

    def request_blocks(self, num_tokens: int, step_tokens: int | None) -> int:
        """Blocks that one request of ``num_tokens`` holds here, when a step computes up to ``step_tokens`` at once.

        A window keeps its tokens and those of the step that is being computed, and rarely starts on a block's edge, so
        it needs one block more. None for ``step_tokens`` is unknown, and counts as the whole request.
        """
        if self.growth is Growth.REQUEST:
            return 1
        kept = num_tokens
        step = num_tokens if step_tokens is None else step_tokens
        if self.growth is Growth.ENCODER and self.window is not None:
            kept = self.window
        elif self.growth is Growth.WINDOW and self.window is not None:
            kept = min(self.window - 1 + step, num_tokens)
        elif self.growth is Growth.CHUNK and self.window is not None:
            kept = min(self.window + step, num_tokens)
        return -(-kept // self.block_size) + (1 if self.growth is Growth.WINDOW else 0)


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
    """One tensor to allocate. ``shape`` is (blocks, heads, block_size, width), or (blocks, 1, 1, bytes) for a pool's
    slot.

    ``layers`` are those whose blocks live in it: one, or in a pool one of each group. ``store`` is ``pool`` for a slot.
    """

    name: str
    shape: tuple[int, int, int, int]
    dtype: str
    nbytes: int
    elements: int
    block_bytes: int
    block_elements: int
    layers: tuple[int, ...]
    store: str
    role: Role


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of one rank: ``groups`` of layers in blocks of ``block_size`` tokens.

    ``alignment`` is the multiple to which every tensor's size is rounded up by the device that will hold it.
    ``max_model_len`` is the longest context that the model was made for, None if its config does not say.
    ``step_tokens`` is the most tokens that one step computes (max_num_batched_tokens), None if unknown; windows need
    it. ``dcp`` is how many ranks share the tokens of a request: a block holds its part of ``block_size * dcp`` tokens.
    ``kernel_block`` is the number of tokens that the engine's kernels take at once, if that is not the whole block.
    ``notes`` say what was derived rather than given (a head size, replicated heads).
    """

    model: str
    block_size: int
    groups: tuple[Group, ...]
    place: RankPlace = RankPlace()
    alignment: int = 1
    max_model_len: int | None = None
    step_tokens: int | None = None
    paging: Paging = Paging.POOL
    dcp: int = 1
    kernel_block: int | None = None
    notes: tuple[str, ...] = ()
    # Distinct (tensor bytes of one block, share) and how often each occurs: bytes(n) is called often for one plan.
    _block_sizes: tuple[tuple[int, Fraction, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts: dict[tuple[int, Fraction], int] = {}
        if self.pooled:
            counts[self.page_bytes, Fraction(1)] = self.slots
        else:
            for group in self.groups:
                for layer in group.layers:
                    for store in layer.stores:
                        size = store.bytes_per_token * self._unit(group), group.share
                        counts[size] = counts.get(size, 0) + 1
        sizes = tuple((nbytes, share, count) for (nbytes, share), count in counts.items())
        object.__setattr__(self, "_block_sizes", sizes)

    @property
    def pooled(self) -> bool:
        """Whether several groups share one pool of equal pages."""
        return len(self.groups) > 1 and self.paging is Paging.POOL

    @property
    def block_tokens(self) -> int:
        """Tokens of a request that one block accounts for, the parts on other ranks included."""
        return self.block_size * self.dcp

    @property
    def slots(self) -> int:
        """Layers of the largest group: the tensors of a pool."""
        return max(len(group.layers) for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer in a pool: the largest group's page."""
        return max(group.page_bytes for group in self.groups)

    @property
    def page_elements(self) -> int:
        """The same in elements of the narrowest store: a kernel counts those of its own type."""
        return self.page_bytes // min(
            store.itemsize for group in self.groups for layer in group.layers for store in layer.stores
        )

    @property
    def num_layers(self) -> int:
        """Layers with a cache on this rank, draft layers included."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of data that one token adds on this rank in all layers that see it, without padding."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on this rank, before the device's rounding of whole tensors."""
        return sum(-(-size * count * share.numerator // share.denominator) for size, share, count in self._block_sizes)

    @property
    def padding_bytes(self) -> int:
        """Bytes that hold nothing in one block of each group: smaller pages, and slots without a layer."""
        if not self.pooled:
            return 0
        return sum(self.bytes_per_block - self._data_bytes(group) for group in self.groups)

    @property
    def marginal_bytes_per_token(self) -> int:
        """Bytes of blocks that one more token of a long request takes, rounded up; its windows are full by then."""
        growing = [group for group in self.groups if group.growth is Growth.TOKEN]
        if not self.pooled:
            return sum(-(-group.bytes_per_token // self.dcp) for group in growing)
        return sum(-(-self.bytes_per_block // (self._unit(group) * self.dcp)) for group in growing)

    @property
    def fixed_bytes_per_request(self) -> int:
        """Bytes of blocks that a long request takes whatever its length: its windows, chunks, states and encoder."""
        fixed = [group for group in self.groups if group.growth is not Growth.TOKEN]
        far = 2**62  # longer than any window and any step
        step = self.step_tokens or 0
        held = [(group, self._request_blocks(group, far, step)) for group in fixed]
        if self.pooled:
            return sum(blocks for _, blocks in held) * self.bytes_per_block
        return sum(blocks * self._data_bytes(group) for group, blocks in held)

    def with_alignment(self, alignment: int) -> CacheLayout:
        """The same layout on a device that rounds tensors up to ``alignment``."""
        return self if alignment == self.alignment else self._with("alignment", alignment)

    def at(self, place: RankPlace) -> CacheLayout:
        """The same layout on another rank of its stage."""
        return self if place == self.place else self._with("place", place)

    def _with(self, name: str, value: object) -> CacheLayout:
        # Nothing that is derived from the groups changes, so it is copied and not derived again.
        changed = copy.copy(self)
        object.__setattr__(changed, name, value)
        return changed

    def bytes(self, num_blocks: int) -> int:
        """Bytes that ``num_blocks`` blocks take on the device, each tensor rounded up to ``alignment``."""
        total = 0
        for block_bytes, share, count in self._block_sizes:
            nbytes = block_bytes * (num_blocks * share.numerator // share.denominator)
            total += count * (-(-nbytes // self.alignment) * self.alignment)
        return total

    def request_blocks(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` tokens holds: in all groups of a pool, or in the fullest apart."""
        held = [(group, self._request_blocks(group, num_tokens, self.step_tokens)) for group in self.groups]
        if self.pooled:
            return sum(blocks for _, blocks in held)
        return max(-(-blocks * group.share.denominator // group.share.numerator) for group, blocks in held)

    def tensors(self, num_blocks: int) -> tuple[TensorSpec, ...]:
        """The tensors of ``num_blocks`` blocks, in layer order; their sizes, rounded up, sum to ``bytes(n)``."""
        if self.pooled:
            return tuple(self._slot(number, num_blocks) for number in range(self.slots))
        return tuple(
            _tensor(layer, store, num_blocks * group.share.numerator // group.share.denominator, self._unit(group))
            for group in self.groups
            for layer in group.layers
            for store in layer.stores
        )

    def _unit(self, group: Group) -> int:
        """Tokens of one block of ``group``; a state is a block by itself."""
        return 1 if group.growth is Growth.REQUEST else group.block_size or self.block_size

    def _request_blocks(self, group: Group, num_tokens: int, step_tokens: int | None) -> int:
        if group.growth is Growth.TOKEN:
            return -(-num_tokens // (self._unit(group) * self.dcp))
        return group.request_blocks(num_tokens, step_tokens)

    def _data_bytes(self, group: Group) -> int:
        return group.bytes_per_request + group.bytes_per_token * self._unit(group)

    def _slot(self, number: int, num_blocks: int) -> TensorSpec:
        members = [group.layers[number] for group in self.groups if number < len(group.layers)]
        return TensorSpec(
            name=f"pool.{number}",
            shape=(num_blocks, 1, 1, self.page_bytes),
            dtype="uint8",
            nbytes=self.page_bytes * num_blocks,
            elements=self.page_elements * num_blocks,
            block_bytes=self.page_bytes,
            block_elements=self.page_elements,
            layers=tuple(layer.index for layer in members),
            store="pool",
            role=Role.TARGET,
        )


def _tensor(layer: Layer, store: Store, num_blocks: int, unit: int) -> TensorSpec:
    block_elements, block_bytes = store.elements_per_token * unit, store.bytes_per_token * unit
    prefix = "layers" if layer.role is Role.TARGET else layer.role.value
    return TensorSpec(
        name=f"{prefix}.{layer.index}.{store.name}",
        shape=(num_blocks, store.heads, unit, store.width),
        dtype=store.dtype,
        nbytes=block_bytes * num_blocks,
        elements=block_elements * num_blocks,
        block_bytes=block_bytes,
        block_elements=block_elements,
        layers=(layer.index,),
        store=store.name,
        role=layer.role,
    )
