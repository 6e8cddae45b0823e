"""Random settings: a workflow or an error with a message, never a traceback, never a hang.

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
from opdcl.errors import OpdclError

EXAMPLES = int(os.environ.get("OPDCL_FUZZ_EXAMPLES", "100"))
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
    try:
        workflow, _ = load([str(file)])
    except OpdclError as fault:
        error = fault
    else:
        # An accepted workflow is dumped as an acceptable one.
        file.write_text(dump(workflow), encoding="utf-8", errors="replace")
        assert isinstance(load([str(file)])[0], Workflow)
        return
    assert error.message.strip()
    assert error.exit_code in (1, 2, 4)
