"""A model without a fine-tune is measured alone: its scores, and nothing that takes two models."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.adapters import made_by_peft
from helpers.command import opdcl
from helpers.tiny import make_model

from opdcl.rundir.layout import RunDir

MEASURE = ("--limit", "4", "--set", "eval.max_new_tokens=6", "--set", "model.dtype=float32")
BOTH = ("--retention", "instructions", "--domain", "rows.jsonl", *MEASURE)


@pytest.fixture
def project(tiny_folder, tiny_model):
    """A folder with a model `base`, and rows."""
    shutil.copytree(tiny_model, tiny_folder / "base")
    return tiny_folder


def test_a_model_is_measured_alone_and_nothing_is_compared(project):
    done = opdcl("eval", "base", *BOTH, "--json", code=0)
    run, found = RunDir(project / "runs" / "base"), json.loads(done.stdout)
    assert {str(p.relative_to(run.evals)) for p in run.evals.glob("*/*.json")} == {
        "base/instructions.json",
        "base/rows.json",
    }
    assert found["verdict"].startswith("Base alone: instruction following ")
    assert found["alone"] is True
    assert found["status"] == "base alone"
    assert found["recovery"] is None
    assert found["domain_retention"] is None
    assert found["closeness"] is None
    for page in run.reports:
        text = page.read_text(encoding="utf-8")
        assert "Base alone" in text
        assert "recovered |" not in text
        assert "Recovery R" not in text
        assert "A LoRA adapter" not in text
    shown = opdcl("report", "runs/base")
    assert shown.stdout.splitlines()[0].startswith("Base alone: ")
    assert "base" in shown.stdout.splitlines()[2]
    assert "tuned" not in shown.stdout
    assert "next: opdcl finetune ROWS.jsonl --base" in shown.stderr
    assert "all " in opdcl("verify", "runs/base").stdout


def test_what_takes_two_models_is_refused_before_anything_is_written(project):
    gated = opdcl("eval", "base", *MEASURE, "--max-drop", "5", code=2)
    assert "a gate needs two models" in gated.stderr
    assert "--base BASE" in gated.stderr
    beside = opdcl("eval", "smollm2-135m", "--base", "base", *MEASURE, code=2)
    assert "smollm2-135m cannot be compared with a base" in beside.stderr
    assert not Path("runs").exists()


def test_an_adapter_joins_the_run_of_its_base_and_a_whole_model_does_not(project, whole_model, loaded):
    assert opdcl("eval", "base", *BOTH, "-o", "run").returncode == 0
    shutil.copytree(whole_model, "mine")
    refused = opdcl("eval", "mine", "--base", "base", "-o", "run", code=2)
    assert "run is a run without a tuned model" in refused.stderr
    made_by_peft(loaded, project / "adapter", r=4, target_modules=["q_proj"])
    done = opdcl(
        "eval", "adapter", "--base", "base", *MEASURE, "--set", "eval.closeness=null", "-o", "run", code=0
    )
    assert "eval instructions base: passed" not in done.stderr, "base was measured already"
    assert {p.parent.name for p in RunDir(Path("run")).evals.glob("*/rows.json")} == {"base", "tuned"}
    assert "Base alone" not in done.stdout


def test_two_models_of_other_shapes_are_compared_prompt_by_prompt(project):
    make_model(project / "wider", intermediate_size=112)
    assert "opdcl eval MODEL measures each of them alone" in opdcl("eval", "wider", "--base", "base").stderr
    for name in ("base", "wider"):
        assert opdcl("eval", name, *BOTH).returncode == 0
    done = opdcl("compare", "runs/base", "runs/wider", "--json", code=0)
    found = json.loads(done.stdout)
    for arm, name in zip(found["arms"], ("base", "wider"), strict=True):
        alone = json.loads(opdcl("report", f"runs/{name}", "--json").stdout)
        assert arm["retention"]["value"] == pytest.approx(alone["suites"]["instructions"]["base"]["value"])
        assert arm["status"] == "base alone"
    assert {*found["against_first"][0]} >= {"retention", "domain"}
    assert not any("not finished" in note for note in found["notes"])
