"""A model's config.json -> :class:`~kvcore.contract.layout.CacheLayout`, one a rank."""

from __future__ import annotations

from kvcore.geometry.model import ModelConfig, read_config
from kvcore.geometry.shard import layouts, stage_layers

__all__ = ["ModelConfig", "layouts", "read_config", "stage_layers"]
