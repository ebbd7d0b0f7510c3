"""What may be imported when: the start of a command must not pay for what it does not use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "asyncio",
    "concurrent.futures",
    "hypothesis",
    "importlib.metadata",
    "logging",
    "msgspec",
    "multiprocessing",
    "numpy",
    "paddle",
    "pynvml",
    "pytest",
    "rich",
    "tomllib",
    "torch",
}
#: Needed to find plugins, and only then.
DISCOVERY = {"importlib.metadata", "logging"}


def imported(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(ran.stderr.splitlines()[-1]))


def test_import_kvcore_brings_nothing_of_its_own() -> None:
    modules = imported("import kvcore")
    assert not modules & (HEAVY | {"pluggy", "click", "fractions", "dataclasses"})
    assert [m for m in modules if m.startswith("kvcore")] == ["kvcore"]


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["plan", "examples/models/qwen3-8b.json", "--kv-cache-memory", "8GiB", "--json"], DISCOVERY),
        (["plan", "examples/models/qwen3-8b.json", "--json", "--max-model-len", "64"], DISCOVERY),
        (["plan", "examples/models/qwen3-8b.json", "--kv-cache-memory", "8GiB"], DISCOVERY),
    ],
)
def test_a_plan_imports_no_framework(arguments: list[str], allowed: set[str]) -> None:
    modules = imported(f"from kvcore.cli.app import run\nassert run({arguments!r}) == 0")
    assert not modules & (HEAVY - allowed)


def test_every_public_name_is_there_and_listed() -> None:
    import kvcore

    assert list(kvcore.__all__) == sorted(kvcore.__all__)
    for name in kvcore.__all__:
        assert getattr(kvcore, name) is not None
    assert set(dir(kvcore)) == set(kvcore.__all__)
    with pytest.raises(AttributeError):
        kvcore.no_such_name  # noqa: B018
