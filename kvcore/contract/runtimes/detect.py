"""Detection in the words of :class:`~kvcore.contract.facts.Detection`, from what was found."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.contract.facts import Detection, DetectionState, Evidence, Reading

__all__ = ["Found", "concluded"]


@dataclass(frozen=True, slots=True)
class Found:
    """What detection looked at: PCI functions, libraries by path, cards and devices, and what failed.

    ``beside_pci`` names hardware of the vendor that is no PCI function of this host.
    """

    pci: tuple[str, ...]
    vendor: str
    library_name: str
    library: str | None
    runtime: str | None
    source: str | None = None
    cards: int = 0
    devices: int = 0
    hidden_by: str | None = None
    skipped: tuple[Reading, ...] = ()
    beside_pci: str | None = None

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The facts, in the order in which they were looked at."""
        lines = [Evidence(f"pci {self.vendor}", address) for address in self.pci]
        lines += [Evidence("hardware", self.beside_pci)] if self.beside_pci is not None else []
        lines += [Evidence("library", self.library)] if self.library is not None else []
        lines += [Evidence("runtime", self.runtime)] if self.runtime is not None else []
        lines += [Evidence(reading.source, str(reading.skipped)) for reading in self.skipped]
        lines += [Evidence(f"devices by {self.source}", str(self.devices))] if self.source is not None else []
        return tuple(lines)


def concluded(found: Found, hint: str) -> Detection:
    """AVAILABLE with a visible device; ABSENT without hardware; else UNUSABLE, with the reason."""
    evidence = found.evidence
    if found.devices:
        reason = f"{found.devices} device(s) by {found.source}"
        return Detection(DetectionState.AVAILABLE, reason, evidence)
    if found.cards:
        reason = f"{found.hidden_by} hides every one of {found.cards} device(s)"
        return Detection(DetectionState.UNUSABLE, reason, evidence, f"unset {found.hidden_by}, or name a device in it")
    failures = "; ".join(f"{reading.source}: {reading.skipped}" for reading in found.skipped)
    if found.pci or found.beside_pci is not None:
        here = f"{len(found.pci)} PCI function(s) of vendor {found.vendor}" if found.pci else found.beside_pci
        reason = f"{here}, but no source can use it: {failures or 'none was found'}"
        return Detection(DetectionState.UNUSABLE, reason, evidence, hint)
    if found.library is not None or found.runtime is not None:
        present = found.library or found.runtime
        reason = f"no PCI function of vendor {found.vendor}; {present} is here" + (f" ({failures})" if failures else "")
        return Detection(DetectionState.ABSENT, reason, evidence, "start the container with access to the devices")
    reason = f"no PCI function of vendor {found.vendor} and no {found.library_name}"
    return Detection(DetectionState.ABSENT, reason, (), hint)
