"""The data file of kernels, and what a kernel does to a plan, the same on every platform."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import api
from kvcore.cli.app import run
from kvcore.contract import (
    AllocationLimits,
    CacheLayout,
    Device,
    DeviceFacts,
    Group,
    Growth,
    Layer,
    Limit,
    LimitKind,
    LimitUnit,
    Mapping,
    MemoryKind,
    Reading,
    Scope,
    Store,
    Stride,
)
from kvcore.conventions import CONVENTIONS
from kvcore.errors import DoesNotFit, PolicyError
from kvcore.sizing.kernels import Kernel, default_limits, kernel, kernels
from kvcore.sizing.limits import bound_of
from kvcore.sizing.plan import Plan
from kvcore.sizing.refusal import Refusal

ROOT = Path(__file__).parents[2]
QWEN8 = str(ROOT / "examples" / "models" / "qwen3-8b.json")
DEEPSEEK = str(ROOT / "examples" / "models" / "deepseek-v2-lite.json")
TIB = 1024**4


def card(platform: str = "replay", total: int = TIB, **more: object) -> DeviceFacts:
    device = Device(platform, 0, "card", "A card", MemoryKind.DISCRETE, Mapping.RUNTIME)
    reading = Reading("test", Scope.DEVICE, total=total, free=total, own=0)
    return DeviceFacts(device, (reading,), AllocationLimits(), **more)  # type: ignore[arg-type]


def one_tensor(elements: int, block_size: int = 1) -> CacheLayout:
    """A block of which adds ``elements`` bytes-long elements to any index."""
    layer = Layer(0, (Store("kv", 1, elements, "uint8", 1),))
    return CacheLayout("one", block_size, (Group("full", "full", Growth.TOKEN, (layer,)),))


def test_every_entry_is_whole() -> None:
    names = [known.name for known in kernels()]
    assert len(set(names)) == len(names) >= 12
    for known in kernels():
        assert known.source.count("/"), f"{known.name}: repository and number"
        assert known.versions
        assert known.expression
        assert (known.kind is LimitKind.INDEX) == (known.stride is not None)
        assert 1 <= known.bits <= 64
    engines = {entry.name for entry in CONVENTIONS}
    assert {known.engine for known in kernels() if known.default} <= engines, (
        "a default of an unknown engine never holds"
    )


@pytest.mark.parametrize("known", [k for k in kernels() if k.published_stride], ids=lambda k: k.name)
def test_the_published_figures_follow_from_the_entry(known: Kernel) -> None:
    assert known.published_stride is not None
    assert bound_of(known.limit, one_tensor(known.published_stride)).max_blocks == known.published_safe


@pytest.mark.parametrize(
    ("report", "limit", "layout", "blocks"),
    [
        # B35: 16 x 2 x 8 x 128 elements a block, K and V interleaved.
        ("vllm#50427", "vllm-flex-attention", {"tp": 1, "block_size": 16}, 65536),
        # B39 at one rank: 8 KV heads.
        ("FastDeploy#5612", "fastdeploy-triton-rope-write", {"tp": 1, "block_size": 64}, 32768),
        ("FastDeploy#5612", "fastdeploy-triton-rope-write", {"tp": 4, "block_size": 64}, 131072),
        ("FastDeploy append_attn", "fastdeploy-append-attn", {"tp": 2, "block_size": 64}, 131072),
        ("FastDeploy append_attn", "fastdeploy-append-attn", {"tp": 1, "block_size": 64}, 65536),
    ],
)
def test_reports_on_a_published_model(report: str, limit: str, layout: dict[str, int], blocks: int) -> None:
    held = api.layout(QWEN8, **layout)
    assert bound_of(kernel(limit).limit, held).max_blocks == blocks, report


def test_slots_and_blocks_of_latent_rows() -> None:
    """B37: 2^31 // 576 slots; blocks of 64 of them."""
    known = kernel("lightllm-mla-slots").limit
    assert bound_of(known, api.layout(DEEPSEEK, block_size=1)).max_blocks == 3_728_270
    assert bound_of(known, api.layout(DEEPSEEK, block_size=64)).max_blocks == 58_254 == 3_728_270 // 64


