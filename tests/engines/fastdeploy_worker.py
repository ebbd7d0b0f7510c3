"""One rank of FastDeploy's start-up: doubles of both worker processes, with what the adapter reads and calls of them.

The attributes are those of PaddlePaddle/FastDeploy (fastdeploy/worker/worker_process.py, iluvatar_worker.py,
gpu_worker.py, config.py); what they do here is our own. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore.engines import fastdeploy
from kvcore.errors import KvcoreError

PUBLISHED: dict[str, Any] = {}


class IPCSignal:
    """An array in shared memory that the engine waits on; here it stays in this process."""

    def __init__(self, name: str, array: Any, dtype: Any, suffix: int, create: bool) -> None:
        assert array.dtype == dtype == np.int32
        assert not create
        self.value = array
        PUBLISHED[f"{name}.{suffix}"] = self.value


class Worker:
    def __init__(self, act: str) -> None:
        self.act = act
        self.model_runner = SimpleNamespace(profile_run=self.profile_run)
        self.num_gpu_blocks: int | None = None

    def profile_run(self) -> None:
        if self.act == "no-profile":
            raise AssertionError("nothing was to be profiled")
        if self.act == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        np.ones(2**20).sum()

    def initialize_cache(self, num_gpu_blocks: int) -> None:
        if self.act == "no-cache":
            raise MemoryError("the cache did not fit")
        self.num_gpu_blocks = num_gpu_blocks


class PaddleDisWorkerProc:
    def __init__(self, fd_config: Any, ranks: int, local_rank: int, act: str) -> None:
        self.fd_config, self.ranks, self.local_rank = fd_config, ranks, local_rank
        self.parallel_config, self.cache_config = fd_config.parallel_config, fd_config.cache_config
        self.worker = Worker(act)
        self.max_chips_per_node = 8

    def initialize_kv_cache(self) -> Any:
        return fastdeploy.initialize_kv_cache(self, IPCSignal, timeout=30)


class IluvatarPaddleDisWorkerProc(PaddleDisWorkerProc):
    """The copy that polled shared memory: nothing is left of it."""

    def __init__(self, fd_config: Any, ranks: int, local_rank: int, act: str) -> None:
        super().__init__(fd_config, ranks, local_rank, act)
        self.max_chips_per_node = 16


def config(tp: int, options: dict[str, Any]) -> Any:
    cache = SimpleNamespace(
        block_size=64, gpu_memory_utilization=options.get("utilization", 0.9), total_block_num=options.get("blocks", 0)
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        do_profile="given" not in options,
        device_ids=options.get("device_ids"),
        engine_pid=4711,
    )
    model = SimpleNamespace(
        model=str(Path("examples/models/qwen3-30b-a3b.json")),
        dtype="bfloat16",
        max_model_len=options.get("max_model_len", 1024),
    )
    return SimpleNamespace(
        cache_config=cache,
        parallel_config=parallel,
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        quant_config=SimpleNamespace(kv_cache_quant_type=options.get("quant")),
        speculative_config=SimpleNamespace(method=None),
    )


def main() -> None:
    act, rank, size, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    import paddle.distributed as dist

    dist.init_parallel_env()
    kind = IluvatarPaddleDisWorkerProc if options.get("vendor") == "iluvatar" else PaddleDisWorkerProc
    proc = kind(config(size, options), size, rank, act)
    answer: dict[str, Any] = {"rank": rank}
    begun = time.monotonic()
    try:
        agreed = proc.initialize_kv_cache()
        answer |= {"num_blocks": agreed.num_blocks, "counts": agreed.counts, "tightest": agreed.tightest}
        facts = agreed.plan.rank.facts
        answer["platform"] = None if facts is None else facts.device.platform
    except KvcoreError as error:
        answer |= {"code": error.code, "got": error.got, "cause": repr(error.__cause__)}
    answer["seconds"] = time.monotonic() - begun
    answer["allocated"] = proc.worker.num_gpu_blocks
    answer["published"] = {name: int(value[0]) for name, value in PUBLISHED.items()}
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
