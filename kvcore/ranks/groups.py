"""Groups of ranks over the libraries that engines use already: one process, torch.distributed, paddle.distributed.

An exchange is two gathers, a header of fixed size and then the payloads, between two counts in the library's key-value
store. The first count says who came, before a collective could hang on who did not; the second, who has everything, so
that no rank believes in an agreement that another does not have. All of it ends within the caller's time: Paddle's
collectives ignore the time-out that they are given.
"""

from __future__ import annotations

import contextlib
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

from kvcore.contract.runtimes.deadline import returned_within
from kvcore.errors import KvcoreError, RanksDisagree

__all__ = ["Group", "PaddleGroup", "SingleGroup", "StoreGroup", "TorchGroup", "current_group"]

#: Seconds between two looks at a count.
PAUSE = 0.02
#: Seconds that survivors of a broken collective give each other to say that they are alive.
GRACE = 2.0


class Group(Protocol):
    """Ranks that exchange bytes; every rank calls in the same order."""

    rank: int
    size: int

    def exchange(self, data: bytes, timeout: float) -> list[bytes]:
        """``data`` of every rank, in rank order, within ``timeout`` seconds.

        Raises :class:`RanksDisagree` that names the ranks that did not answer (KV-RNK-003), or whose data was damaged
        (KV-RNK-005).
        """


class SingleGroup:
    """One process, alone."""

    rank = 0
    size = 1

    def exchange(self, data: bytes, timeout: float) -> list[bytes]:  # noqa: ARG002 - nothing can be late
        """What this rank gave."""
        return [data]


