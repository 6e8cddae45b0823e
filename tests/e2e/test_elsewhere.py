"""A run is continued from other folders than the one where it began."""

import json
import shlex
import shutil

import pytest
from helpers.command import opdcl, sets
from helpers.interrupts import interrupted_when
from helpers.tiny import make_project

TINY = ("finetune.lora.r=4", "finetune.batch_size=4", "finetune.save_steps=3", "model.dtype=float32")
SHORT = ("recover.rollouts=2", "recover.max_new_tokens=6", "recover.validation_prompts=2")


@pytest.fixture
def begun(tmp_path, tiny_model):
    """A folder with rows, prompts, a model, and a fine-tune that was interrupted; all paths were relative."""
    folder = tmp_path / "begun"
    folder.mkdir()
    make_project(folder, tiny_model)
    shutil.copytree(tiny_model, folder / "model")
    words = ["rows.jsonl", "--base", "model", "-o", "runs/mine", "--epochs", "2"]
    with interrupted_when((folder / "runs/mine/stages/01-finetune/trainer/checkpoint-3").exists):
        stopped = opdcl("finetune", *words, *sets(*TINY), cwd=folder)
    assert stopped.returncode == 130, stopped.stderr
    return folder


def test_every_later_command_works_in_another_folder(begun, tmp_path):
    for name in ("second", "third"):
        (tmp_path / name).mkdir()
    for name in ("prompts.jsonl", "rows.jsonl"):
        shutil.copy(begun / name, tmp_path / "second")
    run = "../begun/runs/mine"

    def follow(*words: object, folder: str = "second") -> str:
        done = opdcl(*words, cwd=tmp_path / folder, code=0)
        return done.stderr

    # What the report of the unfinished run prints is typed as it stands.
    (line,) = [line for line in follow("report", run).splitlines() if "next: " in line]
    resumed = follow(*shlex.split(line.split("next: opdcl ")[1]))
    assert "resuming from step" in resumed
    assert "next: opdcl eval ../begun/runs/mine" in resumed  # the fine-tune replayed
    recovered = follow("recover", run, "--prompts", "prompts.jsonl", "--steps", "2", *sets(*SHORT))
    assert "finetune: skipped" in recovered
    named = ["--set", "eval.retention=[]", "--set", "eval.domain=[asked]", "--set", "eval.max_new_tokens=8"]
    follow("eval", run, "--data", "asked=rows.jsonl", "--limit", "4", *named)
    plan = opdcl("eval", run, "--limit", "4", "--dry-run", "--json", cwd=tmp_path / "third")
    assert {task["action"] for task in json.loads(plan.stdout)["tasks"]} == {"skip"}, plan.stderr
    follow("run", f"{run}/workflow.yaml", "-o", run, folder="third")
    follow("verify", run, folder="third")
    report = (begun / "runs/mine/report.md").read_text()
    assert report.startswith("# mine")  # the name of the directory
    for words in ("opdcl finetune rows.jsonl --base", f"opdcl recover {run} --prompts", f"opdcl eval {run}"):
        assert words in report
