"""A run without its checkpoints: whatever could be done with it can still be done."""

import io
import json
import re
import shutil
import sys

from helpers.command import opdcl

from opdcl.cli import screen
from opdcl.cli.runs import clean
from opdcl.rundir.layout import RunDir, locked


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
        opdcl(*words, code=0)


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


def test_what_may_be_the_only_copy_stays(finished, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished, run.path)
    for number, stage in enumerate(run.stages()):
        adapter = stage.adapter / "adapter_model.safetensors"
        whole = adapter.read_bytes()
        for spoilt in (None, whole[:-1] + b"x"):
            adapter.write_bytes(spoilt) if spoilt else adapter.unlink()
            said = opdcl("clean", run.path, "--yes", code=2)
            assert all(each.trainer.exists() for each in run.stages())
            copy = re.search(r"hint: cp (\S+) (\S+)", said.stderr)
            assert copy or number == 0, said.stderr
            if copy:
                shutil.copy(*copy.groups())
                assert adapter.read_bytes() == whole
            adapter.write_bytes(whole)
    result = next(run.evals.glob("*/*.json"))
    result.write_text(result.read_text() + " ")
    assert "has changed since opdcl wrote it" in opdcl("clean", run.path, "--yes").stderr
    assert run.stages()[0].trainer.exists()
