"""Multiple choice beside written answers, in one call: the scores are lm-eval's own, for every state."""

import json
import shutil

import pytest
from helpers.command import ROOT, opdcl
from helpers.likelihood import ROWS, check_against, reference, write_rows

from opdcl.results.document import summarise
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

OPTIONS = ["--retention", f"ifeval,{','.join(ROWS)}", "--set", "eval.limit=null", "--set", "eval.domain=[]"]
OPTIONS += ["--set", "eval.closeness=null"]


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
    """A folder with a finished run and the files of all suites."""
    folder = tmp_path_factory.mktemp("likelihood")
    shutil.copytree(finished, folder / "run")
    official = (ROOT / "evals" / "ifeval" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    write_rows(folder, "ifeval", [json.loads(line) for line in official[:3]])
    for task in ROWS:
        write_rows(folder, task)
    return folder


@pytest.fixture(scope="module")
def files():
    return [word for task in ("ifeval", *ROWS) for word in ("--data", f"{task}={task}.jsonl")]


@pytest.fixture(scope="module")
def measured(folder, files) -> RunDir:
    planned = opdcl("eval", "run", *OPTIONS, *files, "--force", "--dry-run", "--json", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    tasks = [(task["suite"], task["state"]) for task in json.loads(planned.stdout)["tasks"]]
    assert {(suite, state) for suite in ROWS for state in ("base", "tuned", "recovered")} <= {*tasks}
    done = opdcl("eval", "run", *OPTIONS, *files, "--force", cwd=folder)
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "run")


ALONE = [pytest.param(state, marks=pytest.mark.nightly) for state in ("base", "tuned")]


@pytest.mark.parametrize("state", ["recovered", *ALONE])
def test_scores_are_those_of_lm_evals_own_model(measured, tiny_model, folder, state):
    from lm_eval.models.huggingface import HFLM

    adapter = None if state == "base" else str(measured.adapters()[state])
    own = HFLM(str(tiny_model), peft=adapter, device="cpu", dtype="float32")
    expected = reference(folder, own)
    for task in ROWS:
        result = read_json(measured.eval_result(state, task))
        check_against(expected, task, result, read_jsonl(measured.eval_samples(state, task)))


def test_the_report_has_intervals_and_floors_but_no_measure_of_writing(measured):
    suites = summarise(measured)["suites"]
    assert set(suites["ifeval"]["writing"]["base"]) >= {"ended", "tokens", "repetition"}
    for task in ROWS:
        assert suites[task]["writing"] == {"base": {}, "tuned": {}, "recovered": {}}
        assert suites[task]["n"] == len(ROWS[task])
        for state in ("base", "tuned", "recovered"):
            assert suites[task][state]["low"] <= suites[task][state]["value"] <= suites[task][state]["high"]
    assert suites["winogrande"]["floor"] == 0.5
    page = (measured.path / "report.md").read_text(encoding="utf-8")
    assert "arc_easy" in page
    assert "correct answers, corrected for length" in page


def test_malformed_data_are_refused_and_change_nothing(measured, folder, files):
    before = {p: p.read_bytes() for p in measured.path.rglob("*") if p.is_file()}
    rows = [dict(row) for row in ROWS["arc_easy"]]
    rows[6]["answerKey"] = "E"
    write_rows(folder, "broken", rows)
    data = [word.replace("arc_easy.jsonl", "broken.jsonl") for word in files]
    refused = opdcl("eval", "run", *OPTIONS, *data, cwd=folder)
    assert refused.returncode == 2
    assert "broken.jsonl:7 of suite 'arc_easy' cannot be scored: 'E' is not in list" in refused.stderr
    assert {p: p.read_bytes() for p in measured.path.rglob("*") if p.is_file()} == before
