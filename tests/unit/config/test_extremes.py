"""No number makes a command hang, or fail after hours: it is refused at once, or the plan is there at once."""

import time

import pytest
from helpers.tiny import make_project

from opdcl.config.load import load
from opdcl.config.reference import describe_fields
from opdcl.config.trainer_fields import ALLOWED, NUMBER
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.pipeline.dry_run import describe
from opdcl.pipeline.job import Job
from opdcl.pipeline.sources import Sources
from opdcl.rundir.layout import RunDir

EXTREMES = ("-1", "0", "1e-9", "5", "1000000000", "1e9", "4294967296", ".nan", ".inf", "-.inf")
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
    found = [
        (path, rules)
        for path, rules in numbers(Workflow.model_json_schema())
        if "chat_template_kwargs" not in path  # which only the model's own template reads
    ]
    assert len(found) > 40
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    assert [path for path, rules in found if not (low & rules.keys() and high & rules.keys())] == []


def numeric_keys() -> list[str]:
    keys = [key for key, kind, *_ in describe_fields() if "integer" in kind or "number" in kind]
    for stage, fields in ALLOWED.items():
        keys += [f"{stage}.trainer.{name}" for name, kind in fields.items() if kind in (int, NUMBER)]
    return keys


@pytest.fixture(scope="module")
def project(tiny_model, tmp_path_factory):
    """A project, and its rows and tokenizer, which are read once."""
    return make_project(tmp_path_factory.mktemp("extremes"), tiny_model), Sources()


@pytest.mark.parametrize("key", numeric_keys())
def test_an_extreme_number_is_refused_by_its_key_or_planned_at_once(project, monkeypatch, key):
    folder, sources = project
    monkeypatch.chdir(folder)
    for value in EXTREMES:
        began = time.monotonic()
        try:
            workflow, origins = load(["tiny.yaml"], [f"{key}={value}"])
        except UsageError as fault:
            assert key in fault.message
            assert "--set" in fault.message or "line" in fault.message or "has no effect" in fault.message
            assert fault.hint
            continue
        try:
            describe(Job.of(workflow, RunDir(folder / "run"), sources, origins))
        except UsageError as fault:
            assert fault.hint, fault.message
        assert time.monotonic() - began < SECONDS, f"{key}={value}"
