"""pytest's side of the suite: which platforms, what each check's item says, and the report at the end.

Loaded by pytest in every project where kvcore is installed, so it imports pytest alone, and does and prints nothing
until a test asks for its fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcore.conformance.check import Check
    from kvcore.conformance.records import Record
    from kvcore.conformance.setting import Setting


class Specifications:
    """What a project's conftest.py may answer."""

    @pytest.hookspec(firstresult=True)
    def pytest_kvcore_setting(self, config: pytest.Config, platform: str) -> Setting | None:
        """How the processes of ``platform``'s checks are started: its environment, simulated devices, bounds.

        A :class:`kvcore.conformance.setting.Setting`, or None for the usual one.
        """


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kvcore-platform`` and ``--kvcore-report``."""
    group = parser.getgroup("kvcore", "conformance of kvcore platforms")
    group.addoption(
        "--kvcore-platform", action="append", metavar="NAME", help="platform to test; may be given more than once"
    )
    group.addoption(
        "--kvcore-report", metavar="FILE", help="write every record as JSON, or as a page if FILE ends in .html"
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """``pytest_kvcore_setting``."""
    pluginmanager.add_hookspecs(Specifications)


def pytest_configure(config: pytest.Config) -> None:
    """The marker that every check's item carries, so that -k and -m agree."""
    config.addinivalue_line("markers", "platform: a check of kvcore's conformance suite")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An item for every check on every platform."""
    if "kvcore_case" not in metafunc.fixturenames:
        return
    from kvcore.conformance.check import all_checks
    from kvcore.errors import KvcoreError

    try:
        names = _platforms(metafunc.config)
    except KvcoreError as error:
        raise pytest.UsageError(str(error)) from error
    cases = [(name, check) for name in names for check in all_checks().values()]
    metafunc.parametrize(
        "kvcore_case",
        cases,
        indirect=True,
        ids=[f"{name}-{check.id}-{check.name}" for name, check in cases],
        scope="session",
    )


@pytest.fixture(scope="session")
def kvcore_case(request: pytest.FixtureRequest) -> tuple[str, Check]:
    """A platform's name and a check."""
    case: tuple[str, Check] = request.param
    return case


@pytest.fixture(scope="session")
def kvcore_suite(pytestconfig: pytest.Config) -> Iterator[Suite]:
    """The processes that checks run in, one platform's at a time, and the records."""
    suite = Suite(pytestconfig)
    pytestconfig.stash[_SUITE] = suite
    yield suite
    suite.close()


class Suite:
    """What a session has run so far."""

    def __init__(self, config: pytest.Config) -> None:
        from kvcore.conformance.config import read_config

        self._config = config
        self._known = read_config(config.rootpath)
        self._run: Any = None
        self.records: list[Record] = []
        self.about: dict[str, dict[str, Any]] = {}

    def run(self, platform: str, check: Check) -> Record:
        """One check on one platform."""
        from kvcore.conformance.run import PlatformRun

        if self._run is None or self._run.setting.platform != platform:
            self.close()
            self._run = PlatformRun(_setting(self._config, platform), self._known.expected_of(platform))
        record: Record = self._run.run(check)
        self.records.append(record)
        self.about[platform] = self._run.about
        return record

    def close(self) -> None:
        """End the processes of the platform in hand."""
        if self._run is not None:
            self._run.close()
            self._run = None


_SUITE: pytest.StashKey[Suite] = pytest.StashKey()
_SETTINGS: pytest.StashKey[dict[str, Setting]] = pytest.StashKey()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the report; a run that proved nothing is no success."""
    suite = session.config.stash.get(_SUITE, None)
    if suite is None or not suite.records:
        return
    path = session.config.getoption("--kvcore-report")
    if path:
        from kvcore.conformance.check import all_checks
        from kvcore.conformance.report import report_data, write_report

        ran = {record.check for record in suite.records}
        checks = [check for check in all_checks().values() if check.id in ran]
        write_report(Path(path), report_data(checks, suite.records, suite.about))
    if exitstatus == pytest.ExitCode.OK and all(r.outcome.value == "no device" for r in suite.records):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A line of counts a platform, and the matrix of capabilities."""
    suite = config.stash.get(_SUITE, None)
    if suite is None or not suite.records:
        return
    from kvcore.conformance.records import tally
    from kvcore.conformance.report import capability_rows

    terminalreporter.section("kvcore conformance")
    rows = capability_rows(suite.about)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        terminalreporter.write_line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for found in tally(suite.records):
        terminalreporter.write_line(f"{found.platform}: {found.text()}")
    reasons = {(r.platform, r.outcome.value, r.reason) for r in suite.records if r.reason}
    for platform, outcome, reason in sorted(reasons):
        terminalreporter.write_line(f"  {platform}: {outcome}: {reason}")


def _setting(config: pytest.Config, platform: str) -> Setting:
    """The project's own setting of ``platform``, asked for once a session, else the usual one."""
    from kvcore.conformance.setting import built_in

    known = config.stash.setdefault(_SETTINGS, {})
    if platform not in known:
        known[platform] = config.hook.pytest_kvcore_setting(config=config, platform=platform) or built_in(platform)
    return known[platform]


def _platforms(config: pytest.Config) -> list[str]:
    """Those asked for, else the project's own, else all that are installed; each must be there."""
    from importlib.metadata import entry_points

    from kvcore.conformance.config import read_config

    asked = config.getoption("--kvcore-platform") or list(read_config(config.rootpath).platforms)
    installed = sorted({entry.name for entry in entry_points(group="kvcore")})
    names = asked or installed
    for name in names:
        if name not in installed and _setting(config, name).plugin is None:
            raise pytest.UsageError(f"kvcore platform {name} is not installed (there are: {', '.join(installed)})")
    if not names:
        raise pytest.UsageError("no kvcore platform is installed: pip install kvcore")
    return list(names)
