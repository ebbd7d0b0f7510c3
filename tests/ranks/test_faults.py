"""What can go wrong on one rank, on both libraries: all that are left end in time, alike, with nothing allocated."""

from __future__ import annotations

from typing import Any

import pytest

from .test_processes import LIBRARIES, ranks

TIMEOUT = 5
#: What a process takes to start, and survivors to give each other time.
SLACK = 7


def alike(answers: list[dict[str, Any] | None]) -> tuple[str, str, str]:
    """Code, where and got of the error that every answer is."""
    said = {(a["code"], a["where"], a["got"]) for a in answers if a is not None}
    assert len(said) == 1, answers
    assert all(a["seconds"] < TIMEOUT + SLACK for a in answers if a is not None)
    return said.pop()


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    ("act", "reason"),
    [("zero", "KV-FIT-001"), ("negative", "KV-FIT-001"), ("raises", "KV-RNK-009: ZeroDivisionError")],
)
def test_a_rank_without_a_plan_says_why_on_all(name: str, act: str, reason: str) -> None:
    """A worker that waited until every rank showed a number above 0 waited for ever for these."""
    code, where, got = alike(ranks(name, ["plans", act], timeout=TIMEOUT))
    assert (code, where) == ("KV-RNK-001", "rank 1")
    assert got.startswith(f"rank 1: {reason}")


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    ("acts", "what"), [(["version", "version"], "version of acme"), (["share", "version"], "policy")]
)
def test_ranks_that_plan_for_different_things_are_told_what(name: str, acts: list[str], what: str) -> None:
    code, where, got = alike(ranks(name, acts, timeout=TIMEOUT))
    assert code == "KV-RNK-002"
    assert what in where
    assert "on rank 0" in got
    assert "on rank 1" in got


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("act", ["dies-within", "dies-after"])
def test_a_rank_that_is_killed_in_the_exchange_is_named(name: str, act: str) -> None:
    """Within: between the header and the payload. After: it has everything, and nobody knows that it has."""
    answers = ranks(name, ["plans", "plans", act], timeout=TIMEOUT)
    assert answers[2] is None
    code, where, _ = alike(answers)
    assert (code, where) == ("KV-RNK-003", "rank 2")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rank_that_is_killed_after_the_agreement_is_named_by_the_next_step(name: str) -> None:
    answers = ranks(name, ["stays", "stays", "leaves"], timeout=TIMEOUT)
    assert answers[2] is None
    code, where, _ = alike(answers)
    assert (code, where) == ("KV-RNK-003", "rank 2")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_payload_that_is_cut_is_found_out_on_all(name: str) -> None:
    code, where, _ = alike(ranks(name, ["plans", "cut"], timeout=TIMEOUT))
    assert (code, where) == ("KV-RNK-005", "rank 1")
