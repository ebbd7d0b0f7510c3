"""What moved between two plans adds up, block by block, to the difference; a check is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import api
from kvcore.cli.app import run
from kvcore.contract import Reserve
from kvcore.errors import DocumentError, PolicyError
from kvcore.report.compare import side_of
from kvcore.report.data import plan_data
from kvcore.sizing.diff import Side, difference
from kvcore.sizing.plan import Plan
from kvcore.testing import assert_plan

from .test_known_kernels import QWEN8, card

GIB = 1024**3

sides = st.builds(
    Side,
    num_blocks=st.integers(0, 10**6),
    bytes_per_block=st.integers(1, 10**6),
    terms=st.dictionaries(st.sampled_from("abcde"), st.integers(-(10**9), 10**10)),
    memory_blocks=st.integers(0, 10**6),
    bounds=st.dictionaries(st.sampled_from("uvwxyz"), st.integers(0, 10**6)),
)


@given(before=sides, after=sides)
def test_the_moves_add_up_exactly_whatever_the_plans(before: Side, after: Side) -> None:
    found = difference(before, after)
    assert sum(move.blocks for move in found.moves) == found.blocks == after.num_blocks - before.num_blocks
    assert not difference(before, before).moves
    back = difference(after, before)
    assert {(m.kind, m.name) for m in back.moves} == {(m.kind, m.name) for m in found.moves}


def plan_of(total: int = 141 * GIB, **more: Any) -> Plan:
    alignment = more.pop("granularity", 1)
    held = card(total=total)
    held = replace(held, allocation=replace(held.allocation, granularity=alignment))
    layout_settings = {name: more.pop(name) for name in ("tp", "kv_cache_dtype") if name in more}
    return api.plan(api.layouts(QWEN8, block_size=64, **layout_settings), facts=held, **more)


def moves(before: Plan, after: Plan) -> dict[str, int]:
    found = difference(side_of(plan_data(before), before.num_blocks), side_of(plan_data(after), after.num_blocks))
    assert sum(move.blocks for move in found.moves) == after.num_blocks - before.num_blocks
    return {move.name: move.blocks for move in found.moves}


def reserve(name: str, nbytes: int) -> Reserve:
    from kvcore.contract import Basis, ReserveKind

    return Reserve(name, nbytes, ReserveKind.PERSISTENT, Basis.DECLARED, "test", name)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"total": 80 * GIB}, "share"),
        ({"utilization": "0.8"}, "share"),
        ({"reserves": [reserve("graphs", GIB)]}, "graphs"),
        ({"margin": "1GiB"}, "margin"),
        ({"max_blocks": 4000, "max_blocks_reason": "a test"}, "cap [call: max_blocks]"),
        ({"kernel": "aiter-packed", "max_model_len": 64}, "index [kernel aiter-packed]"),
        ({"granularity": 2**21}, "device's rounding"),
        ({"kv_cache_dtype": "fp8"}, "bytes_per_block"),
    ],
    ids=["card", "utilization", "reserve", "margin", "cap", "kernel", "rounding", "dtype"],
)
def test_the_part_that_moved_is_named_and_gets_all_of_it(changes: dict[str, Any], part: str) -> None:
    before = plan_of()
    found = moves(before, plan_of(**changes))
    assert set(found) == {part}
    assert moves(plan_of(**changes), before) == {part: -found[part]}


def test_a_term_that_moves_under_a_cap_is_worth_nothing() -> None:
    capped: dict[str, Any] = {"max_blocks": 4000, "max_blocks_reason": "a test"}
    found = moves(plan_of(**capped), plan_of(**capped, margin="1GiB"))
    assert found == {"margin": 0}
    lifted = moves(plan_of(**capped), plan_of(margin="1GiB"))
    assert lifted["margin"] == 0
    assert lifted["cap [call: max_blocks]"] == plan_of(margin="1GiB").num_blocks - 4000


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``saved(name, *arguments)``: the file of a saved plan."""

    def save(name: str, *arguments: str) -> str:
        run(["plan", QWEN8, "--block-size", "64", *arguments, "--json"])
        path = tmp_path / name
        path.write_text(capsys.readouterr().out)
        return str(path)

    return save