def plan_of(platform: str, **settings: object) -> Plan:
    return api.plan(
        api.layouts(QWEN8, block_size=64),
        facts=card(platform),
        policy=api.policy(**settings),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("platform", ["cpu", "replay", "cuda", "iluvatar"])
def test_a_narrow_kernel_clamps_on_every_platform_alike(platform: str) -> None:
    wide = plan_of(platform)
    narrow = plan_of(platform, kernel="fastdeploy-triton-rope-write")
    assert (narrow.num_blocks, narrow.binding.kind) == (32768, LimitKind.INDEX)
    assert narrow.binding.first_unsafe_block == 32768
    assert narrow.blocks_without_binding == wide.num_blocks
    assert narrow.binding.idle_bytes == wide.cache_bytes - narrow.cache_bytes
    assert "kernel fastdeploy-triton-rope-write" in narrow.binding.source


def test_without_a_declaration_the_plan_is_whole_and_warned() -> None:
    plan = plan_of("replay")
    assert plan.binding.kind is LimitKind.MEMORY
    (warning,) = [w for w in plan.warnings if w.code == "KV-W-020"]
    for part in ("16,384 (signed bytes)", "32,768 (signed elements)", "65,536 (unsigned elements)", "kvcore.verify("):
        assert part in warning.text


def test_an_engines_default_kernels_hold_unless_others_are_named() -> None:
    held = api.layouts(QWEN8, block_size=64)
    by_default = api.plan(held, facts=card(), engine="fastdeploy")
    assert by_default.num_blocks == 65536
    for settings in ({"kernel": "fastdeploy-triton-rope-write"}, {"kernel": "none"}):
        plan = api.plan(held, facts=card(), engine="fastdeploy", **settings)
        assert plan.num_blocks == {"none": plan.rank.memory_blocks}.get(settings["kernel"], 32768)
    assert not default_limits("generic")
    own = Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, 2**63, "wide", "test", Stride.LAYER)
    assert api.plan(held, facts=card(), engine="fastdeploy", limits=[own]).binding.kind is LimitKind.MEMORY


def test_of_several_kernels_the_narrowest_decides() -> None:
    plan = plan_of("replay", kernel=["fastdeploy-append-attn", "fastdeploy-triton-rope-write"])
    assert plan.num_blocks == 32768
    assert {b.max_blocks for b in plan.bounds if b.kind is LimitKind.INDEX} == {32768, 65536}


def test_an_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(PolicyError) as caught:
        plan_of("replay", kernel="fastdeploy")
    assert caught.value.code == "KV-POL-053"
    assert "fastdeploy-append-attn" in (caught.value.expected or "")


def test_what_lifts_it_is_what_the_sum_says() -> None:
    held = api.layouts(QWEN8, block_size=64)

    def alternatives() -> list[api.Alternative]:
        return [api.Alternative("tp", str(tp), api.layouts(QWEN8, tp=tp, block_size=64)) for tp in (2, 4)]

    plan = api.plan(held, facts=card(), kernel="fastdeploy-triton-rope-write", alternatives=alternatives)
    lifts = {lift.knob: lift for lift in plan.lifts}
    assert lifts["index"].num_blocks == api.plan(held, facts=card()).num_blocks
    two = api.plan(api.layouts(QWEN8, tp=2, block_size=64), facts=card(), kernel="fastdeploy-triton-rope-write")
    assert (lifts["tp"].value, lifts["tp"].num_blocks) == ("2", two.num_blocks)
    # Half the block allows twice the blocks, and the same tokens: no lift.
    assert lifts["block_size"].value is None
    half = api.plan(api.layouts(QWEN8, block_size=32), facts=card(), kernel="fastdeploy-triton-rope-write")
    assert (half.num_blocks, half.tokens) == (65536, plan.tokens)
    assert "layout" not in lifts


