"""Closeness to base in a run: planned, listed, skipped, measured again, and on prompts of the user's own."""

import json

import pytest
from helpers.adapters import made_by_peft
from helpers.command import opdcl, sets

from opdcl.config.load import load
from opdcl.errors import UsageError
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

STATES = ("base", "tuned", "recovered")


@pytest.fixture
def project(tiny_folder):
    asked = [{"prompt": f"Was ist {i} mal {i}?", "group": "sums", "cluster": f"c{i // 2}"} for i in range(5)]
    (tiny_folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return tiny_folder


def words(*more):
    return sets("eval.retention=[] eval.domain=[]", *more)


def test_a_run_measures_closeness_on_own_prompts_once(project):
    command = ("run", "tiny.yaml", "-o", "out", *words("eval.closeness=mine.jsonl"))
    plan = opdcl(*command, "--dry-run", "--json", code=0)
    planned = [task for task in json.loads(plan.stdout)["tasks"] if task["stage"] == "eval"]
    assert [(task["suite"], task["state"], task["action"]) for task in planned] == [
        ("closeness", state, "run") for state in STATES
    ]
    done = opdcl(*command, "--json", code=0)
    run, found = RunDir(project / "out"), json.loads(done.stdout)["closeness"]
    rows = read_jsonl(run.eval_samples("recovered", "closeness"))
    assert [row["prompt"] for row in rows] == [f"Was ist {i} mal {i}?" for i in range(5)]
    assert {row["group"] for row in rows} == {"sums"}
    assert found["n"] == 5
    assert found["base"]["distance"]["value"] < found["recovered"]["distance"]["value"]
    assert "all " in opdcl("verify", "out").stdout
    assert "nothing to do: all stages are finished" in opdcl(*command).stderr

    (project / "mine.jsonl").write_text('{"prompt": "Hallo!"}\n{"prompt": "Wer bist du?"}\n')
    again = opdcl(*command, code=0)
    assert "finetune: skipped, done" in again.stderr
    assert read_json(run.eval_result("tuned", "closeness"))["n"] == 2


def test_an_adapter_made_elsewhere_gets_its_distance_and_no_c(project, loaded):
    made_by_peft(loaded, project / "elsewhere", r=4, lora_alpha=64)
    done = opdcl("eval", "elsewhere", *words("eval.closeness=mine.jsonl", "eval.max_new_tokens=6"), code=0)
    assert "eval closeness tuned: distance" in done.stderr
    assert "distance to base" in done.stdout
    summary = json.loads(opdcl("report", "runs/elsewhere", "--json").stdout)["closeness"]
    assert summary["value"] is None
    assert summary["why"] == "recovered not measured"
    assert summary["tuned"]["distance"]["value"] > 0.001
    assert summary["recovered"] == {}


def test_answers_of_base_that_are_gone_are_told(project):
    command = ("run", "tiny.yaml", "-o", "out", *words("eval.closeness=mine.jsonl", "recover=null"))
    assert opdcl(*command).returncode == 0
    run = RunDir(project / "out")
    run.eval_samples("base", "closeness").unlink()
    run.eval_result("tuned", "closeness").unlink()
    refused = opdcl(*command, code=2)
    assert "closeness.samples.jsonl is missing" in refused.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "No question."}\n', "mine.jsonl:1: plain text cannot be a prompt"),
        (json.dumps({"prompt": "word " * 900}), "mine.jsonl:1: the prompt has"),
    ],
)
def test_a_malformed_file_is_refused_before_anything_runs(project, text, message):
    (project / "mine.jsonl").write_text(text)
    refused = opdcl("run", "tiny.yaml", "-o", "out", *words("eval.closeness=mine.jsonl"), code=2)
    assert message in refused.stderr
    assert not RunDir(project / "out").stages()


@pytest.mark.parametrize("key", ["recover.general", "recover.domain", "finetune.data"])
def test_prompts_that_another_stage_learns_from_are_refused(project, key):
    with pytest.raises(UsageError, match=f"{key} learns from the prompts of eval.closeness"):
        load(["tiny.yaml"], [f"{key}=mine.jsonl", "eval.closeness=mine.jsonl"])


def test_no_suite_takes_the_name(project):
    with pytest.raises(UsageError, match="closeness is no suite"):
        load(["tiny.yaml"], ["eval.control=[closeness]"])


def test_the_quick_prompts_are_the_first_of_all():
    from opdcl.data.rows import load_rows

    quick, whole = load_rows("requests_quick"), load_rows("requests")
    assert [row.prompt for row in quick] == [row.prompt for row in whole[:40]]
