"""kvcore platform for MetaX devices."""

from __future__ import annotations

from kvcore_metax.platform import MetaxBlockSizer, plugin

__all__ = ["MetaxBlockSizer", "plugin"]
