"""Promise and outcome: the lines add up to what is held, and the verdict is what planning again would give."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.audit import Audit, audit_plan
from kvcore.cli.app import run
from kvcore.contract import (
    AllocationLimits,
    AllocationRequest,
    Basis,
    CacheLayout,
    Device,
    DeviceFacts,
    Group,
    Growth,
    Layer,
    Mapping,
    MemoryKind,
    MemoryStats,
    Phase,
    Reading,
    Reserve,
    ReserveKind,
    Scope,
    Store,
    hookimpl,
)
from kvcore.handle import PlatformHandle
from kvcore.platforms.replay import ReplayBlockSizer
from kvcore.profiling import profile_run
from kvcore.report.audit import audit_sections
from kvcore.report.text import plain
from kvcore.sizing.plan import Inputs, Plan, make_plan
from kvcore.sizing.policy import OnShortage, Policy

from ..cache.conftest import handle_of

MIB = 1024**2
DEVICE = Device("replay", 0, "card", "A card", MemoryKind.DISCRETE, Mapping.RUNTIME)


def layout(block_bytes: int = 4096) -> CacheLayout:
    stores = tuple(Store(name, 1, block_bytes // 64, "float16", 2) for name in ("k", "v"))
    return CacheLayout("small", 16, (Group("full", "full", Growth.TOKEN, (Layer(0, stores),), block_size=16),))


def facts(total: int, free: int, own: int) -> DeviceFacts:
    reading = Reading("test", Scope.DEVICE, total=total, free=free, own=own)
    return DeviceFacts(DEVICE, (reading,), AllocationLimits())


def reserve(name: str, nbytes: int, *, transient: bool = False, basis: Basis = Basis.DECLARED) -> Reserve:
    kind = ReserveKind.TRANSIENT if transient else ReserveKind.PERSISTENT
    return Reserve(name, nbytes, kind, basis, "test", name)


class Now(ReplayBlockSizer):
    """A device with the given figures at the time of the audit."""

    def __init__(self, reading: Reading, stats: MemoryStats) -> None:
        super().__init__([replace(facts(reading.total or 1, 1, 0), readings=(reading,))])
        self.reading, self.stats = reading, stats

    @hookimpl
    def kvcore_read_memory(self, device: Device) -> list[Reading]:
        return [self.reading]

    @hookimpl
    def kvcore_memory_stats(self, device: Device) -> MemoryStats:
        return self.stats


def audited(plan: Plan, *, own: int | None, free: int, stats: MemoryStats | None = None, **more: object) -> Audit:
    total = 2**40
    reading = Reading("test", Scope.DEVICE, total=total, free=free, own=own)
    handle: PlatformHandle = handle_of(Now(reading, stats or MemoryStats("none")))
    return audit_plan(handle, plan, DEVICE, **more)  # type: ignore[arg-type]


def planned(total: int, own: int = 0, reserves: tuple[Reserve, ...] = (), **policy: object) -> Plan:
    held = facts(total, total - own, own)
    return make_plan(Inputs((layout(),), (held,), Policy(**policy), reserves=reserves))  # type: ignore[arg-type]


@given(
    own=st.integers(0, 100 * MIB),
    graphs=st.integers(0, 50 * MIB),
    step=st.integers(0, 50 * MIB),
    margin=st.integers(0, 20 * MIB),
    surprise=st.integers(-30 * MIB, 400 * MIB),
    neighbour=st.integers(0, 300 * MIB),
)
def test_the_verdict_is_what_planning_again_would_give(
    own: int, graphs: int, step: int, margin: int, surprise: int, neighbour: int
) -> None:
    total = 1024 * MIB
    plan = planned(total, own, (reserve("graphs", graphs), reserve("step", step, transient=True)), margin=margin)
    held = max(0, own + graphs + plan.cache_bytes + surprise)
    free = max(0, total - held - neighbour)
    found = audited(plan, own=held, free=free)
    assert found.held_bytes == held == sum(line.outcome_bytes for line in found.lines)
    assert found.unaccounted_bytes == held - own - graphs - plan.cache_bytes
    without_cache = facts(total, min(total, free + plan.cache_bytes), max(0, held - plan.cache_bytes))
    again = Inputs(
        (plan.layout,),
        (without_cache,),
        Policy(margin=margin, on_shortage=OnShortage.WARN),
        reserves=(reserve("step", step, transient=True),),
    )
    assert found.blocks is not None
    if plan.num_blocks + found.blocks > 0 and held >= plan.cache_bytes:
        assert make_plan(again).num_blocks == plan.num_blocks + found.blocks


def test_use_exceeds_the_share_by_the_graphs() -> None:
    """B62: 0.9 of 24564 MiB promised, 23859 held: 1751.4 MiB too much, of which the graphs are 2464."""
    total = 24564 * MIB
    plan = planned(total, 14000 * MIB)
    held = 23859 * MIB
    found = audited(plan, own=held, free=total - held)
    assert found.promised_bytes is not None
    assert round(found.promised_bytes / MIB, 1) == 22107.6
    assert found.overshoot_bytes is not None
    assert round(found.overshoot_bytes / MIB, 1) == 1751.4
    assert found.blocks is not None
    assert found.blocks < 0
    per_block = plan.layout.bytes_per_block
    assert -found.blocks == -(-found.overshoot_bytes // per_block)
    # Measured, the graphs are a term of their own, and the next plan keeps the promise.
    graphs = reserve("graphs", 2464 * MIB, basis=Basis.MEASURED)
    better = planned(total, 14000 * MIB, (graphs,))
    kept = audited(better, own=14000 * MIB + better.cache_bytes + graphs.nbytes, free=total - held)
    assert (kept.overshoot_bytes, kept.blocks, kept.unaccounted_bytes) == (0, 0, 0)


def test_a_capture_that_needs_more_than_was_estimated_is_named() -> None:
    """B54: the capture asks for 136 MiB where 120.88 are left: 15.12 short, and it says of which term."""
    plan = planned(1024 * MIB, 0, (reserve("graphs", round(120.88 * MIB)),))
    outcome = reserve("graphs", 136 * MIB, basis=Basis.MEASURED)
    held = plan.cache_bytes + outcome.nbytes
    found = audited(plan, own=held, free=1024 * MIB - held, measured=(outcome,))
    (line,) = [line for line in found.lines if line.name == "graphs"]
    assert round(line.moved_bytes / MIB, 2) == 15.12
    assert line.measured
    assert found.unaccounted_bytes == 0
    assert found.blocks is not None
    assert found.blocks < 0
    assert "must shrink" in plain(audit_sections(found))


def test_a_neighbours_memory_bounds_growth_but_is_not_charged() -> None:
    plan = planned(1024 * MIB)
    held = plan.cache_bytes
    full = audited(plan, own=held, free=0)
    assert (full.unaccounted_bytes, full.overshoot_bytes, full.blocks) == (0, 0, 0)
    room = audited(planned(1024 * MIB, max_blocks=100, max_blocks_reason="a test"), own=100 * 4096 * 2, free=512 * MIB)
    assert room.headroom_bytes is not None
    assert room.headroom_bytes > 0
    assert room.blocks == 0, "the cap still holds"


def test_what_the_allocator_keeps_is_not_needed_twice() -> None:
    """A step's peak that the allocator has cached is part of what the process holds."""
    step = reserve("activations", 40 * MIB, transient=True)
    plan = planned(1024 * MIB, 0, (step,))
    held = plan.cache_bytes + 40 * MIB
    cached = MemoryStats("test", current=plan.cache_bytes, peak=plan.cache_bytes + 40 * MIB, reserved=held)
    found = audited(plan, own=held, free=1024 * MIB - held, stats=cached)
    assert found.transient_bytes == 0
    assert found.blocks == 0
    returned = MemoryStats(
        "test", current=plan.cache_bytes, peak=plan.cache_bytes + 40 * MIB, reserved=plan.cache_bytes
    )
    given_back = audited(plan, own=plan.cache_bytes, free=1024 * MIB - plan.cache_bytes, stats=returned)
    assert (given_back.transient_bytes, given_back.blocks) == (40 * MIB, 0)


