"""What a row of any format holds is read, refused with its line, or named as unread."""

import json
from pathlib import Path

import datasets
import pytest

from opdcl.data.messages import FIELDS_HINT
from opdcl.data.rows import check_lines, load_prompts, load_rows, recognised, unread
from opdcl.errors import UsageError
from opdcl.rundir.files import read_jsonl


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def said(row):
    """Return a row in short: each turn after the first letter of its role."""
    turns = [(message["role"], message["content"]) for message in row.prompt]
    turns += [("assistant", row.answer)] if row.answer is not None else []
    turns += [("plain", row.text)] if row.text is not None else []
    return " | ".join(f"{role[0]}: {text}" for role, text in turns)


HERE = Path(__file__)
CHAT = [user("Hi?"), assistant("Hello.")]


# Rows as the documentation of trainers and data sets shows them, then in a few other words: what is read of
# each, and its format. Whether an answer may be empty is for its use to say.
DOCUMENTED = read_jsonl(HERE.with_name("rows_documented.jsonl"))
# Rows that are refused, and the words that follow their place.
REFUSED = read_jsonl(HERE.with_name("rows_refused.jsonl"))
REFUSED.append({"row": {"text": "x" * 200_001}, "words": "text has 200001"})


@pytest.mark.parametrize("number", range(len(DOCUMENTED)))
def test_a_row_is_read_whole(number, tmp_path):
    expected = DOCUMENTED[number]
    (read,) = load_rows(written(tmp_path, expected["row"]))
    assert (said(read), read.format, read.unread) == (expected["read"], expected["format"], ())


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_malformed_or_would_be_lost_is_refused_with_its_line(number, tmp_path):
    row, words = REFUSED[number].values()
    path = written(tmp_path, {"text": "good"}, row)
    with pytest.raises(UsageError) as refused:
        load_rows(path)
    assert refused.value.message.startswith(f"{path}:2: {words}")
    assert refused.value.hint


def test_plain_text_cannot_be_a_prompt(tmp_path):
    path = written(tmp_path, {"prompt": "Who?"}, {"text": "Ada wrote it."})
    with pytest.raises(UsageError, match=r"rows.jsonl:2: plain text cannot be a prompt"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"promt": "x", "completion": "y"}, "did you mean prompt instead of promt? "),
        ({"id": 1, "Question": "x", "answer": "y"}, "did you mean question instead of Question? "),
        ({"mesages": [user("x")]}, "did you mean messages instead of mesages? "),
        ({"answer": "y", "answers": "y", "content": "x"}, ""),
        ({}, ""),
    ],
)
def test_a_misspelt_column_is_named_with_the_likely_one(row, hint, tmp_path):
    with pytest.raises(UsageError, match=r"rows\.jsonl:2: the row ") as refused:
        load_rows(written(tmp_path, {"text": "good"}, row))
    assert refused.value.hint == hint + FIELDS_HINT


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_thought_is_the_same_by_each_of_its_names(name, tmp_path):
    (read,) = load_rows(
        written(tmp_path, {"messages": [user("Hi?"), assistant("Hello.", **{name: "Greet."})]})
    )
    assert read.reply == dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "Greet.")


def test_fields_that_are_not_read_are_named_with_their_rows(tmp_path):
    rows = [
        {"messages": [{**user("Hi?"), "name": "Bo"}, CHAT[1]], "id": 0, "source": "web", "url": None},
        {"question": "Who?", "answer": "Ada.", "id": 1, "source": "", "label": "person"},
        {"text": "Ada signs.", "label": 0, "answer": "Ada."},
        {"prompt": "Who?", "label": 0},
    ]
    read = load_rows(written(tmp_path, *rows))
    unread_fields = [("id", "source", "messages.name"), ("id", "label"), ("label", "answer"), ("label",)]
    assert [row.unread for row in read] == unread_fields
    assert unread("my.jsonl", read) == (
        "my.jsonl: 5 fields are not read: label (3 rows), id (2 rows), source (1 row), "
        "messages.name (1 row), answer (1 row)"
    )
    assert unread("my.jsonl", load_rows(written(tmp_path, {"text": "x"}))) == ""
    many = {"text": "x"} | {f"field {i} {'x' * 200}\n": i for i in range(40)}
    note = unread("my.jsonl", load_rows(written(tmp_path, many)))
    assert note.startswith("my.jsonl: 40 fields are not read: field 0 xxx")
    assert note.endswith("and 32 more")
    assert len(note) < 600


