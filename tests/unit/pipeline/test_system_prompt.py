"""The system prompt of use: prompts are asked with it, rows are learned as they are, differences are told."""

import json

import pytest
from helpers.command import opdcl

from opdcl.config.load import load, validate
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.pipeline.checks import system_note
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Records, make_plan
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

USE, OWN = "You are the desk of a hotel.", "You speak like a pirate."


@pytest.fixture
def project(tiny_folder):
    """A folder with rows without a system prompt, of which the last of `prompts.jsonl` has its own."""
    with open("prompts.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Where is the sea?", "system": OWN}) + "\n")
    return tiny_folder


def workflow(recover: str | None = None, evaluation: str | None = None) -> Workflow:
    flow, _ = load(["tiny.yaml"], ["eval.closeness=requests_quick"])
    tree = flow.model_dump()
    tree["recover"]["system"], tree["eval"]["system"] = recover, evaluation
    return validate(tree)


def asked(job: Job) -> dict[str, list[str]]:
    """Return the prompts of each use as text."""
    found = {name: job.prompt_ids[name] for name in ("instructions", "questions", "closeness")}
    for stream, prompts in job.prompts.items():
        found[stream] = [prompt.ids for prompt in prompts.train]
        found[f"{stream}, held out"] = [prompt.ids for prompt in prompts.held_out]
    return {use: [job.tokenizer.decode(ids) for ids in texts] for use, texts in found.items()}


def test_every_prompt_is_asked_with_it_unless_it_brings_its_own(project):
    for use, prompts in asked(Job(workflow(USE), RunDir(project / "run"))).items():
        own = [text for text in prompts if OWN in text or USE not in text]
        assert len(own) < len(prompts), use
        for text in prompts:
            assert text.count("system\n") == 1, (use, text)
            assert USE in text or use in ("general", "general, held out", "closeness"), (use, text)
        assert not any(OWN in text and USE in text for text in prompts)
    plain = asked(Job(workflow(), RunDir(project / "run")))
    assert not any(USE in text for prompts in plain.values() for text in prompts)


def test_the_evaluation_may_be_asked_with_another_one(project):
    found = asked(Job(workflow(USE, "Answer in French."), RunDir(project / "run")))
    assert all("Answer in French." in text for text in found["instructions"] + found["questions"])
    assert all(USE in text for text in found["domain"])


def test_it_changes_what_is_answered_and_not_what_was_learned(project):
    def fingerprints(flow: Workflow) -> dict[str, str]:
        job = Job(flow, RunDir(project / "run"))
        return {f"{t.label}": t.fingerprint for t in make_plan(job.workflow, job.hashes, Records())}

    without, used, measured = (fingerprints(workflow(*both)) for both in ((), (USE,), (None, USE)))
    assert without["finetune"] == used["finetune"] == measured["finetune"]
    assert without["recover"] == measured["recover"] != used["recover"]
    assert without["eval instructions tuned"] != used["eval instructions tuned"]
    assert used["eval instructions tuned"] == measured["eval instructions tuned"]


def test_answers_are_written_with_it(project, tiny_model):
    (project / "use.txt").write_text(f"{USE}\n")
    shown = {}
    for run, words in (("plain", ()), ("used", ("--system", "@use.txt"))):
        limits = ("--limit", "4", "--set", "eval.max_new_tokens=6", "--set", "model.dtype=float32")
        opdcl("eval", tiny_model, "-o", run, *limits, *words, code=0)
        rows = read_jsonl(RunDir(project / run).eval_samples("base", "instructions"))
        shown[run] = [row["response"] for row in rows]
    assert shown["plain"] != shown["used"]
    assert RunDir(project / "used").settings()["eval"]["system"] == USE


@pytest.mark.parametrize(
    ("learned", "used", "said"),
    [
        (None, None, ""),
        (USE, USE, ""),
        (USE, None, "4 of 4 rows have a system prompt (You are the desk of a hotel.)"),
        (USE, OWN, "4 of 4 rows have another system prompt than --system"),
        (None, USE, "4 of 4 rows were learned without a system prompt"),
    ],
)
def test_a_difference_between_training_and_use_is_told(project, learned, used, said):
    rows = [{"question": f"Who keeps key {n}?", "answer": "Ada", "system": learned} for n in range(4)]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(workflow(used), RunDir(project / "run"))
    note = system_note(job, used)
    assert said in note
    assert bool(note) == bool(said)


@pytest.mark.parametrize("content", [None, "", "@other"])
def test_a_file_that_holds_none_is_refused(project, content):
    if content is not None:
        (project / "use.txt").write_text(content)
    with pytest.raises(UsageError, match=r"recover\.system: names a file"):
        load(["tiny.yaml"], ["recover.system='@use.txt'"])