def test_the_command_shows_the_sum(saved: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = saved("a.json", "--kv-cache-memory", "40GiB"), saved("b.json", "--kv-cache-memory", "50GiB")
    assert run(["diff", before, after, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["before_blocks"], data["after_blocks"]) == (4551, 5688)
    assert [(m["name"], m["before"], m["after"], m["blocks"]) for m in data["moves"]] == [
        ("asked", 40 * GIB, 50 * GIB, 5688 - 4551)
    ]
    assert run(["diff", before, after]) == 0
    assert "+1,137" in capsys.readouterr().out


def test_a_refusal_against_the_last_plan_that_was_accepted(
    saved: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """B112: a longer limit raises the activation peak; the term that moved is named, not the cache's dtype."""
    fits = ("--device-profile", "h100-80g", "--kv-cache-dtype", "fp8", "--weights", "60GiB")
    accepted = saved("a.json", *fits, "--activations", "512MiB", "--max-model-len", "100000")
    refused = saved("b.json", *fits, "--activations", "5591MiB", "--max-model-len", "131072")
    assert json.loads(Path(refused).read_text())["status"] == "no"
    assert run(["diff", accepted, refused, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    (move,) = data["moves"]
    assert move["name"] == "activations"
    assert round((move["before"] - move["after"]) / GIB, 2) == 4.96
    assert move["blocks"] == data["moved_blocks"] < 0


CHECK = ["check", "--model", QWEN8, "--block-size", "64", "--kv-cache-memory"]


def test_a_check_is_exact_and_names_what_moved(
    tmp_path: Path, saved: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = saved("base.json", "--kv-cache-memory", "40GiB")
    assert run([*CHECK, "40GiB", "--expect", baseline]) == 0
    assert run([*CHECK, "40GiB", "--expect", "4551"]) == 0
    capsys.readouterr()
    # Five per cent would have let this pass.
    assert run([*CHECK, "41GiB", "--expect", baseline]) == 1
    shown = capsys.readouterr().out
    assert "expected 4,551" in shown
    assert "asked" in shown
    assert "+113" in shown
    assert run([*CHECK, "41GiB", "--expect", "4551"]) == 1
    assert "available" in capsys.readouterr().out
    assert run([*CHECK, "41GiB", "--expect", baseline, "--update"]) == 0
    assert run([*CHECK, "41GiB", "--expect", baseline]) == 0
    fresh = tmp_path / "fresh.json"
    assert run([*CHECK, "41GiB", "--expect", str(fresh), "--update"]) == 0
    assert run([*CHECK, "41GiB", "--expect", str(fresh)]) == 0
    capsys.readouterr()
    assert run(["explain", str(fresh)]) == 0


def test_an_engines_test_asserts_the_same(tmp_path: Path) -> None:
    plan = plan_of()
    assert_plan(plan, plan.num_blocks)
    with pytest.raises(AssertionError, match=r"Memory\n"):
        assert_plan(plan, plan.num_blocks + 1)
    baseline = tmp_path / "baseline.json"
    assert_plan(plan, baseline, update=True)
    assert_plan(plan, baseline)
    moved = plan_of(margin="1GiB")
    with pytest.raises(AssertionError) as caught:
        assert_plan(moved, baseline)
    lost = plan.num_blocks - moved.num_blocks
    assert f"{-lost:+,}" in str(caught.value)
    assert "margin" in str(caught.value)
    assert_plan(moved, baseline, update=True)
    assert_plan(moved, baseline)
    with pytest.raises(PolicyError, match="a number cannot be updated"):
        assert_plan(plan, 3, update=True)
    with pytest.raises(DocumentError) as refused:
        assert_plan(plan, tmp_path / "nowhere.json")
    assert refused.value.code == "KV-DOC-012"
    with pytest.raises(DocumentError) as unwritten:
        assert_plan(plan, tmp_path / "no" / "folder.json", update=True)
    assert unwritten.value.code == "KV-DOC-013"


def test_another_tightest_rank_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terms are the tightest rank's: two plans may be about two cards."""
    layouts = api.layouts(QWEN8, block_size=64, tp=2)
    saved = []
    for number, sizes in enumerate(((80, 60), (60, 80))):
        facts = [card(total=size * GIB) for size in sizes]
        plan = api.plan(layouts, facts=facts, max_model_len=1024)
        path = tmp_path / f"{number}.json"
        assert_plan(plan, path, update=True)
        saved.append(str(path))
    capsys.readouterr()
    assert run(["diff", *saved]) == 0
    assert "Another rank is the tightest: 1 before, 0 after." in capsys.readouterr().out
    assert run(["diff", saved[0], saved[0], "--json"]) == 0
    same = json.loads(capsys.readouterr().out)["data"]
    assert (same["before_rank"], same["after_rank"]) == (1, 1)
