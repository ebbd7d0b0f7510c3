"""Ranks agree on a number of blocks, allocate it together, and verify it: under either launcher.

python -m paddle.distributed.launch --nproc_per_node 4 examples/agree.py
torchrun --nproc_per_node 4 examples/agree.py
"""

import os
from pathlib import Path

import kvcore

MODEL = Path(__file__).parent / "models" / "qwen3-30b-a3b.json"


def join() -> tuple[int, int]:
    """This process's rank and how many there are, in the library that launched it."""
    if "PADDLE_TRAINER_ID" in os.environ:
        import paddle.distributed as dist

        dist.init_parallel_env()
        return dist.get_rank(), dist.get_world_size()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    rank, size = join()
    device = kvcore.platform("cpu").device()

    def make() -> kvcore.Plan:
        layout = kvcore.layout(MODEL, rank=rank, tp=size, block_size=64)
        # Every rank asks for another size, as cards of different neighbours would have it.
        return kvcore.plan(layout, device, kv_cache_memory=(64 - rank) * layout.bytes_per_block, max_model_len=1024)

    with kvcore.device_turn(device, timeout=60):
        agreed = kvcore.agree(kvcore.outcome(make), timeout=60)
        with kvcore.allocate(agreed, timeout=60, retries=2) as cache:
            kvcore.verify(cache)
            print(
                f"rank {rank} of {size}: {cache.num_blocks} blocks, the tightest is rank {agreed.tightest}", flush=True
            )


if __name__ == "__main__":
    main()
