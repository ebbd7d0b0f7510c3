"""The suite is tested by lies: each is found by exactly the checks that are named for it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcore.conformance.check import all_checks
from kvcore.conformance.records import Outcome, Record
from kvcore.conformance.run import run_suite
from kvcore.conformance.setting import Setting, built_in

HERE = Path(__file__).parent


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("kvcore_mutants", HERE / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


mutants = _load()
LIARS = [mutant for mutant in mutants.MUTANTS.values() if mutant.kills]


def records(name: str) -> list[Record]:
    base = built_in("replay")
    # One thread for numpy: those of its libraries would be found where a mutant imports it.
    environ = {**base.environ, "PYTHONPATH": str(HERE), "OPENBLAS_NUM_THREADS": "1"}
    setting: Setting = replace(base, plugin=f"mutants:{name}", environ=environ, timeout=3.0)
    return list(run_suite(setting))


@pytest.mark.parametrize("mutant", LIARS, ids=lambda mutant: mutant.__name__)
def test_a_lie_is_found_by_its_checks_alone(mutant: Any) -> None:
    found = records(f"mutant_{mutant.__name__}")
    assert {record.check for record in found if record.bad} == mutant.kills
    for record in found:
        if record.bad:
            explained = record.explained(all_checks()[record.check])
            assert None not in (record.call, record.got, record.expected), explained
            for part in (record.check, "platform: replay", "why: ", "fix: ", f"docs/conformance/{record.check}.md"):
                assert part in explained


def test_the_honest_twin_passes_everything() -> None:
    found = records("honest")
    assert {record.outcome for record in found} == {Outcome.PASSED}
    assert {record.check for record in found} == set(all_checks())


def test_there_are_many_lies_and_every_check_finds_one() -> None:
    """So that a check that is taken away, or finds nothing, is missed."""
    assert len(LIARS) >= 40
    assert set().union(*(mutant.kills for mutant in LIARS)) == set(all_checks())


def test_every_lie_is_told() -> None:
    said = [" ".join(str(mutant.__doc__).split()) for mutant in LIARS]
    assert len(set(said)) == len(said)
    assert all(text.endswith(".") for text in said)


@pytest.mark.parametrize("check", all_checks().values(), ids=lambda check: check.id)
def test_a_check_says_what_why_and_how_to_fix(check: Any) -> None:
    for text in (check.title, check.why, check.fix):
        assert len(text) > 15
        assert text.endswith((".", ")"))
