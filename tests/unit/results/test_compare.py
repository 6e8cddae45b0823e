"""A written comparison: files, page, plot and terminal, also with hostile names."""

import json
import re
import subprocess
import warnings
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers.command import opdcl
from helpers.page import HOSTILE, PAYLOAD, safe_page
from helpers.synthetic import METRIC, N, change, held, measure

from opdcl.results.compare import compare_runs, write_comparison
from opdcl.rundir.layout import RunDir


def test_writing_again_gives_the_same_three_files(three, tmp_path):
    written = []
    for _ in range(2):
        files = write_comparison(compare_runs(three), tmp_path / "new" / "out")
        written.append({path.name: path.read_bytes() for path in files})
    assert [*written[0]] == ["compare.md", "compare.html", "compare.json"]
    assert written[0] == written[1]


def test_the_page_links_to_the_reports_of_the_runs(make, tmp_path):
    odd = "javascript:alert(1) & more"
    runs = [make(odd, 28, 32), make("other", 28, 32, method="general")]
    for run in runs:
        run.reports[1].write_text("a report")
    page = safe_page(write_comparison(compare_runs(runs), tmp_path / "a" / "out")[1].read_text())
    links = [value for name, value in page.attributes if name == "href" and not value.startswith("#")]
    assert [(tmp_path / "a/out" / unquote(x)).resolve() for x in links] == [run.reports[1] for run in runs]
    runs[0].reports[1].unlink()
    page = safe_page(write_comparison(compare_runs(runs), tmp_path / "out")[1].read_text())
    assert ("href", "../other/report.html") in page.attributes
    assert len([name for name, value in page.attributes if name == "href" and value[0] != "#"]) == 1


@pytest.fixture
def hostile(make) -> list[RunDir]:
    """Runs with malicious directory names, settings and suite names."""
    folder = HOSTILE.replace("/", "\N{DIVISION SLASH}").replace("\ud800", "").replace("\n", " ")
    runs = [make(f"{folder}-a", 28, 32), make('_b" onload="alert(1)', 28, 30, method="interpolate")]
    for run in runs:
        change(run, "eval", retention=[f"{PAYLOAD.replace('/', '')[:60]}"])
        for state, k in (("base", 32), ("tuned", 8), ("recovered", 28)):
            run.eval_result(state, "instructions").unlink()
            measure(run, state, {PAYLOAD.replace("/", "")[:60]: range(k)})
    change(runs[0], "recover", general=HOSTILE)
    change(runs[0], "model", **{HOSTILE: [HOSTILE]})
    return runs


def opdcl_compare(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return opdcl("compare", *args, cwd=cwd, env={"COLUMNS": "80"})


def test_hostile_names_run_nothing_and_break_no_page_and_no_terminal(hostile, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text, html, data = (p.read_text() for p in write_comparison(compare_runs(hostile), tmp_path / "out"))
    names = [str(run.path.relative_to(tmp_path)) for run in hostile]
    printed = [opdcl_compare(*names, *more, cwd=tmp_path) for more in ([], ["--json"])]
    assert [done.returncode for done in printed] == [0, 0]
    for content in (text, html, data, *(done.stdout + done.stderr for done in printed)):
        assert "\x1b" not in content
        assert "\u202e" not in content
    assert PAYLOAD in safe_page(html).text  # shown, as text
    assert not re.search(r"(?<!\\)<(script|img)", text)
    assert not re.search(r"(?<!\\)\]\(", text)
    # An unescaped bar would add a cell, so every table must keep its number of columns.
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def snapshot(folder: Path) -> list[str]:
    return sorted(str(p) for p in folder.rglob("*"))


def test_the_command_prints_tables_on_stdout_and_writes_nothing(three, tmp_path):
    before = snapshot(tmp_path)
    done = opdcl_compare("ours", "general", "scaled", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    finding, *lines = done.stdout.splitlines()
    assert finding.startswith("ours is above 1 and below none of 2 other arms in retention")
    assert max(map(len, lines)) <= 80
    assert "note: With one seed an interval covers the choice of prompts" in done.stderr
    assert snapshot(tmp_path) == before


def test_the_command_gives_one_json_document_with_stable_keys(three, tmp_path):
    done = opdcl_compare("ours", "general", "scaled", "--json", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    comparison = json.loads(done.stdout)
    held("arms", comparison)
    assert comparison["suites"]["handbook"] == {"role": "domain", "metric": METRIC, "n": N}
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == comparison


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ours"], "at least two"),
        (["ours", "general", "./general"], "general is named twice"),
        (["ours", "nowhere"], "nowhere is not a run directory"),
        (["ours", "general", "-o", "note/out"], "note is a file"),
        (["ours", "general", "-o", "note"], "note is a file"),
        (["ours", "general", "-o", "ours"], "ours is a run directory"),
        ([], "RUN"),
    ],
)
def test_a_wrong_command_is_refused_with_one_error_and_one_hint(three, tmp_path, args, message):
    (tmp_path / "note").write_text("a file")
    before = snapshot(tmp_path)
    done = opdcl_compare(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert snapshot(tmp_path) == before