def test_what_was_recognised_is_told_with_an_example(tmp_path):
    rows = load_rows(written(tmp_path, DOCUMENTED[1]["row"], DOCUMENTED[0]["row"]))
    assert recognised("a.json", rows) == "a.json: 2 of alpaca, such as user: Three tips. assistant: 1."
    long = load_rows(written(tmp_path, {"text": "word " * 900}))
    assert len(recognised("long.jsonl", long)) < 200


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Bergen"}}}
OTHER = {"type": "function", "function": {"name": "g", "arguments": {"a": 1, "b": {"c": [1, 2]}}}}


def tool(name, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_an_earlier_answer_has_its_own_call_and_not_that_of_the_last(tmp_path):
    asks = [assistant("", tool_calls=[{"id": str(i), **CALL}]) for i in range(2)]
    result = {"role": "tool", "tool_call_id": "0", "content": "yes"}
    messages = [user("1?"), asks[0], result, assistant("one"), user("2?"), asks[1]]
    (row,) = load_rows(written(tmp_path, {"messages": messages, "tools": [tool("f", "city")]}))
    names = [[call["id"] for call in turn.reply.get("tool_calls", [])] for turn in row.turns()]
    assert names == [["0"], [], ["1"]]


def test_a_conversation_has_a_prompt_for_each_answer_to_the_user(tmp_path):
    turns = [system("S"), assistant("Hello."), user("1?"), assistant("one"), assistant("more"), user("2?")]
    row, answered, single, text = load_rows(
        written(
            tmp_path,
            {"messages": turns, "teacher": "t", "cluster": "c"},
            {"messages": [*turns, assistant("two")]},
            {"prompt": "1?", "completion": "one"},
            {"text": "x"},
        )
    )
    assert [(r.prompt, r.answer) for r in row.turns()] == [(turns[:3], "one"), (turns, None)]
    assert [(r.prompt, r.answer) for r in answered.turns()] == [(turns[:3], "one"), (turns, "two")]
    assert {(r.teacher, r.cluster, r.where) for r in row.turns()} == {("t", "c", row.where)}
    assert (single.turns(), text.turns()) == ([single], [text])


def test_parquet_and_datasets_add_no_nulls_to_tools_and_arguments(tmp_path):
    calls = [assistant(None, tool_calls=[call]) for call in (CALL, OTHER)]
    rows = [
        {"messages": [user("?"), call], "tools": [tool("f", "city"), tool("g", "a", "b")]} for call in calls
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    assert '"a": null' in json.dumps(table[0])
    plain = load_rows(written(tmp_path, *rows))
    in_memory = check_lines("".join(f"{json.dumps(row)}\n" for row in table), "data").usable
    for others in (load_rows(str(tmp_path / "rows.parquet")), in_memory):
        assert [(row.key(), row.reply) for row in others] == [(row.key(), row.reply) for row in plain]
    assert plain[0].reply["tool_calls"] == [CALL]


def arguments_of(function):
    (read,) = check_lines(
        json.dumps({"messages": [user("?"), assistant("", tool_calls=[function])]}), "r"
    ).usable
    return read.reply["tool_calls"][0]["function"]["arguments"]


def test_arguments_and_tools_may_be_json_text_whose_nulls_stay(tmp_path):
    arguments = {"city": "Bergen", "unit": None}
    assert arguments_of({"name": "f", "arguments": arguments}) == {"city": "Bergen"}
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    assert arguments_of(call) == arguments_of(json.dumps(call)) == arguments
    parts = tool("f", "city")
    parts["function"]["parameters"]["properties"] = json.dumps({"city": {"type": "string"}})
    plain = {"messages": CHAT, "tools": [tool("f", "city")]}
    texts = [json.dumps(plain["tools"]), [json.dumps(plain["tools"][0])], [parts]]
    expected, *others = load_rows(written(tmp_path, plain, *({**plain, "tools": text} for text in texts)))
    assert [row.tools for row in others] == [expected.tools] * 3


@pytest.mark.parametrize("given", ["", " ", None, "null", {}, [], "{}"])
def test_a_call_without_arguments_has_an_empty_object(given):
    assert (
        arguments_of({"function": {"name": "now", "arguments": given}}) == arguments_of({"name": "now"}) == {}
    )


BARE = {"name": "f", "description": "Do it.", "parameters": {"type": "object", "properties": {"x": {}}}}


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [{"type": "function", "function": BARE}]},
        {"tools": [{"function": BARE}]},
        {"tools": [BARE]},
        {"tools": json.dumps([BARE])},
        {"tools": [{"type": "function", **BARE}]},
        {"tools": [{**{k: BARE[k] for k in ("name", "description")}, "input_schema": BARE["parameters"]}]},
        {"tools": [{**{k: BARE[k] for k in ("name", "description")}, "inputSchema": BARE["parameters"]}]},
    ],
)
def test_tools_of_other_formats_are_wrapped_as_openai_does(given):
    (read,) = check_lines(json.dumps({"messages": CHAT, **given}), "r").usable
    assert read.tools == [{"type": "function", "function": BARE}]
    assert not read.unread


