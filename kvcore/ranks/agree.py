"""What ranks do together: agree on a plan, allocate it, take turns on a device. All succeed or all fail alike."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvcore.cache.allocate import Cache
from kvcore.contract.facts import Device
from kvcore.errors import KvcoreError, OutOfMemory, RanksDisagree
from kvcore.ranks.groups import Group, current_group
from kvcore.ranks.lock import device_lock
from kvcore.ranks.settle import NAMED, AgreedPlan, Contribution, Scope, contribution, settle
from kvcore.sizing.plan import Plan

__all__ = ["agree_on", "allocate_together", "outcome_of", "together", "turn_on"]

T = TypeVar("T")

#: Seconds that ranks wait beyond the time that one of them may wait for a lock.
GRACE = 5.0


def outcome_of(make: Callable[[], T]) -> T | KvcoreError:
    """What ``make`` returns, or what kept it from that as an error that other ranks can be told.

    An exception of any other kind (a framework's, in a profile run) becomes a :class:`KvcoreError` with it as cause.
    """
    try:
        return make()
    except KvcoreError as error:
        return error
    except Exception as error:  # noqa: BLE001 - contributed to every rank, and raised on this one
        failed = KvcoreError(
            f"{type(error).__name__}: {error}"[:500],
            code="KV-RNK-009",
            hint="the rank that failed has the traceback of the cause",
        )
        failed.__cause__ = error
        return failed


def agree_on(
    outcome: Plan | KvcoreError, group: object, *, timeout: float, scope: Scope = Scope.ALL, replica: int = 0
) -> AgreedPlan:
    """The plan that all ranks of ``group`` hold; see :func:`kvcore.api.agree`."""
    ranks = current_group(group)
    mine = contribution(outcome, ranks.rank, replica)
    received = ranks.exchange(mine.encode(), timeout)
    everyone = [Contribution.decode(raw, rank) for rank, raw in enumerate(received)]
    try:
        return settle(everyone, outcome, ranks.rank, scope)
    except RanksDisagree as error:
        raise error from (outcome if isinstance(outcome, KvcoreError) else None)


def together(action: Callable[[], T], group: object, *, timeout: float) -> T:
    """What ``action`` gives on every rank; if it fails on any, all raise the same error."""
    ranks = current_group(group)
    result = outcome_of(action)
    failure = result if isinstance(result, KvcoreError) else None
    failed = _failures(ranks.exchange(_said(failure), timeout))
    if failed or isinstance(result, KvcoreError):
        raise _not_on_all(failed, ranks) from failure
    return result


def allocate_together(
    allocate: Callable[[int], Cache],
    num_blocks: int,
    group: object,
    *,
    timeout: float,
    retries: int,
    needed: int,
    fitting: Callable[[int], int],
) -> Cache:
    """``allocate(n)`` on every rank with the same n, or on none.

    Out of memory on some ranks is tried again at most ``retries`` times, on all ranks, with as many blocks as the
    tightest of them had got hold of (``fitting`` turns its bytes into blocks), while one request still fits
    (``needed`` blocks). Raises :class:`RanksDisagree`, the same on every rank, with nothing left allocated.
    """
    ranks = current_group(group)
    while True:
        cache = outcome_of(functools.partial(allocate, num_blocks))
        failure = cache if isinstance(cache, KvcoreError) else None
        short = failure.obtained_bytes if isinstance(failure, OutOfMemory) else None
        try:
            failed = _failures(ranks.exchange(_said(failure, None if short is None else fitting(short)), timeout))
        except BaseException:
            _released(cache)
            raise
        if not failed and isinstance(cache, Cache):
            return cache
        _released(cache)
        fits = [answer["fits"] for answer in failed.values()]
        fewer = min((n for n in fits if n is not None), default=0)
        if retries <= 0 or None in fits or not needed <= fewer < num_blocks:
            raise _not_on_all(failed, ranks) from failure
        retries, num_blocks = retries - 1, fewer


@contextlib.contextmanager
def turn_on(device: Device | KvcoreError, group: object, *, timeout: float) -> Iterator[None]:
    """This group's turn on ``device``; see :func:`kvcore.api.device_turn`.

    Ranks of one group that share a device take one turn: the lowest of them holds the lock for all.
    """
    ranks = current_group(group)
    failure = device if isinstance(device, KvcoreError) else None
    mine = b"" if isinstance(device, KvcoreError) else f"{_boot()} {device.key}".encode()
    first = ranks.exchange(mine, timeout).index(mine) == ranks.rank
    with contextlib.ExitStack() as held:
        if first and not isinstance(device, KvcoreError):
            try:
                held.enter_context(device_lock(device.key, timeout=timeout))
            except KvcoreError as error:
                failure = error
        failed = _failures(ranks.exchange(_said(failure), timeout + GRACE))
        if failed and ranks.size == 1 and failure is not None:
            raise failure
        if failed:
            raise _not_on_all(failed, ranks, "did not get their turn on the device", "KV-RNK-010") from failure
        yield


def _released(cache: Cache | KvcoreError) -> None:
    if isinstance(cache, Cache):
        cache.release()


def _said(failure: KvcoreError | None, fits: int | None = None) -> bytes:
    text = None if failure is None else f"{failure.code}: {failure.what}"
    return json.dumps({"error": text, "fits": fits}).encode()


def _failures(answers: list[bytes]) -> dict[int, dict[str, int | None]]:
    """What ranks that failed said, by rank."""
    said = {rank: json.loads(answer) for rank, answer in enumerate(answers)}
    return {rank: answer for rank, answer in said.items() if answer["error"] is not None}


def _not_on_all(
    failed: dict[int, dict[str, int | None]], ranks: Group, what: str = "could not allocate", code: str = "KV-RNK-008"
) -> RanksDisagree:
    named = [f"rank {rank}: {answer['error']}" for rank, answer in failed.items()]
    more = f"; and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return RanksDisagree(
        f"{len(failed)} of {ranks.size} ranks {what}",
        code=code,
        got="; ".join(named[:NAMED]) + more,
        expected="the same on every rank; nothing stays allocated on any",
    )


def _boot() -> str:
    """What tells this machine from another for as long as it runs."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
