"""Workflow files: what is accepted, which source wins, and errors that name the file and line."""

import json
import re
from pathlib import Path

import pytest

from opdcl.config.load import dump, load, validate
from opdcl.config.reference import describe_fields
from opdcl.config.shipped import workflow_files
from opdcl.data.rows import load_rows
from opdcl.errors import UsageError


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a workflow file and returns its name."""

    def write_file(content: str | bytes, name: str = "flow.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


def complaint(*args, **kwargs) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(*args, **kwargs)
    assert caught.value.exit_code == 2
    assert caught.value.hint, "every error says what to do next"
    return caught.value


def test_each_source_overrides_the_one_before_and_leaves_the_rest(write):
    first = write("recover:\n  steps: 1\n  rollouts: 1\n  seed: 1\n  max_new_tokens: 1\n", "first.yaml")
    second = write("recover:\n  rollouts: 2\n  seed: 2\n  max_new_tokens: 2\n", "second.yaml")
    overrides = ["recover.seed=9", "recover.seed=3", "recover.max_new_tokens=3"]
    given = {"recover.max_new_tokens": 4, "recover.steps": None}  # the latter was not given
    flow, origins = load([first, second], overrides, given)
    recover = flow.recover
    assert (recover.steps, recover.rollouts, recover.seed, recover.max_new_tokens) == (1, 2, 3, 4)
    assert recover.on_policy.reverse == 0.0, "the default"
    assert not any(key.startswith("recover.on_policy") for key in origins)
    assert origins["recover.steps"] == f"{first}:2"
    assert origins["recover.rollouts"] == f"{second}:2"
    assert origins["recover.seed"] == "--set"
    assert origins["recover.max_new_tokens"] == "argument"


def test_a_list_is_replaced_not_extended(write):
    first = write("eval: {retention: [a, b]}\n", "first.yaml")
    second = write("eval: {retention: [c]}\n", "second.yaml")
    assert load([first, second])[0].eval.retention == ["c"]


@pytest.mark.parametrize("written", ["1e-4", "1.0e-4", "0.0001"])
def test_a_number_with_an_exponent_is_a_float_in_a_file_and_in_set(write, written):
    file = write(f"model:\n  chat_template_kwargs:\n    file: {written}\n")
    flow, _ = load([file], [f"model.chat_template_kwargs.set={written}"])
    assert flow.model.chat_template_kwargs == {"file": 1e-4, "set": 1e-4}


@pytest.mark.parametrize("word", ["on", "off", "yes", "no"])
def test_on_and_off_are_words_not_truth_values(write, word):
    flow, _ = load([write(f"eval: {{domain: {word}}}\n")], [f"eval.control={word}"])
    assert (flow.eval.domain, flow.eval.control) == ([word], [word])


@pytest.mark.parametrize(
    ("text", "key", "line", "meant"),
    [
        ("recover:\n  seed: 1\n  stepz: 3\n", "recover.stepz", 3, "recover.steps"),
        ("name: x\nrecovr: {}\n", "recovr", 2, "recover"),
        ("finetune:\n data: d\n lora:\n  rnk:\n  alfa: 0\n", "finetune.lora.alfa", 5, "finetune.lora.alpha"),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_the_nearest_key(write, text, key, line, meant):
    file = write(text)
    fault = complaint([file])
    assert f"unknown key {key}, {file}:{line}" in fault.message
    assert f"did you mean {meant}?" in f"{fault.message} {fault.hint}"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("lora.r=8", "did you mean finetune.lora.r?"),
        ("lora={r: 8}", "did you mean finetune.lora.r?"),
        ("weighting=tokens", "did you mean recover.weighting?"),
        ("recover.epochs=3", "did you mean finetune.epochs?"),
    ],
)
def test_a_key_of_another_section_is_suggested_in_full(override, meant):
    assert complaint(["quickstart"], [override]).hint == meant


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("recover.learning_rate=abc", "must be a number or 'auto' (got 'abc', --set)"),
        ("recover.learning_rate=2", "must be less than 1 or 'auto'"),
        ("recover.rollouts=0", "must be greater than 0 or 'auto'"),
        ("recover.lmbda=1.5", "must be at most 1"),
        ("model.shard=perhaps", "must be true or false"),
        ("recover.general_teacher={kind: base}", "recover.general_teacher: must be text"),
        ("recover.domain_teacher=tunde", "recover.domain_teacher names no teacher 'tunde'"),
        ("recover.teachers.tuned.kind=base", "teachers.tuned: tuned is built in"),
        ("recover.teachers.a.kind=none", "recover.teachers.a.kind: must be 'base', 'tuned'"),
        ("finetune.lora.target_modules=3", "must be text or a list"),
        ("recover.on_policy.reverse=.inf", "must be a finite number"),
        ("seeds=[1, -2]", "seeds.1: must be at least 0"),
        ("recover.steps.x=3", "recover.steps.x"),
    ],
)
def test_a_wrong_value_is_explained_in_plain_words(override, words):
    assert words in complaint(["quickstart"], [override]).message


VALUES = ["../x", "", -1, 2.5, [], {}, None, True, [1], [[]], {"a": 1}, {"kind": 3}, float("nan")]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_no_error_speaks_the_language_of_the_schema_library(value):
    messages = []
    for key, *_ in describe_fields():
        tree: dict = {"finetune": {"data": "d"}}
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
        try:
            validate(tree)
        except UsageError as fault:
            messages.append(fault.message)
    assert messages
    assert [m for m in messages if re.search(r"Input should|valid |parse|instance of|\^\[", m)] == []


@pytest.mark.parametrize(
    ("key", "name"), [("eval.retention", "ifeval"), ("eval.domain", "handbook"), ("track", "tensorboard")]
)
def test_a_single_name_is_a_list_of_one(write, key, name):
    section, _, last = f".{key}".rpartition(".")
    tree = {last: name} if section == "" else {section.strip("."): {last: name}}
    flow, _ = load([write(json.dumps(tree))])
    assert (flow.eval.model_dump()[last] if section else flow.track) == [name]


@pytest.mark.parametrize(
    ("text", "key", "line", "got"),
    [
        ("recover:\n  steps: many\n", "recover.steps", 2, "'many'"),
        ("recover:\n  steps: 2.5\n", "recover.steps", 2, "2.5"),
        ("recover:\n  steps: -1\n", "recover.steps", 2, "-1"),
        ("recover:\n  learning_rate: -1e-4\n", "recover.learning_rate", 2, "-0.0001"),
        ("name: x\nrecover: 5\n", "recover", 2, "5"),
        ("eval:\n  retention: {a: b}\n", "eval.retention", 2, "{'a': 'b'}"),
        ("finetune:\n  data: d\n  long_rows: sometimes\n", "finetune.long_rows", 3, "'sometimes'"),
        (
            "finetune:\n  data: d\n  lora:\n    target_modules: [lm_head]\n",
            "finetune.lora.target_modules",
            4,
            "lm_head",
        ),
        ("name: ../elsewhere\n", "name", 1, "'../elsewhere'"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(write, text, key, line, got):
    file = write(text)
    message = complaint([file]).message
    assert message.startswith(f"{key}: ")
    assert f"{file}:{line})" in message
    assert got in message


def test_all_faults_are_reported_at_once(write):
    file = write("finetune: {data: d, epochs: x}\nrecover:\n  stepz: 3\n  seed: x\n")
    said = [line.partition(";")[0] for line in complaint([file]).message.splitlines()]
    assert said == [
        f"finetune.epochs: must be a number (got 'x', {file}:1)",
        f"recover.seed: must be an integer (got 'x', {file}:4)",
        f"unknown key recover.stepz, {file}:3",
    ]


@pytest.mark.parametrize("text", ["'Tom &co *stars*'", "Tom & Jerry's *stars* and <<marks>>"])
def test_an_ampersand_or_star_inside_quotes_text_or_a_comment_is_text(write, text):
    flow, _ = load([write(f"# *bold* &c\ndescription: {text}\n")])
    assert flow.description == text.strip("'")


def test_an_empty_file_is_all_defaults(write):
    flow, _ = load([write("# nothing yet\n")])
    assert flow.model.id == "smollm2-135m"
    assert flow.finetune is None


def test_relative_paths_start_at_the_folder_of_the_workflow_file(write, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("rows.jsonl", "prompts.jsonl", "ifeval.jsonl"):
        (folder / name).write_text("{}")
    file = write(
        "finetune: {data: rows.jsonl}\nrecover: {general: ./prompts.jsonl, domain: ../project/rows.jsonl}\n"
        "eval: {data: {ifeval: ifeval.jsonl}}\n",
        "project/flow.yaml",
    )
    flow, _ = load([file])
    assert flow.finetune.data == str(folder / "rows.jsonl")
    assert flow.recover.general == str(folder / "prompts.jsonl")
    assert flow.recover.domain == str(folder / "rows.jsonl")
    assert flow.eval.data["ifeval"] == str(folder / "ifeval.jsonl")


def test_aliases_hub_ids_and_absolute_paths_stay_as_written(write):
    text = "model: {id: Qwen/Qwen3-1.7B}\nfinetune: {data: handbook}\nrecover: {general: /data/p.jsonl}\n"
    flow, _ = load([write(text)])
    assert flow.model.id == "Qwen/Qwen3-1.7B"
    assert flow.finetune.data == "handbook"
    assert flow.recover.general == "/data/p.jsonl"


@pytest.mark.parametrize("override", ["recover.steps", "=3", " =3"])
def test_set_without_key_or_value_is_refused(override):
    fault = complaint(["quickstart"], [override])
    assert "is not KEY=VALUE" in fault.message
    assert fault.hint == "--set recover.steps=60"


@pytest.mark.parametrize("override", ["eval.closeness=", "recover.general= "])
def test_set_without_a_value_is_refused_and_names_no_folder(override):
    fault = complaint(["quickstart"], [override])
    assert fault.message == f"--set {override.strip()} has no value"
    assert "=null takes a setting away" in fault.hint


@pytest.mark.parametrize(("typed", "hint"), [("quikstart", "did you mean quickstart?"), ("zz", "quickstart")])
def test_an_unknown_workflow_gets_a_suggestion(typed, hint):
    fault = complaint([typed])
    assert repr(typed) in fault.message
    assert hint in fault.hint


@pytest.mark.parametrize("name", workflow_files())
def test_every_shipped_workflow_loads_and_has_a_description(name):
    flow, _ = load([name])
    assert flow.name == name
    assert flow.description


def test_every_field_is_described_once():
    rows = describe_fields()
    keys = [key for key, *_ in rows]
    assert len(keys) == len(set(keys))
    assert {"model.id", "finetune.lora.r", "recover.steps", "eval.retention", "gates.closeness"} <= {*keys}
    assert [key for key, *_, meaning in rows if len(meaning) < 4] == []
    assert {key: default for key, _, default, _ in rows}["finetune.data"] == "required"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("recover:\n  <<: {steps: 3}\n", "flow.yaml:2 uses a merge key"),
        ("recover: !odd {steps: 3}\n", "flow.yaml:1 uses a tag"),
        ("%YAML 1.1\n---\nname: x\n", "uses a YAML directive"),
        ("recover: &shared {steps: 3}\n", "uses an anchor or alias"),
        ("eval: {retention: &a [x], domain: *a}\n", "uses an anchor or alias"),
        ("recover:\n  general:\n    a: &lol [x, x]\n    b: [*lol, *lol]\n", "uses an anchor or alias"),
        ("[" * 100_000, "nests more than 50 levels"),
        ("\n".join(" " * i + "a:" for i in range(200)), "nests more than 50 levels"),
        (b"#" * 1_000_001, "1000001 bytes"),
        (b"name: caf\xe9\n", "not UTF-8 text (byte 9)"),
        ("- a\n- b\n", "not a mapping"),
        ("just words\n", "not a mapping"),
        ("42\n", "not a mapping"),
        ("name: x\nrecover: [1, 2\nseed: 3\n", "flow.yaml:3:"),
        ("recover:\n  steps: 3\n  seed: 1\n  steps: 4\n", "flow.yaml:4:"),
        ("finetune:\n  epochs: 1\n", "finetune.data is required, FILE:1"),
        ("finetune:\n  data: 2026-01-02\n", "write it in quotes"),
        ("recover: {steps: true}\n", "recover.steps"),
        ("recover: {steps: '3'}\n", "recover.steps"),
        ("recover: {on_policy: {reverse: .inf}}\n", "recover.on_policy.reverse"),
    ],
)
def test_what_no_workflow_needs_is_refused_with_its_place(write, content, said):
    file = write(content)
    assert said.replace("FILE", file) in complaint([file]).message


def test_a_saved_workflow_reads_back_as_it_was(write):
    for name in workflow_files():
        flow, _ = load([name])
        assert load([str(write(dump(flow)))])[0] == flow


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "x" * 200, "nul\0"]
)
def test_a_suite_name_cannot_leave_the_run_directory(name):
    named = [{role: [name]} for role in ("retention", "domain", "control")]
    for evaluation in (*named, {"data": {name: "rows.jsonl"}}):
        with pytest.raises(UsageError, match="not a suite name"):
            validate({"eval": evaluation})


@pytest.mark.parametrize("value", ["~nobody-of-this-name/rows.jsonl", "~\ud800"])
def test_an_unknown_home_folder_is_an_error_with_a_message(tmp_path, value):
    (tmp_path / "flow.yaml").write_text(json.dumps({"finetune": {"data": value}}))
    with pytest.raises(UsageError, match=r"does not exist|valid text"):
        load_rows(load([str(tmp_path / "flow.yaml")])[0].finetune.data)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"recover": {"method": "general", "general": None}}, "without general prompts"),
        ({"recover": {"general": None}}, "without general prompts"),
        ({"recover": {"teachers": {"a": {"kind": "adapter", "adapter": ""}}}}, "adapter"),
        ({"start": ""}, "start"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(section, said):
    with pytest.raises(UsageError, match=said):
        validate(section)


@pytest.mark.parametrize(
    "tree",
    [
        {"eval": {"domain": ["mine", "Mine"], "data": {"mine": "a.jsonl", "Mine": "b.jsonl"}}},
        {"eval": {"retention": ["mine"], "domain": ["MINE"], "data": {"mine": "a.jsonl", "MINE": "b.jsonl"}}},
        {"arms": {"short": {}, "Short": {}}},
    ],
)
def test_names_that_differ_in_case_only_are_refused(tree):
    with pytest.raises(UsageError, match="where file names ignore case"):
        validate({"model": {"id": "smollm2-135m"}, **tree})


def test_the_same_suite_may_be_named_once_per_spelling_that_differs():
    tree = {"eval": {"domain": ["mine", "mine2"], "data": {"mine": "a.jsonl", "mine2": "b.jsonl"}}}
    assert validate({"model": {"id": "smollm2-135m"}, **tree}).eval.domain == ["mine", "mine2"]
