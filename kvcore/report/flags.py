"""What makes an engine do a plan, ready to paste: its command line, or its configuration where that has no flag.

Names are those of vllm serve, sglang.launch_server, FastDeploy's api_server, LMDeploy's PytorchEngineConfig and
TensorRT-LLM's kv_cache_config. What nobody asked for is left to the engine's own default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["EMITTED", "engine_flags"]

Data = Mapping[str, Any]


def _given(data: Data, name: str) -> str | None:
    """The text of a setting that somebody gave."""
    return next((s["value"] for s in data["settings"] if s["name"] == name and s["origin"] != "default"), None)


def _words(flags: Mapping[str, object]) -> str:
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)


def _vllm(data: Data) -> str:
    return "vllm serve MODEL " + _words(
        {
            "--tensor-parallel-size": _given(data, "tp"),
            "--pipeline-parallel-size": _given(data, "pp"),
            "--max-model-len": data["max_model_len"],
            "--block-size": _given(data, "block_size"),
            "--kv-cache-dtype": _given(data, "kv_cache_dtype"),
            "--max-num-seqs": _given(data, "max_num_seqs"),
            "--max-num-batched-tokens": _given(data, "max_num_batched_tokens"),
            "--num-gpu-blocks-override": data["num_blocks"],
        },
    )


def _sglang(data: Data) -> str:
    return "python -m sglang.launch_server --model-path MODEL " + _words(
        {
            "--tp-size": _given(data, "tp"),
            "--pp-size": _given(data, "pp"),
            "--context-length": data["max_model_len"],
            "--page-size": _given(data, "block_size"),
            "--kv-cache-dtype": _given(data, "kv_cache_dtype"),
            "--max-running-requests": _given(data, "max_num_seqs"),
            "--max-total-tokens": data["usable_blocks"] * data["block_size"],
        },
    )


def _fastdeploy(data: Data) -> str:
    return "python -m fastdeploy.entrypoints.openai.api_server --model MODEL " + _words(
        {
            "--tensor-parallel-size": _given(data, "tp"),
            "--max-model-len": data["max_model_len"],
            "--block-size": data["block_size"],
            "--max-num-seqs": _given(data, "max_num_seqs"),
            "--num-gpu-blocks-override": data["num_blocks"],
        },
    )


def _lmdeploy(data: Data) -> str:
    fields = {
        "tp": _given(data, "tp"),
        "session_len": data["max_model_len"],
        "block_size": data["block_size"],
        "max_batch_size": _given(data, "max_num_seqs"),
        "num_gpu_blocks": data["num_blocks"],
    }
    return f"PytorchEngineConfig({', '.join(f'{n}={v}' for n, v in fields.items() if v is not None)})"


def _trtllm(data: Data) -> str:
    lines = ["# --extra_llm_api_options FILE with:", "kv_cache_config:"]
    lines.append(f"  max_tokens: {data['num_blocks'] * data['block_size']}")
    lines.append(f"  tokens_per_block: {data['block_size']}")
    return "\n".join(lines)


EMITTED: Final[Mapping[str, Callable[[Data], str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "lmdeploy": _lmdeploy,
    "fastdeploy": _fastdeploy,
}


def engine_flags(engine: str, data: Data) -> str:
    """The text for ``engine``, one of :data:`EMITTED`, from a plan's data."""
    return EMITTED[engine](data)
