"""Stop a command in this process at a counted place, as Ctrl-C does, or kill a copy of the process there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook

_on_rename: Callable[[], None] | None = None
_watching = False


@contextlib.contextmanager
def signalled(place: str, counts: list[int], number: int = signal.SIGINT) -> Iterator[None]:
    """Send this process a signal at each of `counts` of a place: calls of a "layer", or a "rename" of a file.

    The first one is number 1.
    """
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen in counts:
            os.kill(os.getpid(), number)

    global _on_rename
    _watch_renames()
    hook = register_module_forward_pre_hook(count) if place == "layer" else None
    _on_rename = count if place == "rename" else None
    try:
        with _heard():
            yield
    finally:
        _on_rename = None
        if hook:
            hook.remove()


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], object], number: int = signal.SIGINT) -> Iterator[None]:
    """Send this process a signal, by default as Ctrl-C does, at the first layer after a condition holds."""
    sent = False

    def check(*_: object) -> None:
        nonlocal sent
        if not sent and condition():
            sent = True
            os.kill(os.getpid(), number)

    hook = register_module_forward_pre_hook(check)
    try:
        with _heard():
            yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Let SIGINT act: a shell starts commands in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def killed(
    run: Callable[[], subprocess.CompletedProcess[str]],
    place: str,
    count: int,
    log: Path,
    timeout: float = 300,
) -> bool:
    """Run a command in a copy of this process and kill it at a place; return whether it came that far."""
    child = os.fork()
    if child == 0:
        try:
            with signalled(place, [count], signal.SIGKILL):
                done = run()
            log.write_text(done.stdout + done.stderr)
        finally:
            os._exit(0)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.WIFSIGNALED(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the command hung for {timeout} s; what it printed is in {log}")


def _watch_renames() -> None:
    """Count renames from now on; Python cannot take an audit hook away again."""
    global _watching

    def audit(event: str, _: object) -> None:
        if event == "os.rename" and _on_rename:
            _on_rename()

    if not _watching:
        sys.addaudithook(audit)
        _watching = True
