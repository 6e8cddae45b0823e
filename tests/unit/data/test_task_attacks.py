"""A task of somebody else's, without consent: whatever it is made of, nothing runs, or it is refused."""

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import yaml

from opdcl.config.evaluate import EvalConfig
from opdcl.config.load import validate
from opdcl.data.own_tasks import own_task
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError

PLAIN = {
    "task": "evil",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.json"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{a}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
# Leaves a file behind in the folder in which the test runs.
CODE = "open('RAN', 'w').close()\ndef f(*given): return given\nclass T: pass\n"
BREAK_OUT = "{{ cycler.__init__.__globals__.os.system('touch RAN') }}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    return tmp_path


def prepare(folder: Path) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "utils.py").write_text(CODE)
    (folder / "rows.json").write_text(json.dumps([{"q": f"Q{i}", "a": "A"} for i in range(3)]))


def load(file: Path):
    return load_suite("evil", EvalConfig(data={"evil": str(file)}))


def write(file: Path, text: str = "", **changes) -> Path:
    """Write a task; a text that stands in `text` after it is YAML that no value can be written as."""
    file.write_text(yaml.safe_dump({**PLAIN, **changes}) + text)
    return file


def test_an_include_is_read_from_where_a_link_leads(folder):
    prepare(folder / "real")
    write(folder / "real" / "task.yaml", include="inc.yaml")
    (folder / "real" / "inc.yaml").write_text("process_docs: !function utils.f\n")
    (folder / "inc.yaml").write_text("metadata: {a: 1}\n")
    (folder / "task.yaml").symlink_to("real/task.yaml")
    for place in ([f"{folder}/"], ["evil"]):  # named as a folder, and as a run has stored it
        tree = {"eval": {"domain": place, "data": {"evil": str(folder / "task.yaml")}}}
        config = validate(tree).eval
        with pytest.raises(UsageError, match=r"real/inc\.yaml:1 has process_docs: !function utils\.f"):
            load_suite("evil", config)
    assert not (folder / "RAN").exists()


TAGS = [
    "!function utils.f",
    "!<!function> utils.f",
    "!!python/name:utils.f",
    "!!python/object/apply:os.mkdir [RAN]",
]
PLACES = {
    "a value": "process_docs: {}",
    "a nested list": "metadata: {{a: [1, [{}]]}}",
    "a key": "metadata: {{? {}\n : 1}}",
    "a default": "defaults: &d {{process_docs: {}}}\n<<: *d",
    "a filter": "filter_list: [{{name: x, filter: [{{function: custom, filter_fn: {}}}]}}]",
    "a metric": "metric_list: [{{metric: {}}}]",
    "a member of a group": "group: g\ntask_list: [{{task: evil, process_docs: {}}}]",
    "a sampler": "fewshot_config: {{sampler: {}}}",
    "what is overwritten": "doc_to_text: {}",
}


@pytest.mark.parametrize(("place", "is_included"), itertools.product(PLACES, [False, True]))
def test_a_tag_is_found_wherever_it_stands(folder, place, is_included):
    for tag in TAGS:
        text = PLACES[place].format(f"{tag} ") + "\n"
        if is_included:
            (folder / "inc.yaml").write_text(text)
            file = write(folder / "task.yaml", include="inc.yaml")
        else:
            own = {key: value for key, value in PLAIN.items() if f"\n{key}:" not in f"\n{text}"}
            file = folder / "task.yaml"
            file.write_text(text + yaml.safe_dump(own))
        with pytest.raises(UsageError, match=r"comes with code of its own: \S*/(task|inc)\.yaml:\d+ has "):
            load(file)
        assert not (folder / "RAN").exists()


def test_a_directive_hides_no_tag(folder):
    file = folder / "task.yaml"
    file.write_text("%TAG ! !func\n---\n" + yaml.safe_dump(PLAIN).replace("'{{q}}'", "!tion utils.f"))
    with pytest.raises(UsageError, match="comes with code of its own"):
        load(file)


