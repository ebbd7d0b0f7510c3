"""How engines page a cache and what they print, as data: one entry an engine, or a span of its versions.

``NAME`` is the newest entry of an engine, ``NAME@VERSION`` the one that held at that version. A rule that logs of an
engine show belongs here; a rule of a model family belongs to :mod:`kvcore.geometry.families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from kvcore.errors import PolicyError

__all__ = ["CONVENTIONS", "GENERIC", "Convention", "IndexFormat", "TokensRule", "convention"]


class TokensRule(str, Enum):
    """What an engine means by the tokens that its cache holds."""

    USABLE = "usable"  #: usable blocks x block size
    BLOCKS = "blocks"  #: all blocks x block size
    BLOCKS_OVER_GROUPS = "blocks_over_groups"  #: all blocks // groups x block size
    CONCURRENCY = "concurrency"  #: concurrency at the asked length x that length


class IndexFormat(str, Enum):
    """How the keys of a sparse-attention indexer are stored."""

    FP8 = "fp8"  #: one byte a value and a 4-byte scale for each 128 of them
    MODEL = "model"  #: in the model's dtype


@dataclass(frozen=True, slots=True)
class Convention:
    """One engine's rules.

    ``block_size`` is its default, and blocks are a multiple of ``block_multiple`` tokens. Where a state has to fit into
    a page, the block grows to the smallest multiple of ``state_multiple`` tokens that holds it (``latent_multiple``
    with MLA). Groups have as many layers as the smallest kind, or as the largest if that is less than ``pool_ratio``
    as many. Where kinds have pools of their own, windows have ``window_share`` of the blocks of full layers, and states
    ``state_ratio`` of their bytes. ``state_dtype`` is that of states unless one is asked for; None: the model's.
    ``null_blocks`` are allocated and never used. ``since`` is the first version for which the entry holds.
    """

    name: str
    source: str
    since: tuple[int, ...] = ()
    block_size: int = 16
    block_multiple: int = 1
    state_multiple: int = 16
    kernel_block: int | None = None
    window_share: Fraction | None = None
    state_ratio: Fraction | None = None
    state_dtype: str | None = None
    latent_multiple: int = 64
    pool_ratio: Fraction = Fraction(3, 2)
    null_blocks: int = 0
    index_format: IndexFormat = IndexFormat.FP8
    packs_sparse_fp8: bool = True
    tokens: TokensRule = TokensRule.USABLE
    share_of: str = "of_total"


GENERIC = Convention("generic", "blocks of 16 tokens; several kinds of layers share one pool, as in vLLM")

CONVENTIONS: tuple[Convention, ...] = (
    GENERIC,
    Convention(
        "vllm",
        "vllm/v1/core/kv_cache_utils.py; tokens as concurrency x length since vllm#40691",
        since=(0, 20),
        block_multiple=16,
        kernel_block=16,
        null_blocks=1,
        tokens=TokensRule.CONCURRENCY,
    ),
    Convention(
        "vllm",
        "vllm/v1/core/kv_cache_utils.py up to 0.19; the null block is not left out of what is printed",
        block_multiple=16,
        kernel_block=16,
        null_blocks=1,
        tokens=TokensRule.BLOCKS_OVER_GROUPS,
    ),
    Convention(
        "vllm-ascend",
        "vllm-project/vllm-ascend: blocks of 128, indexer keys in the model's dtype",
        block_size=128,
        block_multiple=128,
        kernel_block=128,
        state_multiple=128,
        latent_multiple=128,
        null_blocks=1,
        index_format=IndexFormat.MODEL,
        tokens=TokensRule.BLOCKS_OVER_GROUPS,
    ),
    Convention("aphrodite", "aphrodite-engine, a fork of vLLM's first engine", tokens=TokensRule.BLOCKS),
    Convention(
        "sglang",
        "sglang/srt/mem_cache: page 1 by default, one page more than is used; swa_full_tokens_ratio 0.8, "
        "mamba_full_memory_ratio 0.9, mamba_ssm_dtype float32",
        block_size=1,
        window_share=Fraction(4, 5),
        state_ratio=Fraction(9, 10),
        state_dtype="float32",
        null_blocks=1,
        share_of="of_free_before_load",
    ),
    Convention(
        "trtllm",
        "TensorRT-LLM, PyTorch backend: tokens_per_block 32",
        block_size=32,
        packs_sparse_fp8=False,
        tokens=TokensRule.BLOCKS,
        share_of="of_remainder",
    ),
    Convention(
        "lmdeploy",
        "InternLM/lmdeploy: cache_block_seq_len 64",
        block_size=64,
        tokens=TokensRule.BLOCKS,
        share_of="of_free_after_load",
    ),
    Convention(
        "fastdeploy",
        "PaddlePaddle/FastDeploy: block_size 64",
        block_size=64,
        index_format=IndexFormat.FP8,
        tokens=TokensRule.BLOCKS,
    ),
)


def convention(name: str, where: str = "engine") -> Convention:
    """The entry for ``NAME`` or ``NAME@VERSION``; raises :class:`PolicyError` for an unknown engine or version."""
    engine, _, version = name.strip().partition("@")
    entries = [entry for entry in CONVENTIONS if entry.name == engine]
    if not entries:
        known = ", ".join(dict.fromkeys(entry.name for entry in CONVENTIONS))
        raise PolicyError("unknown engine", code="KV-POL-028", where=where, got=name[:80], expected=known)
    if not version:
        return max(entries, key=lambda entry: entry.since)
    asked = _version(version, where)
    held = [entry for entry in entries if entry.since <= asked]
    if not held:
        first = ".".join(map(str, min(entry.since for entry in entries)))
        raise PolicyError(
            "no convention is known for this version of the engine",
            code="KV-POL-051",
            where=where,
            got=name[:80],
            expected=f"{engine}@{first} or later",
        )
    return max(held, key=lambda entry: entry.since)


def _version(text: str, where: str) -> tuple[int, ...]:
    """``0.19.0rc1`` as (0, 19, 0): what follows a part's digits does not order releases here."""
    parts = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    if not parts:
        raise PolicyError("not a version", code="KV-POL-052", where=where, got=text[:80], expected="such as 0.19")
    return tuple(parts)
