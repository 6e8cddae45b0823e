"""The run directory: files appear whole or not at all, one writer at a time, and a crash costs little."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from opdcl.errors import UsageError
from opdcl.rundir.files import folder_appears_whole, read_json, read_jsonl, write_atomic, write_json
from opdcl.rundir.layout import RunDir, StageDir
from opdcl.rundir.seals import seal


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_write_atomic_makes_the_folder_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "old")
    write_atomic(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert files(tmp_path) == {"a", "a/b.txt"}


def test_a_write_that_the_system_cuts_off_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_atomic(path, b"n" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert files(tmp_path) == {"state.json"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_what_is_not_json_is_refused_and_leaves_the_old_file(tmp_path, value):
    path = tmp_path / "metrics.json"
    write_json(path, {"loss": 1.5})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, value)
    assert read_json(path) == {"loss": 1.5}
    assert files(tmp_path) == {"metrics.json"}


def test_a_folder_appears_with_all_its_files(tmp_path):
    target = tmp_path / "adapter"
    with folder_appears_whole(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("1")
        assert not target.exists()
    assert files(tmp_path) == {"adapter", "adapter/inner", "adapter/inner/weights"}


def test_a_failure_inside_leaves_the_old_folder_and_no_trace_of_the_new(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "weights").write_text("old")

    def fail_halfway() -> None:
        with folder_appears_whole(target) as folder:
            (folder / "weights").write_text("new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert (target / "weights").read_text() == "old"
    assert files(tmp_path) == {"adapter", "adapter/weights"}


def test_a_folder_replaces_the_old_one_entirely(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "left-over").write_text("old")
    with folder_appears_whole(target) as folder:
        (folder / "weights").write_text("new")
    assert files(target) == {"weights"}


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json does not exist"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_second_owner_is_refused_while_the_first_lives(tmp_path):
    run = RunDir(tmp_path / "run")
    with run.lock(), pytest.raises(UsageError, match=f"in use by process {os.getpid()} "), run.lock():
        pass
    assert (run.path / ".lock").read_text() == ""


def test_a_refused_owner_leaves_the_lock_to_its_holder(tmp_path):
    run = RunDir(tmp_path)
    with run.lock():
        with pytest.raises(UsageError), run.lock():
            pass
        assert (tmp_path / ".lock").exists()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from opdcl.rundir.layout import RunDir\n"
        "with RunDir(Path(sys.argv[1])).lock(): os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == 9
    assert (tmp_path / ".lock").exists()
    with RunDir(tmp_path).lock() as dead:
        assert dead["pid"] != os.getpid()
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / ".lock").read_text() == ""
    with RunDir(tmp_path).lock() as dead:
        assert dead is None


def test_the_lock_of_another_machine_is_respected(tmp_path):
    (tmp_path / ".lock").write_text(
        json.dumps({"pid": 2**22, "host": f"not-{socket.gethostname()}", "since": "long ago"})
    )
    with pytest.raises(UsageError, match="in use") as caught, RunDir(tmp_path).lock():
        pass
    assert str(tmp_path / ".lock") in caught.value.hint


def test_the_lock_is_released_when_the_work_fails(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(RuntimeError), run.lock():
        raise RuntimeError
    with run.lock():
        pass


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2 is not valid JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_a_separator_inside_a_string_does_not_end_the_line(tmp_path, separator):
    path = tmp_path / "samples.jsonl"
    rows = [{"answer": f"one{separator}two"}, {"answer": "three"}]
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    assert read_jsonl(path) == rows


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path):
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_the_last_checkpoint_is_the_newest_whole_one(tmp_path):
    stage = StageDir(tmp_path / "02-recover")
    assert stage.last_checkpoint() is None
    for step, complete in ((8, True), (16, True), (100, False)):
        folder = stage.trainer / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        if complete:
            seal(folder)
    assert stage.last_checkpoint() == stage.trainer / "checkpoint-16"  # and not -8, as the alphabet has it
    (stage.trainer / "checkpoint-16" / "adapter_model.safetensors").write_bytes(b"weight")
    assert stage.last_checkpoint() == stage.trainer / "checkpoint-8"


def test_a_stage_that_has_not_started_has_no_state(tmp_path):
    stage = RunDir(tmp_path).stage(1, "finetune")
    assert stage.path == tmp_path / "stages" / "01-finetune"
    assert stage.state() == {}
    assert RunDir(tmp_path).find_stage("finetune") is None


def test_attempts_are_logged_one_after_the_other(tmp_path):
    run = RunDir(tmp_path)
    for number in (1, 2):
        log = run.new_log()
        assert log.name == f"attempt_{number}.log"
        log.parent.mkdir(exist_ok=True)
        log.touch()
