"""Plans, refusals and devices as JSON-ready data: every figure comes from the object, none is computed here.

Keys that end in ``_bytes`` are whole bytes; null means unknown.
"""

from __future__ import annotations

from fractions import Fraction

from kvcore.cache.allocate import Cache
from kvcore.cache.verify import Verification
from kvcore.contract.facts import Device, DeviceFacts, Reading
from kvcore.contract.layout import Group
from kvcore.registry import PluginRecord
from kvcore.report.schema import (
    BoundData,
    CacheData,
    DeviceData,
    FactsData,
    GroupData,
    LiftData,
    PlanData,
    PluginData,
    RankData,
    ReadingData,
    RefusalData,
    SettingData,
    TermData,
)
from kvcore.settings import SETTINGS, Resolved
from kvcore.sizing.budget import Term
from kvcore.sizing.lifts import Lift
from kvcore.sizing.limits import Bound
from kvcore.sizing.plan import Plan
from kvcore.sizing.refusal import Refusal
from kvcore.units import format_fraction

__all__ = [
    "cache_data",
    "device_data",
    "facts_data",
    "plan_data",
    "record_data",
    "refusal_data",
    "settings_data",
]


def plan_data(plan: Plan, settings: Resolved | None = None) -> PlanData:
    """Everything that ``kvcore plan --json`` and ``kvcore explain`` say of a plan."""
    facts = plan.rank.facts
    concurrency, length = plan.max_concurrency, plan.max_model_len
    return {
        "model": plan.model,
        "engine": plan.engine.name,
        "device": None if facts is None else device_data(facts.device),
        "num_blocks": plan.num_blocks,
        "usable_blocks": plan.usable_blocks,
        "reserved_blocks": plan.reserved_blocks,
        "block_size": plan.block_size,
        "kernel_block_size": plan.layout.kernel_block,
        "block_tokens": plan.layout.block_tokens,
        "tokens": plan.tokens,
        "max_model_len": plan.max_model_len,
        "max_concurrency": _decimal(concurrency),
        "engine_tokens": plan.engine_tokens,
        "engine_concurrency": _printed(plan.engine_concurrency),
        "request_blocks": None if length is None else plan.layout.request_blocks(length),
        "smallest_request_blocks": plan.layout.request_blocks(1),
        "fixed_bytes_per_request": plan.layout.fixed_bytes_per_request,
        "marginal_bytes_per_token": plan.layout.marginal_bytes_per_token,
        "padding_bytes": plan.layout.padding_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_block": plan.bytes_per_block,
        "cache_bytes": plan.cache_bytes,
        "available_bytes": plan.available_bytes,
        "unused_bytes": plan.unused_bytes,
        "binding": _bound(plan.binding),
        "blocks_without_binding": plan.blocks_without_binding,
        "lifts": [_lift(lift) for lift in plan.lifts],
        "bounds": [_bound(bound) for bound in plan.bounds],
        "terms": [_term(term) for term in plan.terms],
        "groups": [_group(group) for group in plan.layout.groups],
        "ranks": [_rank(plan, number) for number in range(len(plan.ranks))],
        "tightest_rank": plan.tightest,
        "notes": list(plan.layout.notes),
        "warnings": [{"code": warning.code, "text": warning.text} for warning in plan.warnings],
        "settings": [] if settings is None else settings_data(settings),
        "flags": None,
    }


def refusal_data(refusal: Refusal) -> RefusalData:
    """A refusal's figures and remedies."""
    return {
        "shortage": refusal.shortage.value,
        "rank": refusal.rank,
        "bytes_per_block": refusal.bytes_per_block,
        "needed_blocks": refusal.needed_blocks,
        "needed_bytes": refusal.needed_bytes,
        "allowed_blocks": refusal.allowed_blocks,
        "available_bytes": refusal.available_bytes,
        "gap_bytes": refusal.gap_bytes,
        "max_model_len": refusal.max_model_len,
        "largest_model_len": refusal.largest_model_len,
        "binding": _bound(refusal.binding),
        "bounds": [_bound(bound) for bound in refusal.bounds],
        "terms": [_term(term) for term in refusal.terms],
        "remedies": [{"knob": r.knob, "value": r.value, "text": r.text} for r in refusal.remedies],
    }


def cache_data(cache: Cache, verification: Verification, rank: int) -> CacheData:
    """A cache that was allocated and verified."""
    return {
        "rank": rank,
        "device": device_data(cache.device),
        "num_blocks": cache.num_blocks,
        "tensors": len(cache.tensors),
        "allocated_bytes": cache.nbytes,
        "committed_bytes": cache.committed_bytes,
        "verified_tensors": verification.tensors,
        "verified_blocks": len(verification.blocks),
        "verified_bytes": verification.probed_bytes,
    }


