"""examples/agree.py under both launchers, as the documentation says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "torch": ("torch.distributed.run", "--nproc_per_node", "2"),
    "paddle": ("paddle.distributed.launch", "--nproc_per_node", "2"),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("library", LAUNCHERS)
def test_ranks_agree_under_a_launcher(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed (an extra of kvcore)", exc_type=ImportError)
    module, *arguments = LAUNCHERS[library]
    if library == "paddle":
        arguments += ["--log_dir", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVCORE_", "PADDLE_"))}
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments, str(ROOT / "examples" / "agree.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("workerlog.*"))
    said = {line for line in (ran.stdout + logs).splitlines() if line.startswith("rank ")}
    assert ran.returncode == 0, ran.stderr + logs
    assert said == {f"rank {rank} of 2: 63 blocks, the tightest is rank 1" for rank in range(2)}
    assert not re.search("Traceback", ran.stderr + logs)
