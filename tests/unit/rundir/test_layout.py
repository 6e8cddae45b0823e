"""The run directory: complete files, one writer at a time, crashes cost little, other folders are refused."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.command import ROOT, opdcl

from opdcl.errors import UsageError
from opdcl.rundir.files import folder_appears_whole, read_json, read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import RunDir, open_run
from opdcl.rundir.stage import StageDir


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_write_atomic_creates_the_folder_and_replaces_an_old_file(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "old")
    write_atomic(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert files(tmp_path) == {"a", "a/b.txt"}


def test_a_write_that_the_system_interrupts_leaves_the_old_file(tmp_path):
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
def test_values_that_json_lacks_are_refused_and_the_old_file_stays(tmp_path, value):
    path = tmp_path / "metrics.json"
    write_json(path, {"loss": 1.5})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, value)
    assert read_json(path) == {"loss": 1.5}
    assert files(tmp_path) == {"metrics.json"}


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "adapter"
    with folder_appears_whole(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("1")
        assert not target.exists()
    assert files(tmp_path) == {"adapter", "adapter/inner", "adapter/inner/weights"}


def test_a_failure_keeps_the_old_folder_and_success_replaces_it(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "old-weights").write_text("old")

    def fail_halfway() -> None:
        with folder_appears_whole(target) as folder:
            (folder / "weights").write_text("new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert files(tmp_path) == {"adapter", "adapter/old-weights"}
    with folder_appears_whole(target) as folder:
        (folder / "weights").write_text("new")
    assert files(tmp_path) == {"adapter", "adapter/weights"}


def test_what_a_killed_process_left_of_a_folder_is_removed_a_day_later(tmp_path):
    kept = [".adapter.backup", ".adapter.opdcl-new", "adapter"]
    for name in (*kept[:2], ".adapter.opdcl-old"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0 if name != ".adapter.opdcl-new" else time.time()))
    with folder_appears_whole(tmp_path / "adapter"):
        pass
    assert files(tmp_path) == {*kept}


KILLED_HALFWAY = """
import os, signal, sys
from pathlib import Path
from opdcl.rundir.files import folder_appears_whole
with folder_appears_whole(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_when_any_folder_is_made_there(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED_HALFWAY, str(tmp_path / "one")], cwd=ROOT, check=False)
    (leftover,) = files(tmp_path) - {f"{name}/weights" for name in files(tmp_path)}
    assert leftover.startswith(".one.opdcl-")
    with folder_appears_whole(tmp_path / "another") as folder:
        (folder / "weights").write_text("whole")
    assert files(tmp_path) == {"another", "another/weights"}


def test_a_folder_that_is_being_made_is_left_alone(tmp_path):
    with folder_appears_whole(tmp_path / "one") as one:
        (one / "weights").write_text("1")
        with folder_appears_whole(tmp_path / "two") as two, folder_appears_whole(tmp_path / "one") as again:
            (two / "weights").write_text("2")
            (again / "weights").write_text("3")
        assert (one / "weights").read_text() == "1"
    assert (tmp_path / "one/weights").read_text() == "1"
    assert files(tmp_path) == {"one", "one/weights", "two", "two/weights"}


def test_a_folder_that_a_slow_process_is_still_filling_is_kept_whatever_its_age(tmp_path):
    """Its time may be that of another clock."""
    with folder_appears_whole(tmp_path / "model") as slow:
        (slow / "weights").write_text("1")
        os.utime(slow, (0, 0))
        with folder_appears_whole(tmp_path / "model") as quick:
            (quick / "weights").write_text("2")
        assert (tmp_path / "model" / "weights").read_text() == "2"
        assert slow.exists()
    assert (tmp_path / "model" / "weights").read_text() == "1"
    assert files(tmp_path) == {"model", "model/weights"}


def test_a_whole_folder_that_others_may_be_reading_is_not_replaced(tmp_path):
    target = tmp_path / "model"
    with folder_appears_whole(target, keep="done") as second:
        with folder_appears_whole(target, keep="done") as first:
            (first / "done").write_text("first")
        (second / "done").write_text("second")
    assert (target / "done").read_text() == "first"
    assert files(tmp_path) == {"model", "model/done"}
    (target / "done").unlink()  # a folder that is not whole is replaced
    (target / "half").write_text("")
    with folder_appears_whole(target, keep="done") as third:
        (third / "done").write_text("third")
    assert files(tmp_path) == {"model", "model/done"}


