"""Run tests on faulty code: libraries are imported once, and each fault gets a forked process."""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Libraries read these when they are imported; pytest's plugins have no part in the unit tests named here.
ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
    "TOKENIZERS_PARALLELISM": "false",
}

# Memory that a faulty test may take beyond what is mapped already, in bytes.
MEMORY = 12 * 2**30

# Processor seconds beyond twice the time of the sound tests, and the clock's limit as a multiple of that.
SPARE_SECONDS, CLOCK = 12, 20


@dataclass(frozen=True)
class Test:
    """A test's processor seconds, and the lines of the package that it runs: file -> numbers."""

    name: str
    seconds: float
    lines: dict[str, set[int]]


@dataclass(frozen=True)
class Job:
    """Tests to run, with the code of one module replaced: `module` is its dotted name, or ""."""

    tests: list[str]
    seconds: float
    module: str = ""
    make_code: Callable | None = None
    plugins: tuple = ()


def preload(files: Iterable[Path], package: str) -> None:
    """Import every library that the files import, but not the package itself."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules: list[tuple[str, list[str]]] = []
            if isinstance(node, ast.Import):
                modules = [(alias.name, []) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [(node.module, [alias.name for alias in node.names])]
            for module, names in modules:
                if module.split(".")[0] not in (package, "helpers"):
                    with contextlib.suppress(ImportError):
                        imported = importlib.import_module(module)
                        for name in names:  # transformers imports a submodule when a name is first asked for
                            getattr(imported, name, None)
    gc.freeze()  # so that forks share these pages


def run(jobs: Iterable[Job], parallel: int, root: Path) -> Iterator[tuple[int, int, str]]:
    """Run jobs in forked processes; yield each one's index, exit status and output as it ends."""
    waiting, running = list(enumerate(jobs))[::-1], {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        while waiting or running:
            while waiting and len(running) < parallel:
                index, job = waiting.pop()
                folder = Path(scratch) / str(index)
                folder.mkdir()
                limit = time.monotonic() + CLOCK * (2 * job.seconds + SPARE_SECONDS)
                running[_start(job, folder, root)] = index, folder, limit
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                for process, (_, _, limit) in running.items():
                    if time.monotonic() > limit:
                        os.killpg(process, signal.SIGKILL)
                time.sleep(0.02)
                continue
            index, folder, _ = running.pop(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what a test left behind
            output = (folder / "output").read_text(encoding="utf-8", errors="replace")
            shutil.rmtree(folder, ignore_errors=True)
            yield index, os.waitstatus_to_exitcode(status), output


def in_fork(task: Callable[[], object]) -> None:
    """Run a task in a process of its own, so that this one imports nothing."""
    if pid := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError("the task failed")
        return
    code = 1
    try:
        task()
        code = 0
    finally:
        os._exit(code)


def _start(job: Job, folder: Path, root: Path) -> int:
    if pid := os.fork():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    os.setpgrp()
    with open(folder / "output", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = 3
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * job.seconds) + SPARE_SECONDS,) * 2)
        code = _test(job, folder, root)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _test(job: Job, folder: Path, root: Path) -> int:
    import pytest

    os.chdir(root)
    if job.make_code:
        sys.meta_path.insert(0, _Replaced(job.module, job.make_code()))
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    return int(pytest.main([*options, *job.tests], plugins=list(job.plugins)))


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import one module from other code than its file's."""

    def __init__(self, module: str, code):
        self.module, self.code = module, code

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.module:
            return importlib.util.spec_from_file_location(fullname, self.code.co_filename, loader=self)
        return None

    def get_code(self, fullname):
        return self.code

    def get_source(self, fullname):
        return None


class Recorder:
    """A pytest plugin that writes each test's time and lines to a file."""

    def __init__(self, sources: set[str], record: Path):
        self.sources, self.record = sources, record
        self.rows: list[tuple[str, float, dict[str, list[int]]]] = []

    def pytest_runtest_protocol(self, item, nextitem):
        from _pytest.runner import runtestprotocol

        lines: dict[str, set[int]] = {}

        def line(frame, event, argument):
            if event == "line":
                lines[frame.f_code.co_filename].add(frame.f_lineno)
            return line

        def call(frame, event, argument):
            file = frame.f_code.co_filename
            if file not in self.sources:
                return None
            lines.setdefault(file, set())
            return line

        started = time.process_time()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        threading.settrace(call)
        sys.settrace(call)
        try:
            runtestprotocol(item, nextitem=nextitem)
        finally:
            sys.settrace(None)
            threading.settrace(None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        rows = {file: sorted(numbers) for file, numbers in lines.items()}
        self.rows.append((item.nodeid, time.process_time() - started, rows))
        return True

    def pytest_sessionfinish(self):
        self.record.write_text(json.dumps(self.rows))


def measure(
    files: list[str], sources: set[str], parallel: int, root: Path, cache: Path
) -> dict[str, list[Test]]:
    """Run sound code; return the tests of each file. Files are run again when they or the code have changed.

    Raises:
        RuntimeError: A test fails.
    """
    shared = [*map(Path, sorted(sources)), *sorted((root / "tests" / "helpers").glob("*.py"))]
    records = {}
    for file in files:
        digest = hashlib.sha256()
        for source in (*shared, root / file):
            digest.update(source.read_bytes())
        records[file] = cache / f"{Path(file).stem}-{digest.hexdigest()[:16]}.json"
    missing = [file for file in files if not records[file].exists()]
    cache.mkdir(exist_ok=True)
    jobs = [Job([file], 900, plugins=(Recorder(sources, records[file]),)) for file in missing]
    for index, code, output in run(jobs, parallel, root):
        if code:
            records[missing[index]].unlink(missing_ok=True)
            raise RuntimeError(f"{missing[index]} fails without a fault:\n{output[-3000:]}")
    return {
        file: [
            Test(name, seconds, {source: set(numbers) for source, numbers in lines.items()})
            for name, seconds, lines in json.loads(record.read_text())
        ]
        for file, record in records.items()
    }
