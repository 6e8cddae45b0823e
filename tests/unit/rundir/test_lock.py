"""The lock of a run directory: one writer at a time, and the next one goes on where one has died."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from opdcl.errors import OpdclError, UsageError
from opdcl.rundir import lock
from opdcl.rundir.files import write_json
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import RunDir
from opdcl.rundir.lock import locked
from opdcl.rundir.seals import seal_new


def test_a_second_writer_is_refused_and_learns_who_holds_the_lock(tmp_path):
    run = RunDir(tmp_path / "run")
    holder = f"in use by process {os.getpid()} on {socket.gethostname()} since 20"
    with locked(run), pytest.raises(UsageError, match=holder) as caught, locked(run):
        pass
    assert "wait" in caught.value.hint
    assert not run.path.exists(), "nothing was written into the new directory"


def test_a_refused_writer_does_not_touch_the_lock(tmp_path):
    run = RunDir(tmp_path)
    with locked(run):
        with pytest.raises(UsageError), locked(run):
            pass
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(UsageError), locked(run):
            pass
    assert (tmp_path / ".lock").read_text() == ""


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from opdcl.rundir.layout import RunDir; from opdcl.rundir.lock import locked\n"
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


@pytest.fixture
def left_by_another_machine(tmp_path):
    """A lock file as a process leaves it that was just killed on a machine of another name."""
    file = tmp_path / ".lock"
    file.write_text(json.dumps({"pid": 2**22, "host": f"not-{socket.gethostname()}", "since": "long ago"}))
    return file


@pytest.fixture
def shared_disk(monkeypatch):
    """Treat the disk as one that other machines reach, where an owner counts as dead after half a second."""
    monkeypatch.setattr(lock, "LOCAL", set())
    monkeypatch.setattr(lock, "SILENCE", 0.5)


def test_on_a_local_disk_a_free_lock_is_taken_over_whatever_the_host_was_called(left_by_another_machine):
    """As in a container, which has another name each time it is started."""
    run = RunDir(left_by_another_machine.parent)
    if not lock._is_local(run.path):
        pytest.skip("the temporary folder is not on a local disk")
    with locked(run) as dead:
        assert dead["host"] == f"not-{socket.gethostname()}"


def test_on_a_shared_disk_an_owner_without_a_sign_of_life_is_dead(left_by_another_machine, shared_disk):
    os.utime(left_by_another_machine, (time.time() - 60, time.time() - 60))
    notes = []
    with locked(RunDir(left_by_another_machine.parent), notes.append) as dead:
        assert dead["pid"] == 2**22
    assert notes == []


def test_on_a_shared_disk_one_waits_for_a_sign_of_life(left_by_another_machine, shared_disk):
    notes = []
    with locked(RunDir(left_by_another_machine.parent), notes.append) as dead:
        assert dead["pid"] == 2**22
    (note,) = notes
    assert "was left locked by process" in note


def test_on_a_shared_disk_an_owner_that_gives_a_sign_of_life_keeps_its_lock(
    left_by_another_machine, shared_disk, monkeypatch
):
    monkeypatch.setattr(lock, "SILENCE", 20)
    monkeypatch.setattr(lock, "BEAT", 0.2)
    content, ended = left_by_another_machine.read_text(), threading.Event()
    owner = threading.Thread(target=lock._beat, args=(left_by_another_machine, content, ended))
    owner.start()
    try:
        with pytest.raises(UsageError, match="in use"), locked(RunDir(left_by_another_machine.parent)):
            pass
    finally:
        ended.set()
        owner.join()
    assert left_by_another_machine.read_text() == content


def test_a_time_stamp_that_lies_ahead_does_not_prolong_the_wait(left_by_another_machine, shared_disk):
    os.utime(left_by_another_machine, (time.time() + 30, time.time() + 30))
    started, notes = time.monotonic(), []
    with locked(RunDir(left_by_another_machine.parent), notes.append) as dead:
        assert dead["pid"] == 2**22
    assert 0.5 <= time.monotonic() - started < 20
    assert "waiting 0 s" in notes[0] or "waiting 1 s" in notes[0]


TAKEN = json.dumps({"pid": 7, "host": "another", "since": "later"})


@pytest.mark.parametrize("content", [TAKEN, ""], ids=["by another", "and released"])
def test_an_owner_that_was_taken_over_is_interrupted_and_leaves_the_lock_alone(
    tmp_path, monkeypatch, content
):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    file = tmp_path / ".lock"
    touched = []

    def suspended():
        with locked(RunDir(tmp_path)):
            file.write_text(content)
            touched.append(file.stat().st_mtime_ns)
            for _ in range(2_000):  # until the heartbeat interrupts, which does not shorten a single sleep
                time.sleep(0.01)
            pytest.fail("nothing interrupted the run")

    with pytest.raises(OpdclError, match="taken over by another process"):
        suspended()
    assert (file.read_text(), file.stat().st_mtime_ns) == (content, touched[0])


def test_an_owner_that_was_taken_over_writes_nothing_more(tmp_path):
    """Also where it was not interrupted: between two beats, or because signals are ignored."""
    run = RunDir(tmp_path / "run")
    with locked(run):
        write_json(run.path / "a/b.json", 1)
        (run.path / ".lock").write_text(TAKEN)
        (run.path / "c").mkdir()
        for write in (
            lambda: write_json(run.path / "a/b.json", 2),
            lambda: seal(run.path / "c"),
            lambda: seal_new(run),
        ):
            with pytest.raises(OpdclError, match="taken over by another process"):
                write()
        write_json(tmp_path / "elsewhere.json", 2)
    assert sorted(file.name for file in run.path.rglob("*") if file.is_file()) == [".lock", "b.json"]
    assert json.loads((run.path / "a/b.json").read_text()) == 1
    write_json(run.path / "a/b.json", 3)  # the lock is no longer this process's


def test_a_lock_file_that_cannot_be_read_proves_nothing(tmp_path):
    with locked(RunDir(tmp_path)):
        (tmp_path / ".lock").unlink()
        write_json(tmp_path / "a.json", 1)


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with locked(RunDir(tmp_path)):
        first = (tmp_path / ".lock").stat().st_mtime_ns
        deadline = time.monotonic() + 10
        while (tmp_path / ".lock").stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


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
