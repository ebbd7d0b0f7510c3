"""One rank of a test: joins a group of torch or paddle, does what it is told, prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import kvcore
from kvcore.catalogue import device_profile
from kvcore.contract import Basis, Reserve, ReserveKind
from kvcore.errors import KvcoreError, PlanError
from kvcore.ranks.groups import current_group

FAULTS = ("dies-within", "dies-after", "cut")
PERSISTENT = (ReserveKind.PERSISTENT, Basis.DECLARED, "test", "what the model takes")


def join(library: str, rank: int, size: int, port: int) -> None:
    if library == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        return
    ports = [port + number for number in range(size)]
    os.environ.update(
        {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(size),
            "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{ports[rank]}",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{p}" for p in ports),
            "PADDLE_MASTER": f"127.0.0.1:{port + size}",
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
    )
    import paddle.distributed as dist

    dist.init_parallel_env()


def outcome(act: str, rank: int) -> kvcore.Plan | KvcoreError:
    if act == "fails":
        return PlanError("this rank has no memory", code="KV-FIT-001")
    if act == "late":
        time.sleep(30)
    if act == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return kvcore.outcome(lambda: planned(act, rank))


def planned(act: str, rank: int) -> kvcore.Plan:
    if act == "raises":
        kvcore.profile(kvcore.platform("cpu").device(), lambda: 1 / 0)
    layout = kvcore.layout("examples/models/tinyllama-1.1b-chat-v1.0.json", block_size=16)
    if act == "zero":
        return kvcore.plan(layout, kv_cache_memory=layout.bytes(1) - 1, max_model_len=16)
    if act in ("negative", "version", "share"):
        read = device_profile("tests/data/profiles/card-80g.json")
        facts = replace(read, versions=(("acme", f"1.{rank}" if act == "version" else "1.2"),))
        weights = Reserve("weights", 2**40 if act == "negative" else 0, *PERSISTENT)
        return kvcore.plan(
            layout, facts=facts, reserves=[weights], utilization="0.8" if act == "share" else "0.9", max_model_len=1024
        )
    model = "examples/models/qwen3-8b.json" if act == "other" else "examples/models/tinyllama-1.1b-chat-v1.0.json"
    layout = kvcore.layout(model, block_size=16)
    return kvcore.plan(layout, kv_cache_memory=layout.bytes(300 - rank), max_model_len=1024)


class Faulty:
    """A group whose rank does something wrong in the middle of an exchange."""

    def __init__(self, act: str) -> None:
        self._real = current_group()
        self.rank, self.size = self._real.rank, self._real.size
        gather, meet = self._real._gather, self._real._meet
        gathers: list[int] = []

        def gathering(numbers: Sequence[int]) -> list[list[int]]:
            gathers.append(1)
            if len(gathers) == 2 and act == "dies-within":
                os.kill(os.getpid(), signal.SIGKILL)
            if len(gathers) == 2 and act == "cut":
                numbers = [*numbers[: len(numbers) // 2], *[0] * (len(numbers) - len(numbers) // 2)]
            return gather(numbers)

        def meeting(key: str, deadline: float, timeout: float) -> None:
            if key.endswith("/done") and act == "dies-after":
                os.kill(os.getpid(), signal.SIGKILL)
            meet(key, deadline, timeout)

        self._real._gather, self._real._meet = gathering, meeting  # type: ignore[method-assign]
        self.exchange = self._real.exchange


def main() -> None:
    library, act, *numbers = sys.argv[1:]
    rank, size, port, timeout = map(int, numbers)
    join(library, rank, size, port)
    started = time.monotonic()
    answer: dict[str, object] = {"rank": rank}
    try:
        if act.startswith("full"):
            retries = int(act.removeprefix("full") or 0)
            layout = kvcore.layout("examples/models/tinyllama-1.1b-chat-v1.0.json", block_size=16)
            made = kvcore.plan(layout, kv_cache_memory=layout.bytes(20), max_model_len=64)
            device = kvcore.platform("cpu" if rank else "replay").device()
            cache = kvcore.allocate(made, device, group=current_group(), timeout=timeout, retries=retries)
            answer |= {"num_blocks": cache.num_blocks, "freed": cache.release()}
        if act == "turns":
            device = kvcore.platform("cpu").device()
            with kvcore.device_turn(device, timeout=timeout):
                answer["holder"] = os.getpid()
        if not act.startswith("full"):
            made = outcome(act, rank)
            agreed = kvcore.agree(made, Faulty(act) if act in FAULTS else None, timeout=timeout)
            if act == "leaves":
                os.kill(os.getpid(), signal.SIGKILL)
            if act == "stays":
                device = kvcore.platform("cpu").device()
                kvcore.allocate(agreed, device, timeout=timeout)
            answer |= {"num_blocks": agreed.num_blocks, "tightest": agreed.tightest, "counts": agreed.counts}
    except KvcoreError as error:
        answer |= {"code": error.code, "where": error.where, "got": error.got}
    answer["seconds"] = time.monotonic() - started
    print(json.dumps(answer), flush=True)
    # A collective that was given up may still hang on a thread: the process does not wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
