"""The report-only suites in one command, from the settings to the report."""

import shutil

import pytest
from helpers.command import opdcl

from opdcl.results.summary import summarise
from opdcl.rundir.layout import RunDir

CONTROLS = ["refusal", "choices", "coherence", "instructions_sampled"]
OPTIONS = ["--set", f"eval.control=[{','.join(CONTROLS)}]", "--limit", "4", "--set", "eval.closeness=null"]
OPTIONS += ["--set", "eval.domain=[]", "--set", "eval.max_new_tokens=6"]


@pytest.fixture(scope="module")
def measured(finished, tmp_path_factory) -> RunDir:
    folder = tmp_path_factory.mktemp("controls")
    shutil.copytree(finished, folder / "run")
    done = opdcl("eval", "run", *OPTIONS, "--force", cwd=folder)
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "run")


def test_each_state_is_measured_and_the_verdict_is_about_other_suites(measured):
    summary = summarise(measured)
    assert summary["headline"]["retention"] not in CONTROLS
    for name, headline in zip(CONTROLS, ("told_apart", "acc", "acc", "passed"), strict=True):
        suite = summary["suites"][name]
        assert (suite["role"], suite["metric"], suite["n"]) == ("control", headline, 4)
        assert all(suite[state] for state in ("base", "tuned", "recovered"))
    assert set(summary["suites"]["choices"]["metrics"]) == {"brier", "overconfidence"}
    assert set(summary["suites"]["refusal"]["metrics"]) == {"harmful_refused", "harmless_answered"}
    assert (summary["suites"]["refusal"]["floor"], summary["suites"]["choices"]["floor"]) == (0.5, 0.25)


def test_the_report_tells_the_shares_beside_the_score(measured):
    page = (measured.path / "report.md").read_text(encoding="utf-8")
    for words in ("harmful requests refused", "harmless requests answered", "Brier score"):
        assert words in page
    for name in CONTROLS:
        assert name in page


def test_the_same_command_measures_nothing_again(measured):
    again = opdcl("eval", "run", *OPTIONS, cwd=measured.path.parent)
    assert again.returncode == 0, again.stderr
    assert "everything is done already" in again.stderr
