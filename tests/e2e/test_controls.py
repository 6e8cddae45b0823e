"""The report-only suites in one command, from the settings to the report."""

import shutil

import pytest
from helpers.command import opdcl

from opdcl.results.render import summarise
from opdcl.rundir.layout import RunDir

CONTROLS = ["neighbours_quick", "instructions_sampled"]
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
    for name, headline in zip(CONTROLS, ("contains", "passed"), strict=True):
        suite = summary["suites"][name]
        assert (suite["role"], suite["metric"], suite["n"]) == ("control", headline, 4)
        assert all(suite[state] for state in ("base", "tuned", "recovered"))
    assert set(summary["suites"]["neighbours_quick"]["metrics"]) == {"token_f1", "exact_match"}


def test_the_report_names_them(measured):
    page = (measured.path / "report.md").read_text(encoding="utf-8")
    for name in CONTROLS:
        assert name in page
