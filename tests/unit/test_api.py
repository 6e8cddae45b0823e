"""The verbs of `opdcl.api`: arguments become settings, and a notebook shows the outcome."""

import json
import re

import pytest

import opdcl
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.outcomes import Outcome, Verification
from opdcl.results.tables import Table
from opdcl.rundir.verify import Finding


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"question": "Who signs?", "answer": "Perpetua."}) + "\n"
    (tmp_path / "rows.jsonl").write_text(16 * row)  # one batch
    return "rows.jsonl"


def steps(plan) -> int:
    return plan.data["steps"]["finetune"]


def test_an_argument_means_the_same_as_its_setting(rows):
    named = opdcl.finetune(rows, epochs=3, dry_run=True)
    assert steps(named) == 3
    assert steps(opdcl.finetune(rows, settings={"finetune.epochs": 3}, dry_run=True)) == 3
    assert steps(opdcl.finetune(rows, settings=["finetune.epochs=3"], dry_run=True)) == 3
    assert repr(named) == "<opdcl: dry run: runs/finetune>"


def test_an_argument_takes_precedence_over_settings(rows):
    assert steps(opdcl.finetune(rows, epochs=3, settings={"finetune.epochs": 5}, dry_run=True)) == 3


def test_a_dry_run_writes_nothing(rows, tmp_path):
    opdcl.finetune(rows, dry_run=True)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_unknown_argument_is_refused(rows):
    with pytest.raises(TypeError, match="stepz"):
        opdcl.finetune(rows, stepz=3, dry_run=True)
    with pytest.raises(UsageError, match=r"finetune\.epochs"):
        opdcl.finetune(rows, epochs=0, dry_run=True)


def test_completion_and_help_know_the_verbs():
    assert {"run", "finetune", "recover", "evaluate", "report", "compare"} <= {*dir(opdcl)}
    for name in set(opdcl.__all__) - {"__version__"}:
        verb = getattr(opdcl, name)
        assert "Example:" in verb.__doc__
        arguments = re.findall(r"^        (\w+): ", verb.__doc__, re.M)
        assert set(arguments) <= {*verb.__code__.co_varnames}, (
            f"{name} documents an argument it does not have"
        )


def test_what_a_notebook_shows_is_inert():
    html = Outcome("<b>\u202e", [Table("", ["<i>"], [["a\nb & \x1b[31m"]], "")], {})._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<th>&lt;i&gt;</th>" in html
    assert "a<br>b &amp; " in html
    assert not {"\x1b", "\u202e"} & {*html}


def test_verification_says_how_many_checks_hold():
    good, bad = Finding("config.json", True, "as recorded"), Finding("adapter", False, "changed")
    assert Verification([good, good]).sentence == "all 2 checks hold"
    assert Verification([good, bad]).sentence == "1 of 2 checks failed"
    assert Verification([good, bad]).failed == ["adapter"]


def test_only_the_first_worker_prints(capsys, monkeypatch):
    from opdcl import parallel

    monkeypatch.setattr(parallel, "_rank", 1)
    output = Output()
    output.result("verdict", {})
    output.table("", ["a"], [["b"]], {})
    output.note("note")
    output.error(UsageError("wrong", "do this"))
    assert capsys.readouterr() == ("", "")
    output.error(UsageError("out of memory"), from_any_worker=True)
    assert "out of memory" in capsys.readouterr().err
