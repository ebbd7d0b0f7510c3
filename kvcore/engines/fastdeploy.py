"""FastDeploy: one function for what its worker processes do at start-up, on every vendor's hardware.

``PaddleDisWorkerProc.initialize_kv_cache`` profiles, sizes, agrees by an all-reduce, tells the engine and allocates;
``IluvatarPaddleDisWorkerProc`` has a copy that takes a constant for memory and polls shared memory until every rank
shows a number above 0 (PaddlePaddle/FastDeploy: worker/worker_process.py, worker/iluvatar_worker.py). Both become::

    from kvcore.engines import fastdeploy

    def initialize_kv_cache(self):
        fastdeploy.initialize_kv_cache(self, IPCSignal)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kvcore
from kvcore.contract.facts import Device
from kvcore.errors import KvcoreError, PolicyError
from kvcore.ranks.agree import together
from kvcore.ranks.settle import AgreedPlan
from kvcore.sizing.plan import Plan

__all__ = ["Start", "initialize_kv_cache", "start_of"]

#: What FastDeploy calls the stored types, and what they are; see :mod:`kvcore.geometry.formats`.
CACHE_DTYPES = {
    "int8": "int8_static",
    "int8_zp": "int8_static",
    "int4_zp": "int4_static",
    "fp8": "fp8_e4m3",
    "fp8_zp": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "block_wise_fp8": "fp8_block_wise",
}


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker process says of its start, by kvcore's words.

    ``given_blocks`` are blocks that someone fixed (no profile then); ``held_blocks`` those of the cache that exists
    while the model is profiled. ``first_of_node`` is true for the process that speaks to the node's engine.
    """

    model: str
    tp: int
    block_size: int
    dtype: str | None
    cache_dtype: str | None
    draft_layers: int
    utilization: float
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    given_blocks: int | None
    held_blocks: int
    first_of_node: bool


def initialize_kv_cache(
    proc: Any, signal: Any, *, platform: str | None = None, group: object = None, timeout: float = 600.0
) -> AgreedPlan:
    """Profile or take the blocks given, plan, agree with all ranks, tell the engine, and allocate.

    ``proc`` is the worker process, ``signal`` FastDeploy's ``IPCSignal`` class, ``platform`` a kvcore platform by name
    (None: by the rule of choice), ``group`` the ranks that share block numbers (None: all).

    Raises :class:`~kvcore.errors.RanksDisagree`, the same on every rank, if any of them fails to profile, plan or
    allocate, within ``timeout`` seconds; the rank that failed has its own error as the cause. What ranks allocated is
    theirs to free: FastDeploy's workers end on the error.
    """
    device = kvcore.outcome(lambda: kvcore.platform(platform).device(_local(proc)))
    with kvcore.device_turn(device, group, timeout=timeout):
        agreed = kvcore.agree(kvcore.outcome(lambda: _plan(proc, start_of(proc), device)), group, timeout=timeout)
        start = start_of(proc)
        if start.first_of_node and start.given_blocks is None:
            _publish(proc, signal, agreed.num_blocks)
        together(lambda: proc.worker.initialize_cache(num_gpu_blocks=agreed.num_blocks), group, timeout=timeout)
    return agreed


def start_of(proc: Any) -> Start:
    """Read FastDeploy's configuration. Raises :class:`PolicyError` for a stored type that kvcore does not know."""
    config = proc.fd_config
    cache, parallel = config.cache_config, config.parallel_config
    model, scheduler = config.model_config, config.scheduler_config
    return Start(
        model=str(model.model),
        tp=parallel.tensor_parallel_size,
        block_size=cache.block_size,
        dtype=getattr(model, "dtype", None),
        cache_dtype=_cache_dtype(config),
        draft_layers=_draft_layers(config),
        utilization=cache.gpu_memory_utilization,
        max_model_len=getattr(model, "max_model_len", None) or getattr(parallel, "max_model_len", None),
        max_num_seqs=getattr(scheduler, "max_num_seqs", None),
        max_num_batched_tokens=getattr(scheduler, "max_num_batched_tokens", None),
        given_blocks=None if parallel.do_profile else cache.total_block_num,
        held_blocks=cache.total_block_num if parallel.do_profile else 0,
        first_of_node=_local(proc) == 0,
    )


def _plan(proc: Any, start: Start, device: Device | KvcoreError) -> Plan:
    """This rank's plan: from a measured run, or with the blocks given, which all checks then are made against."""
    if isinstance(device, KvcoreError):
        raise device
    layout = kvcore.layout(
        start.model,
        rank=proc.local_rank % start.tp,
        tp=start.tp,
        block_size=start.block_size,
        dtype=start.dtype,
        kv_cache_dtype=start.cache_dtype,
        draft_layers=start.draft_layers,
        engine="fastdeploy",
    )
    settings: dict[str, Any] = {
        "utilization": start.utilization,
        "max_model_len": start.max_model_len,
        "max_num_seqs": start.max_num_seqs,
        "max_num_batched_tokens": start.max_num_batched_tokens,
    }
    if start.given_blocks is not None:
        given = {**settings, "num_blocks_override": start.given_blocks}
        return kvcore.plan(layout, device, engine="fastdeploy", **given)
    measured = kvcore.profile(device, proc.worker.model_runner.profile_run)
    return kvcore.plan(
        layout,
        device,
        reserves=measured.reserves,
        baseline=measured.baseline,
        temporary_bytes=layout.bytes(start.held_blocks),
        engine="fastdeploy",
        **settings,
    )


def _publish(proc: Any, signal: Any, num_blocks: int) -> None:
    """Write the number where the engine waits for it: it goes on as soon as the number is not 0."""
    import numpy as np

    proc.get_profile_block_num_signal = signal(
        name="get_profile_block_num",
        array=np.zeros(shape=[1], dtype=np.int32),
        dtype=np.int32,
        suffix=proc.parallel_config.engine_pid,
        create=False,
    )
    proc.get_profile_block_num_signal.value[0] = num_blocks


def _local(proc: Any) -> int:
    """The process's logical device: its rank within the node, of as many as are listed, or as a node can have."""
    listed = str(getattr(proc.fd_config.parallel_config, "device_ids", "") or "")
    return int(proc.local_rank) % (len(listed.split(",")) if listed else int(proc.max_chips_per_node))


def _cache_dtype(config: Any) -> str | None:
    name = getattr(getattr(config, "quant_config", None), "kv_cache_quant_type", None)
    if name is None:
        return None
    known = CACHE_DTYPES.get(name)
    if known is None:
        raise PolicyError(
            "a stored type of FastDeploy's cache that kvcore does not know",
            code="KV-POL-070",
            where="kv_cache_quant_type",
            got=name,
            expected=", ".join(CACHE_DTYPES),
        )
    return known


def _draft_layers(config: Any) -> int:
    """FastDeploy adds ``num_gpu_block_expand_ratio`` layers for multi-token prediction."""
    speculative = getattr(config, "speculative_config", None)
    if speculative is None or getattr(speculative, "method", None) != "mtp":
        return 0
    return int(getattr(speculative, "num_gpu_block_expand_ratio", 1))
