"""The Python API: five calls from a config.json to a verified cache.

::

    layout = kvcore.layout("config.json", tp=4, block_size=64)
    device = kvcore.platform().device()
    plan = kvcore.plan(layout, device, utilization="0.9", max_model_len=32768)
    with kvcore.allocate(plan) as cache:
        kvcore.verify(cache)

Names that end in a platform or device may be left out where there is one answer; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvcore.contract.facts import Device, DeviceFacts, Limit, LimitKind, Phase, Reserve
from kvcore.contract.layout import CacheLayout
from kvcore.conventions import GENERIC, Convention, convention
from kvcore.errors import CapabilityMissing, KvcoreError, PlanError, PolicyError
from kvcore.geometry import ModelConfig, read_config
from kvcore.geometry import layouts as _layouts
from kvcore.handle import PlatformHandle
from kvcore.registry import default_registry
from kvcore.settings import policy_of, resolve
from kvcore.sizing.budget import Baseline
from kvcore.sizing.plan import Alternative, Inputs, Plan, make_plan
from kvcore.sizing.policy import OnShortage, Policy, ShareOf

# A plan needs none of these: what allocates, verifies, measures or agrees is imported by the call that does.
if TYPE_CHECKING:
    from kvcore.audit import Audit
    from kvcore.cache.allocate import Cache, Progress
    from kvcore.cache.kernels import Gather, Write
    from kvcore.cache.verify import Verification
    from kvcore.profiling import Profile
    from kvcore.ranks.settle import AgreedPlan

__all__ = [
    "agree",
    "allocate",
    "audit",
    "device_facts",
    "device_turn",
    "layout",
    "layouts",
    "outcome",
    "plan",
    "platform",
    "policy",
    "profile",
    "verify",
]

T = TypeVar("T")

ModelSource = ModelConfig | str | os.PathLike[str] | Mapping[str, Any]


def layouts(
    model: ModelSource,
    *,
    tp: int = 1,
    pp: int = 1,
    pp_layers: Sequence[int] | None = None,
    dcp: int = 1,
    block_size: int | None = None,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    state_dtype: str | None = None,
    draft_layers: int = 0,
    draft: ModelSource | None = None,
    max_num_batched_tokens: int | None = None,
    engine: Convention | str = GENERIC,
) -> tuple[CacheLayout, ...]:
    """The cache layouts of all ``tp * pp`` ranks of ``model``, tensor-parallel ranks of one stage together.

    ``model`` is a config.json (file, directory that holds one, or parsed object). ``pp_layers`` are the layers of
    each pipeline stage, divided evenly if None. ``block_size`` defaults to the engine's; ``dtype``, ``kv_cache_dtype``
    and ``state_dtype`` (of recurrent states) to the model's own. ``max_num_batched_tokens`` bounds what sliding
    windows hold of a step. ``engine`` is a name such as ``"vllm"`` or ``"vllm@0.19"`` (:mod:`kvcore.conventions`).

    Raises :class:`ConfigError` for a config that cannot be used and :class:`PolicyError` for a wrong argument.
    """
    config = model if isinstance(model, ModelConfig) else read_config(model)
    return _layouts(
        config,
        tp=tp,
        pp=pp,
        pp_layers=pp_layers,
        dcp=dcp,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=kv_cache_dtype,
        state_dtype=state_dtype,
        draft_layers=draft_layers,
        draft=None if draft is None else (draft if isinstance(draft, ModelConfig) else read_config(draft)),
        step_tokens=max_num_batched_tokens,
        engine=engine if isinstance(engine, Convention) else convention(engine),
    )


def layout(model: ModelSource, *, rank: int = 0, **options: Any) -> CacheLayout:
    """The cache layout of one rank; ``options`` as for :func:`layouts`."""
    ranks = layouts(model, **options)
    if not 0 <= rank < len(ranks):
        raise PolicyError("no such rank", code="KV-POL-036", where="rank", got=rank, expected=f"0 to {len(ranks) - 1}")
    return ranks[rank]


def platform(name: str | None = None) -> PlatformHandle:
    """The platform ``name``, or the one that the rule of choice gives (:meth:`kvcore.registry.Registry.choose`).

    Raises :class:`NoPlatform` if there is none, or more than one.
    """
    return default_registry().choose(name).platform


def device_facts(device: Device, *, phase: Phase = Phase.PROFILE) -> DeviceFacts:
    """What the device's platform says of it now, with the reserves that plugins state after ``phase``."""
    registry = default_registry()
    facts = registry.platform(device.platform).facts(device)
    return replace(facts, reserves=registry.reserves(device, phase))


