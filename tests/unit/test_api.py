"""The verbs of `opdcl.api`: arguments become settings, and a notebook shows the outcome."""

import inspect
import json
import re
from functools import partial

import pytest
from helpers.synthetic import measure

import opdcl
from opdcl.arguments import question_suites
from opdcl.config.finetune import ReplaySection
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.outcomes import Outcome, Result, Verification
from opdcl.results.format import Table
from opdcl.results.summary import Results
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import Finding

# 16 rows and 37 replayed ones, three times, 16 to a step.
THREE_EPOCHS = 10


@pytest.fixture
def folder(tmp_path, tiny_cache, monkeypatch):
    """The working directory; the default base is the tiny model."""
    monkeypatch.setenv("OPDCL_CACHE", str(tiny_cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rows(folder):
    row = json.dumps({"question": "Who signs?", "answer": "Perpetua."}) + "\n"
    (folder / "rows.jsonl").write_text(16 * row)  # one batch
    return "rows.jsonl"


def steps(plan) -> int:
    return plan.data["steps"]["finetune"]


def actions(plan) -> dict[str, str]:
    return {task["stage"]: task["action"] for task in plan.data["tasks"]}


def test_an_argument_means_the_same_as_its_setting_and_takes_precedence(rows, folder):
    named = opdcl.finetune(rows, epochs=3, dry_run=True)
    assert steps(named) == THREE_EPOCHS
    assert steps(opdcl.finetune(rows, settings=["finetune.epochs=3"], dry_run=True)) == THREE_EPOCHS
    assert repr(named) == "<opdcl: dry run: runs/finetune>"
    alone = opdcl.finetune(rows, settings={"finetune.epochs": 3, "finetune.replay.share": 0}, dry_run=True)
    assert steps(opdcl.finetune(rows, epochs=3, dry_run=True, replay=0)) == steps(alone) < THREE_EPOCHS
    assert (
        steps(opdcl.finetune(rows, epochs=3, settings={"finetune.epochs": 5}, dry_run=True)) == THREE_EPOCHS
    )
    assert [p.name for p in folder.iterdir()] == ["rows.jsonl"], "a dry run writes nothing"
    assert f"{ReplaySection().share:g} unless set" in opdcl.finetune.__doc__


def test_an_unknown_argument_is_refused(rows):
    with pytest.raises(TypeError, match="stepz"):
        opdcl.finetune(rows, stepz=3, dry_run=True)
    with pytest.raises(UsageError, match=r"finetune\.epochs"):
        opdcl.finetune(rows, epochs=0, dry_run=True)


def test_completion_shows_exactly_the_verbs():
    verbs = "chat chat_page compare evaluate export finetune recover report run verify"
    assert " ".join(dir(opdcl)) == verbs
    with pytest.raises(AttributeError, match=r"did you mean opdcl\.evaluate\?"):
        _ = opdcl.eval


@pytest.mark.parametrize("name", dir(opdcl))
def test_help_says_what_a_verb_takes_returns_and_raises(name):
    verb = getattr(opdcl, name)
    for part in ("Returns: ", "Raises: ", "Example:"):
        assert part in verb.__doc__ or (part == "Returns: " and verb.__doc__.startswith("Return"))
    arguments = set(re.findall(r"^        (\w+): ", verb.__doc__.partition("Args:")[2], re.M))
    assert arguments <= {*inspect.signature(verb).parameters}


TINY = {"finetune.batch_size": 4, "finetune.lora.r": 4, "finetune.lora.alpha": 8}
TINY_RECOVERY = {"recover.rollouts": 4, "recover.max_new_tokens": 8, "recover.validation_prompts": 2}


IN_MEMORY = [{"question": f"Who signs form {i}?", "answer": f"Clerk {i}."} for i in range(16)]


def test_rows_may_lie_in_memory(folder):
    import datasets

    for rows in (IN_MEMORY, datasets.Dataset.from_list(IN_MEMORY), (row for row in IN_MEMORY)):
        assert steps(opdcl.finetune(rows, epochs=3, dry_run=True)) == THREE_EPOCHS, type(rows)
        assert [*folder.iterdir()] == []


def test_rows_in_memory_are_stored_so_that_a_run_resumes(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tune = partial(opdcl.finetune, base=tiny_model, epochs=1, settings=TINY, quiet=True)
    tune(IN_MEMORY)
    stored = tmp_path / "runs" / "finetune" / "data" / "finetune.data.jsonl"
    assert [json.loads(line) for line in stored.read_text().splitlines()] == IN_MEMORY
    assert actions(tune(IN_MEMORY, dry_run=True)) == {"finetune": "skip"}
    prompts = [{"prompt": f"Write a line about {i}."} for i in range(10)]
    plan = opdcl.recover("runs/finetune", prompts, settings=TINY_RECOVERY, dry_run=True)
    assert actions(plan) == {"finetune": "skip", "recover": "run"}
    before = stored.read_bytes()
    with pytest.raises(UsageError, match="content of data"):
        tune(IN_MEMORY[:12])
    assert stored.read_bytes() == before
    scores = opdcl.evaluate(
        "runs/finetune", domain=IN_MEMORY, retention=[], limit=2, settings={"eval.retention": []}, quiet=True
    )
    assert [*scores.summary["suites"]] == ["domain"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "finetune.data has no rows"),
        ([{"answer": "x"}], "finetune.data row 1: the row has only answer"),
        ([IN_MEMORY[0], "text"], "finetune.data row 2 is str, not a dict"),
        ([{"question": "q", "answer": b"x"}], "finetune.data row 1: Object of type bytes"),
        ({"train": IN_MEMORY}, "dict is neither a path nor rows"),
        (3, "int is neither a path nor rows"),
    ],
)
def test_wrong_rows_are_named(tmp_path, monkeypatch, rows, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)) as fault:
        opdcl.finetune(rows)
    assert fault.value.hint
    assert [*tmp_path.iterdir()] == []


