"""Run one command in an empty folder: `opdcl` expects it to succeed, `refused` to fail cleanly."""

from pathlib import Path

import pytest
from helpers import command as runner


@pytest.fixture
def opdcl(tmp_path: Path):
    """Return a function that runs one command in an empty folder, expects success, and returns stdout."""

    def command(*words: str) -> str:
        done = runner.opdcl(*words, cwd=tmp_path, env={"COLUMNS": "120"}, code=0)
        return done.stdout

    return command


@pytest.fixture
def refused(tmp_path: Path):
    """Return a function that runs one command, expects a clean refusal, and returns stderr."""

    def command(*words: str, code: int = 2) -> str:
        before = snapshot(tmp_path)
        done = runner.opdcl(*words, cwd=tmp_path, env={"COLUMNS": "120"})
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        first, *rest = done.stderr.splitlines()
        assert first.startswith("error: ")
        assert rest, "an error says what to do next"
        assert rest[-1].startswith("hint: ")
        assert "Traceback" not in done.stderr
        assert snapshot(tmp_path) == before, "a refused command leaves nothing behind"
        return done.stderr

    return command


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}