def policy(
    *,
    utilization: Fraction | float | str | None = None,
    utilization_of: ShareOf | str | None = None,
    kv_cache_memory: int | str | Sequence[int | str] | None = None,
    margin: int | str | None = None,
    reserves: Iterable[Reserve] = (),
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    limit_to_demand: bool = False,
    kernel: str | Sequence[str] | None = None,
    limits: Iterable[Limit] = (),
    max_blocks: int | None = None,
    max_blocks_reason: str | None = None,
    num_blocks_override: int | None = None,
    on_shortage: OnShortage | str | None = None,
) -> Policy:
    """A checked :class:`Policy`; what is left out keeps its default.

    ``utilization`` given as a float is taken at its shortest decimal form: 0.9 is 9/10. Sizes are bytes, or texts
    such as ``"24GiB"``. ``kernel`` names known kernels (:mod:`kvcore.sizing.kernels`). Raises :class:`PolicyError`.
    """
    given: dict[str, Any] = {
        "utilization": utilization,
        "utilization_of": utilization_of,
        "kv_cache_memory": kv_cache_memory,
        "margin": margin,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "limit_to_demand": limit_to_demand or None,
        "kernel": kernel,
        "max_blocks": max_blocks,
        "max_blocks_reason": max_blocks_reason,
        "num_blocks_override": num_blocks_override,
        "on_shortage": on_shortage,
    }
    # One parser for every value, wherever it comes from: a call's values take the way of a flag's texts.
    texts = {name: _text(value) for name, value in given.items() if value is not None}
    made = policy_of(resolve(texts, environ={}, origin="call"))
    return replace(made, reserves=tuple(reserves), limits=(*made.limits, *limits))


def plan(
    layouts: CacheLayout | Sequence[CacheLayout],
    device: Device | None = None,
    *,
    facts: DeviceFacts | Sequence[DeviceFacts] | None = None,
    policy: Policy | None = None,
    reserves: Iterable[Reserve] = (),
    baseline: Baseline | None = None,
    temporary_bytes: int = 0,
    engine: Convention | str = GENERIC,
    alternatives: Callable[[], Iterable[Alternative]] | None = None,
    **settings: Any,
) -> Plan:
    """How many blocks every rank of ``layouts`` holds.

    Memory comes from ``device``, which is read now, or from ``facts`` read earlier (one for all ranks, or one a
    rank). With neither, the policy must give an absolute size, and nothing is verified against any memory.
    ``settings`` are those of :func:`policy`, for a policy made on the spot; ``reserves`` add what was measured;
    ``engine`` is the one that the layouts were made for.

    Raises :class:`DoesNotFit` if what was asked does not fit, :class:`PlanError` and :class:`PolicyError` if the
    sum cannot be computed, and :class:`DeviceError` if the device cannot be read.
    """
    if policy is not None and settings:
        raise PolicyError("either a policy or settings", code="KV-POL-022", got=", ".join(sorted(settings)))
    ranks = (layouts,) if isinstance(layouts, CacheLayout) else tuple(layouts)
    read: tuple[DeviceFacts | None, ...]
    if facts is None:
        read = (None if device is None else device_facts(device),) * len(ranks)
    else:
        read = (facts,) * len(ranks) if isinstance(facts, DeviceFacts) else tuple(facts)
    if len(read) != len(ranks):
        raise PlanError(
            "facts for every rank, or one for all",
            code="KV-PLAN-005",
            got=f"{len(read)} devices",
            expected=f"1 or {len(ranks)}",
        )
    aligned = _aligned(ranks, read)
    first = read[0]
    asked = policy if policy is not None else _policy_of(settings)
    rules = engine if isinstance(engine, Convention) else convention(engine)
    stated = () if first is None else tuple(default_registry().limits(first.device, aligned[0]))
    inputs = Inputs(
        layouts=aligned,
        facts=read,
        policy=asked,
        limits=(*stated, *_engine_limits(rules, asked)),
        reserves=tuple(reserves),
        engine=rules,
        model_max_len=ranks[0].max_model_len,
        baseline=baseline,
        temporary_bytes=temporary_bytes,
    )
    made = make_plan(inputs, alternatives=alternatives)
    _notify("kvcore_planned", plan=made)
    return made