def test_what_is_unknown_is_not_made_up() -> None:
    plan = planned(1024 * MIB)
    found = audited(plan, own=None, free=10 * MIB)
    assert (found.held_bytes, found.unaccounted_bytes, found.overshoot_bytes) == (None, None, None)
    assert found.headroom_bytes == 10 * MIB
    absolute = make_plan(Inputs((layout(),), (facts(1024 * MIB, 1024 * MIB, 0),), Policy(kv_cache_memory=(MIB,))))
    assert audited(absolute, own=MIB, free=MIB).promised_bytes is None
    handle = handle_of(Now(Reading("test", Scope.DEVICE, skipped="no permission"), MemoryStats("none")))
    blind = audit_plan(handle, plan, DEVICE)
    assert (blind.headroom_bytes, blind.blocks) == (None, None)
    assert "nothing can be said" in plain(audit_sections(blind))


def test_a_temporary_cache_is_not_promised() -> None:
    total, own, temporary = 1024 * MIB, 300 * MIB, 200 * MIB
    held = facts(total, total - own, own)
    plan = make_plan(Inputs((layout(),), (held,), Policy(), temporary_bytes=temporary))
    now = own - temporary + plan.cache_bytes
    found = audited(plan, own=now, free=total - now)
    assert found.promised_bytes == total * 9 // 10
    assert (found.unaccounted_bytes, found.blocks) == (0, 0)


