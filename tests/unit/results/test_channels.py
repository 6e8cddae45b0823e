"""What a report knows, every channel says: terminal, JSON, Markdown, HTML, pull request, notebook, card."""

import html
import json
import math
import shutil

import pytest
from helpers.command import opdcl
from helpers.synthetic import alter, change, measure_fully, measure_states, write

from opdcl import api
from opdcl.config.load import validate
from opdcl.console import Output
from opdcl.errors import GateError, InconclusiveError
from opdcl.pipeline.execute import finish
from opdcl.pipeline.trackers import Tracking
from opdcl.results.document import summarise
from opdcl.results.report import card
from opdcl.rundir.layout import ADAPTER, RunDir


@pytest.fixture
def flawed(run, tmp_path) -> RunDir:
    """A run with every kind of fault, and with notes on a suite and on the recovery.

    `other` is what it was before.
    """
    shutil.copytree(run.path, tmp_path / "other")
    for index, stage in enumerate(("finetune", "recover"), 1):
        folder = run.stage(index, stage)
        folder.adapter.mkdir(parents=True)
        (folder.adapter / ADAPTER).write_bytes(b"changed <b> & since")
        alter(folder.record, adapter_sha256="0" * 64)
    alter(run.manifest, base={"fingerprint_after": "deadbeef"})
    alter(run.manifest, adapters={"recovered": {"sha256": "retrained"}})
    # A suite that decides nothing: a score is no number, and one state has answered fewer prompts.
    measure_states(run, "neighbours", (20, 20, 20))
    measure_fully(run, "base", "neighbours", 20, n=35)
    rows = [json.loads(line) for line in run.eval_samples("recovered", "neighbours").read_text().splitlines()]
    rows[3]["scores"][next(iter(rows[3]["scores"]))] = math.nan
    write(run.eval_samples("recovered", "neighbours"), rows)
    steps = [{"step": step, "validation": {"general_kl": 0.1, "best": step == 0}} for step in (0, 8)]
    write(
        run.stage(2, "recover").metrics,
        [
            *steps,
            {
                "step": 8,
                "health": {"sign": "repetition", "value": 0.5, "bound": 0.2, "action": "rate halved"},
            },
        ],
    )
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


def test_every_channel_of_a_report_has_each_fault_and_each_note(flawed):
    summary = summarise(flawed)
    assert len(summary["faults"]) >= 5
    assert any(note.startswith("Recovered is the tuned adapter") for note in summary["notes"])
    assert any("prompts are left out" in note for note in summary["notes"])
    told = {
        "terminal": opdcl("report", flawed.path),
        "json": opdcl("report", flawed.path, "--json"),
        "pull request": opdcl("report", flawed.path, "--format", "pr"),
    }
    assert {name: result.returncode for name, result in told.items()} == dict.fromkeys(told, 1)
    channels = {name: result.stdout for name, result in told.items()}
    channels["terminal"] = told["terminal"].stderr
    channels |= {file.name: file.read_text() for file in flawed.reports}
    channels["public card"] = card(flawed, "recovered", "owner/base", "adapter", None, [], "adapter")
    channels["notebook"] = api.report(flawed.path)._repr_html_()
    document = json.loads(channels["json"])
    channels["json"] = "\n".join(document["notes"])
    assert document["faults"] == summary["faults"]
    assert missing(summary["notes"], channels) == {}


def test_a_fault_is_named_before_the_verdict_which_is_still_printed(flawed):
    result, summary = opdcl("report", flawed.path), summarise(flawed)
    assert summary["verdict"] in result.stdout
    lines = result.stderr.splitlines()
    assert lines[-2].startswith(
        f"error: do not trust these results: they have {len(summary['faults'])} faults"
    )
    assert [line for line in lines if line.startswith("fault: ")] == [
        f"fault: {f}" for f in summary["faults"]
    ]
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


def test_a_sound_run_has_notes_on_the_terminal_and_exit_code_0(run):
    write(
        run.stage(2, "recover").metrics,
        [{"step": 8, "health": {"sign": "repetition", "value": 0.5, "bound": 0.2, "action": "rate halved"}}],
    )
    result = opdcl("report", run.path)
    assert result.returncode == 0
    assert "fault: " not in result.stderr
    assert (
        "note: Recovery, step 8: repetition was 0.5, beyond its limit of 0.2; rate halved." in result.stderr
    )


@pytest.mark.parametrize("option", [(), ("--json",), ("--quiet",)])
def test_a_report_that_cannot_be_written_is_told_all_the_same(run, option):
    run.reports[1].mkdir()
    (run.reports[1] / "in the way").write_text("")
    result, summary = opdcl("report", run.path, *option), summarise(run)
    assert result.returncode == 0
    assert summary["verdict"] in result.stdout
    assert "not written: the report and the model card; " in result.stderr
    assert str(run.reports[1]) in result.stderr
