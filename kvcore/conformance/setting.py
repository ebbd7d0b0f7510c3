"""Where a platform is tested: its plugin, its process's environment, and how much of a device a check may take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DEVICES", "Setting", "built_in"]

MIB = 1024**2
#: Two devices that are mostly other tenants': small enough to be filled in host memory, as large as cards are.
DEVICES = tuple(Path(__file__).with_name(f"device{number}.json") for number in (0, 1))


@dataclass(frozen=True, slots=True)
class Setting:
    """How the processes of one platform's checks are started.

    ``plugin`` is ``module:object`` for a plugin that is not installed. ``data_bytes`` bounds the process's own memory
    (RLIMIT_DATA), so that a host can be filled without harm. ``largest_bytes`` is the largest single buffer of the
    checks that do not fill a device. ``timeout`` is what one check may take, in seconds. ``real`` says whether devices
    are hardware, and not simulated.
    """

    platform: str
    plugin: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    data_bytes: int | None = None
    largest_bytes: int = 32 * MIB
    timeout: float = 60.0
    real: bool = True


def built_in(platform: str) -> Setting:
    """The setting of ``platform`` where nobody gives another one."""
    if platform == "cpu":
        return Setting("cpu", data_bytes=512 * MIB)
    if platform == "replay" and not os.environ.get("KVCORE_REPLAY"):
        return Setting("replay", environ={"KVCORE_REPLAY": os.pathsep.join(map(str, DEVICES))}, real=False)
    return Setting(platform)