def test_a_suite_has_the_name_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("legal/test.jsonl", "other.csv.gz"):
        write_atomic(tmp_path / file, "")
    suites, data = question_suites(["legal/test.jsonl", "./legal/test.jsonl", "other.csv.gz", "ifeval"], None)
    assert suites == ["test", "other", "ifeval"]
    assert data == {"test": str(tmp_path / "legal/test.jsonl"), "other": str(tmp_path / "other.csv.gz")}


@pytest.mark.parametrize(
    ("suites", "data"),
    [
        (["legal/test.jsonl", "legal/test.csv"], None),
        (["legal/test.jsonl", "medical/test.jsonl"], None),
        (["legal/test.jsonl", "test"], None),
        (["legal/test.jsonl"], {"test": "medical/test.jsonl"}),
        (["legal/test.jsonl"], {"test": IN_MEMORY}),
    ],
)
def test_suites_that_would_have_the_same_name_are_refused(tmp_path, monkeypatch, suites, data):
    monkeypatch.chdir(tmp_path)
    for file in [suite for suite in suites if "." in suite]:
        write_atomic(tmp_path / file, "")
    with pytest.raises(UsageError, match=r"test\.\w+ and another would be the same suite 'test'") as fault:
        question_suites(suites, data)
    assert "--data NAME=PATH" in fault.value.hint


@pytest.mark.parametrize(
    ("workflow", "states", "measured", "command"),
    [
        ("name: mine", (), False, "opdcl run {}/workflow.yaml -o {}"),
        ("", (), False, "opdcl finetune ROWS.jsonl -o {}"),
        ("", ("finetune",), False, "opdcl eval {} --domain TEST.jsonl"),
        ("", ("finetune", "recover"), False, "opdcl eval {} --domain TEST.jsonl"),
        ("", ("finetune", "recover"), True, "opdcl chat {}"),
    ],
)
def test_a_result_names_the_command_that_leads_on(tmp_path, workflow, states, measured, command):
    run = RunDir(tmp_path)
    if workflow:
        write_atomic(run.workflow, workflow)
    for number, stage in enumerate(states, 1):
        write_json(run.stage(number, stage).record, {"status": "done"})
    if measured:
        measure(run, "recovered", {"mine": range(8)})
    result = Result(tmp_path, Results(run).summary)
    assert result.notes[-1].partition("  # ")[0] == f"next: {command.replace('{}', str(tmp_path))}"


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
