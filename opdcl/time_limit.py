"""A time limit for what a file of somebody else makes Python compute: a regular expression, a template."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class TooSlow(BaseException):
    """The time limit has passed. It is no `Exception`, which libraries catch and go on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` if the block takes longer.

    The system's alarm interrupts Python, so this works in the main thread only; in others nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TooSlow

    handler = signal.signal(signal.SIGALRM, stop)
    before, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, before, interval)
        signal.signal(signal.SIGALRM, handler)
