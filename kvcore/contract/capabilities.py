"""What a platform can do, declared without a default: a plugin that leaves one out is refused."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "CONTRACT_VERSION",
    "FULL",
    "Capability",
    "PlatformInfo",
    "Support",
    "Supported",
    "not_implemented",
    "unsupported",
]

#: Version of everything in :mod:`kvcore.contract`. A plugin states the one it was written for.
CONTRACT_VERSION = 1


class Capability(str, Enum):
    """One thing that a platform does or does not do; each belongs to one hook."""

    DETECT = "detect"  #: ``kvcore_detect`` tells hardware that is here from hardware that is not
    DEVICES = "devices"  #: ``kvcore_devices`` lists visible devices with their keys
    READ_MEMORY = "read_memory"  #: ``kvcore_read_memory`` gives total and free of a device
    OWN_MEMORY = "own_memory"  #: a reading says what this process itself holds
    MEMORY_STATS = "memory_stats"  #: ``kvcore_memory_stats`` gives the allocator's current and peak
    RESET_PEAK = "reset_peak"  #: ``kvcore_reset_peak`` starts a new peak
    ALLOCATION_LIMITS = "allocation_limits"  #: ``kvcore_allocation_limits`` is known for this device
    ALLOCATE = "allocate"  #: ``kvcore_allocate`` and ``kvcore_release``
    COMMIT = "commit"  #: an allocation is backed by real memory when ``kvcore_allocate`` returns
    RAW_ACCESS = "raw_access"  #: ``kvcore_write``, ``kvcore_read`` and ``kvcore_fill``
    TENSOR_NUMPY = "tensor_numpy"  #: ``kvcore_tensor(..., "numpy")`` without a copy
    TENSOR_PADDLE = "tensor_paddle"  #: ``kvcore_tensor(..., "paddle")`` without a copy
    TENSOR_TORCH = "tensor_torch"  #: ``kvcore_tensor(..., "torch")`` without a copy
    THREADS = "threads"  #: several threads may call the hooks at once
    FORK = "fork"  #: a process forked after the hooks were used may use them too


class Support(str, Enum):
    """How far a capability goes. UNSUPPORTED: the hardware cannot. NOT_IMPLEMENTED: the plugin does not yet."""

    FULL = "full"
    UNSUPPORTED = "unsupported"
    NOT_IMPLEMENTED = "not_implemented"


@dataclass(frozen=True, slots=True)
class Supported:
    """One declaration; all but FULL need a reason."""

    support: Support
    reason: str | None = None


FULL = Supported(Support.FULL)


def unsupported(reason: str) -> Supported:
    """The hardware or runtime cannot do it, or what it takes is not installed here.

    The hook must raise :class:`~kvcore.errors.CapabilityMissing`.
    """
    return Supported(Support.UNSUPPORTED, reason)


def not_implemented(reason: str) -> Supported:
    """The plugin does not do it yet; the hook must raise :class:`~kvcore.errors.CapabilityMissing`."""
    return Supported(Support.NOT_IMPLEMENTED, reason)


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """The answer of ``kvcore_platform``: who this is, for which contract, and what it can do.

    ``name`` is the entry point's. ``contract`` is the version that the plugin was written for, as a literal: one that
    is imported would always be the newest. ``accelerator`` is False for platforms that need no choice between vendors:
    the host and replayed devices.
    """

    name: str
    vendor: str
    version: str
    contract: int
    capabilities: collections.abc.Mapping[Capability, Supported]
    accelerator: bool = True
