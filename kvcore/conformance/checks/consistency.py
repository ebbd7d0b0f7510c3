"""CON: one rule on every platform: facts in, memory moved, and no number of blocks in between."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import NotApplicable, check
from kvcore.contract.capabilities import Capability
from kvcore.contract.facts import DeviceFacts, Limit, LimitUnit
from kvcore.contract.hookspecs import Observer, hookimpl
from kvcore.errors import KvcoreError
from kvcore.handle import PlatformHandle

ALLOCATE, RAW, READ, LIMITS = (
    Capability.ALLOCATE,
    Capability.RAW_ACCESS,
    Capability.READ_MEMORY,
    Capability.ALLOCATION_LIMITS,
)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
}
#: A prime that no size, offset or figure of these checks happens to be.
BLOCKS = 1013


@check("CON-001", Capability.DEVICES, READ, LIMITS)
def the_same_facts_give_the_same_plan(bench: Bench) -> None:
    """The device's facts, written down and read back, give the same plan on any platform.

    Why: "the same plan without the hardware" is how a number is explained, compared and trusted.
    Fix: facts are plain values of the contract's types: texts that JSON can carry, ints, None.
    """
    import kvcore
    from kvcore.documents import dump_device_profile, load_device_profile

    device = bench.device()
    facts = DeviceFacts(device, tuple(bench.readings(device)), bench.limits(device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.json"
        path.write_text(dump_device_profile(facts), encoding="utf-8")
        read = load_device_profile(str(path))
    layout = kvcore.layout(MODEL, block_size=16)
    plans = [
        kvcore.plan(layout, facts=given, utilization="0.9", max_model_len=16)
        for given in (facts, read, replace(read, device=replace(read.device, platform="elsewhere")))
    ]
    said = [(plan.num_blocks, [(t.name, t.nbytes) for t in plan.ranks[0].budget.terms]) for plan in plans]
    bench.expect(
        said[1:] == [said[0]] * 2, "kvcore.plan of recorded facts", got=said[1:], expected=said[0], device=device
    )


@check("CON-002", Capability.DEVICES, LIMITS, ALLOCATE, RAW)
def no_hook_is_told_a_number_of_blocks(bench: Bench) -> None:
    """No argument of a hook is a number of blocks, and the platform does not watch plans.

    Why: who is not told it cannot cap it. One platform's `min(num_blocks, 40000)` outlived the reason for it by years.
    Fix: implement BlockSizer alone; observers are for tools that watch, in a plugin of their own.
    """
    watched = [name for name in vars(Observer) if name.startswith("kvcore_") and hasattr(bench.plugin, name)]
    bench.expect(not watched, "the plugin's hooks", got=watched, expected="those of BlockSizer")
    told: list[str] = []

    def before(hook_name: str, _: object, kwargs: Mapping[str, Any]) -> None:
        told.extend(f"{hook_name}({name})" for name, value in kwargs.items() if BLOCKS in _numbers(value))

    undo = bench.manager.add_hookcall_monitoring(before, lambda *_: None)
    try:
        with contextlib.suppress(KvcoreError):  # what else is wrong is CON-005's finding
            _round_trip(bench)
    finally:
        undo()
    bench.expect(not told, "every hook of an allocation", got=told, expected=f"no argument that is {BLOCKS}")


@check("CON-003", Capability.DEVICES)
def a_stated_limit_is_no_constant(bench: Bench) -> None:
    """A limit that the platform states counts what its cause counts: not a fixed number of blocks.

    Why: the same kernel reaches twice as many blocks of half the size; a fixed number is wrong for every model but one.
    Fix: state elements or bytes and the stride; or leave the limit to who knows the kernel.
    """
    import kvcore

    if not hasattr(bench.plugin, "kvcore_limits"):
        return
    device = bench.device()
    for block_size in (16, 64):
        layout = kvcore.layout(MODEL, block_size=block_size)
        for limit in bench.call("kvcore_limits", device=device, layout=layout):
            right = isinstance(limit, Limit) and limit.unit is not LimitUnit.BLOCKS and bool(limit.reason)
            bench.expect(
                right,
                "kvcore_limits(device, layout)",
                got=limit,
                expected="no fixed blocks, and a reason",
                device=device,
            )


@check("CON-004", Capability.DEVICES, READ)
def wrappers_still_run(bench: Bench) -> None:
    """A wrapper of another plugin runs around the platform's hooks, and its answer is the one that counts.

    Why: tracing, recording and fault injection are wrappers; they come to every platform for nothing.
    Fix: plain @hookimpl methods: not wrapper=True, and no specname of another.
    """
    calls: list[str] = []

    class Wrapper:
        @hookimpl(wrapper=True, tryfirst=True)
        def kvcore_devices(self) -> Iterator[None]:
            answer = yield
            calls.append("devices")
            return answer

        @hookimpl(wrapper=True, tryfirst=True)
        def kvcore_read_memory(self, device: object) -> Iterator[None]:  # noqa: ARG002
            answer = yield
            calls.append("read_memory")
            return answer

    for caller in bench.manager.get_hookcallers(bench.plugin) or ():
        for found in caller.get_hookimpls():
            plain = not (found.wrapper or found.hookwrapper)
            bench.expect(plain, f"{caller.name} of the plugin", got="a wrapper", expected="a plain implementation")
    wrapper = Wrapper()
    bench.manager.register(wrapper, "conformance-wrapper")
    try:
        bench.readings(bench.device())
    finally:
        bench.manager.unregister(wrapper)
    right = {"devices", "read_memory"} <= set(calls)
    bench.expect(right, "a wrapper around devices and read_memory", got=calls, expected="both")


@check("CON-005", Capability.DEVICES, LIMITS, ALLOCATE, RAW, READ)
def a_cache_is_allocated_verified_and_released(bench: Bench) -> None:
    """kvcore's own way works on it from end to end: allocate, verify, release.

    Why: it is what every engine does.
    Fix: the other checks say what is wrong.
    """
    freed, held = _round_trip(bench)
    bench.expect(freed == held, "cache.release()", got=freed, expected=held, unit="bytes")


def _round_trip(bench: Bench) -> tuple[int, int]:
    """Bytes freed and bytes that were held by a cache of :data:`BLOCKS` blocks."""
    import kvcore
    from kvcore.cache.allocate import allocate_cache
    from kvcore.cache.verify import verify_cache

    device = bench.device()
    layout = kvcore.layout(MODEL, block_size=16).with_alignment(bench.limits(device).granularity)
    room = layout.bytes(BLOCKS)
    if room > bench.free(device):
        raise NotApplicable(f"{room} bytes are needed, and fewer are free")
    handle = PlatformHandle(bench.manager, bench.name, bench.info(), (), "conformance")
    cache = allocate_cache(handle, device, layout, BLOCKS)
    try:
        verify_cache(cache, samples=8)
        held = cache.nbytes
    finally:
        freed = cache.release()
    return freed, held


def _numbers(value: object) -> Iterator[object]:
    """``value`` itself and what its fields hold."""
    yield value
    for name in getattr(type(value), "__slots__", ()):
        yield from _numbers(getattr(value, name))
