"""What the user asked for, as values already parsed and checked; each field remembers where it came from."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from kvcore.contract.facts import Limit, Reserve

__all__ = ["DEFAULT_UTILIZATION", "OnShortage", "Policy", "ShareOf"]

DEFAULT_UTILIZATION = Fraction(9, 10)


class ShareOf(str, Enum):
    """Of what the utilization is a share. Engines disagree, so the base is part of the figure's name.

    Sources: vLLM and FastDeploy's CUDA worker take it of the device's total, SGLang of what was free before the
    weights were loaded, LMDeploy of what is free afterwards, TensorRT-LLM of what remains after everything else.
    """

    TOTAL = "of_total"
    FREE_BEFORE_LOAD = "of_free_before_load"
    FREE_AFTER_LOAD = "of_free_after_load"
    REMAINDER = "of_remainder"


class OnShortage(str, Enum):
    """What to do when the asked length, size or override does not fit."""

    REFUSE = "refuse"  #: an error with the figures and what would help
    WARN = "warn"  #: go on, with a warning in the plan
    SHRINK = "shrink"  #: take the largest that fits, with a warning in the plan


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's side of the sum.

    ``kv_cache_memory`` is the cache's size in bytes for every rank, or one size a rank; it replaces the share of
    memory. ``num_blocks_override`` replaces the blocks that memory allows. Neither skips a check.
    ``max_blocks`` is a cap: it can only lower, and has a reason. ``origins`` maps a field's name to where its value
    came from (``default``, ``call``, a flag, a variable or a file); fields not in it are defaults.
    """

    utilization: Fraction = DEFAULT_UTILIZATION
    utilization_of: ShareOf = ShareOf.TOTAL
    kv_cache_memory: tuple[int, ...] | None = None
    margin: int = 0
    reserves: tuple[Reserve, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    limit_to_demand: bool = False
    limits: tuple[Limit, ...] = ()
    max_blocks: int | None = None
    max_blocks_reason: str | None = None
    num_blocks_override: int | None = None
    on_shortage: OnShortage = OnShortage.REFUSE
    origins: collections.abc.Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where the value of field ``name`` came from."""
        return self.origins.get(name, "default")

    def asked_bytes(self, rank: int) -> int | None:
        """The absolute size asked for ``rank``, or None if a share of memory was asked for."""
        if self.kv_cache_memory is None:
            return None
        return self.kv_cache_memory[rank if len(self.kv_cache_memory) > 1 else 0]
