"""kvcore platform for Toy devices."""

from __future__ import annotations

from kvcore_toy.platform import ToyBlockSizer, plugin

__all__ = ["ToyBlockSizer", "plugin"]
