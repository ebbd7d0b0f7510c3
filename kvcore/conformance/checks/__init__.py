"""The checks, by what they look at. Importing this registers them all."""

from kvcore.conformance.checks import (  # noqa: F401
    access,
    allocation,
    capabilities,
    concurrency,
    conduct,
    consistency,
    devices,
    memory,
    stats,
    tensors,
)
