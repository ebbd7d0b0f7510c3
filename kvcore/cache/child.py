"""Run a check in a child process, so that a crash in it is an answer and not the end of the caller.

The child is a copy of this process (fork): it sees the same host memory, and what it writes there is its own. A runtime
of a device does not survive a fork, so a cache on an accelerator is refused here.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvcore.errors import KernelUnsafe, KvcoreError, VerificationFailed

if TYPE_CHECKING:
    from kvcore.cache.kernels import Watch

__all__ = ["run_in_child"]

T = TypeVar("T")


def run_in_child(work: Callable[[Watch], T], *, timeout_s: float = 600.0) -> T:
    """What ``work`` returns in a forked child; its :class:`KvcoreError` is raised here.

    Raises :class:`KernelUnsafe` if the child dies of a signal, with the tensor and block that ``work`` was at, and
    :class:`VerificationFailed` if it does not end within ``timeout_s`` seconds or fails otherwise.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = _fork()
    if child == 0:
        os.close(reader)
        _be_the_child(work, writer)
    os.close(writer)
    try:
        messages, ended = _messages(reader, timeout_s)
    finally:
        os.close(reader)
        if not _is_gone(child, wait_s=1.0):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return _outcome(messages, ended, status, timeout_s)  # type: ignore[no-any-return]


def _fork() -> int:
    with warnings.catch_warnings():
        # Threads of numerical libraries are idle, and the child calls none of them that holds a lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _be_the_child(work: Callable[[Watch], Any], writer: int) -> None:
    """Do the work and end here, whatever happens: the caller's code must not run twice."""
    status = 70
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def send(kind: str, value: object) -> None:
            raw = pickle.dumps((kind, value))
            message = len(raw).to_bytes(4, "little") + raw
            while message:
                message = message[os.write(writer, message) :]

        try:
            send("done", work(lambda *place: send("at", place)))
        except KvcoreError as error:
            send("error", error)
        except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it as its own error
            send("failed", f"{type(error).__name__}: {error}")
        status = 0
    finally:
        os._exit(status)


def _messages(reader: int, timeout_s: float) -> tuple[dict[str, Any], bool]:
    """The last message of each kind, and whether the child closed its end in time."""
    deadline = time.monotonic() + timeout_s
    held = bytearray()
    last: dict[str, Any] = {}
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            break
        part = os.read(reader, 1 << 16)
        if not part:
            return last, True
        held += part
        while len(held) >= 4 and len(held) >= (size := 4 + int.from_bytes(held[:4], "little")):
            kind, value = pickle.loads(held[4:size])  # noqa: S301 - from our own child
            last[kind] = value
            del held[:size]
    return last, False


def _is_gone(child: int, *, wait_s: float) -> bool:
    """Whether the child ended by itself; it is not reaped yet."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.001)
    return False


def _outcome(messages: dict[str, Any], ended: bool, status: int, timeout_s: float) -> Any:
    doing, tensor, block = messages.get("at", ("starting", None, None))
    place = "before the first block" if tensor is None else f"{doing} {tensor}, block {block:,}"
    if "error" in messages:
        raise messages["error"]
    if "done" in messages and ended:
        return messages["done"]
    if not ended:
        raise VerificationFailed(
            "the verification did not end in time", code="KV-VER-012", where=place, expected=f"within {timeout_s:g} s"
        )
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        raise KernelUnsafe(
            "the engine's kernels crashed",
            tensor=tensor,
            block=block,
            code="KV-VER-011",
            where=place,
            got=f"{signal.Signals(number).name} ({signal.strsignal(number)})",
            expected="every block written and read back",
        )
    raise VerificationFailed(
        "the verification failed in its child process",
        code="KV-VER-013",
        where=place,
        got=messages.get("failed", f"exit status {os.waitstatus_to_exitcode(status)}"),
    )
