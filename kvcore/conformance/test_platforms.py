"""The suite as pytest sees it. A vendor's tests/test_platforms.py is one line that imports this function."""

from __future__ import annotations

import pytest

from kvcore.conformance.check import Check
from kvcore.conformance.pytest_plugin import Suite
from kvcore.conformance.records import Outcome

__all__ = ["test_platform"]


@pytest.mark.platform
def test_platform(kvcore_case: tuple[str, Check], kvcore_suite: Suite) -> None:
    """One check on one platform."""
    platform, check = kvcore_case
    record = kvcore_suite.run(platform, check)
    if record.outcome is Outcome.NO_DEVICE:
        pytest.skip(f"{platform}: {record.reason}")
    if record.outcome is Outcome.EXPECTED:
        pytest.xfail(str(record.reason))
    if record.bad:
        pytest.fail(record.explained(check), pytrace=False)
