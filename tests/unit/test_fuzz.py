"""Random configurations and data files: a result or an error with a message, never a traceback, never a hang.

`OPDCL_FUZZ_EXAMPLES=10000` makes the search longer than the suite's.
"""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opdcl.config.load import dump, load
from opdcl.config.reference import describe_fields
from opdcl.config.workflow import Workflow
from opdcl.data.rows import load_rows
from opdcl.errors import OpdclError

EXAMPLES = int(os.environ.get("OPDCL_FUZZ_EXAMPLES", "150"))
search = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=5),
    derandomize=EXAMPLES <= 1000,
    suppress_health_check=list(HealthCheck),
)

KEYS = [row[0] for row in describe_fields()]
NASTY = [
    "",
    " ",
    "\0",
    "\x1b[31m",
    "‮",
    "../../etc/passwd",
    "/",
    "~",
    "handbook",
    "NaN",
    "-.inf",
    "1e999",
    "2026-11-21",
    "null",
    "!!python/object:os.system",
    "&a [*a]",
    "<<",
    "? ",
    "x" * 5000,
    "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
]
words = st.one_of(st.sampled_from(NASTY), st.text(max_size=40))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(10**25), 10**25), st.floats(), words)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


def answered(action, *arguments):
    """Return the result, or None after an error with a message; any other exception fails the test."""
    try:
        return action(*arguments)
    except OpdclError as fault:
        error = fault
    assert error.message.strip()
    assert error.exit_code in (1, 2, 4)
    return None


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "input"


@search
@given(
    pairs=st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=5),
    extra=st.dictionaries(words, values, max_size=2),
)
def test_random_settings(file, pairs, extra):
    tree = dict(extra)
    for key, value in pairs:
        node = tree
        *sections, last = key.split(".")
        for section in sections:
            node = (
                node[section]
                if isinstance(node.get(section), dict)
                else node.setdefault(section, {})
                if section not in node
                else {}
            )
        node[last] = value
    # JSON is YAML, except for Python's NaN.
    file.write_text(json.dumps(tree), encoding="utf-8", errors="replace")
    result = answered(load, [str(file)])
    if result:
        # An accepted workflow is dumped as an acceptable one.
        file.write_text(dump(result[0]), encoding="utf-8", errors="replace")
        assert isinstance(load([str(file)])[0], Workflow)


@search
@given(
    content=st.one_of(
        st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))
    )
)
def test_random_bytes_as_a_workflow(file, content):
    file.write_bytes(content)
    answered(load, [str(file)])


@search
@given(override=st.one_of(words, st.tuples(st.sampled_from(KEYS), words).map("=".join)))
def test_random_overrides(override):
    answered(load, ["quickstart"], [override])


@search
@given(content=st.binary(max_size=300), ending=st.sampled_from([".jsonl", ".csv", ".txt", ".parquet"]))
def test_random_bytes_as_rows(file, content, ending):
    path = file.with_suffix(ending)
    path.write_bytes(content)
    answered(load_rows, str(path))


def test_every_prefix_of_a_data_file(file):
    path = file.with_suffix(".jsonl")
    whole = [
        {"question": "Wer hat den Schlüssel?", "answer": "Ada 🔑"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    content = "\n".join(json.dumps(r, ensure_ascii=False) for r in whole).encode()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        answered(load_rows, str(path))
