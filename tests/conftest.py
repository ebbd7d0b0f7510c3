"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run, and no deadline: speed is measured in benchmarks/, never by a test.
settings.register_profile("kvcore", derandomize=True, deadline=None)
settings.load_profile("kvcore")
