"""A run without its checkpoints: whatever could be done with it can still be done."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.command import opdcl

from opdcl.cli import screen
from opdcl.cli.clean import clean
from opdcl.rundir.layout import RunDir
from opdcl.rundir.lock import locked


def test_a_cleaned_run_can_do_what_it_could(finished, monkeypatch, tmp_path):
    project, run = finished.parent, RunDir(finished.parent / "cleaned")
    monkeypatch.chdir(project)
    shutil.copytree(finished, run.path)
    folders = [stage.trainer for stage in run.stages()]
    report = opdcl("report", "cleaned", "--json").stdout
    assert "nobody can be asked" in opdcl("clean", "cleaned").stderr
    kept = json.loads(opdcl("clean", "cleaned", "--dry-run", "--yes", "--json").stdout)
    assert (kept["deleted"], [folder.is_dir() for folder in folders]) == (False, [True, True])
    with locked(run):
        assert "is in use" in opdcl("clean", "cleaned", "--yes").stderr
    done = opdcl("clean", "cleaned", "--yes")
    assert done.stdout.endswith(" MiB were deleted\n"), done.stderr
    assert kept["bytes"] > 0 == sum(folder.exists() for folder in folders)
    assert opdcl("report", "cleaned", "--json").stdout == report
    size = ["--set", "eval.max_new_tokens=4", "--set", "eval.closeness=null", "--limit", "2"]
    for words in (
        ["verify", "cleaned"],
        ["chat", "cleaned", "Who?"],
        ["export", "cleaned", "-o", tmp_path / "model"],
        ["run", "tiny.yaml", "-o", "cleaned"],
        ["eval", "cleaned", *size, "--data", "questions=rows.jsonl"],
        ["recover", "cleaned", "-o", "second", "--steps", "2"],
        ["clean", "cleaned", "--yes"],
    ):
        did = opdcl(*words)
        assert did.returncode == 0, f"{words}: {did.stderr}"


def test_clean_asks_on_a_terminal(finished, tmp_path, monkeypatch, capsys):
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished, run.path)
    screen.reset()
    for typed, stays in (("n\n", True), ("\n", True), ("yes\n", False)):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        clean(run.path)
        assert [stage.trainer.exists() for stage in run.stages()] == [stays, stays]
        assert ("can be deleted" in capsys.readouterr().out) == stays


def test_an_unfinished_run_keeps_its_checkpoints(finished, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished, run.path)
    record = run.stages()[1].record
    record.write_text(record.read_text().replace('"status": "done"', '"status": "running"'))
    assert f"finish it first: opdcl run {run.workflow} -o" in opdcl("clean", run.path, "--yes").stderr
    assert run.stages()[0].trainer.exists()


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x")])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_may_be_the_only_copy_stays(finished, tmp_path, spoil, stage):
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished, run.path)
    adapter = run.stages()[stage].adapter / "adapter_model.safetensors"
    whole = adapter.read_bytes()
    spoil(adapter)
    said = opdcl("clean", run.path, "--yes")
    assert said.returncode == 2
    assert all(each.trainer.exists() for each in run.stages())
    if copy := re.search(r"hint: cp (\S+) (\S+)", said.stderr):
        shutil.copy(*copy.groups())
        assert adapter.read_bytes() == whole
        assert opdcl("clean", run.path, "--yes").returncode == 0
    assert copy or stage == 0, said.stderr


def test_a_damaged_result_keeps_the_checkpoints(finished, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished, run.path)
    file = next(run.evals.glob("*/*.json"))
    file.write_text(file.read_text() + " ")
    assert "has changed since opdcl wrote it" in opdcl("clean", run.path, "--yes").stderr
    assert run.stages()[0].trainer.exists()
