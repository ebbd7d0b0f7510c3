"""A warm plan of a 64-layer model, beside reading the device and making the layout."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import kvcore
from kvcore.geometry import read_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
}
TARGET = 200


def microseconds(call: Callable[[], object], rounds: int = 300) -> float:
    """The median of ``rounds`` calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    """Everything that a start-up does, call by call."""
    device = kvcore.platform("cpu").device()
    facts = kvcore.device_facts(device)
    model = read_config(LLAMA)
    policy = kvcore.policy(utilization="0.9", max_model_len=1024)
    one, eight = kvcore.layout(model), kvcore.layouts(model, tp=8)
    plan = microseconds(lambda: kvcore.plan(one, facts=facts, policy=policy))
    print(f"{'plan, one rank':32} {plan:8.0f} us  target {TARGET} us")
    for name, call in {
        "plan, eight ranks": lambda: kvcore.plan(eight, facts=facts, policy=policy),
        "read the host's memory": lambda: kvcore.device_facts(device),
        "layouts of eight ranks": lambda: kvcore.layouts(model, tp=8),
        "read a config": lambda: read_config(LLAMA),
    }.items():
        took = microseconds(call)
        print(f"{name:32} {took:8.0f} us  {took / plan:5.1f} x plan")
