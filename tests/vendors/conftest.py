"""Simulated vendors: libraries built from tests/fakes, a scenario that tests write, and processes that load them.

The real client libraries (pynvml, cuda-bindings, Paddle) find the simulated ones through the loader, in a process of
their own. A missing compiler fails these tests.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "fakes"
GIB = 1024**3
UUIDS = tuple(f"GPU-{digit * 8}-0000-4000-8000-00000000000{digit}" for digit in "1234")
PCIS = ("0000:3b:00.0", "0000:5b:00.0", "0000:86:00.0", "0000:af:00.0")


def compile_library(target: Path, source: str, *flags: str, compiler: str = "cc") -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", f"-I{FAKES}", f"-Wl,-soname,{target.name}", *flags]
    subprocess.run([*command, "-o", str(target), str(FAKES / source)], check=True, capture_output=True, timeout=120)
    return target


class Libraries:
    """Each library in a folder of its own, built when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> str:
        file, source, *flags = {
            "nvml": ("libnvidia-ml.so.1", "nvml.c"),
            "nvml_v1": ("libnvidia-ml.so.1", "nvml.c", "-DNO_V2"),
            "cuda": ("libcuda.so.1", "cuda.c"),
            "ixml": ("libixml.so", "nvml.c", "-DIXML"),
            "ixml_plain": ("libixml.so", "nvml.c", "-DIXML", "-DPLAIN_INIT", "-DNO_V2"),
            "upnp": ("libixml.so", "upnp.c"),
            "mxsml": ("libmxsml.so", "mxsml.c"),
            "mxsml_old": ("libmxsml.so", "mxsml.c", "-DOLD"),
            "mcruntime": ("libmcruntime.so", "mcruntime.c", "-pthread"),
        }[name]
        target = self._folder / name / file
        if not target.exists():
            compile_library(target, source, *flags)
        return str(target.parent)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return Libraries(tmp_path_factory.mktemp("libraries"))


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Machine:
    """A machine with simulated devices, and processes on it."""

    folder: Path
    libraries: Libraries
    parts: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    lines: dict[str, object] = field(default_factory=dict)

    @property
    def scenario(self) -> Path:
        return self.folder / "scenario.txt"

    def card(self, index: int, **keys: object) -> Machine:
        defaults = {"total": 8 * GIB, "name": "Simulated", "uuid": UUIDS[index], "pci": PCIS[index]}
        self.lines.update({f"{index}.{key.replace('__', '.')}": value for key, value in {**defaults, **keys}.items()})
        self.lines["count"] = max(index + 1, int(str(self.lines.get("count", 0))))
        return self

    def set(self, lines: Mapping[str, object]) -> Machine:
        self.lines.update(lines)
        return self

    def write(self) -> None:
        self.scenario.write_text("".join(f"{key}={value}\n" for key, value in self.lines.items()))

    def held(self) -> list[int]:
        path = Path(f"{self.scenario}.held")
        return list(struct.unpack("16Q", path.read_bytes())) if path.exists() else [0] * 16

    def process(self, *command: str, **environ: str) -> Ran:
        self.write()
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVCORE_", "CUDA_", "IX_", "ILUVATAR_", "FD_", "COREX", "MACA_", "CUSTOM_DEVICE_"))
        }
        paths = os.pathsep.join(self.libraries(part) for part in self.parts)
        env = {
            **clean,
            "LD_LIBRARY_PATH": paths,
            "FAKE_SCENARIO": str(self.scenario),
            "FAKE_BALANCE": str(self.folder / "balance"),
            **self.environ,
            **environ,
        }
        ran = subprocess.run(
            [sys.executable, "-W", "error", *command], env=env, capture_output=True, text=True, timeout=100, cwd=ROOT
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def kvcore(self, *arguments: str, **environ: str) -> Ran:
        return self.process("-m", "kvcore", *arguments, **environ)

    def ask(self, code: str, **environ: str) -> Any:
        """What ``code`` leaves in ``answer``, in a process on this machine; an error is its code, what, got, hint."""
        script = (
            "import json, os\nfrom pathlib import Path\nfrom kvcore.errors import KvcoreError\n"
            "from kvcore.contract import *\n"
            f"try:\n{textwrap.indent(textwrap.dedent(code), '    ')}\n"
            "except KvcoreError as error:\n    answer = error.to_dict()\n"
            "print(json.dumps(answer, default=str))"
        )
        ran = self.process("-c", script, **environ)
        assert ran.status == 0, ran.err
        return json.loads(ran.out.splitlines()[-1])

    def readings(self, platform: str = "cuda", index: int = 0, **environ: str) -> Any:
        """The readings of a device as a list of dictionaries."""
        return self.ask(
            f"""
            from dataclasses import asdict
            from kvcore_{platform}.platform import plugin
            answer = [asdict(r) for r in plugin.kvcore_read_memory(plugin.kvcore_devices()[{index}])]
            """,
            **environ,
        )

    def devices(self, platform: str = "cuda", **environ: str) -> Any:
        return self.ask(
            f"""
            from dataclasses import asdict
            from kvcore_{platform}.platform import plugin
            answer = [asdict(d) for d in plugin.kvcore_devices()]
            """,
            **environ,
        )

    def detection(self, platform: str = "cuda", **environ: str) -> Any:
        return self.ask(
            f"""
            from dataclasses import asdict
            from kvcore_{platform}.platform import plugin
            answer = asdict(plugin.kvcore_detect())
            """,
            **environ,
        )


@pytest.fixture
def machine(tmp_path: Path, libraries: Libraries) -> Callable[..., Machine]:
    """``machine("nvml", "cuda")``: the parts that are installed on it."""

    def make(*parts: str) -> Machine:
        return Machine(tmp_path, libraries, parts)

    return make
