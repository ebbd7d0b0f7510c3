"""kvcore platform for Iluvatar devices."""

from __future__ import annotations

from kvcore_iluvatar.platform import IluvatarBlockSizer, plugin

__all__ = ["IluvatarBlockSizer", "plugin"]
