"""One engine at a time sizes on a device: two that start together would each count the other's memory as gone.

An advisory lock a device (flock), which the kernel drops when its holder ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvcore.errors import DeviceError

__all__ = ["device_lock"]

PAUSE = 0.05


@contextlib.contextmanager
def device_lock(key: str, *, timeout: float) -> Iterator[None]:
    """Hold the lock of the device ``key``; raises :class:`DeviceError` with its holder's pid after ``timeout``."""
    path = _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.lock"
    deadline = time.monotonic() + timeout
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not _taken(descriptor):
            if time.monotonic() > deadline:
                raise DeviceError(
                    "another process is sizing on this device",
                    code="KV-DEV-040",
                    where=key,
                    got=f"held by pid {_holder(descriptor)}",
                    expected=f"the lock within {timeout:g} s",
                    hint="start engines on one device one after another",
                )
            time.sleep(PAUSE)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _folder() -> Path:
    """The runtime directory of this user, or of the host."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / "kvcore"
    folder.mkdir(mode=0o777, exist_ok=True)
    return folder


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", "replace") or "unknown"
