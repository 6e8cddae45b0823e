"""A row of any format with any JSON value in any place: it is read, or refused with its file and line.

`OPDCL_FUZZ_EXAMPLES=10000` makes the search longer than the suite's.
"""

import copy
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opdcl.data.formats import CONVERSATIONS, KNOWN_COLUMNS, OF_CONVERSATIONS, PAIRS, SYSTEM, Row
from opdcl.data.messages import FOREIGN_TOOLS, LEARNED, PICTURES, SPEAKERS, THOUGHT
from opdcl.data.rows import load_rows, recognised
from opdcl.errors import UsageError

EXAMPLES = int(os.environ.get("OPDCL_FUZZ_EXAMPLES", "400"))
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}
search = settings(max_examples=EXAMPLES, derandomize=EXAMPLES <= 1000, **quiet)

CALL = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
ASKED = [
    {"role": "system", "content": "Be brief.", "weight": 1},
    {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "I add."},
    {"role": "tool", "name": "sum", "tool_call_id": "1", "content": "2"},
]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Two.", "reasoning_content": "It is 2."}]
SHAREGPT = [{"from": "human", "value": "What is 1 + 1?"}, {"from": "gpt", "value": "Two."}]
# What a row of any format may have besides.
MORE = {
    **dict.fromkeys(SYSTEM, "Be brief."),
    "history": [["What is 1 + 0?", "One."]],
    "teacher": "sums",
    "cluster": "one",
    "label": True,
    "tools": [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "rejected": "Three.",
    "context": "1 + 1",  # which every prompt quotes
    "source": "a quiz",
}

# Each format as its trainers write it, with each name of an answer; prompts also as lists of messages.
ROWS = [{"text": "One and one is two."}, {"chosen": ANSWERED}]
ROWS += [{key: turns} for key in CONVERSATIONS for turns in (ANSWERED, SHAREGPT)]
ROWS += [{key: ASKED[:2], "chosen": "Two."} for key in CONVERSATIONS]
for pair in PAIRS:
    for name in pair.answers:
        ROWS.append({pair.prompt: "What is 1 + 1?", name: "Two.", **dict.fromkeys(pair.more, "In words.")})
        ROWS.append({pair.prompt: ASKED, name: ANSWERED[-1:]})

MARKUP = [*SPEAKERS, *FOREIGN_TOOLS, *THOUGHT, *LEARNED, *PICTURES]
MARKUP += ["text", "[", "[]", "{}", '[{"a": 1}]', '{"a": 1}', "null", "[" * 9000]
words = st.one_of(st.sampled_from([*MARKUP, "", " ", "\ud800", "a" * 200_001]), st.text(max_size=20))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(["role", "content", "function"]), words), inner, max_size=3
        ),
    ),
    max_leaves=8,
)
# Depths at which the reader, or what checks a value after it, reaches its limit; 5,000 digits.
DEEP, LONG = "deep {}", "a long integer"
nested = st.one_of(st.sampled_from([20, 5000]), st.integers(500, 1000)).map(DEEP.format)
anything = st.one_of(values, values, nested, st.just(LONG))


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each part of a row."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """Draw a row of one format with some of the other fields, and whether any part of it was replaced."""
    row = copy.deepcopy(draw(st.sampled_from(ROWS)))
    row |= copy.deepcopy({key: MORE[key] for key in draw(st.lists(st.sampled_from([*MORE]), max_size=3))})
    count = draw(st.integers(0, 3))
    for _ in range(count):
        *before, last = draw(st.sampled_from([*places(row)]))
        owner = row
        for key in before:
            owner = owner[key]
        owner[last] = draw(anything)
    return row, count > 0


def as_line(row: dict[str, Any]) -> str:
    """Return a row as JSON, with what `json.dumps` cannot write."""
    line = json.dumps(row).replace(json.dumps(LONG), "7" * 5000)
    for depth in {20, 5000, *range(500, 1001)}:
        mark = json.dumps(DEEP.format(depth))
        if mark in line:
            line = line.replace(mark, "[" * depth + "]" * depth)
    return line


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("rows") / "rows.jsonl"


@search
@given(drawn=rows())
def test_any_row_is_read_or_refused_with_its_file_and_line(file, drawn):
    row, changed = drawn
    file.write_text(f'{{"text": "good"}}\n{as_line(row)}\n')
    try:
        _, read = loaded = load_rows(str(file))
    except UsageError as fault:
        error = fault
    else:
        assert all(turn.prompt for turn in read.turns()) or read.text
        # What later goes to a chat template, to a tokenizer and into UTF-8 files.
        parts = [read.prompt, read.answer, read.text, read.reply, read.tools, read.teacher, read.cluster]
        json.dumps(parts, ensure_ascii=False).encode()
        assert Row.unpacked(read.packed()).key() == read.key()
        assert isinstance(read.shown() if read.prompt else "", str)
        assert isinstance(read.teacher, str)
        assert recognised(str(file), loaded)
        return
    # Plain text has no place for a system message and the like.
    would_lose = "text" in row and row.keys() & {*OF_CONVERSATIONS}
    assert changed or would_lose, "a row as its format is documented"
    assert error.message.startswith(f"{file}:2")
    assert error.hint


def test_the_rows_have_every_column_that_is_known():
    keys = {key for row in ROWS for key in row}
    assert keys >= KNOWN_COLUMNS
    assert {"history", *SYSTEM} <= MORE.keys()