OTHER_WAYS = {
    "a class as text": {"class": "utils.T"},
    "a metric of another library": {"metric_list": [{"metric": "./utils.py"}]},
    "a metric that is no name": {"metric_list": [{"metric": ["exact_match"]}]},
    "metrics that are no list": {"metric_list": {"metric": "./utils.py"}},
    "a metric by evaluate": {"metric_list": [{"metric": "exact_match", "hf_evaluate": "yes"}]},
    "prompts of a file": {"use_prompt": "p.yaml:x"},
    "data as a pickle": {"dataset_path": "pandas"},
    "data of a database": {"dataset_path": "sql", "dataset_kwargs": {"sql": "select 1", "con": "sqlite://"}},
    "a script as data": {"dataset_path": "./utils.py", "dataset_kwargs": {"trust_remote_code": True}},
    "a function as text": {"process_docs": "utils.f"},
    "a scorer as text": {"process_results": "utils.f"},
    "a sampler as text": {"fewshot_config": {"sampler": "utils.T", "split": "test"}, "num_fewshot": 1},
    "a filter as text": {
        "filter_list": [{"name": "x", "filter": [{"function": "custom", "filter_fn": "f"}]}]
    },
    "a template of the question": {"doc_to_text": BREAK_OUT},
    "a template of the answer": {"doc_to_target": BREAK_OUT},
    "a template of the description": {"description": BREAK_OUT},
    "a template of the prefix": {"gen_prefix": BREAK_OUT},
    "a template of examples": {
        "fewshot_config": {"doc_to_text": BREAK_OUT, "split": "test"},
        "num_fewshot": 1,
    },
    "a format of Python": {"doc_to_text": "{{ '{0.__class__}'.format_map({0: q}) ~ q.__class__.__mro__ }}"},
    "a pipe as data": {"dataset_kwargs": {"data_files": {"test": "pipe"}}},
    "a pipe that is included": {"include": "pipe"},
    "a folder that is included": {"include": ["."]},
    "a device that is included": {"include": "/dev/zero"},
    "itself": {"include": "task.yaml"},
    "a circle": {"include": ["circle.yaml"]},
    "a number that is included": {"include": 5},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_what_would_run_or_never_end_is_refused(folder, way):
    os.mkfifo(folder / "pipe")
    (folder / "p.yaml").write_text(
        "prompts: {x: {doc_to_text: !!python/name:os.system , doc_to_target: a}}\n"
    )
    (folder / "circle.yaml").write_text("include: link.yaml\n")
    (folder / "link.yaml").symlink_to("circle.yaml")
    with pytest.raises(UsageError) as caught:
        load(write(folder / "task.yaml", **OTHER_WAYS[way]))
    assert caught.value.hint
    assert not (folder / "RAN").exists()


@pytest.mark.parametrize(
    "text",
    [
        "dataset_kwargs: {data_files: &a [*a]}\n",
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{n}: &{n} [{', '.join([f'*{o}'] * 9)}]\n" for o, n in itertools.pairwise("abcdefghij")),
        "metadata: " + "[" * 5_000 + "]" * 5_000 + "\n",
    ],
    ids=["a value that holds itself", "values that hold each other", "a deep value"],
)
def test_values_without_end_are_refused(folder, text):
    own = {key: value for key, value in PLAIN.items() if key != "dataset_kwargs"}
    (folder / "task.yaml").write_text(yaml.safe_dump(own) + text)
    with pytest.raises(UsageError, match=r"holds itself|recursion"):
        load(folder / "task.yaml")


def test_a_long_chain_of_includes_is_refused(folder):
    for i in range(200):
        (folder / f"{i}.yaml").write_text(f"include: {i + 1}.yaml\n")
    with pytest.raises(UsageError, match="more than 100 files"):
        load(write(folder / "task.yaml", include="0.yaml"))


@pytest.mark.parametrize("seed", range(40))
def test_any_graph_of_includes_and_links_runs_nothing_and_is_read_as_lm_eval_reads_it(folder, seed):
    from lm_eval.tasks._yaml_loader import load_yaml

    draw = random.Random(seed)
    folders = [folder, folder / "a", folder / "a" / "b", folder / "c"]
    for place in folders:
        prepare(place)
    names = ["task.yaml", "one.yaml", "two.yaml", "three.yaml"]
    for place, name in itertools.product(folders, names):
        kind = draw.choice(["file", "file", "link"]) if (place, name) != (folder, "task.yaml") else "link"
        if kind == "link":
            target = draw.choice(folders) / draw.choice(names)
            (place / name).symlink_to(os.path.relpath(target, place))
            continue
        others = ["one.yaml", "two.yaml", "../one.yaml", "b/two.yaml", str(folder / "c" / "three.yaml")]
        content = {**PLAIN, "metadata": {"from": f"{place.name}/{name}"}, draw.choice("xyz"): draw.random()}
        included = draw.choices(others, k=draw.choice([0, 1, 1, 2]))
        content |= {"include": included} if included else {}
        tag = "process_docs: !function utils.f\n" if draw.random() < 0.15 else ""
        (place / name).write_text(yaml.safe_dump(content) + tag)
    try:
        settings = own_task("evil", folder / "task.yaml", trusted=False)
    except UsageError:
        assert not [*folder.rglob("RAN")]
        return
    assert not [*folder.rglob("RAN")]
    theirs = load_yaml(folder / "task.yaml")
    assert not [*folder.rglob("RAN")]  # with what was accepted, lm-eval runs nothing either
    assert settings | {"dataset_kwargs": 0} == theirs | {"dataset_kwargs": 0}


def test_what_was_checked_is_what_runs(folder, monkeypatch):
    """Between the check and the loading, somebody changes the file."""
    from lm_eval.tasks import TaskManager

    file = write(folder / "task.yaml", include="inc.yaml")
    (folder / "inc.yaml").write_text("metadata: {a: 1}\n")
    load_task = TaskManager.load

    def change_and_load(self, task):
        (folder / "inc.yaml").write_text("process_docs: !function utils.f\n")
        file.write_text(yaml.safe_dump(PLAIN) + "process_docs: !function utils.f\n")
        return load_task(self, task)

    monkeypatch.setattr(TaskManager, "load", change_and_load)
    assert [doc["q"] for doc in load(file).documents(None)] == ["Q0", "Q1", "Q2"]
    assert not (folder / "RAN").exists()