def agree(
    outcome: Plan | KvcoreError,
    group: object = None,
    *,
    timeout: float = 60.0,
    scope: Literal["all", "pipeline", "tensor"] = "all",
    replica: int = 0,
) -> AgreedPlan:
    """One number of blocks for all ranks of ``group``, or the same error on all of them.

    Every rank calls it, with its plan or with the :class:`KvcoreError` that kept it from one: a rank that has nothing
    to say would leave the others waiting. ``group`` is one of torch.distributed or paddle.distributed; None takes what
    this process has initialised, or the process alone. ``scope`` says among which ranks block numbers travel: ``all``,
    the ``pipeline`` of one ``replica``, or the ``tensor``-parallel ranks of one stage.

    Raises :class:`RanksDisagree` within ``timeout`` seconds: naming ranks that failed and why, what differs between
    them, or who did not answer.
    """
    from kvcore.ranks.agree import agree_on
    from kvcore.ranks.settle import Scope

    return agree_on(outcome, group, timeout=timeout, scope=Scope(scope), replica=replica)


def outcome(make: Callable[[], T]) -> T | KvcoreError:
    """What ``make`` returns, such as a plan, or the error that keeps it from that: what :func:`agree` takes.

    ``make`` may profile, read and plan; whatever it raises is told to all ranks instead of leaving them waiting.
    """
    from kvcore.ranks.agree import outcome_of

    return outcome_of(make)


def allocate(
    plan: Plan | AgreedPlan,
    device: Device | None = None,
    *,
    rank: int = 0,
    group: object = None,
    timeout: float = 600.0,
    retries: int = 0,
    progress: Progress | None = None,
) -> Cache:
    """The cache of one rank of ``plan``, on the device it was planned for or on ``device``.

    All or nothing: whatever fails, nothing stays allocated. An :class:`AgreedPlan`, or a ``group``, makes it a
    collective: every rank of the group calls it, and if one fails, all give back what they had and raise the same
    :class:`RanksDisagree` within ``timeout`` seconds. Out of memory is then tried again at most ``retries`` times, on
    all ranks with fewer blocks: the cache's ``num_blocks`` are what counts.

    Raises :class:`OutOfMemory`, :class:`VerificationFailed` and, as a collective, :class:`RanksDisagree`.
    """
    from kvcore.cache.allocate import allocate_cache

    single = plan if isinstance(plan, Plan) else plan.plan
    where, layout = _place(single, device, rank)

    def of(num_blocks: int) -> Cache:
        handle = default_registry().platform(where.platform)
        return allocate_cache(handle, where, layout, num_blocks, progress=progress, released=_released)

    if isinstance(plan, Plan) and group is None:
        cache = of(plan.num_blocks)
    else:
        from kvcore.ranks.agree import allocate_together
        from kvcore.ranks.settle import needed_blocks
        from kvcore.sizing.limits import largest_fitting

        cache = allocate_together(
            of,
            single.num_blocks,
            group,
            timeout=timeout,
            retries=retries,
            needed=needed_blocks(single),
            fitting=lambda nbytes: largest_fitting(layout, nbytes),
        )
    _notify("kvcore_allocated", cache=cache)
    return cache


@contextlib.contextmanager
def device_turn(device: Device | KvcoreError, group: object = None, *, timeout: float = 600.0) -> Iterator[None]:
    """Hold a device while this engine reads, plans and allocates, so that no other counts the same memory.

    ::

        with kvcore.device_turn(device):
            plan = kvcore.plan(layout, device)
            cache = kvcore.allocate(plan)

    An advisory lock of this host for the device's key, which ends with its holder. In a ``group`` of ranks (None takes
    what this process has initialised) every rank calls it; those that share a device take one turn together. Raises
    :class:`DeviceError` with the holder's process id after ``timeout`` seconds, or :class:`RanksDisagree` on all ranks.
    A rank that has no device gives the error (:func:`outcome`), so that the others hear of it.
    """
    from kvcore.ranks.agree import turn_on

    with turn_on(device, group, timeout=timeout):
        yield


