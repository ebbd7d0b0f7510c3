"""The command line, run in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.app import run
from kvcore.registry import default_registry

ROOT = Path(__file__).parents[2]
CARD = "tests/data/profiles/card-80g.json"
QWEN = "examples/models/qwen3-30b-a3b.json"


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting from outside, paths relative to the repository, and a registry that was made under these."""
    for name in list(os.environ):
        if name.startswith("KVCORE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@pytest.fixture
def kvcore(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """``kvcore(*arguments)`` in this process."""

    def call(*arguments: str) -> Ran:
        status = run(arguments)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


@pytest.fixture
def process() -> Callable[..., Ran]:
    """``kvcore(*arguments)`` as a user starts it; keywords are environment variables."""

    def call(*arguments: str, **environ: str) -> Ran:
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-m", "kvcore", *arguments],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return call
