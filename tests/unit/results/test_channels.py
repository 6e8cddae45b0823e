"""What a report knows, every channel says: terminal, JSON, Markdown, HTML, pull request, notebook, card."""

import html
import json
import math
import shutil

import pytest
from helpers.command import opdcl
from helpers.synthetic import alter, change, with_faults, write

from opdcl import api
from opdcl.config.load import validate
from opdcl.console import Output
from opdcl.errors import GateError, InconclusiveError
from opdcl.pipeline.execute import finish
from opdcl.pipeline.trackers import Tracking
from opdcl.results.render import summarise
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir


@pytest.fixture
def flawed(run, tmp_path) -> RunDir:
    """A run with every kind of fault, and with notes on a suite and on the recovery.

    `other` is what it was before.
    """
    shutil.copytree(run.path, tmp_path / "other")
    with_faults(run)
    rows = read_jsonl(run.eval_samples("recovered", "neighbours"))
    rows[3]["scores"] = dict.fromkeys(rows[3]["scores"], math.nan)
    write(run.eval_samples("recovered", "neighbours"), rows)
    alarm = {"sign": "repetition", "value": 0.5, "bound": 0.2, "action": "rate halved"}
    write(run.stage(2, "recover").metrics, [{"step": 8, "health": alarm}])
    return run


def plain(text: str) -> str:
    """Return the text without the escapes of HTML and Markdown, in one line."""
    return " ".join(html.unescape(text).replace("\\", "").split())


def missing(remarks: list[str], channels: dict[str, str]) -> dict[str, list[str]]:
    lacking = {
        name: [remark for remark in remarks if plain(remark) not in plain(text)]
        for name, text in channels.items()
    }
    return {name: remarks for name, remarks in lacking.items() if remarks}


def test_a_fault_is_named_before_the_verdict_which_is_still_printed(flawed):
    result, summary = opdcl("report", flawed.path), summarise(flawed)
    assert summary["verdict"] in result.stdout
    lines = result.stderr.splitlines()
    assert lines[-2].startswith(
        f"error: do not trust these results: they have {len(summary['faults'])} faults"
    )
    assert [x for x in lines if x.startswith("fault: ")] == [f"fault: {f}" for f in summary["faults"]]
    assert sum(line.startswith("note: ") for line in lines) == len(summary["notes"]) - len(summary["faults"])


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_where_notes_are_not_wanted_stderr_names_the_faults_all_the_same(flawed, option):
    lines = opdcl("report", flawed.path, option).stderr.splitlines()
    assert sum(line.startswith("fault: ") for line in lines) == len(summarise(flawed)["faults"])
    assert not any(line.startswith("note: ") for line in lines)


@pytest.mark.parametrize("in_a_row", [False, True])
def test_every_channel_of_a_comparison_has_the_faults_and_notes_of_its_runs(flawed, tmp_path, in_a_row):
    other = RunDir(tmp_path / "other")
    change(other, "recover", steps=24)
    if in_a_row:
        alter(other.config, workflow={"start": str(flawed.path)})
    out = tmp_path / "comparison"
    result = opdcl("compare", flawed.path, other.path, "-o", out)
    as_json = opdcl("compare", flawed.path, other.path, "--json")
    assert (result.returncode, as_json.returncode) == (1, 1)
    assert ("no forgetting is shown" in result.stdout) == in_a_row
    summary, document = summarise(flawed), json.loads(as_json.stdout)
    assert {f"{flawed.path}: {fault}" for fault in summary["faults"]} == {*document["faults"]}
    channels = {f"compare.{kind}": (out / f"compare.{kind}").read_text() for kind in ("md", "html")}
    channels["terminal"] = result.stderr
    channels["json"] = "\n".join(document["notes"])
    channels["notebook"] = api.compare([flawed.path, other.path])._repr_html_()
    assert missing(summary["notes"], channels) == {}


@pytest.mark.parametrize(("gate", "error"), [("max_drop", InconclusiveError), ("recovery", GateError)])
def test_a_run_that_does_not_meet_its_gate_says_what_its_report_says(flawed, capsys, gate, error):
    flow = validate({"eval": {"retention": ["instructions"]}, "gates": {gate: 1.2}})
    with pytest.raises(error):
        finish(flow, flawed, Output(), Tracking([], flawed, print))
    summary = summarise(flawed)
    assert missing([*summary["notes"], summary["verdict"]], {"terminal": capsys.readouterr().err}) == {}


@pytest.mark.parametrize("option", [(), ("--json",), ("--quiet",)])
def test_a_report_that_cannot_be_written_is_told_all_the_same(run, option):
    run.reports[1].mkdir()
    (run.reports[1] / "in the way").write_text("")
    result, summary = opdcl("report", run.path, *option), summarise(run)
    assert result.returncode == 0
    assert summary["verdict"] in result.stdout
    assert "not written: the report and the model card; " in result.stderr
    assert str(run.reports[1]) in result.stderr