def verify(
    cache: Cache,
    *,
    write: Write | None = None,
    gather: Gather | None = None,
    isolate: bool = False,
    samples: int = 16,
    seed: int = 0,
) -> Verification:
    """Prove that every block of ``cache`` has memory of its own, and that the engine's kernels reach it.

    Alone, the platform's raw access is used (:func:`kvcore.cache.verify.verify_cache`). With ``write(tensor, block,
    token, data)`` and ``gather(tensor, block, token, nbytes)``, which call the engine's kernels for one token, those
    are driven as well (:func:`kvcore.cache.kernels.verify_kernels`); a token's bytes are its heads one after the other.
    ``isolate`` drives them in a child process, so that a crash is an answer: for host memory alone.

    Raises :class:`VerificationFailed`, of which :class:`KernelUnsafe` names the first block that is out of reach.
    """
    if (write is None) != (gather is None):
        raise PolicyError("a pair of kernels", code="KV-POL-054", where="verify", expected="both write and gather")
    from kvcore.cache.verify import verify_cache

    found = verify_cache(cache, samples=samples, seed=seed)
    if write is None or gather is None:
        return found
    from kvcore.cache.kernels import verify_kernels

    if not isolate:
        return verify_kernels(cache, write, gather, samples=samples, seed=seed)
    if cache.platform.info.accelerator:
        raise CapabilityMissing(
            "an accelerator's runtime does not survive a fork",
            code="KV-CAP-004",
            where=f"platform {cache.platform.name}",
            expected="host memory",
            hint="allocate and verify in a process of your own, and take its death for a failed verification",
        )
    from kvcore.cache.child import run_in_child

    return run_in_child(lambda watch: verify_kernels(cache, write, gather, samples=samples, seed=seed, watch=watch))


def profile(
    device: Device, run: Callable[[], object], *, name: str = "activations", phase: Phase = Phase.PROFILE
) -> Profile:
    """Run ``run`` and measure what it takes on ``device``; give the result's reserves to :func:`plan`."""
    from kvcore.profiling import profile_run

    return profile_run(default_registry().platform(device.platform), device, run, name=name, phase=phase)


def audit(plan: Plan, device: Device, *, rank: int = 0, measured: Iterable[Reserve] = ()) -> Audit:
    """Compare what ``plan`` promised with what this process holds, now that the cache is there and the engine is warm.

    ``measured`` are the reserves that profiles of single phases found. Raises :class:`DeviceError` if the device cannot
    be read.
    """
    from kvcore.audit import audit_plan

    return audit_plan(default_registry().platform(device.platform), plan, device, rank=rank, measured=tuple(measured))


def _place(plan: Plan, device: Device | None, rank: int) -> tuple[Device, CacheLayout]:
    """The device of one rank of ``plan``, and its layout as that device allocates it."""
    held = plan.ranks[rank]
    where = device if device is not None else (held.facts.device if held.facts is not None else None)
    if where is None:
        raise PlanError("the plan was made without a device", code="KV-PLAN-006", expected="a device to allocate on")
    granularity = default_registry().platform(where.platform).allocation_limits(where).granularity
    return where, held.layout.with_alignment(granularity)


def _aligned(layouts: tuple[CacheLayout, ...], facts: tuple[DeviceFacts | None, ...]) -> tuple[CacheLayout, ...]:
    """The layouts with their devices' granularity, sharing what is equal."""
    made: dict[tuple[int, int], CacheLayout] = {}
    result = []
    for held, read in zip(layouts, facts, strict=True):
        granularity = held.alignment if read is None else read.allocation.granularity
        key = (id(held.groups), granularity)
        same = made.get(key)
        if same is None:
            same = made[key] = held.with_alignment(granularity)
        result.append(same.at(held.place))
    return tuple(result)


def _engine_limits(engine: Convention, policy: Policy) -> tuple[Limit, ...]:
    """Those of the engine's default kernels, unless someone declared the kernels or their index."""
    declared = "kernel" in policy.origins or any(limit.kind is LimitKind.INDEX for limit in policy.limits)
    if declared or engine.name == GENERIC.name:
        return ()
    from kvcore.sizing.kernels import default_limits

    return default_limits(engine.name)


def _policy_of(settings: Mapping[str, Any]) -> Policy:
    return policy(**settings) if settings else Policy()


def _released(cache: Cache, freed_bytes: int) -> None:
    _notify("kvcore_released", cache=cache, freed_bytes=freed_bytes)


def _notify(hook: str, **arguments: object) -> None:
    for problem in default_registry().notify(hook, **arguments):
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def _text(value: object) -> str:
    """A value as a flag would give it: the shortest decimal form of a float, the word of a choice."""
    if isinstance(value, (list, tuple)):
        return ",".join(_text(item) for item in value)
    return str(getattr(value, "value", value))
