"""No number makes a command hang or fail after hours: it is refused at once, or planned at once."""

import time

import pytest
from helpers.tiny import make_project

from opdcl.config.load import load
from opdcl.config.reference import describe_fields
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.pipeline.dry_run import describe
from opdcl.pipeline.job import Inputs, Job
from opdcl.rundir.layout import RunDir

EXTREMES = ("-1", "0", "1e9", "4294967296", ".nan", ".inf")
REWARDED = ["recover.reward.suite=instructions_train", "recover.keep=last", "recover.rollouts=8"]
# Section -> what it needs to have an effect.
NEEDS = {"recover.reward": [*REWARDED, "recover.lmbda=1"]}
SECONDS = 20  # on a busy machine; a plan takes a fraction of one


def numbers(schema: object, path: str = "") -> list[tuple[str, dict]]:
    """Return every description of a number in a JSON schema, with its place."""
    if isinstance(schema, list):
        return [found for index, part in enumerate(schema) for found in numbers(part, f"{path}[{index}]")]
    if not isinstance(schema, dict):
        return []
    own = [(path, schema)] if schema.get("type") in ("integer", "number") else []
    return own + [found for key, part in schema.items() for found in numbers(part, f"{path}.{key}")]


def test_every_number_of_a_workflow_has_a_smallest_and_a_largest_value():
    every = numbers(Workflow.model_json_schema())
    # What the model's own template reads is its own affair.
    found = [(path, rules) for path, rules in every if "chat_template_kwargs" not in path]
    assert len(found) > 30
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    assert [path for path, rules in found if not (low & rules.keys() and high & rules.keys())] == []


def numeric_keys() -> list[str]:
    return [key for key, kind, *_ in describe_fields() if "integer" in kind or "number" in kind]


@pytest.fixture(scope="module")
def project(tiny_model, tmp_path_factory):
    """A project, and its rows and tokenizer, which are read once."""
    return make_project(tmp_path_factory.mktemp("extremes"), tiny_model), Inputs()


def fault_of(project, *settings: str) -> UsageError | None:
    """Return the error of a dry run with these settings, if there is one."""
    folder, sources = project
    try:
        workflow, origins = load(["tiny.yaml"], [*settings])
        describe(Job(workflow, RunDir(folder / "run"), sources, origins))
    except UsageError as fault:
        return fault
    return None


@pytest.mark.parametrize("key", numeric_keys())
def test_an_extreme_number_is_refused_by_its_key_or_planned_at_once(project, monkeypatch, key):
    monkeypatch.chdir(project[0])
    section, _, name = key.rpartition(".")
    for value in EXTREMES:
        began = time.monotonic()
        fault = fault_of(project, *NEEDS.get(section, []), f"{key}={value}")
        assert time.monotonic() - began < SECONDS, f"{key}={value}"
        if fault:
            assert name in fault.message + fault.hint
            assert fault.hint
        assert value != ".nan" or "--set" in fault.message


# Each number is possible alone, but not what they make together.
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recover.steps=100000", "recover.rollouts=10000"], "completions are more than"),
        (["recover.steps=100000", "recover.domain_rollouts=10000"], "completions are more than"),
        (["finetune.epochs=10000", "finetune.data=many.jsonl"], "rows to learn from"),
    ],
)
def test_what_fails_when_its_stage_begins_is_refused_by_a_dry_run(project, monkeypatch, settings, message):
    folder = project[0]
    monkeypatch.chdir(folder)
    rows = (folder / "rows.jsonl").read_text()
    (folder / "many.jsonl").write_text("".join(rows.replace("room", f"room {i}") for i in range(100)))
    fault = fault_of(project, *settings)
    assert message in fault.message
    assert fault.hint
