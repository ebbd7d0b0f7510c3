"""Sizes: one parser, one formatter, exact fractions. Bytes are ``int``; no float ever enters a sum.

GiB, MiB and KiB are powers of 1024, GB, MB and KB powers of 1000; a label always follows its divisor.
"""

from __future__ import annotations

from fractions import Fraction

from kvcore.errors import PolicyError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
#: Sizes above this are refused at the border: no device has an exbibyte, so it is a slip of the keyboard.
LARGEST_SIZE = 2**63 - 1


def parse_size(text: str, *, where: str | None = None) -> int:
    """``"24GiB"``, ``"24 GB"``, ``"1.5GiB"`` or ``"25769803776"`` as whole bytes.

    Raises :class:`PolicyError` for an unknown unit, a negative or non-finite number, a fraction of a byte, or
    more than 2**63 - 1 bytes.
    """
    cleaned = text.strip().replace("_", "").replace(",", "")
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = cleaned[len(digits) :].strip().lower()
    if unit not in _UNITS:
        raise PolicyError(
            "unknown unit of size",
            code="KV-POL-011",
            where=where,
            got=text,
            expected="bytes, or a number with KiB, MiB, GiB, TiB (1024) or KB, MB, GB, TB (1000)",
        )
    number = parse_fraction(digits, where=where, original=text)
    size = number * _UNITS[unit]
    if size.denominator != 1:
        raise PolicyError(
            "a size is whole bytes",
            code="KV-POL-012",
            where=where,
            got=text,
            expected="a whole number of bytes",
        )
    if not 0 <= size.numerator <= LARGEST_SIZE:
        raise PolicyError(
            "size out of range", code="KV-POL-013", where=where, got=text, expected="0 to 2**63 - 1 bytes"
        )
    return size.numerator


def parse_fraction(text: str, *, where: str | None = None, original: str | None = None) -> Fraction:
    """``"0.9"``, ``"9/10"`` or ``"1e-1"`` as an exact fraction; raises :class:`PolicyError` for anything else."""
    shown = original if original is not None else text
    # A long exponent would make Fraction build a number of that many digits.
    mantissa, _, exponent = text.strip().lower().partition("e")
    too_long = len(mantissa) > 64 or len(exponent.lstrip("+-")) > 2
    try:
        value = None if too_long else Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        value = None
    if value is None:
        raise PolicyError(
            "not a number",
            code="KV-POL-010",
            where=where,
            got=shown[:80],
            expected="a decimal number, such as 0.9",
        )
    return value


def format_bytes(size: int | None) -> str:
    """``116391936000`` as ``"108.40 GiB"``; None as ``"unknown"``. Two decimals, rounded half up, sign kept."""
    if size is None:
        return "unknown"
    magnitude = abs(size)
    sign = "-" if size < 0 else ""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= unit:
            hundredths = (magnitude * 100 + unit // 2) // unit
            return f"{sign}{hundredths // 100:,}.{hundredths % 100:02d} {name}"
    return f"{sign}{magnitude} B"


def format_count(number: int | None) -> str:
    """``116508`` as ``"116,508"``; None as ``"unknown"``."""
    return "unknown" if number is None else f"{number:,}"


def format_fraction(value: Fraction, decimals: int = 2) -> str:
    """A fraction rounded down to ``decimals`` places: a concurrency of 1.999 is not 2.00."""
    scale = 10**decimals
    scaled = (value.numerator * scale) // value.denominator
    sign = "-" if scaled < 0 else ""
    whole, rest = divmod(abs(scaled), scale)
    return f"{sign}{whole:,}.{rest:0{decimals}d}" if decimals else f"{sign}{whole:,}"


def format_percent(part: int, whole: int) -> str:
    """``part`` of ``whole`` in percent with one decimal; ``"n/a"`` has no place here, so ``whole`` must be > 0."""
    return f"{format_fraction(Fraction(part * 100, whole), 1)} %"