class StoreGroup:
    """What torch and paddle have in common: a store that counts, and gathers of equal tensors."""

    rank: int
    size: int

    def exchange(self, data: bytes, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        # Each rank counts its own calls in the store, so that no two exchanges share a key.
        key = f"kvcore/{self._name()}/{self._count(f'kvcore/{self._name()}/calls/{self.rank}', 1)}"
        try:
            self._meet(f"{key}/came", deadline, timeout)
            received = self._gathered(data, key, deadline, timeout)
            self._meet(f"{key}/done", deadline, timeout)
        finally:
            self._leave(key)
        return received

    def _gathered(self, data: bytes, key: str, deadline: float, timeout: float) -> list[bytes]:
        try:
            left = max(0.0, deadline - time.monotonic())
            return returned_within(left, "the collective", lambda: self._gather_all(data))
        except KvcoreError:
            raise
        except Exception as error:
            self._count(f"{key}/broken/{self.rank}", 1)
            raise self._lost(key, deadline, timeout, error) from error

    def _leave(self, key: str) -> None:
        """The first rank often holds the store: it does not go on, and maybe end, while others still read in it."""
        # What this rank got is decided by now; a store that is gone can no longer tell anyone.
        with contextlib.suppress(RanksDisagree):
            self._count(f"{key}/left", 1)
            until = time.monotonic() + GRACE
            while self.rank == 0 and time.monotonic() < until:
                if self._count(f"{key}/left", 0) >= self._count(f"{key}/came", 0):
                    return
                time.sleep(PAUSE)

    def _meet(self, key: str, deadline: float, timeout: float) -> None:
        """Until every rank has come to ``key``; names those that have not, when time is up."""
        self._count(f"{key}/{self.rank}", 1)
        self._count(key, 1)
        while self._count(key, 0) < self.size:
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self.size) if not self._count(f"{key}/{rank}", 0)]
                raise _no_answer(missing, timeout, "they did not come")
            time.sleep(PAUSE)

    def _lost(self, key: str, deadline: float, timeout: float, error: Exception) -> RanksDisagree:
        """Who is gone after a collective broke: those who do not say that it broke for them too."""
        until = min(deadline, time.monotonic() + GRACE)
        silent = list(range(self.size))
        while silent and time.monotonic() < until:
            silent = [
                r for r in silent if not self._count(f"{key}/broken/{r}", 0) and not self._count(f"{key}/done/{r}", 0)
            ]
            time.sleep(PAUSE)
        if silent:
            return _no_answer(silent, timeout, "they were lost in the exchange")
        return RanksDisagree(
            "the exchange between ranks broke", code="KV-RNK-006", got=f"{type(error).__name__}: {error}"
        )

    def _gather_all(self, data: bytes) -> list[bytes]:
        headers = self._gather([len(data), zlib.crc32(data)])
        longest = max(1, *(length for length, _ in headers))
        words = -(-longest // 8)  # integers of 64 bits: what every library gathers everywhere
        payloads = self._gather(struct.unpack(f"<{words}q", data.ljust(8 * words, b"\0")))
        received = []
        for rank, ((length, checksum), payload) in enumerate(zip(headers, payloads, strict=True)):
            raw = struct.pack(f"<{words}q", *payload)[:length]
            if zlib.crc32(raw) != checksum:
                raise RanksDisagree(
                    "a rank's contribution was damaged on its way",
                    code="KV-RNK-005",
                    where=f"rank {rank}",
                    got=f"{len(raw)} bytes with another checksum",
                )
            received.append(raw)
        return received

    def _count(self, key: str, amount: int) -> int:
        """Add to a counter; a store that does not answer any more is an error of the ranks."""
        try:
            return self._add(key, amount)
        except (RuntimeError, ValueError, OSError) as error:
            raise RanksDisagree(
                "the store that ranks meet in is gone",
                code="KV-RNK-006",
                got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                expected="the rank that holds it, usually rank 0, to be alive",
                hint="see why that rank ended; its own error is the first one",
            ) from error

    def _name(self) -> str:
        raise NotImplementedError

    def _add(self, key: str, amount: int) -> int:
        """Add to a counter of the store; returns its value. 0 for a key that nobody has added to."""
        raise NotImplementedError

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """``numbers`` of every rank, as many on each, in rank order."""
        raise NotImplementedError


class TorchGroup(StoreGroup):
    """A process group of torch.distributed (gloo or nccl); the default group if none is given."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only way to the group's store

    def _name(self) -> str:
        return "all" if self._group is None else "-".join(map(str, self._dist.get_process_group_ranks(self._group)))

    def _add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        import torch

        device = "cuda" if self._dist.get_backend(self._group) == "nccl" else "cpu"
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        self._dist.all_gather(every, mine, group=self._group)
        return [tensor.tolist() for tensor in every]


class PaddleGroup(StoreGroup):
    """A group of paddle.distributed (gloo on CPU, nccl on GPU); the default group if none is given."""

    def __init__(self, group: Any = None) -> None:
        import paddle.distributed as dist
        from paddle.base import core

        self._dist, self._group = dist, group
        self.rank = dist.get_rank() if group is None else group.rank
        self.size = dist.get_world_size() if group is None else group.nranks
        self._store = core.create_or_get_global_tcp_store()

    def _name(self) -> str:
        return "all" if self._group is None else "-".join(map(str, self._group.ranks))

    def _add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        import paddle

        every: list[Any] = []
        self._dist.all_gather(every, paddle.to_tensor(list(numbers), dtype="int64"), group=self._group)
        return [tensor.tolist() for tensor in every]


def current_group(group: object = None) -> Group:
    """``group`` as a :class:`Group`; without one, the library that this process has initialised, else a single process.

    Looks only at libraries that are imported already.
    """
    import sys

    if group is not None and hasattr(group, "exchange"):
        return group  # type: ignore[return-value]
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return TorchGroup(group)
    if paddle is not None and paddle.distributed.is_initialized():
        return PaddleGroup(group)
    if group is not None:
        raise RanksDisagree(
            "a group of no library that is initialised",
            code="KV-RNK-007",
            got=type(group).__name__,
            expected="a group of torch.distributed or paddle.distributed, initialised before",
        )
    return SingleGroup()


def _no_answer(missing: Sequence[int], timeout: float, how: str) -> RanksDisagree:
    return RanksDisagree(
        f"{len(missing)} rank{'s' if len(missing) != 1 else ''} did not answer within {timeout:g} s",
        code="KV-RNK-003",
        where=f"rank {', '.join(map(str, missing))}",
        got=how,
        expected="an answer from every rank",
        hint="see why these ranks died or stalled; raise the time-out if they are only slow",
    )
