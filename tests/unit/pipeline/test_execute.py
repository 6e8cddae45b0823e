"""A run that goes on elsewhere keeps the precision it was begun in, or is refused with the option to add."""

import json
import sys
from pathlib import Path

import pytest

from opdcl.config.load import dump, validate
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.pipeline.defaults import resolve_for_machine, with_dtype
from opdcl.pipeline.execute import execute
from opdcl.pipeline.plan import stage_folder
from opdcl.pipeline.session import command_line
from opdcl.pipeline.sources import Sources
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import RunDir


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
    elsewhere, origins = resolve_for_machine(elsewhere)
    (task,) = Sources().plan(elsewhere, run)
    record = {"status": "running", "fingerprint": task.fingerprint, "inputs": task.inputs}
    stage = stage_folder(run, "finetune")
    write_json(stage.record, record)
    write_atomic(stage.trainer / "checkpoint-1" / "weights", "of step 1")
    seal(stage.trainer / "checkpoint-1")
    write_json(run.config, {"workflow": elsewhere.model_dump(), "origins": origins})
    write_atomic(run.workflow, dump(elsewhere))
    return workflow, run, other


def test_another_automatic_value_is_refused_with_the_option_that_keeps_the_first(begun):
    workflow, run, other = begun
    with pytest.raises(UsageError) as caught:
        execute(workflow, {}, run, Output("quiet"))
    assert "changed: batch_size, dtype" in caught.value.message
    assert f"--set model.dtype={other}" in caught.value.hint
    assert "--set finetune.batch_size=7" in caught.value.hint
    asked = {"model": {"id": workflow.model.id, "dtype": other}}
    asked["finetune"] = {"data": workflow.finetune.data, "batch_size": 7}
    (task,) = Sources().plan(resolve_for_machine(validate(asked))[0], run)
    assert task.action == "resume"


def test_a_run_without_stages_keeps_its_precision_too(tmp_path, tiny_model):
    workflow, run = validate({"model": {"id": str(tiny_model)}}), RunDir(tmp_path / "run")
    write_json(run.config, {"workflow": workflow.model_dump(), "origins": {}})
    write_json(run.manifest, {"device": {"dtype": "float16"}})
    write_json(run.eval_result("base", "instructions"), {"fingerprint": "of another time"})
    with pytest.raises(UsageError, match="begun in float16") as caught:
        execute(workflow, {}, run, Output("quiet"))
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
