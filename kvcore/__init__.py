"""How many KV-cache blocks fit on each device, by one rule on every vendor's hardware.

``layout`` -> ``plan`` -> ``allocate`` -> ``verify``; see :mod:`kvcore.api`. Everything here is loaded on first use, so
that importing kvcore costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.api import agree as agree
    from kvcore.api import allocate as allocate
    from kvcore.api import audit as audit
    from kvcore.api import device_facts as device_facts
    from kvcore.api import device_turn as device_turn
    from kvcore.api import layout as layout
    from kvcore.api import layouts as layouts
    from kvcore.api import outcome as outcome
    from kvcore.api import plan as plan
    from kvcore.api import platform as platform
    from kvcore.api import policy as policy
    from kvcore.api import profile as profile
    from kvcore.api import verify as verify
    from kvcore.cache.allocate import Cache as Cache
    from kvcore.cache.verify import Verification as Verification
    from kvcore.contract.layout import CacheLayout as CacheLayout
    from kvcore.errors import DoesNotFit as DoesNotFit
    from kvcore.errors import KvcoreError as KvcoreError
    from kvcore.sizing.plan import Plan as Plan
    from kvcore.sizing.policy import Policy as Policy

__version__ = "0.1.0"

_HOMES = {
    "Cache": "kvcore.cache.allocate",
    "CacheLayout": "kvcore.contract.layout",
    "DoesNotFit": "kvcore.errors",
    "KvcoreError": "kvcore.errors",
    "Plan": "kvcore.sizing.plan",
    "Policy": "kvcore.sizing.policy",
    "Verification": "kvcore.cache.verify",
    "agree": "kvcore.api",
    "allocate": "kvcore.api",
    "audit": "kvcore.api",
    "device_facts": "kvcore.api",
    "device_turn": "kvcore.api",
    "layout": "kvcore.api",
    "layouts": "kvcore.api",
    "outcome": "kvcore.api",
    "plan": "kvcore.api",
    "platform": "kvcore.api",
    "policy": "kvcore.api",
    "profile": "kvcore.api",
    "verify": "kvcore.api",
}

__all__ = [
    "Cache",
    "CacheLayout",
    "DoesNotFit",
    "KvcoreError",
    "Plan",
    "Policy",
    "Verification",
    "__version__",
    "agree",
    "allocate",
    "audit",
    "device_facts",
    "device_turn",
    "layout",
    "layouts",
    "outcome",
    "plan",
    "platform",
    "policy",
    "profile",
    "verify",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
