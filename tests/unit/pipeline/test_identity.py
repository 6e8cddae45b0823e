"""Results are shared only where all that they depend on is the same: contents and settings, not names."""

import json
import shutil

import pytest
from helpers.command import opdcl, sets
from helpers.tiny import make_project
from safetensors.torch import load_file, save_file

from opdcl.config.load import load
from opdcl.pipeline.job import Job
from opdcl.rundir.files import read_json, read_jsonl, write_json
from opdcl.rundir.layout import RunDir

SMALL = sets("recover=null finetune.epochs=1")
MEASURED = sets("eval.limit=3 eval.closeness=null")


@pytest.fixture
def project(tiny_model, tmp_path, monkeypatch):
    """A project whose base is a folder of its own."""
    monkeypatch.chdir(make_project(tmp_path, tmp_path / "model"))
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path


def replace_weights(project) -> None:
    """Put other weights under the same path, as a new checkpoint of a model does."""
    file = project / "model" / "model.safetensors"
    weights = {name: weight * 1.1 for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def tiny(*words: str):
    return opdcl("run", "tiny.yaml", *SMALL, *words)


def test_nothing_is_taken_from_a_run_whose_base_had_other_weights_under_the_same_name(project):
    (project / "one.yaml").write_text("arms: {a: {}, b: {eval: {max_new_tokens: 11}}}")
    (project / "two.yaml").write_text("arms: {c: {}, d: {eval: {max_new_tokens: 11}}}")
    assert tiny("one.yaml", "-o", "runs", *MEASURED).returncode == 0
    replace_weights(project)
    refused = opdcl("recover", "runs/a", "--prompts", "prompts.jsonl", "-o", "second", code=2)
    assert "the weights of" in refused.stderr
    assert "are not those that runs/a was made with" in refused.stderr
    assert not RunDir(project / "second").is_run()
    made = tiny("two.yaml", "-o", "runs", *MEASURED)
    assert made.returncode == 0, made.stderr
    assert "nothing is taken from a: its base, of the same name, had other weights" in made.stderr
    a, c, d = (RunDir(project / "runs" / name) for name in "acd")
    assert a.stage_record("finetune")["adapter_sha256"] != c.stage_record("finetune")["adapter_sha256"]
    assert c.stage_record("finetune") == d.stage_record("finetune"), "these two have one base"
    responses = []
    for run in (a, c):
        responses.append([row["response"] for row in read_jsonl(run.eval_samples("base", "instructions"))])
    assert responses[0] != responses[1]


def test_a_run_that_has_not_recorded_its_base_gives_nothing(project):
    alone = sets("eval=null")
    assert tiny("-o", "runs/a", *alone).returncode == 0
    manifest = RunDir(project / "runs" / "a").manifest
    write_json(manifest, read_json(manifest) | {"base": {}})
    (project / "two.yaml").write_text("arms: {c: {}}")
    made = tiny("two.yaml", "-o", "runs", *alone)
    assert "nothing is taken from a: it has not recorded the weights of its base" in made.stderr


def test_a_teacher_that_lies_here_is_known_by_its_weights(project):
    teacher = json.dumps({"t": {"kind": "model", "model": {"id": str(project / "model")}}})
    found = []
    for _ in range(2):
        workflow, _ = load(["tiny.yaml"], [f"recover.teachers={teacher}", "recover.domain_teacher=t"])
        found.append(Job(workflow, RunDir("run")).hashes["recover.teachers.t.model"])
        replace_weights(project)
    assert found[0] != found[1]
