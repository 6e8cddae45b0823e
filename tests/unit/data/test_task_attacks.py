"""A task of somebody else's, without consent: whatever it is made of, nothing runs, and every reader ends."""

import itertools
import json
import os

import pytest
import yaml

from opdcl.config.load import validate
from opdcl.data.rows import source_files
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
    (tmp_path / "utils.py").write_text(CODE)
    (tmp_path / "rows.json").write_text(json.dumps([{"q": f"Q{i}", "a": "A"} for i in range(3)]))
    return tmp_path


def write(file, text="", **changes):
    """Write a task; a text that stands in `text` after it is YAML that no value can be written as."""
    file.write_text(yaml.safe_dump({**PLAIN, **changes}) + text)
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
def test_without_consent_nothing_runs(folder, way):
    (folder / "inc.yaml").write_text("process_docs: !function utils.f\n")
    file = write(folder / "task.yaml", **WAYS[way])
    for place in ([f"{folder}/task.yaml"], ["evil"]):  # named by the user, and as a run has stored it
        config = validate({"eval": {"domain": place, "data": {"evil": str(file)}}}).eval
        assert folder / "utils.py" in source_files(str(file))  # what plans are made from
        with pytest.raises(UsageError, match="and a task is code") as caught:
            load_suite("evil", config)
        assert "--set model.trust_remote_code=true" in caught.value.hint
    assert not (folder / "RAN").exists()


ENDLESS = {
    "a pipe that is included": "include: pipe\n",
    "a folder that is included": "include: [.]\n",
    "a device that is included": "include: /dev/zero\n",
    "itself": "include: task.yaml\n",
    "a circle": "include: [circle.yaml]\n",
    "a number that is included": "include: 5\n",
    "a long chain": "include: 0.yaml\n",
    "a deep value": "metadata: " + "[" * 5_000 + "]" * 5_000 + "\n",
    "a value that holds itself": "dataset_kwargs: {data_files: &a [*a]}\n",
    "no object": "- a\n",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_what_would_never_end_is_refused(folder, case):
    os.mkfifo(folder / "pipe")
    (folder / "circle.yaml").write_text("include: link.yaml\n")
    (folder / "link.yaml").symlink_to("circle.yaml")
    for i in range(200):
        (folder / f"{i}.yaml").write_text(f"include: {i + 1}.yaml\n")
    (folder / "task.yaml").write_text(ENDLESS[case])
    with pytest.raises(UsageError) as caught:
        source_files(str(folder / "task.yaml"))
    assert caught.value.hint


VALUES = {
    "values that hold each other": "dataset_kwargs: {data_files: *j}\n",
    "a list under many names": f"l: &l [{'rows.json, ' * 2000}]\n"
    + f"dataset_kwargs: {{data_files: {{{', '.join(f'{i}: *l' for i in range(2000))}}}}}\n",
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_under_many_names_is_read_once(folder, case):
    nested = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
        f"{n}: &{n} [{', '.join([f'*{o}'] * 9)}]\n" for o, n in itertools.pairwise("abcdefghij")
    )
    (folder / "task.yaml").write_text(f"task: evil\n{nested}{VALUES[case]}")
    assert {file.name for file in source_files(str(folder / "task.yaml"))} <= {
        "task.yaml",
        "utils.py",
        "rows.json",
    }
