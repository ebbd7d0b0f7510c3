"""A toy engine: size the cache, allocate it, and write and read tokens through a block table.

python examples/engine.py
"""

from __future__ import annotations

import numpy as np

import kvcore

# Config -> layout -> plan -> cache. The length that one request may reach is part of the plan.
layout = kvcore.layout("examples/models/tinyllama-1.1b-chat-v1.0.json", block_size=16)
device = kvcore.platform("cpu").device()
plan = kvcore.plan(layout, device, kv_cache_memory="64MiB", max_model_len=2048)
print(f"{plan.num_blocks} blocks of {plan.block_size} tokens, bound by {plan.binding.kind.value}")

with kvcore.allocate(plan) as cache:
    print(f"verified {len(kvcore.verify(cache).blocks)} blocks of {cache.nbytes:,} bytes")

    # (blocks, heads, tokens per block, head size); numpy shows bfloat16 as its 16 bits.
    keys = np.asarray(cache.tensor("layers.0.k"))
    free_blocks = list(range(plan.usable_blocks))

    # A request of 40 tokens takes three blocks, which need not be neighbours.
    request = np.random.default_rng(0).integers(0, 2**16, (40, keys.shape[1], keys.shape[3]), dtype=np.uint16)
    block_table = [free_blocks.pop() for _ in range(layout.request_blocks(len(request)))]
    for token, vectors in enumerate(request):
        keys[block_table[token // plan.block_size], :, token % plan.block_size] = vectors

    # Gather them back in the request's order.
    read = keys[block_table].transpose(0, 2, 1, 3).reshape(-1, keys.shape[1], keys.shape[3])[: len(request)]
    assert np.array_equal(read, request)
    print(f"request of {len(request)} tokens read back from blocks {block_table}")
    del keys, read
