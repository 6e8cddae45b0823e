"""Scores come from the samples, so samples that contradict the result beside them are a fault."""

import json

import pytest
from helpers.synthetic import STRICT, alter, measure_states, workflow, write

from opdcl.results.render import summarise
from opdcl.rundir.layout import RunDir


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    write(run.config, {"workflow": workflow(), "origins": {}})
    measure_states(run, "instructions", (32, 8, 30))
    return run


def faults(run):
    return " ".join(summarise(run)["faults"])


def edit_samples(run, change):
    file = run.eval_samples("tuned", "instructions")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    write(file, change(rows))


def test_results_that_agree_with_their_samples_have_no_fault(run):
    assert faults(run) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:-1], "there are 39 answers, and its result was made from 40"),
        (lambda rows: [r | {"scores": {STRICT: True}} for r in rows], f"give {STRICT} as 1, and its result"),
        (
            lambda rows: [r | {"scores": r["scores"] | {"inst_level_strict_acc": [False]}} for r in rows],
            "give inst_level_strict_acc as 0, and its result",
        ),
    ],
    ids=["cut off", "headline score", "further score"],
)
def test_edited_samples_are_a_fault_and_their_state_is_not_measured(run, change, said):
    edit_samples(run, change)
    assert said in faults(run)
    assert summarise(run)["suites"]["instructions"]["tuned"] == {}


def test_an_edited_result_is_a_fault(run):
    alter(run.eval_result("recovered", "instructions"), metrics={STRICT: 0.99})
    assert "recovered: its answers give" in faults(run)
