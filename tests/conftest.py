"""Settings shared by all tests, and the simulated machines on which the conformance suite runs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from kvcore.conformance.setting import Setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The same examples on every run, and no deadline: speed is measured in benchmarks/, never by a test.
settings.register_profile("kvcore", derandomize=True, deadline=None)
settings.load_profile("kvcore")

ROOT = Path(__file__).parents[1]
#: The simulated libraries of each vendor, and where its plugin is if it is not installed.
VENDORS = {
    "cuda": (("nvml", "cuda"), None),
    "iluvatar": (("ixml", "cuda"), None),
    "metax": (("mxsml", "mcruntime"), "kvcore_metax:plugin"),
}


@pytest.fixture(scope="session")
def as_installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """A PYTHONPATH on which the plugin project in a folder is as pip installs it: its metadata, then its sources."""

    def path(folder: Path) -> str:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        site = tmp_path_factory.mktemp("site")
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(head)
        points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["kvcore"].items())
        (info / "entry_points.txt").write_text(f"[kvcore]\n{points}")
        return os.pathsep.join((str(site), str(folder / "src")))

    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvcore-real", action="store_true", help="run the suite on this machine's own accelerators")


def pytest_kvcore_setting(config: pytest.Config, platform: str) -> Setting | None:
    """Two simulated cards of the vendor, most of whose memory other tenants hold."""
    if platform not in VENDORS or config.getoption("--kvcore-real"):
        return None
    from kvcore.conformance.setting import Setting

    parts, plugin = VENDORS[platform]
    environ = _simulated(config, platform, parts)
    if plugin is not None:
        environ["PYTHONPATH"] = str(ROOT / "plugins" / platform / "src")
    return Setting(platform, plugin=plugin, environ=environ, real=False)


def _simulated(config: pytest.Config, platform: str, parts: tuple[str, ...]) -> dict[str, str]:
    from .vendors.conftest import GIB, Libraries, Machine

    folder = Path(tempfile.mkdtemp(prefix=f"kvcore-{platform}-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    machine = Machine(folder, Libraries(folder), parts)
    for index, free in enumerate((GIB // 8, GIB // 10)):
        machine.card(index, free=free, context=GIB // 128, pids="self:0")
    machine.write()
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(machine.libraries(part) for part in parts),
        "FAKE_SCENARIO": str(machine.scenario),
    }
