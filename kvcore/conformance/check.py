"""What a check is: a function with an id, a level, what it needs, and a docstring that says why and how to fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvcore.contract.capabilities import Capability

if TYPE_CHECKING:
    from kvcore.conformance.bench import Bench

__all__ = ["Check", "CheckFailed", "Level", "NoDevice", "NotApplicable", "all_checks", "check"]


class Level(str, Enum):
    """What a failure means."""

    CORE = "core"  #: a plan or a cache would be wrong
    CONDUCT = "conduct"  #: figures are right, but the process or its neighbours are harmed


class CheckFailed(AssertionError):
    """What was called, what came back, and what was expected."""

    def __init__(
        self, call: str, *, got: object, expected: object, unit: str | None = None, device: str | None = None
    ) -> None:
        super().__init__(f"{call}: got {got}, expected {expected}")
        self.call = call
        self.got = str(got)
        self.expected = str(expected)
        self.unit = unit
        self.device = device


class NotApplicable(Exception):
    """The check has no subject here: one device where two are needed, a bound that is not declared."""


class NoDevice(Exception):
    """The platform says, with a reason, that no device of it can be used on this machine."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``since`` is the version of the contract that it belongs to; ``fresh`` wants a process of its own."""

    id: str
    name: str
    level: Level
    since: int
    needs: tuple[Capability, ...]
    fresh: bool
    run: Callable[[Bench], None]

    @property
    def title(self) -> str:
        """One line: what holds if the check passes."""
        return self._parts()[0]

    @property
    def why(self) -> str:
        """What goes wrong for users where it does not hold."""
        return self._parts()[1]

    @property
    def fix(self) -> str:
        """What a plugin's author does about it."""
        return self._parts()[2]

    @property
    def page(self) -> str:
        """The check's page in the documentation."""
        return f"docs/conformance/{self.id}.md"

    def _parts(self) -> tuple[str, str, str]:
        before, _, fix = (self.run.__doc__ or "").partition("Fix:")
        title, _, why = before.partition("Why:")
        return " ".join(title.split()), " ".join(why.split()), " ".join(fix.split())


_CHECKS: dict[str, Check] = {}


def check(
    id: str,  # noqa: A002 - the word that everyone uses for it
    *needs: Capability,
    level: Level = Level.CORE,
    since: int = 1,
    fresh: bool = False,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Make a check of a function. Its docstring is a title, then "Why:" and "Fix:"."""

    def registered(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        if id in _CHECKS:
            raise ValueError(f"two checks have the id {id}")
        _CHECKS[id] = Check(id, function.__name__, level, since, needs, fresh, function)
        return function

    return registered


def all_checks() -> dict[str, Check]:
    """Every check by its id, in the order of ids. The suite lists itself: there is no other list."""
    import kvcore.conformance.checks  # noqa: F401 - importing them registers them

    return dict(sorted(_CHECKS.items()))