def test_a_later_phase_becomes_a_term_of_the_next_start() -> None:
    """Graphs captured after the cache: measured once, they replace the estimate of the next plan."""
    handle = handle_of(ReplayBlockSizer([facts(256 * MIB, 256 * MIB, 0)]))
    device = handle.device()
    kept = []

    def capture() -> None:
        kept.append(handle.allocate(device, AllocationRequest("graphs", 24 * MIB, 256, 1)))

    found = profile_run(handle, device, capture, name="graphs", phase=Phase.GRAPHS)
    assert found.grown is not None
    assert (found.grown.nbytes, found.grown.phase, found.grown.basis) == (24 * MIB, Phase.GRAPHS, Basis.MEASURED)
    plan = planned(256 * MIB, 0, (reserve("graphs", 10 * MIB), found.grown))
    (term,) = [term for term in plan.terms if term.name == "graphs"]
    assert (term.nbytes, term.basis) == (-24 * MIB, "measured")
    handle.release(kept[0])


@pytest.mark.parametrize("blocks", [1, 7])
def test_growth_and_shrinking_follow_the_devices_rounding(blocks: int) -> None:
    aligned = replace(layout(), alignment=2 * MIB)
    held = facts(1024 * MIB, 1024 * MIB, 0)
    plan = make_plan(Inputs((aligned,), (held,), Policy()))
    missing = aligned.bytes(plan.num_blocks) - aligned.bytes(plan.num_blocks - blocks) or 1
    promise = 1024 * MIB * 9 // 10
    found = audited(plan, own=promise + missing, free=1024 * MIB)
    assert found.blocks is not None
    assert found.blocks < 0
    after = plan.num_blocks + found.blocks
    assert aligned.bytes(plan.num_blocks) - aligned.bytes(after) >= missing
    assert aligned.bytes(plan.num_blocks) - aligned.bytes(after + 1) < missing


def test_the_command_line_audits_what_it_allocates(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["allocate", "examples/models/tinyllama-1.1b-chat-v1.0.json", "--utilization", "0.02", "--json"]
    assert run([*arguments, "--platform", "cpu", "--max-model-len", "256", "--audit"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    audit = data["audit"]
    assert sum(line["outcome_bytes"] for line in audit["lines"]) == audit["held_bytes"]
    assert {line["name"]: line["outcome_bytes"] for line in audit["lines"]}["cache"] == data["cache_bytes"]
    assert run([*arguments, "--platform", "cpu", "--max-model-len", "256"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["audit"] is None