def device_data(device: Device) -> DeviceData:
    """One device."""
    return {
        "platform": device.platform,
        "index": device.index,
        "key": device.key,
        "name": device.name,
        "kind": device.kind.value,
        "mapping": device.mapping.value,
        "visible": device.visible,
        "parent": device.parent,
    }


def facts_data(facts: DeviceFacts) -> FactsData:
    """A device and what was read of it."""
    allocation = facts.allocation
    return {
        **device_data(facts.device),
        "readings": [_reading(reading) for reading in facts.readings],
        "granularity_bytes": allocation.granularity,
        "largest_allocation_bytes": allocation.max_bytes,
        "largest_allocation_elements": allocation.max_elements,
    }


def record_data(record: PluginRecord) -> PluginData:
    """What became of one plugin."""
    info = record.info
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "state": record.state.value,
        "reason": record.reason,
        "vendor": None if info is None else info.vendor,
        "contract": None if info is None else info.contract,
        "accelerator": None if info is None else info.accelerator,
        "capabilities": None
        if info is None
        else {
            capability.value: {"support": supported.support.value, "reason": supported.reason}
            for capability, supported in info.capabilities.items()
        },
    }


def settings_data(settings: Resolved) -> list[SettingData]:
    """Every setting, its text and where that came from."""
    return [
        {
            "name": setting.name,
            "value": settings.texts.get(setting.name, setting.default),
            "origin": settings.origins.get(setting.name, "default"),
        }
        for setting in SETTINGS
    ]


def _decimal(value: Fraction | None) -> float | None:
    """A ratio with two decimals, rounded down."""
    return None if value is None else float(format_fraction(value).replace(",", ""))


def _printed(value: Fraction | None) -> float | None:
    """A ratio as an engine's log prints it: two decimals, to nearest."""
    return None if value is None else float(round(value, 2))


def _term(term: Term) -> TermData:
    return {
        "name": term.name,
        "signed_bytes": term.nbytes,
        "reason": term.reason,
        "source": term.source,
        "basis": term.basis,
    }


def _bound(bound: Bound) -> BoundData:
    return {
        "kind": bound.kind.value,
        "max_blocks": bound.max_blocks,
        "reason": bound.reason,
        "source": bound.source,
        "idle_bytes": bound.idle_bytes,
        "first_unsafe_block": bound.first_unsafe_block,
    }


def _lift(lift: Lift) -> LiftData:
    return {
        "knob": lift.knob,
        "value": lift.value,
        "num_blocks": lift.num_blocks,
        "tokens": lift.tokens,
        "cache_bytes": lift.cache_bytes,
        "text": lift.text,
    }


def _group(group: Group) -> GroupData:
    # A group's layers may differ in their stores (a narrower draft layer), so every distinct set is listed.
    stores = {layer.stores: None for layer in group.layers}
    return {
        "name": group.name,
        "kind": group.kind,
        "growth": group.growth.value,
        "window": group.window,
        "layers": len(group.layers),
        "block_size": group.block_size,
        "bytes_per_token": group.bytes_per_token,
        "bytes_per_request": group.bytes_per_request,
        "stores": [
            {
                "name": store.name,
                "heads": store.heads,
                "width": store.width,
                "dtype": store.dtype,
                "nbytes": store.bytes_per_token,
            }
            for distinct in stores
            for store in distinct
        ],
    }


def _rank(plan: Plan, number: int) -> RankData:
    rank = plan.ranks[number]
    return {
        "rank": number,
        "tp_rank": rank.place.tp_rank,
        "pp_rank": rank.place.pp_rank,
        "layers": rank.layout.num_layers,
        "device": None if rank.facts is None else rank.facts.device.key,
        "bytes_per_block": rank.layout.bytes_per_block,
        "available_bytes": rank.budget.available,
        "num_blocks": rank.num_blocks,
        "binding": rank.binding.kind.value,
        "cache_bytes": rank.layout.bytes(plan.num_blocks),
        "idle_bytes": plan.idle_bytes(number),
    }


def _reading(reading: Reading) -> ReadingData:
    return {
        "source": reading.source,
        "scope": reading.scope.value,
        "total_bytes": reading.total,
        "free_bytes": reading.free,
        "used_bytes": reading.used,
        "reserved_bytes": reading.reserved,
        "own_bytes": reading.own,
        "basis": reading.basis.value,
        "note": reading.note,
        "skipped": reading.skipped,
    }
