"""One process at a time sizes on a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvcore.errors import DeviceError
from kvcore.ranks.lock import device_lock

HOLDER = """
import sys, time
from kvcore.ranks.lock import device_lock
with device_lock("GPU-1", timeout=5):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_waits_and_then_says_who_holds_it(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DeviceError) as caught, device_lock("GPU-1", timeout=0.2):
            pass
        assert caught.value.code == "KV-DEV-040"
        assert caught.value.got == f"held by pid {holder.pid}"
        with device_lock("GPU-2", timeout=0.2):
            pass
    finally:
        # Killed, not asked: the kernel gives the lock back.
        holder.kill()
        holder.communicate()
    with device_lock("GPU-1", timeout=5):
        pass
