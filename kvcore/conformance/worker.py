"""The process that checks run in: ``python -m kvcore.conformance.worker SETTING RECORDS [--fresh]``.

Reads ids of checks from standard input, a line each, and writes what came of each to file descriptor RECORDS as a line
of JSON. With ``--fresh`` every check has a process of its own, forked before the plugin is imported. Whatever a plugin
prints, leaves behind, or dies of stays here.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from typing import Any

from kvcore.conformance.bench import Bench
from kvcore.conformance.check import Check, CheckFailed, NoDevice, NotApplicable, all_checks
from kvcore.conformance.records import Outcome
from kvcore.conformance.setting import Setting
from kvcore.conformance.surroundings import look_around
from kvcore.contract.capabilities import Support
from kvcore.errors import CapabilityMissing

__all__ = ["main", "run_check"]


def main(arguments: list[str]) -> None:
    """Serve until standard input ends."""
    setting, records = Setting(**json.loads(arguments[0])), int(arguments[1])
    checks = all_checks()
    # What a plugin prints is a finding of one check, and never part of this process's answers.
    os.dup2(2, 1)
    _bound(setting)
    bench: Bench | None = None
    for line in sys.stdin:
        check = checks[line.strip()]
        if "--fresh" in arguments:
            _in_a_fork(check, setting, records)
            continue
        try:
            bench = bench or _bench(setting)
        except Exception as error:  # noqa: BLE001 - a plugin that cannot be loaded fails every check, and says why
            _say(records, _not_loaded(error))
            continue
        _say(records, run_check(check, bench))


def _bench(setting: Setting) -> Bench:
    before = look_around()
    return Bench(setting, load(setting), before)


def load(setting: Setting) -> object:
    """The plugin, given or by its entry point."""
    from importlib.metadata import EntryPoint, entry_points

    if setting.plugin is not None:
        return EntryPoint(setting.platform, setting.plugin, "kvcore").load()
    for entry in entry_points(group="kvcore", name=setting.platform):
        return entry.load()
    raise CapabilityMissing(
        f"no plugin named {setting.platform} is installed", hint=f"pip install kvcore-{setting.platform}"
    )


def run_check(check: Check, bench: Bench) -> dict[str, Any]:
    """What came of ``check``: the members of a record that only this process can know."""
    begun = time.monotonic()
    try:
        found = _missing(check, bench)
        if found is None:
            check.run(bench)
            found = {"outcome": Outcome.PASSED.value}
    except CheckFailed as failed:
        members = ("call", "got", "expected", "unit", "device")
        found = {"outcome": Outcome.FAILED.value, **{name: getattr(failed, name) for name in members}}
    except NotApplicable as reason:
        found = {"outcome": Outcome.NOT_APPLICABLE.value, "reason": str(reason)}
    except NoDevice as reason:
        found = {"outcome": Outcome.NO_DEVICE.value, "reason": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises where it should not is the finding
        found = _raised(error)
    # What cannot be given back would be the next check's burden: this process then is the last to have used it.
    return {**found, "seconds": time.monotonic() - begun, "about": _about(bench), "clean": bench.tidy()}


def _missing(check: Check, bench: Bench) -> dict[str, Any] | None:
    """Why the check has no subject, by the platform's own declaration."""
    for capability in check.needs:
        declared = bench.info().capabilities.get(capability)
        if declared is not None and declared.support is not Support.FULL:
            unsupported = declared.support is Support.UNSUPPORTED
            outcome = Outcome.UNSUPPORTED if unsupported else Outcome.NOT_IMPLEMENTED
            return {"outcome": outcome.value, "reason": f"{capability.value}: {declared.reason}"}
    return None


def _about(bench: Bench) -> dict[str, Any] | None:
    """What the platform says of itself, for the report."""
    try:
        info = bench.info()
        capabilities = {c.value: s.support.value for c, s in info.capabilities.items()}
        return {"version": info.version, "contract": info.contract, "capabilities": capabilities}
    except Exception:  # noqa: BLE001 - a platform that cannot say who it is fails RUN-001
        return None


def _raised(error: BaseException) -> dict[str, Any]:
    where = traceback.extract_tb(error.__traceback__)
    hook = next((frame.name for frame in reversed(where) if frame.name.startswith("kvcore_")), "a hook")
    text = f"{type(error).__name__}: {error}"
    return {
        "outcome": Outcome.FAILED.value,
        "call": f"{hook}()",
        "got": text[:2000],
        "expected": "an answer, and no error",
    }


def _not_loaded(error: BaseException) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    return {
        "outcome": Outcome.FAILED.value,
        "call": "import of the plugin",
        "got": text[:2000],
        "expected": "a plugin object",
        "seconds": 0.0,
        "about": None,
        "clean": True,
    }


def _in_a_fork(check: Check, setting: Setting, records: int) -> None:
    """The check in a process of its own. Its death is told by the record that does not come."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            _say(records, _died(status))
        return
    status = 1
    try:
        try:
            found = run_check(check, _bench(setting))
        except Exception as error:  # noqa: BLE001 - as above
            found = _not_loaded(error)
        _say(records, found)
        status = 0
    finally:
        os._exit(status)


def _died(status: int) -> dict[str, Any]:
    how = os.waitstatus_to_exitcode(status)
    return {
        "outcome": Outcome.FAILED.value,
        "call": "the check's process",
        "got": f"killed by signal {-how}" if how < 0 else f"it ended with status {how}",
        "expected": "a process that survives its plugin",
        "seconds": 0.0,
        "about": None,
        "clean": True,
    }


def _bound(setting: Setting) -> None:
    """Bound this process's own memory, counted from what it has now."""
    if setting.data_bytes is None:
        return
    with open("/proc/self/statm", encoding="ascii") as stream:
        used = int(stream.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + setting.data_bytes, hard))


def _say(records: int, found: dict[str, Any]) -> None:
    os.write(records, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