def test_a_column_of_functions_is_named_and_not_read():
    (read,) = check_lines(json.dumps({"messages": CHAT, "functions": ["sin", "cos"]}), "r").usable
    assert (read.tools, read.unread) == (None, ("functions",))


COLUMNS = {"question": "Frage", "answer": "Antwort"}


def test_named_columns_take_the_place_of_ours_and_other_files_keep_their_names(tmp_path):
    rows = [{"Nr": 1, "Frage": "Wer?", "Antwort": "Ada.", "text": "x"}, {"Frage": "Wer?"}, {"prompt": "Who?"}]
    read = load_rows(written(tmp_path, *rows), columns=COLUMNS)
    assert [said(row) for row in read] == ["u: Wer? | a: Ada.", "u: Wer?", "u: Who?"]
    path = written(tmp_path, {"Nr": 1, "Frage": "Wer?", "Antwort": "Ada."})
    with pytest.raises(UsageError, match=r"rows.jsonl:1: the row has no column 'Fragen'") as refused:
        load_rows(path, columns={"question": "Fragen", "answer": "Antwort"})
    assert refused.value.hint == "its columns are Nr, Frage, Antwort"
    path = written(tmp_path, {"Frage": "Wer?", "answer": "Ada.", "label": False})
    with pytest.raises(UsageError, match="its answer is marked as a bad one"):
        load_rows(path, columns={"question": "Frage"})


def test_named_columns_leave_the_others_that_are_known(tmp_path):
    row = {
        "dialog": CHAT,
        "tools": [tool("f", "city")],
        "system": "Be terse.",
        "chat_template_kwargs": {"enable_thinking": True},
        "group": "code",
        "cluster": "one",
        "teacher": "base",
        "text": "another format",
        "id": 7,
    }
    (read,) = load_rows(written(tmp_path, row), columns={"messages": "dialog"})
    assert said(read) == "s: Be terse. | u: Hi? | a: Hello."
    assert (read.tools, read.variables) == ([tool("f", "city")], {"enable_thinking": True})
    assert (read.group, read.cluster, read.teacher) == ("code", "one", "base")
    assert read.unread == ("id", "text")
    row = {"question": "How many?", "answer": "Two.", "passage": "Two ports.", "topic": "ports"}
    (read,) = load_rows(written(tmp_path, row), columns={"context": "passage", "cluster": "topic"})
    assert (said(read), read.cluster, read.unread) == ("u: How many?\n\nTwo ports. | a: Two.", "ports", ())
