"""Looking for hardware and libraries without touching a driver: files and the loader's cache, nothing else."""

from __future__ import annotations

import ctypes.util
import glob
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["find_library", "pci_devices"]


def pci_devices(vendor: str, root: Path = Path("/")) -> list[str]:
    """PCI addresses of display and accelerator functions of ``vendor`` (``"0x10de"``), from sysfs.

    Class 0x03 is a display controller, 0x12 a processing accelerator; a card's audio function is neither.
    """
    return [
        folder.name
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _text(folder / "vendor") == vendor and _text(folder / "class")[:4] in ("0x03", "0x12")
    ]


def find_library(name: str, folders: Iterable[str] = ()) -> str | None:
    """Where shared library ``name`` (``"libnvidia-ml.so.1"``) would come from, or None; it is not loaded.

    Looks in LD_LIBRARY_PATH, then in ``folders`` (patterns are allowed), then asks the loader's cache.
    """
    search = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    for folder in (*search, *folders):
        for candidate in sorted(glob.glob(os.path.join(folder, name))):
            if os.path.isfile(candidate):
                return candidate
    stem = name.removeprefix("lib").partition(".so")[0]
    cached = ctypes.util.find_library(stem)
    return cached if cached is not None and cached.startswith(name) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""  # a function that vanished, or sysfs without the file: it is then no evidence
