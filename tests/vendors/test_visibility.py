"""CUDA_VISIBLE_DEVICES in all its forms, as the programming guide and PyTorch's tests have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.contract.runtimes.management import Card
from kvcore.contract.runtimes.visibility import select_visible
from kvcore.errors import DeviceError

CARDS = [Card(f"GPU-{n}0000000-aaaa-4000-8000-000000000000", "Card") for n in range(6)]
PIECES = tuple(
    Card(f"MIG-{n}1111111-aaaa-4000-8000-000000000000", "Slice", parent="GPU-99", instance=(n + 1, 0)) for n in range(2)
)
SLICED = Card("GPU-99999999-aaaa-4000-8000-000000000000", "Card", slices=PIECES)


def numbers(text: str | None, count: int = 6) -> list[int]:
    return [CARDS.index(card) for _, card in select_visible(text, CARDS[:count])]


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (None, 3, [0, 1, 2]),
        ("", 3, []),
        ("2,1", 3, [2, 1]),
        ("0,2,-1,1", 3, [0, 2]),
        ("0,9,1", 2, [0]),
        ("0,1,2,1", 3, []),
        ("2, +3, -0, 5", 6, [2, 3, 0, 5]),
        ("1gpu2,2ampere", 6, [1, 2]),
        ("one,two,3", 6, []),
        ("4,3,two,one", 6, [4, 3]),
        ("0,,1", 6, [0]),
        (",0", 6, []),
        (" 1 , 0 ", 6, [1, 0]),
        ("NoDevFiles", 6, []),
        ("-1", 6, []),
        ("18446744073709551616", 6, []),
    ],
)
def test_numbers(text: str | None, count: int, expected: list[int]) -> None:
    assert numbers(text, count) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU-2", [2]),
        ("GPU-20000000-aaaa-4000-8000-000000000000,GPU-0", [2, 0]),
        ("GPU-2,GPU-2", []),
        ("GPU-2,GPU-20", []),  # one card under two names
        ("GPU-", []),  # every card starts so: ambiguous
        ("GPU-7", []),
        ("GPU-1,GPU-7,GPU-2", [1]),
        ("GPU-1, 2", [1]),  # no mixing after the first form
        ("gpu-1", []),
    ],
)
def test_uuids(text: str, expected: list[int]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize("name", [PIECES[1].uuid, f"MIG-{SLICED.uuid}/2/0"])
def test_slices_by_both_forms(name: str) -> None:
    assert select_visible(name, [CARDS[0], SLICED]) == [(name, PIECES[1])]


def test_a_slice_named_twice_in_either_form_empties_the_list() -> None:
    by_instance = f"MIG-{SLICED.uuid}/2/0"
    assert select_visible(f"{PIECES[1].uuid},{by_instance}", [SLICED]) == []
    both = select_visible(f"{by_instance}, {PIECES[0].uuid}", [SLICED])
    assert [card for _, card in both] == [PIECES[1], PIECES[0]]
    assert select_visible(f"{by_instance},GPU-0", [CARDS[0], SLICED]) == [(by_instance, PIECES[1])]


def test_a_card_in_mig_mode_whose_slices_are_hidden_is_no_answer() -> None:
    hidden = Card("GPU-99999999-aaaa-4000-8000-000000000000", "Card", slices=())
    with pytest.raises(DeviceError) as caught:
        select_visible("0", [hidden])
    assert (caught.value.code, caught.value.got) == ("KV-DEV-026", "no slice")


@pytest.mark.parametrize("name", ["MIG-7", f"MIG-{SLICED.uuid}/9/0", f"MIG-{SLICED.uuid}", "MIG-"])
def test_a_slice_that_is_not_there_names_nothing(name: str) -> None:
    assert select_visible(name, [SLICED]) == []


@pytest.mark.parametrize("text", [None, "0", SLICED.uuid])
def test_a_card_with_several_slices_is_no_answer(text: str | None) -> None:
    with pytest.raises(DeviceError) as caught:
        select_visible(text, [SLICED])
    assert caught.value.code == "KV-DEV-026"
    assert PIECES[0].uuid in str(caught.value)


def test_a_card_with_one_slice_is_that_slice() -> None:
    card = Card("GPU-99", "Card", slices=PIECES[:1])
    assert select_visible("0", [card]) == [("0", PIECES[0])]


@given(st.text(alphabet="0123456789,+- GPUMIGgpu/a", max_size=24), st.integers(0, 6))
def test_any_text_names_cards_once_and_never_fails(text: str, count: int) -> None:
    chosen = numbers(text, count)
    assert len(set(chosen)) == len(chosen)
    assert all(number < count for number in chosen)


@given(st.lists(st.integers(0, 5), unique=True))
def test_distinct_numbers_in_range_are_taken_as_they_stand(order: list[int]) -> None:
    assert numbers(",".join(map(str, order))) == order
