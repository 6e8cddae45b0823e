"""The lock of a run directory: one writer at a time, and the next one goes on where one has died."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from opdcl.errors import UsageError
from opdcl.rundir.layout import RunDir, locked


def test_a_second_writer_is_refused_and_learns_who_holds_the_lock(tmp_path):
    run = RunDir(tmp_path / "run")
    holder = f"in use by process {os.getpid()} on {socket.gethostname()} since 20"
    with locked(run):
        for _ in range(2):  # who is refused does not touch the lock
            with pytest.raises(UsageError, match=holder) as caught, locked(run):
                pass
            assert "wait" in caught.value.hint
    assert not run.path.exists(), "nothing was written into the new directory"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from opdcl.rundir.layout import RunDir, locked\n"
        "with locked(RunDir(Path(sys.argv[1]))): os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == 9
    assert (tmp_path / ".lock").exists()
    with locked(RunDir(tmp_path)) as dead:
        assert dead["pid"] != os.getpid()
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / ".lock").read_text() == ""
    with locked(RunDir(tmp_path)) as dead:
        assert dead is None


def test_an_owner_on_another_machine_keeps_its_lock_until_the_file_that_the_hint_names_is_removed(tmp_path):
    file, run = tmp_path / "my run" / ".lock", RunDir(tmp_path / "my run")
    run.path.mkdir()
    content = json.dumps({"pid": 7, "host": f"not-{socket.gethostname()}", "since": "long ago"})
    file.write_text(content)
    with pytest.raises(UsageError, match="in use by process 7 on not-") as caught, locked(run):
        pass
    assert file.read_text() == content
    subprocess.run(caught.value.hint.rpartition(": ")[2], shell=True, check=True)
    with locked(run) as dead:
        assert dead is None


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match="this file system cannot lock") as caught, locked(RunDir(tmp_path)):
        pass
    assert "local disk" in caught.value.hint


def test_the_lock_is_released_when_the_work_fails(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(RuntimeError), locked(run):
        raise RuntimeError
    with locked(run):
        pass
