"""Real plugin distributions, made in a folder and found through their metadata like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLATFORM = """
from kvcore.contract import *
from kvcore.contract.base import PlatformBase

class Platform(PlatformBase):
    name = {name!r}
    state = DetectionState.{state}
    contract = {contract}
    drop = {drop!r}

    @hookimpl
    def kvcore_platform(self):
        later = not_implemented("a test")
        capabilities = {{c: later for c in Capability if c.value != self.drop}}
        capabilities[Capability.DETECT] = FULL
        capabilities[Capability.DEVICES] = FULL
        return PlatformInfo(self.name, "Test", "1.0", self.contract, capabilities)

    @hookimpl
    def kvcore_detect(self):
        return Detection(self.state, "as the test says", (Evidence("library", "/opt/lib.so"),))

{extra}

plugin = Platform()
"""


class Site:
    """A folder of installed distributions, and a way to ask a fresh interpreter what it makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, source: str, *, distribution: str | None = None, entry: str | None = None) -> None:
        module = f"plugin_{(distribution or name).replace('-', '_')}"
        (self.folder / f"{module}.py").write_text(source)
        distribution = distribution or f"kvcore-{name}"
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        points = info / "entry_points.txt"
        known = points.read_text() if points.exists() else "[kvcore]\n"
        points.write_text(f"{known}{name} = {entry or f'{module}:plugin'}\n")

    def platform(
        self, name: str, state: str = "AVAILABLE", *, contract: int = 1, drop: str = "", extra: str = ""
    ) -> None:
        body = textwrap.indent(textwrap.dedent(extra), "    ")
        self.install(name, PLATFORM.format(name=name, state=state, contract=contract, drop=drop, extra=body))

    def ask(self, code: str, **environ: str) -> Any:
        """What ``code`` leaves in ``answer``, in an interpreter that has these distributions."""
        script = (
            "import json\nfrom kvcore.registry import default_registry\nfrom kvcore.errors import *\n"
            f"registry = default_registry()\n{textwrap.dedent(code)}\nprint(json.dumps(answer))"
        )
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
        path = os.pathsep.join([str(self.folder), clean.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**clean, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    def states(self, **environ: str) -> dict[str, list[str | None]]:
        return self.ask("answer = {r.name: [r.state.value, r.reason] for r in registry.records}", **environ)

    def choice(self, **environ: str) -> dict[str, Any]:
        return self.ask(
            """
            try:
                c = registry.choose()
                answer = {"platform": c.platform.name, "fallback": c.fallback, "reason": c.reason}
            except NoPlatform as e:
                answer = {"code": e.code, "what": e.what, "got": e.got, "hint": e.hint}
            """,
            **environ,
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def make_site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Site]:
    return lambda: Site(tmp_path_factory.mktemp("site"))
