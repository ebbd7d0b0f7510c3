"""Run checks on a platform, each in a process that may hang, crash or be killed without harm to the others."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from kvcore.conformance.check import Check, all_checks
from kvcore.conformance.records import Outcome, Record, judged
from kvcore.conformance.setting import Setting

__all__ = ["PlatformRun", "run_suite"]


class _Worker:
    """One process that runs checks, and what it says of them."""

    def __init__(self, setting: Setting, *, fresh: bool) -> None:
        records, theirs = os.pipe()
        self._records = records
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvcore.conformance.worker"),
                *(json.dumps({**asdict(setting), "environ": {}}), str(theirs)),
                *(("--fresh",) if fresh else ()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **setting.environ},
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)

    def ask(self, check: str, timeout: float) -> dict[str, Any]:
        """What came of ``check``; a worker that dies or does not answer is that check's failure, and is ended."""
        begun = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{check}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._lost(begun)
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._records], [], [], max(0.0, begun + timeout - time.monotonic()))
            if not ready:
                self.close()
                return _failure(begun, f"no answer within {timeout:g} s", "an answer in time")
            part = os.read(self._records, 1 << 16)
            if not part:
                return self._lost(begun)
            line += part
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and all that it started."""
        if self._records < 0:
            return
        os.close(self._records)
        self._records = -1
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()

    def _lost(self, begun: float) -> dict[str, Any]:
        how = self._process.wait()
        self.close()
        died = f"killed by signal {-how}" if how < 0 else f"it ended with status {how}"
        return _failure(begun, died, "a process that survives its plugin")


class PlatformRun:
    """The checks of one platform, one after another. A context manager: its processes end with it."""

    def __init__(self, setting: Setting, expected: Mapping[str, str] | None = None) -> None:
        self.setting = setting
        self.expected = dict(expected or {})
        #: What the platform said of itself: version, contract, capabilities.
        self.about: dict[str, Any] = {"version": None, "contract": None, "capabilities": {}}
        self._workers: dict[bool, _Worker] = {}

    def __enter__(self) -> PlatformRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def run(self, check: Check) -> Record:
        """What came of ``check``."""
        worker = self._worker(check.fresh)
        found = worker.ask(check.id, self.setting.timeout)
        if not found.pop("clean"):
            worker.close()
        self.about = found.pop("about") or self.about
        outcome = Outcome(found.pop("outcome"))
        record = Record(check.id, check.name, self.setting.platform, check.level.value, check.since, outcome, **found)
        return judged(record, self.about["contract"], self.expected.get(check.id))

    def _worker(self, fresh: bool) -> _Worker:
        worker = self._workers.get(fresh)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close()
            worker = self._workers[fresh] = _Worker(self.setting, fresh=fresh)
        return worker


def run_suite(
    setting: Setting, expected: Mapping[str, str] | None = None, checks: Iterable[Check] | None = None
) -> Iterator[Record]:
    """Every check on the platform of ``setting``, as each ends."""
    with PlatformRun(setting, expected) as run:
        for check in all_checks().values() if checks is None else checks:
            yield run.run(check)


def _failure(begun: float, got: str, expected: str) -> dict[str, Any]:
    return {
        "outcome": Outcome.FAILED.value,
        "call": "the check's process",
        "got": got,
        "expected": expected,
        "seconds": time.monotonic() - begun,
        "about": None,
        "clean": True,
    }
