"""Settings shared by all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The same examples on every run, and no deadline: speed is measured in benchmarks/, never by a test.
settings.register_profile("kvcore", derandomize=True, deadline=None)
settings.load_profile("kvcore")


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
