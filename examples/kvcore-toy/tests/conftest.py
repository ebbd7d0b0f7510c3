"""The suite's processes get two simulated cards; on a machine with cards this is not needed."""

from __future__ import annotations

from kvcore.conformance.setting import Setting


def pytest_kvcore_setting(platform: str) -> Setting | None:
    """How the processes of the toy's checks are started; other platforms are not ours."""
    if platform != "toy":
        return None
    cards = "TOY-5f3a:1GiB:96MiB,TOY-81c0:1GiB:96MiB"
    return Setting(platform, environ={"TOY_CARDS": cards}, real=False)
