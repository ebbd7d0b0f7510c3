"""What came of a check, as a record that a person, a program and a page can read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvcore.conformance.check import Check

__all__ = ["Outcome", "Record", "Tally", "judged", "tally"]


class Outcome(str, Enum):
    """What came of a check on a platform. There is none for "left out"."""

    PASSED = "passed"
    FAILED = "failed"
    EXPECTED = "expected failure"  #: it failed, and the vendor's pyproject says why
    UNEXPECTED = "unexpected pass"  #: the vendor's pyproject says that it fails, and it does not: a failure
    ADVISORY = "advisory"  #: it failed, and is newer than the contract that the plugin was written for
    UNSUPPORTED = "unsupported"  #: the hardware cannot, and says so
    NOT_IMPLEMENTED = "not implemented"  #: the plugin does not do it yet, and says so
    NOT_APPLICABLE = "not applicable"  #: there is no subject here, such as a second device
    NO_DEVICE = "no device"  #: no device of the platform is on this machine


BAD = (Outcome.FAILED, Outcome.UNEXPECTED)


@dataclass(frozen=True, slots=True)
class Record:
    """One check on one platform. The members from ``device`` on are None where they say nothing."""

    check: str
    name: str
    platform: str
    level: str
    since: int
    outcome: Outcome
    seconds: float
    reason: str | None = None
    device: str | None = None
    call: str | None = None
    got: str | None = None
    expected: str | None = None
    unit: str | None = None

    @property
    def bad(self) -> bool:
        """Whether the platform does not conform because of this."""
        return self.outcome in BAD

    def explained(self, check: Check) -> str:
        """Everything that its reader needs to mend it."""
        lines = [f"{self.check} {self.name}: {check.title}", f"  platform: {self.platform}"]
        for label in ("device", "call", "got", "expected", "unit", "reason"):
            value = getattr(self, label)
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join([*lines, f"  why: {check.why}", f"  fix: {check.fix}", f"  see: {check.page}"])


def judged(record: Record, contract: int | None, expected: str | None) -> Record:
    """``record`` in the light of the plugin's contract and of what its vendor says is known to fail."""
    if expected is not None:
        if record.outcome is Outcome.FAILED:
            return replace(record, outcome=Outcome.EXPECTED, reason=expected)
        if record.outcome is Outcome.PASSED:
            return replace(record, outcome=Outcome.UNEXPECTED, reason=f"expected to fail: {expected}")
    if record.outcome is Outcome.FAILED and contract is not None and record.since > contract:
        return replace(record, outcome=Outcome.ADVISORY)
    return record


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one platform's records."""

    platform: str
    counts: tuple[tuple[Outcome, int], ...]

    @property
    def conforms(self) -> bool:
        """Whether something was proved and nothing failed."""
        found = dict(self.counts)
        return found.get(Outcome.PASSED, 0) > 0 and not any(found.get(bad, 0) for bad in BAD)

    @property
    def complete(self) -> bool:
        """Whether a device was there to be checked."""
        return not dict(self.counts).get(Outcome.NO_DEVICE, 0)

    def text(self) -> str:
        """Such as "61 passed, 2 unsupported"."""
        return ", ".join(f"{count} {outcome.value}" for outcome, count in self.counts) or "no check ran"


def tally(records: Iterable[Record]) -> Sequence[Tally]:
    """One a platform, in the order of the records."""
    platforms: dict[str, dict[Outcome, int]] = {}
    for record in records:
        counts = platforms.setdefault(record.platform, {})
        counts[record.outcome] = counts.get(record.outcome, 0) + 1
    return [
        Tally(platform, tuple((outcome, counts[outcome]) for outcome in Outcome if outcome in counts))
        for platform, counts in platforms.items()
    ]
