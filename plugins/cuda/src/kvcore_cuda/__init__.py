"""kvcore platform for NVIDIA devices."""

from __future__ import annotations

from kvcore_cuda.platform import CudaBlockSizer, plugin

__all__ = ["CudaBlockSizer", "plugin"]
