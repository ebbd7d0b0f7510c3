"""A time limit for calls that cannot be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvcore.errors import DeviceError

__all__ = ["SECONDS", "NoAnswer", "returned_within", "within"]

T = TypeVar("T")

#: A management library answers in milliseconds; a driver that wakes a sleeping card takes a few seconds.
SECONDS = 15.0


class NoAnswer(TimeoutError):
    """A call did not return in time, and was given up."""


def returned_within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """``call()`` on a thread of its own; raises :class:`NoAnswer` when it has not returned in time.

    A thread that hangs in a driver or a collective cannot be stopped; it does not keep the process from ending.
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
        raise NoAnswer(f"{what} did not return in time")
    return results[0]


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """``call()``, or :class:`DeviceError` when the device behind it has not answered in time."""
    try:
        return returned_within(seconds, what, call)
    except NoAnswer:
        raise DeviceError(
            f"{what} did not answer",
            code="KV-DEV-025",
            where=what,
            got=f"nothing within {seconds:g} s",
            hint="the driver hangs: look at the kernel's log, and reset the device or restart the machine",
        ) from None
