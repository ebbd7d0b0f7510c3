"""All that a vendor reads. Plugins import this package, :mod:`kvcore.errors` and :mod:`kvcore.units`, no more.

The hook specifications are loaded on first use, because only they need pluggy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvcore.contract.capabilities import *
from kvcore.contract.capabilities import __all__ as _capabilities
from kvcore.contract.facts import *
from kvcore.contract.facts import __all__ as _facts
from kvcore.contract.layout import *
from kvcore.contract.layout import __all__ as _layout

if TYPE_CHECKING:
    from kvcore.contract.hookspecs import BlockSizer as BlockSizer
    from kvcore.contract.hookspecs import Contributor as Contributor
    from kvcore.contract.hookspecs import Observer as Observer
    from kvcore.contract.hookspecs import hookimpl as hookimpl

_hookspecs = ["BlockSizer", "Contributor", "Observer", "hookimpl"]
__all__ = sorted([*_capabilities, *_facts, *_layout, *_hookspecs])


def __getattr__(name: str) -> object:
    if name in _hookspecs:
        return getattr(importlib.import_module("kvcore.contract.hookspecs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
