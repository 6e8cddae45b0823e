"""A run that goes on elsewhere keeps the precision it was begun in, or is refused with the option to add."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers.command import opdcl, sets
from helpers.tiny import make_project
from safetensors.torch import load_file, save_file

from opdcl.config.load import dump, validate
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.pipeline.defaults import resolve_for_machine, with_dtype
from opdcl.pipeline.execute import command_line, execute
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import stage_folder
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import seal_new


@pytest.fixture
def begun(tmp_path, tiny_model):
    """A workflow, and a run of it that a machine with another automatic dtype and batch has begun."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "What is it?", "answer": "Seven"}))
    tree = {"model": {"id": str(tiny_model)}, "finetune": {"data": str(tmp_path / "rows.jsonl")}}
    workflow, run = validate(tree), RunDir(tmp_path / "run")
    here, _ = resolve_for_machine(workflow)
    other = "float32" if here.model.dtype == "bfloat16" else "bfloat16"
    finetune = workflow.finetune.model_copy(update={"batch_size": 7})
    elsewhere, _ = with_dtype(workflow.model_copy(update={"finetune": finetune}), other, "cuda")
    job = Job(elsewhere, run)
    (task,) = job.plan()
    record = {"status": "running", "fingerprint": task.fingerprint, "inputs": task.inputs}
    stage = stage_folder(run, "finetune")
    write_json(stage.record, record)
    write_atomic(stage.trainer / "checkpoint-1" / "weights", "of step 1")
    seal(stage.trainer / "checkpoint-1")
    write_json(run.config, {"workflow": job.workflow.model_dump(), "origins": job.origins})
    write_atomic(run.workflow, dump(job.workflow))
    return workflow, run, other


def test_another_automatic_value_is_refused_with_the_option_that_keeps_the_first(begun):
    workflow, run, other = begun
    with pytest.raises(UsageError) as caught:
        execute(Job(workflow, run), Output("quiet"))
    assert "changed: batch_size 7 -> 16, dtype" in caught.value.message
    assert f"--set model.dtype={other}" in caught.value.hint
    assert "--set finetune.batch_size=7" in caught.value.hint
    asked = {"model": {"id": workflow.model.id, "dtype": other}}
    asked["finetune"] = {"data": workflow.finetune.data, "batch_size": 7}
    (task,) = Job(validate(asked), run).plan()
    assert task.action == "resume"


def files(run) -> dict[str, bytes]:
    """Return what a run directory holds, without the logs of its attempts."""
    paths = [path for path in run.path.rglob("*") if path.is_file() and path.parent.name != "logs"]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in paths}


def test_a_command_that_is_refused_leaves_the_run_as_it_was(tmp_path, tiny_model):
    """The model's file has been replaced since, which is found once it is loaded."""
    shutil.copytree(tiny_model, tmp_path / "model")
    make_project(tmp_path, tmp_path / "model")
    small = sets("finetune.epochs=1 recover=null eval.retention=[]")
    opdcl("run", "tiny.yaml", "-o", "out", *small, cwd=tmp_path, code=0)
    run, weights = RunDir(tmp_path / "out"), tmp_path / "model" / "model.safetensors"
    before = files(run)
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    for words in (["eval", "out", "--limit", "3"], ["recover", "out", "--prompts", "prompts.jsonl"]):
        refused = opdcl(*words, cwd=tmp_path, code=2)
        assert "are not those that this run began with" in refused.stderr
        assert files(run) == before
    assert opdcl("verify", "out", cwd=tmp_path).returncode == 0
    assert "changed during the run" not in opdcl("report", "out", cwd=tmp_path).stdout


def test_all_weights_are_hashed_once_before_and_once_after_a_run(tmp_path, tiny_model, monkeypatch):
    """However many checkpoints, states and suites there are."""
    hashed = []
    fingerprint = Backbone.fingerprint
    monkeypatch.setattr(Backbone, "fingerprint", lambda self: hashed.append(self) or fingerprint(self))
    make_project(tmp_path, tiny_model)
    settings = sets("finetune.epochs=1 finetune.save_steps=1 eval.limit=2 recover=null")
    opdcl("run", "tiny.yaml", "-o", "out", *settings, cwd=tmp_path, code=0)
    assert len(hashed) == 2
    base = json.loads((tmp_path / "out" / "manifest.json").read_text())["base"]
    assert base["fingerprint_before"] == base["fingerprint_after"]


def test_a_run_without_stages_keeps_its_precision_too(tmp_path, tiny_model):
    workflow, run = validate({"model": {"id": str(tiny_model)}}), RunDir(tmp_path / "run")
    write_json(run.config, {"workflow": workflow.model_dump(), "origins": {}})
    write_json(run.manifest, {"device": {"dtype": "float16"}})
    result = {"metric": "acc", "metrics": {"acc": 0.5}, "n": 2, "fingerprint": "of another time"}
    write_json(run.eval_result("base", "instructions"), result)
    seal_new(run)
    with pytest.raises(UsageError, match="started in float16") as caught:
        execute(Job(workflow, run), Output("quiet"))
    assert "--set model.dtype=float16" in caught.value.hint


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/opdcl", "eval", "my run"], "opdcl eval 'my run'"),
        (["/lib/opdcl/__main__.py", "run", "quickstart"], "opdcl run quickstart"),
        (["ipykernel_launcher.py", "-f", "kernel.json"], "opdcl run runs/x/workflow.yaml -o runs/x"),
        (["study.py"], "opdcl run runs/x/workflow.yaml -o runs/x"),
    ],
)
def test_a_run_records_a_command_that_can_be_typed(monkeypatch, argv, command):
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line(RunDir(Path("runs/x"))) == command


def test_a_recovery_that_keeps_the_tuned_adapter_says_so_once(tmp_path, tiny_model):
    """Steps of this size lead away from both teachers, so none is nearer than step 0."""
    make_project(tmp_path, tiny_model)
    harm = "recover.start=1 recover.learning_rate=0.9 recover.health=false"
    short = "recover.steps=4 recover.validate_every=4 finetune.epochs=1 eval.retention=[] eval.limit=2"
    done = opdcl("run", "tiny.yaml", "-o", "out", *sets(harm, short), cwd=tmp_path, code=0)
    said = "Recovered is the tuned adapter: no training step came nearer to the teachers on held-out prompts."
    assert [line for line in done.stderr.splitlines() if said in line] == [f"note: {said}"]
