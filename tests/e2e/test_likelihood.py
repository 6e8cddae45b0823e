"""Multiple choice beside written answers, in one call, for every state."""

import json
import shutil

import pytest
from helpers.command import ROOT, opdcl
from helpers.likelihood import ROWS, write_rows

from opdcl.results.render import summarise
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
def measured(folder) -> RunDir:
    files = [word for task in ("ifeval", *ROWS) for word in ("--data", f"{task}={task}.jsonl")]
    planned = opdcl("eval", "run", *OPTIONS, *files, "--force", "--dry-run", "--json", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    tasks = [(task["suite"], task["state"]) for task in json.loads(planned.stdout)["tasks"]]
    assert {(suite, state) for suite in ROWS for state in ("base", "tuned", "recovered")} <= {*tasks}
    done = opdcl("eval", "run", *OPTIONS, *files, "--force", cwd=folder)
    assert done.returncode == 0, done.stderr
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
