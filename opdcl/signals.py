"""The signals that ask a command to end: Ctrl-C, SIGTERM from a scheduler, SIGHUP from a lost terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

# Seconds in which a repeated SIGTERM or SIGHUP is ignored. Schedulers and terminals send several, and those
# after the first would interrupt the removal of temporary files.
PAUSE = 5
_heard = -float(PAUSE)


def ending() -> list[signal.Signals]:
    """Return the signals that ask this process to end. `nohup` ignores SIGHUP, and so does opdcl then."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that they clean up as Ctrl-C does.

    Outside of the main thread, which alone may handle signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        global _heard
        now = time.monotonic()
        if now - _heard >= PAUSE:
            _heard = now
            raise KeyboardInterrupt

    others = [number for number in ending() if number != signal.SIGINT]
    previous = {number: signal.signal(number, stop) for number in others}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