def test_processes_that_make_the_same_folder_at_once_all_find_it_whole(tmp_path):
    """With slow renames, as on a network disk, makers met and readers found the folder gone."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from opdcl.rundir.files import folder_appears_whole\n"
        "rename = os.rename\n"
        "def slowly(a, b): time.sleep(0.002); rename(a, b); time.sleep(0.002)\n"
        "os.rename = os.replace = slowly\n"
        "target = Path(sys.argv[1])\n"
        "for _ in range(20):\n"
        "    with folder_appears_whole(target, keep='done') as folder: (folder / 'done').write_text('1')\n"
        "    assert (target / 'done').read_text() == '1'\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    makers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [maker.communicate()[1] for maker in makers]
    assert said == ["", "", ""]
    assert files(tmp_path) == {"model", "model/done"}


def test_a_run_in_the_home_folder_can_be_named_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunDir(Path("~/runs/mine")).path == tmp_path / "runs" / "mine"
    assert RunDir(Path("~")).path == tmp_path
    assert RunDir(Path("~nobody-of-this-name/x")).path == Path("~nobody-of-this-name/x")


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_files_get_the_mode_that_the_umask_allows(tmp_path, umask, file, folder):
    target = tmp_path / "model"
    previous = os.umask(umask)
    try:
        with folder_appears_whole(target) as temporary:
            (temporary / "inner").mkdir(mode=0o700)
            # safetensors writes its files like this, for their owner only
            os.close(os.open(temporary / "inner" / "model.safetensors", os.O_CREAT, 0o600))
        write_atomic(tmp_path / "config.json", "{}")
        assert os.umask(umask) == umask, "the umask of the process stays"
    finally:
        os.umask(previous)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "config.json", target, *target.rglob("*"))}
    assert modes == {"config.json": file, "model": folder, "inner": folder, "model.safetensors": file}


def test_the_error_names_a_missing_or_broken_file(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json does not exist"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_truncated_last_line_is_ignored_and_a_broken_one_before_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_jsonl(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2 is not valid JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_a_separator_inside_a_string_does_not_end_the_line(tmp_path, separator):
    path = tmp_path / "samples.jsonl"
    rows = [{"answer": f"one{separator}two"}, {"answer": "three"}]
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    assert read_jsonl(path) == rows


def test_the_last_checkpoint_is_the_newest_undamaged_one(tmp_path):
    stage = StageDir(tmp_path / "02-recover")
    assert stage.last_checkpoint() is None
    for step, complete in ((8, True), (16, True), (100, False)):
        folder = stage.trainer / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        if complete:
            seal(folder)
    assert stage.last_checkpoint() == stage.trainer / "checkpoint-16"  # -8 would be last alphabetically
    (stage.trainer / "checkpoint-16" / "adapter_model.safetensors").write_bytes(b"weight")
    assert stage.last_checkpoint() == stage.trainer / "checkpoint-8"


def test_a_stage_that_has_not_started_has_no_state(tmp_path):
    stage = RunDir(tmp_path).stage(1, "finetune")
    assert stage.path == tmp_path / "stages" / "01-finetune"
    assert stage.state() == {}
    assert RunDir(tmp_path).find_stage("finetune") is None


def test_each_attempt_has_its_own_log(tmp_path):
    run = RunDir(tmp_path)
    for number in (1, 2):
        log = run.new_log()
        assert log.name == f"attempt_{number}.log"
        log.parent.mkdir(exist_ok=True)
        log.touch()


@pytest.fixture
def model_folder(tmp_path):
    """A model as `save_pretrained` writes it, with a model card."""
    folder = tmp_path / "model"
    write_json(folder / "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    (folder / "README.md").write_text("# The author's own card")
    return folder


def test_a_run_directory_is_recognized_by_its_own_config(tmp_path, model_folder):
    run = RunDir(tmp_path / "run")
    assert not run.is_run()
    assert run.settings() == {}
    write_json(run.config, {"workflow": {"name": "mine"}, "origins": {}})
    assert open_run(run.path) == run
    assert run.settings() == {"name": "mine"}
    write_json(tmp_path / "adapter" / "adapter_config.json", {"r": 8})
    (tmp_path / "compare.html").touch()
    for name, message in (
        ("compare.html", "compare.html is not a run directory"),
        ("model", "model is a model folder, not a run directory"),
        ("adapter", "adapter is an adapter folder, not a run directory"),
        ("nowhere", "nowhere is not a run directory"),
    ):
        with pytest.raises(UsageError, match=message):
            open_run(tmp_path / name)


def test_a_run_with_a_damaged_config_is_still_a_run_and_a_stranger_s_folder_is_none(tmp_path):
    run = RunDir(tmp_path)
    run.config.write_text('{"workflow": ')
    assert not run.is_run()
    run.workflow.write_text("name: mine")
    assert run.is_run()
    with pytest.raises(UsageError, match="is not valid JSON"):
        open_run(tmp_path).settings()


@pytest.mark.parametrize("verb", ["report", "recover"])
def test_a_model_folder_is_refused_and_nothing_is_written(model_folder, verb):
    before = {path: path.read_bytes() for path in model_folder.iterdir()}
    done = opdcl(verb, model_folder, code=2)
    reason = "is a model folder" if verb == "report" else "is a whole model, which does not name its base"
    assert f"{model_folder} {reason}" in done.stderr
    assert {path: path.read_bytes() for path in model_folder.iterdir()} == before
