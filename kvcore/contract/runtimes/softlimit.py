"""Memory limits in variables: HAMi's, enforced by interception, and that of Paddle's own allocator."""

from __future__ import annotations

import collections.abc
import re

from kvcore.contract.facts import Basis, Reading, Scope
from kvcore.contract.validate import LARGEST_BYTES
from kvcore.units import GIB, KIB, MIB

__all__ = ["paddle_limit_reading", "soft_limit_reading"]

_LIMIT = re.compile(r"(\d{1,20})([kmg]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB}
VARIABLE = "CUDA_DEVICE_MEMORY_LIMIT"
PADDLE_VARIABLE = "FLAGS_gpu_memory_limit_mb"


def soft_limit_reading(index: int, environ: collections.abc.Mapping[str, str]) -> Reading | None:
    """The limit of the device with logical ``index``, its own before the one for all; None if there is none.

    Bytes, or a number with k, m or g (HAMi-core, src/multiprocess). 0 means no limit there. A text that is no size
    is a skipped source.
    """
    for name in (f"{VARIABLE}_{index}", VARIABLE):
        text = environ.get(name)
        if text is None or not text.strip():
            continue
        match = _LIMIT.fullmatch(text.strip())
        size = None if match is None else int(match[1]) * _UNITS[match[2].lower()]
        if size == 0:
            return None
        if size is None or size > LARGEST_BYTES:
            return Reading(name, Scope.SOFT, skipped=f"{text[:40]!a} is no size: bytes, or a number with k, m or g")
        return Reading(name, Scope.SOFT, total=size, basis=Basis.DECLARED, note="enforced by interception")
    return None


def paddle_limit_reading(environ: collections.abc.Mapping[str, str]) -> Reading | None:
    """What Paddle's allocator takes of a GPU at most, in MiB; 0, its default, means no limit.

    Paddle shifts it by 20 bits (paddle/phi/core/platform/device/gpu/gpu_info.cc).
    """
    text = environ.get(PADDLE_VARIABLE, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) * MIB > LARGEST_BYTES:
        return Reading(PADDLE_VARIABLE, Scope.SOFT, skipped=f"{text[:40]!a} is no number of MiB")
    if int(text) == 0:
        return None
    note = "enforced by Paddle's allocator"
    return Reading(PADDLE_VARIABLE, Scope.SOFT, total=int(text) * MIB, basis=Basis.DECLARED, note=note)
