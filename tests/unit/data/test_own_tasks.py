"""A user's own task of lm-eval: named by its path, measured like any other, and its code asks for consent."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from helpers.command import ROOT, opdcl
from helpers.tiny import make_project

from opdcl.config.evaluate import EvalConfig
from opdcl.config.load import load, validate
from opdcl.data.rows import source_files
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError
from opdcl.rundir.files import read_json

ROWS = [{"question": f"What colour is flag {i}?", "answer": "green" if i % 2 else "blue"} for i in range(6)]
PLAIN = """
task: flags
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
"""
CHOICE = PLAIN.partition("generation_kwargs")[0].replace("generate_until", "multiple_choice") + (
    "doc_to_choice: [green, blue]\n"
    "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
)
SCORED = PLAIN.partition("metric_list")[0] + (
    "process_results: !function utils.score\n"
    "metric_list:\n  - {metric: hit, aggregation: mean, higher_is_better: true}\n"
)
# Leaves a file behind, as code that nobody asked for might do.
CODE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


def score(doc, results):
    return {"hit": float(doc["answer"] in results[0])}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mytasks").mkdir()
    (tmp_path / "mytasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mytasks" / "flags.yaml").write_text(PLAIN)
    return tmp_path


def configured(folder: Path, place: str = "mytasks/flags.yaml") -> EvalConfig:
    """Return the evaluation of a workflow in a folder that names a task by its path."""
    (folder / "flow.yaml").write_text(f"eval: {{retention: [{place}], domain: [handbook]}}\n")
    return load([str(folder / "flow.yaml")])[0].eval


@pytest.mark.parametrize("place", ["mytasks/flags.yaml", "mytasks/../mytasks/flags.yaml"])
def test_a_path_becomes_the_name_of_the_task_and_scores_like_any_suite(folder, place):
    config = configured(folder, place)
    assert (config.retention, config.domain) == (["flags"], ["handbook"])
    assert config.data == {"flags": str(folder / "mytasks" / "flags.yaml")}
    suite = load_suite("flags", config, trusted=True)
    assert [suite.prompt_of(doc) for doc in suite.documents(2)] == [
        "What colour is flag 0?",
        "What colour is flag 1?",
    ]
    scores = suite.scores(suite.documents(None), ["Blue", "green", "red", "red", "red", "red"])
    assert suite.means(scores) == {"exact_match": round(2 / 6, 6)}


def test_a_task_of_multiple_choice_has_chance_as_its_floor(folder):
    (folder / "mytasks" / "flags.yaml").write_text(CHOICE)
    suite = load_suite("flags", configured(folder), trusted=True)
    assert suite.means(suite.floors(None, [])["chance"]) == {"acc": 0.5}


def test_the_command_resolves_a_path_where_it_is_given(folder, tiny_model):
    make_project(folder, tiny_model)
    words = ["--set", "finetune=null", "--set", "recover=null", "--set", "eval.domain=[]"]
    named = [*words, "--set", "eval.retention=[mytasks/flags.yaml]"]
    words += ["--set", "model.trust_remote_code=true"]
    refused = opdcl("run", "tiny.yaml", *named, cwd=folder, code=2)
    assert "mytasks/flags.yaml, and a task is code" in refused.stderr
    assert "--set model.trust_remote_code=true" in refused.stderr
    opdcl("run", "tiny.yaml", *named, *words, cwd=folder, code=0)
    assert read_json(folder / "runs/tiny/evals/base/flags.json")["metrics"].keys() == {"exact_match"}
    # Other questions are another suite, though the path is the same.
    again = ["run", folder / "tiny.yaml", *words, "--set", f"eval.retention=[{folder}/mytasks/flags.yaml]"]
    again += ["-o", str(folder / "runs" / "tiny"), "--dry-run", "--json"]

    def actions() -> set[str]:
        tasks = json.loads(opdcl(*again, cwd=ROOT).stdout)["tasks"]
        return {task["action"] for task in tasks if task["suite"] == "flags"}

    assert actions() == {"skip"}
    (folder / "mytasks" / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    assert actions() == {"run"}
    (folder / "mytasks" / "scored.yml").write_text(SCORED.replace("task: flags", "task: scored"))
    (folder / "mytasks" / "utils.py").write_text(CODE)
    for option in ("--retention", "--domain"):
        added = ["eval", "runs/tiny", option, "mytasks/scored.yml", "--dry-run"]
        refused = opdcl(*added, cwd=folder, code=2)
        assert "runs/tiny was made with Python code" in refused.stderr
        agreed = opdcl(*added, "--set", "model.trust_remote_code=true", cwd=folder, code=0)
        assert "scored" in agreed.stdout


def test_the_files_on_which_scores_depend_are_those_beside_the_task(folder):
    mine = folder / "mytasks"
    (mine / "flags.yaml").write_text("include: base.yaml\n")
    (mine / "base.yaml").write_text(SCORED)
    (mine / "utils.py").write_text(CODE)
    (mine / "photo.png").write_text("Nothing of this is read.")
    (folder / "linked.yaml").symlink_to(mine / "flags.yaml")
    for place in (mine / "flags.yaml", folder / "linked.yaml"):
        names = [file.name for file in source_files(str(place))]
        assert names == ["base.yaml", "flags.yaml", "rows.jsonl", "utils.py"]
    config = configured(folder, "linked.yaml")
    suite = load_suite(config.retention[0], config, trusted=True)
    assert suite.means(suite.scores(suite.documents(None), ["blue"] * 6)) == {"hit": 0.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("include: ../base.yaml\n", "base.yaml, of another folder"),
        ("include: part.yaml\n", "base.yaml, of another folder"),
        (PLAIN.replace("rows.jsonl", "../far.jsonl"), "is not among the rows beside the task"),
        (PLAIN.replace("rows.jsonl", "far.jsonl"), "is not among the rows beside the task"),
        (PLAIN.replace("{test: rows.jsonl}", "{test: [rows.jsonl, FAR]}"), "is not among the rows"),
    ],
)
def test_a_task_whose_files_lie_elsewhere_is_refused(folder, text, words, monkeypatch):
    """Nobody would notice that they change."""
    monkeypatch.chdir(folder)  # where `datasets` would find a file of this name
    for name in ("base.yaml", "far.jsonl"):
        (folder / name).write_text(PLAIN if name == "base.yaml" else json.dumps(ROWS[0]))
    (folder / "mytasks" / "part.yaml").write_text("include: ../base.yaml\n")
    (folder / "mytasks" / "flags.yaml").write_text(text.replace("FAR", str(folder / "far.jsonl")))
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        load_suite("flags", configured(folder), trusted=True)
    assert "copy it" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("group: flags\ntask: [a, b]\n", "is a group of tasks"),
        ("name: flags\n", "cannot be loaded from"),
        ("task: flags\n- x", "cannot be used here"),
        ("- x\n", "Expected YAML dict"),
        (PLAIN + "metadata: !!python/object/apply:os.mkdir [ran]\n", "cannot be used here"),
        (PLAIN + "repeats: 4\n", "samples several answers"),
        (PLAIN.replace("generate_until", "loglikelihood_rolling"), "measures perplexity"),
        (PLAIN.replace("rows.jsonl", "nowhere.jsonl"), "cannot be loaded from"),
        (PLAIN.replace("{{question}}", "{{nothing}}"), "'nothing' is undefined"),
        (PLAIN.replace("exact_match", "bleu"), "does not score prompt by prompt"),
        (PLAIN.replace("better: true", "better: false"), "good when high: less exact_match is better"),
        (PLAIN.replace("aggregation: mean", "aggregation: median"), "does not score prompt by prompt"),
        (PLAIN + "description: '{{nothing}}'\n", "suite 'flags' cannot be scored: 'nothing' is undefined"),
        ("include: flags.yaml\ntask: flags\n", "Include cycle"),
    ],
)
def test_what_cannot_be_measured_is_said(folder, text, words):
    (folder / "mytasks" / "flags.yaml").write_text(text)

    def measure() -> None:
        config = configured(folder)
        load_suite(config.retention[0], config, trusted=True)

    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        measure()
    assert caught.value.hint


def test_a_path_that_leads_nowhere_and_two_suites_of_one_name_are_refused(folder):
    with pytest.raises(UsageError, match=r"mytasks/other\.yaml' does not exist"):
        configured(folder, "mytasks/other.yaml")
    (folder / "flags.yaml").write_text(PLAIN)
    with pytest.raises(UsageError, match="would be the same suite 'flags'"):
        configured(folder, "mytasks/flags.yaml, flags.yaml")
    (folder / "instructions.yml").write_text(PLAIN)
    with pytest.raises(UsageError, match="is shipped with its data"):
        load_suite("instructions", configured(folder, "instructions.yml"), trusted=True)
    os.mkfifo(folder / "mytasks" / "pipe.yaml")
    with pytest.raises(UsageError, match=r"pipe\.yaml' does not exist"):
        configured(folder, "mytasks/pipe.yaml")


def test_the_example_on_the_page_is_measured(folder):
    text = (ROOT / "docs/data.md").read_text().partition("## A scorer of your own")[2]
    task, scorer = re.findall(r"```(?:text|python)\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)
    (folder / "flow.yaml").write_text("eval: {retention: [mytasks/flags.yaml]}")
    for name, file in (("mytasks/flags.yaml", task), ("mytasks/utils.py", scorer)):
        (folder / name).write_text(file)
    config = load([str(folder / "flow.yaml")])[0].eval
    suite = load_suite(config.retention[0], config, trusted=True)
    scores = suite.scores(suite.documents(None), ["blue", "green", "", "", "", "it is green and blue"])
    assert [*suite.means(scores).values()] == [round(3 / 6, 6)]


# Without consent nothing of a task of somebody else's runs, whatever it is made of, and every reader ends.

# Leaves a file behind in the folder in which the test runs.
SPOILING = "open('RAN', 'w').close()\ndef f(*given): return given\nclass T: pass\n"
BREAK_OUT = "{{ cycler.__init__.__globals__.os.system('touch RAN') }}"


@pytest.fixture
def spoilt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "utils.py").write_text(SPOILING)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    return tmp_path


def write(file, text="", **changes):
    """Write a task; a text that stands in `text` after it is YAML that no value can be written as."""
    file.write_text(yaml.safe_dump(yaml.safe_load(PLAIN) | changes) + text)
    return file


WAYS = {
    "a function": {"text": "process_docs: !function utils.f\n"},
    "an object of Python": {"text": "metadata: !!python/object/apply:os.mkdir [RAN]\n"},
    "a name of Python": {"text": "metadata: {a: [1, !!python/name:utils.f ]}\n"},
    "a function that is included": {"include": "inc.yaml"},
    "a class as text": {"class": "utils.T"},
    "a metric of another library": {"metric_list": [{"metric": "./utils.py"}]},
    "a script as data": {"dataset_path": "./utils.py", "dataset_kwargs": {"trust_remote_code": True}},
    "a template of the question": {"doc_to_text": BREAK_OUT},
    "a template of the description": {"description": BREAK_OUT},
    "nothing": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_without_consent_nothing_runs(spoilt, way):
    (spoilt / "inc.yaml").write_text("process_docs: !function utils.f\n")
    file = write(spoilt / "task.yaml", **WAYS[way])
    for place in ([f"{spoilt}/task.yaml"], ["task"]):  # named by the user, and as a run has stored it
        config = validate({"eval": {"domain": place, "data": {"task": str(file)}}}).eval
        assert spoilt / "utils.py" in source_files(str(file))  # what plans are made from
        with pytest.raises(UsageError, match="and a task is code") as caught:
            load_suite("task", config)
        assert "--set model.trust_remote_code=true" in caught.value.hint
    assert not (spoilt / "RAN").exists()


def test_without_consent_no_file_of_a_task_is_opened(spoilt):
    """Names of files are all that a plan needs, so what is in them cannot hold it up."""
    (spoilt / "task.yaml").write_text("include: [pipe, /dev/zero, task.yaml]\n- " + "[" * 5_000)
    (spoilt / "huge.yaml").write_text("a: &a [1, 1]\n" * 1_000)
    os.mkfifo(spoilt / "pipe.yaml")
    (spoilt / "zero.jsonl").symlink_to("/dev/zero")
    (spoilt / "circle.yaml").symlink_to("circle.yaml")
    (spoilt / "linked").symlink_to(spoilt)
    assert validate({"eval": {"domain": ["task.yaml"]}}).eval.data == {"task": "task.yaml"}
    names = [file.name for file in source_files(str(spoilt / "task.yaml"))]
    assert names == ["huge.yaml", "rows.jsonl", "task.yaml", "utils.py"]
