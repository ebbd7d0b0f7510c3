"""From limits, which are data with reasons, to upper bounds in blocks for one layout."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

from kvcore.contract.facts import AllocationLimits, Limit, LimitKind, LimitUnit, Stride
from kvcore.contract.layout import CacheLayout
from kvcore.errors import PlanError
from kvcore.sizing.policy import Policy

__all__ = ["Bound", "IndexThreshold", "bound_of", "index_thresholds", "largest_fitting", "limit_bounds", "stride_of"]


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest number of blocks that one limit allows, why, and who says so.

    ``idle_bytes`` is the memory that would hold blocks but for this bound: 0 unless it is below the memory bound.
    """

    kind: LimitKind
    max_blocks: int
    reason: str
    source: str
    idle_bytes: int = 0

    @property
    def first_unsafe_block(self) -> int | None:
        """The number of the first block that an index cannot reach to its end; None for other kinds of bounds."""
        return self.max_blocks if self.kind is LimitKind.INDEX else None


@dataclass(frozen=True, slots=True)
class IndexThreshold:
    """The number of blocks up to which a 32-bit index is safe: signed or unsigned, counting ``unit``."""

    signed: bool
    unit: LimitUnit
    max_blocks: int


def largest_fitting(layout: CacheLayout, available: int) -> int:
    """The largest n with ``layout.bytes(n) <= available``; 0 if not even one block fits."""
    high = max(0, available) // layout.bytes_per_block
    if layout.bytes(high) <= available:
        return _upward(layout, available, high)
    low = 0  # bytes(0) is 0, and bytes(high) is too much: the device rounds tensors up
    while high - low > 1:
        middle = (low + high) // 2
        if layout.bytes(middle) <= available:
            low = middle
        else:
            high = middle
    return low


def _upward(layout: CacheLayout, available: int, fitting: int) -> int:
    """The most blocks from ``fitting`` on: groups that are paged apart have whole blocks, which may leave room."""
    step = 1
    while layout.bytes(fitting + step) <= available:
        fitting += step
        step *= 2
    while step:
        if layout.bytes(fitting + step) <= available:
            fitting += step
        step //= 2
    return fitting


def limit_bounds(
    layout: CacheLayout,
    allocation: AllocationLimits | None,
    limits: collections.abc.Sequence[Limit],
    policy: Policy,
    *,
    max_model_len: int | None,
    reserved_blocks: int,
) -> list[Bound]:
    """Every bound but memory, as blocks of ``layout``."""
    bounds = [bound_of(limit, layout) for limit in (*limits, *policy.limits)]
    if allocation is not None:
        bounds.extend(_allocation_bounds(layout, allocation))
    if policy.limit_to_demand:
        bounds.append(_demand_bound(layout, policy, max_model_len, reserved_blocks))
    if policy.max_blocks is not None:
        reason = policy.max_blocks_reason or ""
        bounds.append(Bound(LimitKind.CAP, policy.max_blocks, reason, policy.origin("max_blocks")))
    return bounds


def bound_of(limit: Limit, layout: CacheLayout) -> Bound:
    """The blocks that a limit allows: its bound over what one block adds in the limit's unit."""
    return Bound(limit.kind, limit.bound // _per_block(limit, layout), limit.reason, limit.source)


def index_thresholds(layout: CacheLayout) -> list[IndexThreshold]:
    """Up to how many blocks a 32-bit index into one tensor is safe, for each way of counting; smallest first."""
    strides = {unit: stride_of(Stride.LAYER, unit, layout) for unit in (LimitUnit.BYTES, LimitUnit.ELEMENTS)}
    thresholds = [
        IndexThreshold(signed, unit, 2 ** (31 if signed else 32) // stride)
        for signed in (True, False)
        for unit, stride in strides.items()
    ]
    return sorted(thresholds, key=lambda t: t.max_blocks)


def _per_block(limit: Limit, layout: CacheLayout) -> int:
    if limit.unit is LimitUnit.BLOCKS:
        return 1
    if limit.unit is LimitUnit.TOKENS:
        return layout.block_size
    if limit.stride_size is not None:
        return limit.stride_size
    if limit.stride is None:
        raise PlanError(
            f"a limit in {limit.unit.value} needs a stride: what one block adds",
            code="KV-PLAN-010",
            where=limit.source,
            expected="stride or stride_size",
        )
    return stride_of(limit.stride, limit.unit, layout)


def stride_of(stride: Stride, unit: LimitUnit, layout: CacheLayout) -> int:
    """What one block adds to an index, in ``unit``. The largest layer counts, since it overflows first."""
    if layout.pooled:
        page = layout.page_bytes if unit is LimitUnit.BYTES else layout.page_elements
        return page * layout.slots if stride is Stride.ALL_LAYERS else page
    per_token = "bytes_per_token" if unit is LimitUnit.BYTES else "elements_per_token"
    # Layers that are alike share one tuple of stores, so the distinct ones are few; comparing them would cost more.
    layers = {id(layer.stores): layer.stores for group in layout.groups for layer in group.layers}.values()
    if stride is Stride.LAYER:
        widest = max(getattr(store, per_token) for stores in layers for store in stores)
    elif stride is Stride.LAYER_KV:
        widest = max(sum(getattr(store, per_token) for store in stores) for stores in layers)
    else:
        widest = sum(getattr(s, per_token) for group in layout.groups for layer in group.layers for s in layer.stores)
    return int(widest) * layout.block_size


def _allocation_bounds(layout: CacheLayout, allocation: AllocationLimits) -> list[Bound]:
    bounds = []
    for unit, most in ((LimitUnit.BYTES, allocation.max_bytes), (LimitUnit.ELEMENTS, allocation.max_elements)):
        if most is not None:
            reason = allocation.reason or f"one tensor can have at most {most:,} {unit.value}"
            per_block = stride_of(Stride.LAYER, unit, layout)
            bounds.append(Bound(LimitKind.ALLOCATION, most // per_block, reason, "platform"))
    return bounds


def _demand_bound(layout: CacheLayout, policy: Policy, max_model_len: int | None, reserved_blocks: int) -> Bound:
    if policy.max_num_seqs is None or max_model_len is None:
        raise PlanError(
            "the demand is unknown",
            code="KV-PLAN-011",
            got=f"max_num_seqs={policy.max_num_seqs}, max_model_len={max_model_len}",
            expected="both, to limit the cache to what they can use",
        )
    blocks = policy.max_num_seqs * layout.request_blocks(max_model_len) + reserved_blocks
    reason = f"{policy.max_num_seqs:,} requests of {max_model_len:,} tokens can use no more"
    return Bound(LimitKind.DEMAND, blocks, reason, policy.origin("limit_to_demand"))
