"""The command line: `opdcl` runs it in this process, `opdcl_process` in a process of its own.

A process imports torch and its like again, which takes seconds. Use one only for what needs it: several
workers, what is imported when, how long `--help` takes, pipes, and variables that libraries read at import.
`helpers.interrupts` sends signals to this process.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
OPDCL = [sys.executable, "-c", "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"]
ENV = {**os.environ, "TERM": "dumb", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
# Libraries read these when they are imported, so a change here would have no effect.
READ_AT_IMPORT = ("HF_HOME", "HF_HUB_", "HF_ENDPOINT", "OMP_", "CUDA", "TENSORBOARD", "MLFLOW_", "WANDB_MODE")
KEPT = ("_environment",)  # the templates of reports, whose compilation takes longer than a dry run


def opdcl(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command in this process and return its exit code, stdout and stderr.

    `code` is the exit code that it must have. The command leaves nothing behind in this process. An
    exception that escapes `main` is raised.
    """
    words = ["opdcl", *map(str, arguments)]
    changes = {"TERM": "dumb", "OPDCL_DEBUG": "", **(env or {})}
    fixed = [name for name in env or {} if name.startswith(READ_AT_IMPORT)]
    assert not fixed, f"{fixed} take effect at import only: use opdcl_process"
    out, err = io.StringIO(), io.StringIO()
    with _restored_process(), _restored_libraries(), contextlib.ExitStack() as streams:
        os.environ.update(changes)
        os.chdir(cwd or os.getcwd())
        streams.enter_context(contextlib.redirect_stdout(out))
        streams.enter_context(contextlib.redirect_stderr(err))
        sys.argv, sys.stdin = words, io.StringIO()
        done = subprocess.CompletedProcess(words, _exit_code_of_main())
    done.stdout, done.stderr = out.getvalue(), err.getvalue()
    assert code in (None, done.returncode), done.stderr
    return done


def opdcl_process(
    *arguments: object, timeout: float = 300, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run one command in a process of its own."""
    return subprocess.run(
        [*OPDCL, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENV | dict(env or {}),
        timeout=timeout,
        check=False,
        **options,
    )


def sets(*settings: str) -> list[str]:
    """Return the `--set` options of settings; a text may hold several, parted by blanks."""
    return [word for text in settings for pair in text.split() for word in ("--set", pair)]


def _exit_code_of_main() -> int:
    """Call `main` with an empty state, and return the code with which a process would exit."""
    from opdcl import cli

    _clear_caches()
    with _fresh_outputs():
        try:
            cli.main()
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
                return 1
            return end.code or 0
    return 0


@contextlib.contextmanager
def _fresh_outputs() -> Iterator[None]:
    """Give every module that owns an `Output` one that writes to the current streams."""
    from opdcl.console import Output

    originals = [
        (module, name, value)
        for module in _opdcl_modules()
        for name, value in vars(module).items()
        if isinstance(value, Output)
    ]
    fresh = {id(output): Output() for _, _, output in originals}  # modules that share one keep sharing
    for module, name, output in originals:
        setattr(module, name, fresh[id(output)])
    try:
        yield
    finally:
        for module, name, output in originals:
            setattr(module, name, output)


def _clear_caches() -> None:
    """Forget what functions have cached, as a new process would.

    What depends on the machine and the installed packages alone stays: what takes no argument, and `KEPT`.
    """
    for module in _opdcl_modules():
        for name, value in list(vars(module).items()):
            is_cached = callable(getattr(value, "cache_clear", None)) and name not in KEPT
            if is_cached and inspect.signature(value).parameters:
                value.cache_clear()


def _opdcl_modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "opdcl" and m]


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Put back what Python and the operating system hold for the whole process."""
    folder, variables, argv, stdin = os.getcwd(), dict(os.environ), sys.argv, sys.stdin
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    logs, level, generator, temporary = list(root.handlers), root.level, random.getstate(), tempfile.tempdir
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(folder)
        for name in os.environ.keys() - variables:
            del os.environ[name]
        os.environ.update(variables)
        sys.argv, sys.stdin = argv, stdin
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.captureWarnings(False)
        root.handlers[:] = logs
        root.setLevel(level)
        random.setstate(generator)
        tempfile.tempdir = temporary


@contextlib.contextmanager
def _restored_libraries() -> Iterator[None]:
    """Put back the global settings of torch, transformers and datasets, and the number of workers."""
    import datasets
    import numpy
    import torch
    from transformers.utils import logging as transformers_logging

    from opdcl import parallel

    processes = {name: value for name, value in vars(parallel).items() if isinstance(value, bool | int)}
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    generators = torch.get_rng_state(), numpy.random.get_state()
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    try:
        yield
    finally:
        vars(parallel).update(processes)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        torch.set_rng_state(generators[0])
        numpy.random.set_state(generators[1])
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        transformers_logging.set_verbosity(verbosity)
        if bars[0]:
            transformers_logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()
