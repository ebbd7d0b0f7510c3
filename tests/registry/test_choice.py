"""The rule of choice: explicit, else the one accelerator available, else cpu if none is here; never a guess."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import Site


def test_no_accelerator_means_cpu_and_says_so(site: Site) -> None:
    site.platform("acme", "ABSENT")
    choice = site.choice()
    assert choice["platform"] == "cpu"
    assert choice["fallback"] is True
    assert "acme: as the test says" in choice["reason"]


def test_one_accelerator_is_taken(site: Site) -> None:
    site.platform("acme")
    site.platform("zenith", "ABSENT")
    choice = site.choice()
    assert choice["platform"] == "acme"
    assert choice["fallback"] is False


def test_two_accelerators_need_a_word(site: Site) -> None:
    site.platform("acme")
    site.platform("zenith")
    error = site.choice()
    assert error["code"] == "KV-PLG-010"
    assert "acme" in error["got"]
    assert "zenith" in error["got"]
    assert "/opt/lib.so" in error["got"]
    assert "KVCORE_PLATFORM" in error["hint"]
    assert site.choice(KVCORE_PLATFORM="zenith")["platform"] == "zenith"


def test_the_order_of_installation_picks_nobody(make_site: Callable[[], Site]) -> None:
    answers = []
    for names in (("acme", "zenith"), ("zenith", "acme")):
        site = make_site()
        for name in names:
            site.platform(name)
        answers.append(site.choice())
    assert answers[0] == answers[1]


@pytest.mark.parametrize("broken", ["import no_such_library", "unusable", "refused"])
def test_a_doubt_is_never_a_silent_cpu(site: Site, broken: str) -> None:
    """B93: a plugin that failed to register, and an engine that ran on the CPU without a word."""
    if broken == "unusable":
        site.platform("acme", "UNUSABLE")
    elif broken == "refused":
        site.platform("acme", contract=99)
    else:
        site.install("acme", broken)
    error = site.choice()
    assert error["code"] == "KV-PLG-010"
    assert "acme" in error["what"]
    assert site.choice(KVCORE_PLATFORM="cpu")["platform"] == "cpu"


def test_a_detection_that_raises_counts_as_found_but_unusable(site: Site) -> None:
    site.platform("acme", extra="@hookimpl\ndef kvcore_detect(self): raise OSError('driver crashed')")
    error = site.choice()
    assert error["code"] == "KV-PLG-010"
    assert "driver crashed" in error["got"]


@pytest.mark.parametrize(
    ("name", "code"), [("acme", "KV-PLG-012"), ("nothing", "KV-PLG-011"), ("broken", "KV-PLG-011")]
)
def test_what_was_asked_for_is_used_or_the_error_says_why(site: Site, name: str, code: str) -> None:
    site.platform("acme", "ABSENT")
    site.install("broken", "1/0")
    error = site.choice(KVCORE_PLATFORM=name)
    assert error["code"] == code
    assert name in error["what"]
    if name == "broken":
        assert "ZeroDivisionError" in error["got"]
    if name == "nothing":
        assert error["hint"] == "pip install kvcore-nothing"
