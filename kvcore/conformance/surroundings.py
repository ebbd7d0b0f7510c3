"""What a plugin must leave as it found it: environment, threads, libraries, standard output, descriptors."""

from __future__ import annotations

import contextlib
import ctypes  # noqa: F401 - so that the libraries that these need are there before a plugin is looked at
import hashlib  # noqa: F401
import os
import socket  # noqa: F401
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FRAMEWORKS", "Surroundings", "descriptors", "frameworks", "look_around", "printed"]

#: Importing one takes seconds and gigabytes of address space, and may create a context.
FRAMEWORKS = ("jax", "mindspore", "paddle", "tensorflow", "torch")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A process before its plugin was imported."""

    environ: dict[str, str]
    threads: int
    libraries: frozenset[str]


def look_around() -> Surroundings:
    """This process now."""
    return Surroundings(dict(os.environ), len(os.listdir("/proc/self/task")), _libraries())


def frameworks() -> list[str]:
    """Those that this process has imported."""
    return [name for name in FRAMEWORKS if name in sys.modules]


def descriptors() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """What is written to standard output, by Python or by a library, as the list's only item once this has ended."""
    text: list[str] = []
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            text.append(file.read().decode("utf-8", "replace"))


def _libraries() -> frozenset[str]:
    """Shared libraries that are mapped, without Python's own extension modules."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:
        paths = {line.split(maxsplit=5)[5].strip() for line in stream if line.count("/")}
    names = {path for path in paths if ".so" in os.path.basename(path)}
    return frozenset(p for p in names if ".cpython-" not in p and ".abi3." not in p and "lib-dynload" not in p)
