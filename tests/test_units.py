"""Sizes: exact, labelled by their divisor, and refused when they cannot be."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import PolicyError
from kvcore.units import format_bytes, format_count, format_fraction, parse_fraction, parse_size

UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "B": 1,
}


@given(st.integers(0, 2**63 - 1))
def test_bytes_read_back(size: int) -> None:
    assert parse_size(str(size)) == parse_size(f"{size:,}") == parse_size(f" {size} B ") == size


@given(st.integers(0, 10**5), st.sampled_from(sorted(UNITS)))
def test_units_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == parse_size(f"{number} {unit.lower()}") == number * UNITS[unit]


def test_fractions_of_a_unit() -> None:
    assert parse_size("1.5GiB") == 3 * 2**29
    assert parse_size("0.1GB") == 10**8
    with pytest.raises(PolicyError, match="whole bytes"):
        parse_size("0.1GiB")


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 XB", "-1", "1e400", "nan", "inf", "0x10", "1GiBs", "1..5", "9" * 100, "1/0"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_size(text, where="--margin")


@pytest.mark.parametrize(
    ("text", "value"), [("0.9", Fraction(9, 10)), ("9/10", Fraction(9, 10)), ("1e-1", Fraction(1, 10))]
)
def test_shares_are_exact(text: str, value: Fraction) -> None:
    assert parse_fraction(text) == value


@given(st.integers(-(2**63), 2**63))
def test_text_is_within_half_a_hundredth(size: int) -> None:
    """B108: 14.9888 GiB must not be called GB."""
    number, unit = format_bytes(size).rsplit(" ", 1)
    shown = Fraction(number.replace(",", "")) * UNITS[unit]
    assert abs(shown - size) * 200 <= UNITS[unit]


def test_what_is_unknown_is_said_so() -> None:
    assert format_bytes(None) == format_count(None) == "unknown"
    assert format_bytes(116_391_936_000) == "108.40 GiB"
    assert format_bytes(-(2**20)) == "-1.00 MiB"
    assert format_count(74_000) == "74,000"


@given(st.fractions(min_value=0, max_value=10**6, max_denominator=10**6))
def test_fractions_are_never_rounded_up(value: Fraction) -> None:
    shown = Fraction(format_fraction(value).replace(",", ""))
    assert shown <= value < shown + Fraction(1, 100)
