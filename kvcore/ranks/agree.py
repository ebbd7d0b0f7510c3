"""Agree on a plan, and allocate it together."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.cache.allocate import Cache
from kvcore.errors import KvcoreError, RanksDisagree
from kvcore.ranks.groups import Group, current_group
from kvcore.ranks.settle import AgreedPlan, Contribution, Scope, contribution, settle
from kvcore.sizing.plan import Plan

__all__ = ["agree_on", "allocate_together"]


def agree_on(
    outcome: Plan | KvcoreError, group: object, *, timeout: float, scope: Scope = Scope.ALL, replica: int = 0
) -> AgreedPlan:
    """The plan that all ranks of ``group`` hold; see :func:`kvcore.api.agree`."""
    ranks = current_group(group)
    mine = contribution(outcome, ranks.rank, replica)
    received = ranks.exchange(mine.encode(), timeout)
    everyone = [Contribution.decode(raw, rank) for rank, raw in enumerate(received)]
    return settle(everyone, outcome, ranks.rank, scope)


def allocate_together(allocate: Callable[[], Cache], group: object, *, timeout: float) -> Cache:
    """What ``allocate`` gives on every rank; if it fails on any, all give back what they had and raise the same."""
    ranks: Group = current_group(group)
    cache: Cache | None = None
    failure: KvcoreError | None = None
    try:
        cache = allocate()
    except KvcoreError as error:
        failure = error
    said = b"" if failure is None else f"{failure.code}: {failure.what}".encode()
    try:
        answers = ranks.exchange(said, timeout)
    except BaseException:
        if cache is not None:
            cache.release()
        raise
    failed = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer]
    if not failed:
        assert cache is not None
        return cache
    if cache is not None:
        cache.release()
    raise RanksDisagree(
        f"{len(failed)} of {ranks.size} ranks could not allocate",
        code="KV-RNK-008",
        got="; ".join(failed[:8]),
        expected="an allocation on every rank; nothing stays allocated on any",
    ) from failure
