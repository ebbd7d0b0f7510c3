"""A time limit for calls that cannot be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvcore.errors import DeviceError

__all__ = ["SECONDS", "within"]

T = TypeVar("T")

#: A management library answers in milliseconds; a driver that wakes a sleeping card takes a few seconds.
SECONDS = 15.0


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """``call()``, or :class:`DeviceError` when it has not returned in time.

    The thread of a call that hangs in a driver cannot be stopped; it does not keep the process from ending.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            errors.append(error)

    thread = threading.Thread(target=work, name=f"kvcore: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise DeviceError(
            f"{what} did not answer",
            code="KV-DEV-025",
            where=what,
            got=f"nothing within {seconds:g} s",
            hint="the driver hangs: look at the kernel's log, and reset the device or restart the machine",
        )
    return results[0]
