"""Which answers of a plugin are acceptable. Used at the border, by the core and by the conformance suite alike."""

from __future__ import annotations

from kvcore.contract.capabilities import CONTRACT_VERSION, Capability, PlatformInfo, Support
from kvcore.contract.facts import Reading

#: A byte count above this has wrapped: an unsigned subtraction below zero lands near 2**64.
LARGEST_BYTES = 2**62

_FIGURES = ("total", "free", "used", "reserved", "own")


def reading_faults(reading: Reading) -> list[str]:
    """What is wrong with a reading, one sentence each; an empty list means that it can be used.

    Refused are figures that are not plain ``int`` (bool, float and numpy numbers among them), negative, wrapped
    around, a total of 0, and free, used or own above total.
    """
    faults = [fault for name in _FIGURES if (fault := _figure_fault(name, getattr(reading, name)))]
    if faults:
        return faults
    if reading.total == 0:
        return ["total is 0, which is no device's size: an unknown total must be None"]
    if reading.total is not None:
        for name in ("free", "used", "own"):
            value = getattr(reading, name)
            if value is not None and value > reading.total:
                faults.append(f"{name} {value} exceeds total {reading.total}")
    if reading.skipped is not None and any(getattr(reading, name) is not None for name in _FIGURES):
        faults.append("a skipped source cannot carry figures")
    return faults


def _figure_fault(name: str, value: object) -> str | None:
    if value is None:
        return None
    if type(value) is not int:
        return f"{name} is {value!r} of type {type(value).__name__}, not int bytes"
    if value < 0:
        return f"{name} is negative: {value}"
    if value > LARGEST_BYTES:
        return f"{name} is {value}, which looks like an unsigned counter below zero"
    return None


def platform_faults(info: PlatformInfo) -> list[str]:
    """What is wrong with a platform's declaration: contract version, missing capabilities, missing reasons."""
    faults = []
    if info.contract != CONTRACT_VERSION:
        faults.append(f"written for contract {info.contract}; this kvcore speaks contract {CONTRACT_VERSION}")
    undeclared = [c.value for c in Capability if c not in info.capabilities]
    if undeclared:
        faults.append(f"undeclared capabilities: {', '.join(undeclared)}")
    for capability, supported in info.capabilities.items():
        if supported.support is not Support.FULL and not supported.reason:
            faults.append(f"capability {capability.value} is {supported.support.value} without a reason")
    return faults
