"""A row is whole in all its uses: what is learned after a prompt is what the recovery and a suite ask."""

import json

import pytest
from helpers.families import FAMILIES, make_tokenizer
from helpers.learning import encode_example
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import Table
from pyarrow.parquet import write_table

from opdcl.config.evaluate import EvalConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import CONVERSATIONS, OF_CONVERSATIONS, PAIRS, SYSTEM, check_row
from opdcl.data.messages import THOUGHT
from opdcl.data.rows import load_rows
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError

# Each loads a suite of its own, which takes a second.
search = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def tool(name, argument):
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


RAIN, SUM = tool("rain", "city"), tool("total", "number")
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Bergen"}}}
OTHER_CALL = {"type": "function", "function": {"name": "total", "arguments": {"number": "40"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(FAMILIES["qwen3"])


@st.composite
def conversations(draw):
    """Draw a conversation in OpenAI's or ShareGPT's form, and the texts that its prompt has to show."""
    speaker, text = draw(st.sampled_from([("role", "content"), ("from", "value")]))
    turns, shown = [], ["Who signs?"]
    if draw(st.booleans()):
        turns.append({speaker: "system", text: "You are a porter."})
        shown.append("You are a porter.")
    if draw(st.booleans()):
        turns += [{speaker: "user", text: "My form is A."}, {speaker: "assistant", text: "Noted."}]
        shown += ["My form is A.", "Noted."]
    if draw(st.booleans()):
        call = draw(st.sampled_from([CALL, OTHER_CALL]))
        turns += [
            {speaker: "user", text: "Is it raining?"},
            {speaker: "assistant", text: "", "tool_calls": [call]},
            {speaker: "tool", text: "Wet."},
            {speaker: "assistant", text: "Yes."},
        ]
        shown += [json.dumps(call["function"]["arguments"]), "Wet.", "Yes."]
    return [*turns, {speaker: "user", text: "Who signs?"}], {speaker: "assistant", text: "Ada."}, shown


@st.composite
def rows(draw):
    """Draw a row with any of the known fields, and the texts that its prompt has to show."""
    pair = draw(st.sampled_from([*PAIRS, None, None, None]))
    turns, answer, shown = draw(conversations())
    more = {
        draw(st.sampled_from(SYSTEM)): "You are a porter.",
        "history": [["Is it open?", "Until nine."]],
        "context": "The gate is green.",
        "tools": draw(st.sampled_from([[RAIN], [SUM, RAIN]])),
        "chat_template_kwargs": {"enable_thinking": True},
    }
    more = {name: more[name] for name in draw(st.lists(st.sampled_from([*more]), unique=True))}
    if "chat_template_kwargs" in more:
        answer[draw(st.sampled_from(THOUGHT))] = "She always does."
    if pair and pair.name != "prompt and completion":
        row = {pair.prompt: "Who signs?", draw(st.sampled_from(pair.answers)): "Ada."}
        shown = ["Who signs?"]
    elif pair:  # as text, since a column of Parquet has one type
        row = {"prompt": json.dumps(turns), "completion": json.dumps([answer])}
    else:
        row = {draw(st.sampled_from([*CONVERSATIONS])): [*turns, answer]}
    texts = {"history": ["Is it open?", "Until nine."], "tools": ['"rain"'], "chat_template_kwargs": []}
    for name, value in more.items():
        shown += texts.get(name, [value])
    return row | more, shown


def prompt_part(row, tokenizer):
    """Return the ids before the last answer of a row in the fine-tune."""
    example = encode_example(row, tokenizer, 4000)[0]
    last = max(i for i, learned in enumerate(example.learned) if not learned)
    return example.ids[: last + 1]


def write(file, rows):
    if file.suffix == ".parquet":
        write_table(Table.from_pylist(rows, schema=schema_of(rows)), file)
    else:
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def schema_of(rows):
    """Return the columns of all rows: pyarrow takes those of the first one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return Table.from_pylist([{name: row.get(name) for name in names} for row in rows]).schema


@search
@given(drawn=st.lists(rows(), min_size=10, max_size=10), ending=st.sampled_from(["jsonl", "parquet"]))
def test_the_prompt_is_the_same_and_whole_in_all_uses(drawn, ending, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    readable = []
    for row, shown in drawn:
        file = write(folder / "one.jsonl", [row])
        # Nothing but a text that has no place beside messages is refused.
        if "context" in row and row.keys() & {"prompt", *CONVERSATIONS}:
            with pytest.raises(UsageError, match=r"one\.jsonl:1: context would not be shown to the model"):
                load_rows(file)
        else:
            readable.append((row, shown))
    if not readable:
        return
    file = write(folder / f"rows.{ending}", [row for row, _ in readable])
    suite = load_suite("own", EvalConfig(data={"own": file}))
    asked = suite.encode(None, tokenizer)
    for (row, shown), ids, read in zip(readable, asked, load_rows(file), strict=True):
        assert read.key() == check_row(row, "r:1").key()
        assert ids == encode_prompt(read.turns()[-1], tokenizer, 4000) == prompt_part(read, tokenizer)
        text = tokenizer.decode(ids)
        assert [part for part in shown if part not in text] == []
        assert text.count("You are a porter.") <= 1
        assert text.endswith("<think>\n\n</think>\n\n") == ("chat_template_kwargs" not in row)


def test_the_search_draws_every_field_that_has_a_place_in_a_conversation():
    assert {*OF_CONVERSATIONS} == {*SYSTEM, "history", "context", "tools", "chat_template_kwargs"}
