"""Agreement: its pure part for up to 16,384 ranks, and the whole beside a bare all-reduce of real processes.

The pure part is what every rank computes from everyone's contributions; time and bytes for one rank should grow with
the number of ranks, not faster. Between real processes, agree and a bare all_reduce of one number are timed in the same
processes, in turns.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time

import kvcore
from benchmarks.plan import microseconds
from kvcore.ranks.settle import Contribution, contribution, settle

SIZES = (256, 1024, 4096, 16_384)
PROCESSES = (2, 4, 8)
ROUNDS = 10
MODEL = "examples/models/qwen3-30b-a3b.json"


def main() -> None:
    """Print both tables."""
    plan = _plan(0)
    first: tuple[int, float] | None = None
    for size in SIZES:
        raw = [_encoded(plan, rank) for rank in range(size)]
        seconds = microseconds(lambda raw=raw: _settled(raw, plan), rounds=3) / 1e6
        first = first or (size, seconds)
        growth = (seconds / first[1]) / (size / first[0])
        print(
            f"settle, {size:>6,} ranks {seconds * 1e3:>9.1f} ms a rank {sum(map(len, raw)) / 2**20:>7.2f} MiB a rank"
            f" {growth:>6.2f} x linear  target at most 1.00"
        )
    for size in PROCESSES:
        bare, agreed = _real(size)
        ratio = f"{agreed / bare:>6.1f} x a bare all_reduce ({bare * 1e3:.2f} ms)"
        print(f"agree, {size} processes {agreed * 1e3:>8.1f} ms  {ratio}")


def _plan(rank: int) -> kvcore.Plan:
    layout = kvcore.layout(MODEL, tp=4, block_size=64)
    return kvcore.plan(layout, kv_cache_memory=layout.bytes(1000 - rank % 10), max_model_len=1024)


def _settled(raw: list[bytes], plan: kvcore.Plan) -> None:
    settle([Contribution.decode(one, rank) for rank, one in enumerate(raw)], plan, 0)


def _encoded(plan: kvcore.Plan, rank: int) -> bytes:
    return contribution(plan, rank).encode()


def _real(size: int) -> tuple[float, float]:
    """Median seconds of a bare all_reduce and of agree, over torch's gloo."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.agree", "rank"]
    running = [
        subprocess.Popen([*command, str(rank), str(size), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    bare, agreed = zip(*(json.loads(out.splitlines()[-1]) for out in outputs), strict=True)
    return max(bare), max(agreed)


def _rank(rank: int, size: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    plan = _plan(rank)
    bare, agreed = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(torch.tensor([rank]), op=dist.ReduceOp.MIN)
        bare.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        kvcore.agree(plan, timeout=60)
        agreed.append(time.perf_counter() - begun)
    print(json.dumps([statistics.median(bare), statistics.median(agreed)]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _rank(*map(int, sys.argv[2:]))