def test_a_packed_layout_is_lifted_by_tensors_of_their_own() -> None:
    held = api.layouts(QWEN8, block_size=16)
    packed = api.plan(held, facts=card(), kernel="vllm-flex-attention")
    lifts = {lift.knob: lift for lift in packed.lifts}
    assert packed.num_blocks == 65536
    assert lifts["layout"].num_blocks == 131072
    all_layers = api.plan(held, facts=card(), kernel="vllm-xpu-packed", max_model_len=1024)
    assert all_layers.num_blocks == 2**31 // (16 * 2 * 8 * 128 * 36)


def test_a_block_that_does_not_divide_the_index_can_gain_by_halves() -> None:
    """2^31 over a stride that is not a power of two leaves a rest, of which smaller blocks use more."""
    held = api.layouts(DEEPSEEK, block_size=64)
    plan = api.plan(held, facts=card(), kernel="vllm-triton-decode-mla")
    (lift,) = [lift for lift in plan.lifts if lift.knob == "block_size"]
    assert lift.value is not None
    again = api.plan(api.layouts(DEEPSEEK, block_size=int(lift.value)), facts=card(), kernel="vllm-triton-decode-mla")
    assert (again.num_blocks, again.tokens) == (lift.num_blocks, lift.tokens)
    assert plan.tokens is not None
    assert again.tokens is not None
    assert again.tokens > plan.tokens


@given(elements=st.integers(1, 2**20), bits=st.sampled_from([31, 32]))
def test_the_last_safe_block_ends_inside_and_the_next_does_not(elements: int, bits: int) -> None:
    limit = Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, 2**bits, "test", "test", Stride.LAYER)
    most = bound_of(limit, one_tensor(elements)).max_blocks
    assert most * elements - 1 <= 2**bits - 1 < (most + 1) * elements - 1 + (most + 1 == 0)


def test_a_third_partys_limit_counts_like_any_other() -> None:
    stated = Limit(LimitKind.INDEX, LimitUnit.ELEMENTS, 2**31, "acme kernel", "acme 1.2", Stride.LAYER)
    plan = api.plan(api.layouts(QWEN8, block_size=64), facts=replace(card(), limits=(stated,)))
    assert (plan.num_blocks, plan.binding.source) == (32768, "acme 1.2")
    assert plan.lifts[0].num_blocks == plan.rank.memory_blocks


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["data"]["kernels"]
    assert [entry["name"] for entry in listed] == [known.name for known in kernels()]
    assert run(["kernels", "--engine", "zz"]) == 2
    assert "no kernel of this engine is known" in capsys.readouterr().err
    assert run(["kernels", "--engine", "lmdeploy"]) == 0
    assert "InternLM/lmdeploy#4494" in capsys.readouterr().out


def test_a_refusal_by_an_index_says_what_a_wider_one_would_do() -> None:
    held = api.layouts(QWEN8, block_size=16)
    with pytest.raises(DoesNotFit) as caught:
        api.plan(held, facts=card(), kernel="vllm-xpu-packed")
    refusal = caught.value.refusal
    assert isinstance(refusal, Refusal)
    assert ("index", "64 bits") in {(remedy.knob, remedy.value) for remedy in refusal.remedies}
    assert api.plan(held, facts=card(), kernel="none").binding.kind is LimitKind.MEMORY
    with pytest.raises(DoesNotFit) as caught:
        api.plan(held, facts=card(), kernel="vllm-xpu-packed", max_model_len=10**9)
    assert isinstance(caught.value.refusal, Refusal)
    assert ("index", None) in {(remedy.knob, remedy.value) for remedy in caught.value.refusal.remedies}
