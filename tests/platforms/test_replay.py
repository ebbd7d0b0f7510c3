"""Replayed devices: exactly the memory of the profile, with a real allocator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.contract import (
    AllocationLimits,
    AllocationRequest,
    Device,
    DeviceFacts,
    Limit,
    LimitKind,
    LimitUnit,
    Mapping,
    MemoryKind,
    Reading,
    Scope,
    Stride,
)
from kvcore.contract.validate import reading_faults
from kvcore.documents import dump_device_profile, load_device_profile, parse_device_profile
from kvcore.errors import BufferMisuse, DeviceError, DocumentError, KvcoreError, OutOfMemory
from kvcore.platforms.replay import ReplayBlockSizer
from kvcore.registry import default_registry
from kvcore.sizing.plan import make_plan

from ..cache.conftest import handle_of
from ..sizing.build import inputs, uniform

MIB = 1024**2


def card(
    total: int = 64 * MIB, free: int = 48 * MIB, own: int | None = 0, key: str = "card", **limits: int
) -> DeviceFacts:
    device = Device("replay", 0, key, "A card", MemoryKind.DISCRETE, Mapping.RUNTIME)
    readings = (Reading("test", Scope.DEVICE, total=total, free=free, used=total - free, own=own),)
    return DeviceFacts(device, readings, AllocationLimits(granularity=512, alignment=256, **limits))


def request(nbytes: int, elements: int | None = None) -> AllocationRequest:
    return AllocationRequest("t", nbytes, 256, nbytes if elements is None else elements)


def test_what_is_allocated_is_gone_from_what_is_free() -> None:
    platform = ReplayBlockSizer([card()])
    (device,) = platform.kvcore_devices()
    buffer = platform.kvcore_allocate(device, request(10 * MIB + 1))
    assert buffer.nbytes == 10 * MIB + 512
    (reading,) = platform.kvcore_read_memory(device)
    assert (reading.free, reading.own) == (38 * MIB - 512, 10 * MIB + 512)
    assert reading_faults(reading) == []
    assert platform.kvcore_release(buffer) == 10 * MIB + 512
    assert platform.kvcore_read_memory(device)[0].free == 48 * MIB
    with pytest.raises(BufferMisuse):
        platform.kvcore_release(buffer)
    assert platform.kvcore_read_memory(device)[0].free == 48 * MIB


def test_a_device_holds_what_is_free_and_not_a_byte_more() -> None:
    platform = ReplayBlockSizer([card(free=1 * MIB)])
    (device,) = platform.kvcore_devices()
    buffer = platform.kvcore_allocate(device, request(1 * MIB))
    with pytest.raises(OutOfMemory):
        platform.kvcore_allocate(device, request(1))
    platform.kvcore_release(buffer)
    platform.kvcore_release(platform.kvcore_allocate(device, request(1 * MIB)))


@pytest.mark.parametrize("limits", [{"max_bytes": 4096}, {"max_elements": 4096}])
def test_one_allocation_has_a_largest_size(limits: dict[str, int]) -> None:
    platform = ReplayBlockSizer([card(**limits)])
    (device,) = platform.kvcore_devices()
    platform.kvcore_release(platform.kvcore_allocate(device, request(4096)))
    with pytest.raises(OutOfMemory) as caught:
        platform.kvcore_allocate(device, request(4097))
    assert caught.value.code == "KV-OOM-002"


def test_two_devices_do_not_mix_and_need_two_keys() -> None:
    platform = ReplayBlockSizer([card(key="a"), card(key="b")])
    first, second = platform.kvcore_devices()
    assert [d.index for d in (first, second)] == [0, 1]
    buffer = platform.kvcore_allocate(first, request(MIB))
    assert platform.kvcore_read_memory(second)[0].free == 48 * MIB
    platform.kvcore_release(buffer)
    with pytest.raises(DeviceError, match="one key"):
        ReplayBlockSizer([card(), card()]).kvcore_devices()


def test_a_large_card_in_address_space_alone() -> None:
    """The last block of a 141 GB card can be written and read on a small machine."""
    total = 141 * 10**9
    platform = ReplayBlockSizer([card(total=total, free=total)], backing="address_space")
    (device,) = platform.kvcore_devices()
    buffer = platform.kvcore_allocate(device, request(100 * 10**9))
    assert buffer.committed_bytes == 0
    platform.kvcore_write(buffer, 100 * 10**9 - 4, b"last")
    assert platform.kvcore_read(buffer, 100 * 10**9 - 4, 4) == b"last"
    assert platform.kvcore_read(buffer, 2**32, 4) == bytes(4)
    platform.kvcore_release(buffer)


def test_a_profile_without_free_cannot_be_allocated_from() -> None:
    facts = card()
    platform = ReplayBlockSizer([replace(facts, readings=(replace(facts.readings[0], free=None, used=None),))])
    (device,) = platform.kvcore_devices()
    with pytest.raises(DeviceError) as caught:
        platform.kvcore_allocate(device, request(1))
    assert caught.value.code == "KV-DEV-012"


@st.composite
def profiles(draw: st.DrawFn) -> DeviceFacts:
    total = draw(st.integers(1, 2**45))
    free = draw(st.none() | st.integers(0, total))
    limits = tuple(
        Limit(
            LimitKind.INDEX,
            LimitUnit.ELEMENTS,
            draw(st.integers(1, 2**62)),
            "why",
            "who",
            stride=draw(st.sampled_from(Stride)),
        )
        for _ in range(draw(st.integers(0, 2)))
    )
    return DeviceFacts(
        Device(
            "acme",
            draw(st.integers(0, 15)),
            "GPU-1",
            "A \N{GREEK SMALL LETTER MU} card",
            MemoryKind.DISCRETE,
            Mapping.RUNTIME,
        ),
        (
            Reading("nvml_v2", Scope.DEVICE, total=total, free=free),
            Reading("runtime", Scope.DEVICE, skipped="no context"),
        ),
        AllocationLimits(draw(st.integers(1, 2**21)), 256, draw(st.none() | st.integers(1, 2**45))),
        limits=limits,
        versions=(("acme", "1.0"),),
    )


@given(profiles())
def test_a_profile_reads_back_as_it_was_written(facts: DeviceFacts) -> None:
    assert parse_device_profile(dump_device_profile(facts).encode(), where="test") == facts


def test_a_recorded_device_gives_the_same_plan_anywhere(tmp_path: Path) -> None:
    device = default_registry().platform("cpu").device()
    facts = kvcore.device_facts(device)
    path = tmp_path / "profile.json"
    path.write_text(dump_device_profile(facts))
    layout = kvcore.layout("examples/models/qwen3-8b.json", block_size=16)
    settings = {"utilization": "0.8", "max_model_len": 8192}
    here = kvcore.plan(layout, facts=facts, **settings)
    there = kvcore.plan(layout, facts=load_device_profile(path), **settings)
    assert there.num_blocks == here.num_blocks > 0
    assert there.terms == here.terms
    assert there.bounds == here.bounds
    assert "host" in path.read_text()
    import socket

    assert socket.gethostname() not in path.read_text()


@given(profiles())
def test_replaying_a_record_plans_as_the_device_did(facts: DeviceFacts) -> None:
    """plan(replay(record(x))) == plan(x), for whatever was recorded."""
    recorded = parse_device_profile(dump_device_profile(facts).encode(), where="test")
    platform = handle_of(ReplayBlockSizer([recorded], backing="address_space"))
    device = platform.device()
    read = replace(platform.facts(device), limits=recorded.limits, reserves=recorded.reserves)
    layout = uniform(layers=4, heads=2, width=64)
    outcomes = []
    for held in (facts, read):
        question = inputs(replace(layout, alignment=held.allocation.granularity), held)
        try:
            made = make_plan(question)
            outcomes.append((made.num_blocks, made.terms, made.bounds, made.warnings))
        except KvcoreError as error:
            outcomes.append((error.code, error.what))
    assert outcomes[0] == outcomes[1]


def profile_text(**changed: object) -> bytes:
    import json

    document = json.loads(dump_device_profile(card()))
    document.update(changed)
    return json.dumps({k: v for k, v in document.items() if v is not ...}).encode()


READING = {"source": "t", "scope": "device"}


@pytest.mark.parametrize(
    ("raw", "code", "place"),
    [
        (b"", "KV-DOC-003", ""),
        (profile_text()[:-20], "KV-DOC-003", ""),
        (b"[]", "KV-DOC-005", ""),
        (b"[" * 100_000, "KV-DOC-003", ""),
        (b" " * (2 * MIB), "KV-DOC-002", ""),
        (profile_text(schema="other"), "KV-DOC-004", ""),
        (profile_text(schema_version=2), "KV-DOC-004", ""),
        (profile_text(schema_version=True), "KV-DOC-004", ""),
        (profile_text(readings=...), "KV-DOC-006", ""),
        (profile_text(readings={}), "KV-DOC-006", "readings"),
        (profile_text(readings=[{**READING, "total": 1.5}]), "KV-DOC-006", "total"),
        (profile_text(readings=[{**READING, "total": "1"}]), "KV-DOC-006", "total"),
        (profile_text(readings=[{**READING, "scope": "moon"}]), "KV-DOC-006", "scope"),
        (profile_text(readings=[{**READING, "totl": 1}]), "KV-DOC-008", "readings[0].totl"),
        (profile_text(redings=[]), "KV-DOC-008", "redings"),
        (profile_text(readings=[{**READING, "total": -1}]), "KV-DOC-007", "readings[0]"),
        (profile_text(readings=[{**READING, "total": 0}]), "KV-DOC-007", "readings[0]"),
        (profile_text(readings=[{**READING, "total": 5, "free": 6}]), "KV-DOC-007", "readings[0]"),
        (profile_text(readings=[{**READING, "total": 2**63}]), "KV-DOC-007", "readings[0]"),
        (profile_text(readings=[{**READING, "total": 10**30}]), "KV-DOC-00", "readings"),
        (profile_text(versions={"a": 1}), "KV-DOC-006", "versions"),
        (profile_text(allocation={"granularity": None}), "KV-DOC-006", "granularity"),
        (profile_text(allocation={"granularity": 0}), "KV-DOC-007", "allocation"),
    ],
)
def test_bad_profiles_are_typed_errors(tmp_path: Path, raw: bytes, code: str, place: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(raw)
    with pytest.raises(DocumentError) as caught:
        load_device_profile(path)
    assert caught.value.code.startswith(code)
    assert str(path) in str(caught.value)
    assert place in str(caught.value)
    assert caught.value.exit_code == 2
