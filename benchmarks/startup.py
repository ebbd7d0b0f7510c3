"""Wall time of a start, over that of a bare interpreter in the same run; bytecode is cached, as installed code's is."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

ROUNDS = 15
QWEN = "examples/models/qwen3-30b-a3b.json"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import kvcore": ["-c", "import kvcore"],
    "kvcore plan --json, a size": ["-m", "kvcore", "plan", QWEN, "--tp", "4", "--kv-cache-memory", "8GiB", "--json"],
    "kvcore plan --json, this host": ["-m", "kvcore", "plan", QWEN, "--tp", "4", "--json"],
    "kvcore --help": ["-m", "kvcore", "--help"],
}
#: Milliseconds over the bare interpreter; the plans in all.
TARGETS = {"import kvcore": 40, "kvcore plan --json, a size": 250, "kvcore plan --json, this host": 250}


def main() -> None:
    """Interleaved rounds, so that a slow moment of the machine falls on all alike."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(ROUNDS + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environ)
            if number:
                times[name].append((time.perf_counter() - start) * 1000)
    bare = statistics.median(times["python -c pass"])
    for name, measured in times.items():
        median = statistics.median(measured)
        target = f"  target {TARGETS[name]} ms" if name in TARGETS else ""
        shown = f"{median - bare:6.1f} ms over bare" if name == "import kvcore" else f"{median:6.1f} ms"
        print(f"{name:32} {shown:22} {median / bare:5.1f} x bare{target}")
