"""One run reads each file once."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.command import opdcl

from opdcl.config.load import load
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.pipeline.dry_run import describe
from opdcl.pipeline.execute import execute
from opdcl.pipeline.job import Inputs, Job
from opdcl.pipeline.plan import Records, StoredStage, make_plan
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir
from opdcl.rundir.stage import StageRecord

OPENED: list[str] = []
_listening = False


@pytest.fixture
def opened():
    """Collect the names of the files that this process opens."""
    global _listening
    if not _listening:  # an audit hook cannot be removed
        sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)
        _listening = True
    OPENED.clear()
    return OPENED


def counts(opened: list[str], *names: str) -> dict[str, int]:
    shipped = ("evals", "closeness", "prompts.jsonl")
    files = Counter(Path(name).name for name in opened if Path(name).parts[-3:] != shipped)
    return {name: files[name] for name in names}


def count_suites(monkeypatch) -> Counter:
    """Count what lm-eval loads."""
    from lm_eval.tasks import TaskManager

    loaded: Counter = Counter()
    load_tasks = TaskManager.load

    def count(self, tasks):
        loaded.update(t if isinstance(t, str) else t["task"] for t in tasks)
        return load_tasks(self, tasks)

    monkeypatch.setattr(TaskManager, "load", count)
    return loaded


def test_named_columns_are_read_told_and_part_of_the_run(tiny_folder):
    (tiny_folder / "rows.csv").write_text("Frage;Antwort;Thema\nWer?;Ada.;Leute\nWo?;London.;Orte\n")
    model = load(["tiny.yaml"])[0].model.id
    words = ("finetune", "rows.csv", "--base", model, "-o", "run", "--epochs", "1")
    assert "has only Frage, Antwort, Thema" in opdcl(*words).stderr
    made = opdcl(*words, "--columns", "question=Frage,answer=Antwort", "--set", "finetune.lora.r=2", code=0)
    assert "rows.csv: 2 of question and answer, such as user: Wer? assistant: Ada." in made.stderr
    assert read_json(tiny_folder / "run" / "config.json")["workflow"]["columns"] == {
        "question": "Frage",
        "answer": "Antwort",
    }
    other = opdcl(*words, "--columns", "question=Frage,answer=Thema", "--set", "finetune.lora.r=2", code=2)
    assert "finetune changed: content of data\n" in other.stderr


def test_names_of_columns_count_where_a_source_has_one(tiny_folder):
    """Those of a later file leave earlier results as they are; so do keys of before, which had them all."""
    lines = (tiny_folder / "rows.jsonl").read_text()
    (tiny_folder / "other.jsonl").write_text(lines.replace("question", "Q").replace("answer", "A"))
    run, made = RunDir(tiny_folder / "run"), ["finetune.replay={share: 0.5}"]
    data = ["eval.domain=[other]", "eval.data={other: other.jsonl}", "columns={question: Q, answer: A}"]
    alone = Job(load(["tiny.yaml"], [*made, "eval=null", "recover=null"])[0], run)
    later = Job(load(["tiny.yaml"], [*made, *data])[0], run)
    assert later.hashes["finetune.data"] == alone.hashes["finetune.data"]
    assert later.hashes["finetune.replay.prompts"] == alone.hashes["finetune.replay.prompts"]
    assert later.hashes["eval.data.other"] != Inputs().hash("other.jsonl")
    before = make_plan(later.workflow, later.hashes | later.earlier_hashes, Records())
    tuned = StageRecord(fingerprint=before[0].fingerprint, inputs=before[0].inputs, status="running")
    stored = Records({"finetune": StoredStage(tuned, checkpoint="checkpoint-2")})
    assert make_plan(later.workflow, later.hashes, stored, later.earlier_hashes)[0].action == "resume"
    assert make_plan(later.workflow, later.hashes, stored)[0].action == "stale"


@pytest.mark.parametrize("columns", ["question", "question=", "=Frage", "query=Frage"])
def test_a_malformed_option_for_columns_is_refused(tiny_folder, columns):
    refused = opdcl("finetune", "rows.jsonl", "--columns", columns, code=2)
    assert "columns" in refused.stderr


def test_a_run_parses_each_file_and_builds_each_suite_once(tiny_folder, opened, monkeypatch):
    loaded = count_suites(monkeypatch)
    run = RunDir(tiny_folder / "run")
    execute(Job(load(["tiny.yaml"])[0], run), Output("quiet"))
    # Once for its hash, once for its rows, which are trained on and asked.
    names = "rows.jsonl", "prompts.jsonl", "test.jsonl"
    assert counts(opened, *names) == dict.fromkeys(names, 2)
    assert loaded == {"instructions": 1, "questions": 1}
    for suite in ("instructions", "questions"):
        base, tuned = (read_json(run.eval_result(state, suite))["floor"] for state in ("base", "tuned"))
        # All other floors are answers that no state wrote.
        assert base.keys() == tuned.keys() > {"shuffled"}
        assert [base[name] for name in base if name != "shuffled"] == [
            tuned[name] for name in base if name != "shuffled"
        ]


def test_the_arms_of_a_sweep_share_what_is_read(tiny_folder, opened):
    from opdcl.pipeline.sweep import describe_all

    (tiny_folder / "arms.yaml").write_text("arms: {one: {}, two: {finetune: {epochs: 2}}}")
    workflow, _ = load(["tiny.yaml", "arms.yaml"], ["recover=null"])
    _, plans = describe_all(workflow, {}, tiny_folder / "sweep", Inputs())
    assert [plan["run"] for plan in plans] == ["one", "two"]
    assert counts(opened, "rows.jsonl") == {"rows.jsonl": 2}


def test_rows_that_a_caller_changes_stay_as_they_were_read(tiny_folder):
    sources = Inputs()
    sources.rows("rows.jsonl").clear()
    assert len(sources.rows("rows.jsonl")) == 12


def test_rows_that_the_fine_tune_leaves_out_are_no_domain_prompts(tiny_folder):
    with open(tiny_folder / "rows.jsonl", "a") as file:
        file.write(json.dumps({"question": "What is it?", "answer": "word " * 300}) + "\n")
        file.write(json.dumps({"question": "And that?", "answer": ""}) + "\n")
    kept = {}
    for long_rows in ("skip", "cut"):
        settings = ["finetune.max_length=99", "finetune.bad_rows=skip", f"finetune.long_rows={long_rows}"]
        workflow, _ = load(["tiny.yaml"], settings)
        kept[long_rows] = len(Job(workflow, RunDir(tiny_folder)).recovery.rows["domain"])
    assert kept == {"skip": 12, "cut": 13}


def test_the_hash_of_a_suite_covers_its_data_and_each_field_has_its_own(tiny_folder):
    workflow, _ = load(["tiny.yaml"])
    hashes = Job(workflow, RunDir(tiny_folder)).hashes
    assert [*hashes] == [
        "finetune.data",
        "recover.general.0",
        "recover.domain",
        "eval.closeness",
        "eval.data.questions",
        "eval.suite.instructions",
        "eval.suite.questions",
    ]
    assert hashes["finetune.data"] == hashes["recover.domain"] != hashes["recover.general.0"]
    (tiny_folder / "prompts.jsonl").write_text('{"prompt": "Another."}\n{"prompt": "Two."}\n')
    assert Job(workflow, RunDir(tiny_folder)).hashes["recover.general.0"] != hashes["recover.general.0"]


def test_recovery_practises_every_answer_of_a_conversation_about_the_domain(tiny_folder):
    turns = [{"role": r, "content": c} for r, c in (("user", "1?"), ("assistant", "one"), ("user", "2?"))]
    conversation = {"messages": [*turns, {"role": "assistant", "content": "two"}]}
    rows = [conversation, {"question": "3?", "answer": "three"}]
    (tiny_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workflow, _ = load(["tiny.yaml"], ["eval=null"])
    job = Job(workflow, RunDir(tiny_folder))
    domain = job.recovery.rows["domain"]
    assert [(row.prompt, row.answer) for row in domain] == [
        (turns[:1], "one"),
        (turns, "two"),
        ([{"role": "user", "content": "3?"}], "three"),
    ]
    assert len(job.examples.rows) == 2


def test_prompts_to_replay_are_part_of_the_fine_tune(tiny_folder):
    """They are read, hashed by content and checked like its rows, and not at all without a share."""
    prompts = tiny_folder / "replayed.jsonl"
    prompts.write_text('{"prompt": "Say something."}\n')
    (tiny_folder / "replay.yaml").write_text("finetune: {replay: {share: 0.5, prompts: replayed.jsonl}}\n")
    hashes = []
    for text in ('{"prompt": "Say something."}', '{"prompt": "Say more."}'):
        prompts.write_text(text)
        flow, _ = load(["tiny.yaml", "replay.yaml"])
        job = Job(flow, RunDir(tiny_folder))
        assert len(job.examples.replay) == 1
        hashes.append(job.hashes["finetune.replay.prompts"])
    assert hashes[0] != hashes[1]
    prompts.write_text('{"text": "A document."}')
    with pytest.raises(UsageError, match="plain text cannot be a prompt"):
        _ = Job(flow, RunDir(tiny_folder)).examples
    assert "finetune.replay.prompts" not in Job(load(["tiny.yaml"])[0], RunDir(tiny_folder)).hashes


def test_the_arms_of_a_sweep_check_again_that_prompts_have_room(tiny_folder):
    sources = Inputs()
    flow, _ = load(["tiny.yaml"], ["recover.max_new_tokens=8"])
    describe(Job(flow, RunDir(tiny_folder / "run"), sources))
    flow, _ = load(["tiny.yaml"], ["recover.max_new_tokens=500"])
    with pytest.raises(UsageError, match=r"prompts.jsonl:1: .* the context leaves room for 12"):
        describe(Job(flow, RunDir(tiny_folder / "run"), sources))
