"""Suites of all kinds in one call, for every state: written, chosen and sampled answers, and controls."""

import json
import shutil

import pytest
from helpers.command import ROOT, opdcl
from helpers.likelihood import ROWS, write_rows

from opdcl.results.render import summarise
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

CONTROLS = ["neighbours_quick", "instructions_sampled"]
OPTIONS = ["--retention", f"ifeval,{','.join(ROWS)}", "--set", f"eval.control=[{','.join(CONTROLS)}]"]
OPTIONS += ["--limit", "10", "--set", "eval.domain=[]", "--set", "eval.closeness=null"]


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
    """A folder with a finished run and the files of all suites."""
    folder = tmp_path_factory.mktemp("likelihood")
    shutil.copytree(finished, folder / "run")
    official = read_jsonl(ROOT / "evals" / "ifeval" / "prompts.jsonl")[:10]
    for row in official:  # an instruction names only the arguments that it uses
        row["kwargs"] = [{k: v for k, v in kwargs.items() if v is not None} for kwargs in row["kwargs"]]
    write_rows(folder, "ifeval", official)
    for task in ROWS:
        write_rows(folder, task)
    return folder


@pytest.fixture(scope="module")
def measured(folder) -> RunDir:
    files = [word for task in ("ifeval", *ROWS) for word in ("--data", f"{task}={task}.jsonl")]
    planned = opdcl("eval", "run", *OPTIONS, *files, "--force", "--dry-run", "--json", cwd=folder, code=0)
    tasks = [(task["suite"], task["state"]) for task in json.loads(planned.stdout)["tasks"]]
    assert {(suite, state) for suite in ROWS for state in ("base", "tuned", "recovered")} <= {*tasks}
    opdcl("eval", "run", *OPTIONS, *files, "--force", cwd=folder, code=0)
    return RunDir(folder / "run")


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


def test_controls_are_measured_and_the_verdict_is_about_other_suites(measured):
    summary = summarise(measured)
    assert summary["headline"]["retention"] not in CONTROLS
    page = (measured.path / "report.md").read_text(encoding="utf-8")
    for name, headline in zip(CONTROLS, ("contains", "passed"), strict=True):
        suite = summary["suites"][name]
        assert (suite["role"], suite["metric"], suite["n"]) == ("control", headline, 10)
        assert all(suite[state] for state in ("base", "tuned", "recovered"))
        assert name in page
    assert set(summary["suites"]["neighbours_quick"]["metrics"]) == {"token_f1", "exact_match"}


def test_ifeval_has_the_scores_of_lm_evals_own_functions(folder, measured):
    import langdetect
    from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    rows = read_jsonl(folder / "ifeval.jsonl")
    for state in ("base", "tuned", "recovered"):
        answers = read_jsonl(measured.eval_samples(state, "ifeval"))
        assert [answer["prompt"] for answer in answers] == [row["prompt"] for row in rows]
        for row, answer in zip(rows, answers, strict=True):
            assert answer["scores"] == utils.process_results(row, [answer["response"]])
