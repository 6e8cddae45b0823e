"""What a row holds is read, refused with its line, or named as unread."""

import csv
import json
import math

import datasets
import pytest

from opdcl.data.rows import check_lines, load_rows, unread
from opdcl.errors import UsageError


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


CHAT = [user("Hi?"), assistant("Hello.")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# A row, and the prompt and the answer that are read from it.
READ = {
    "a context after a question": (
        {"question": "How many?", "context": "TABLE ports", "answer": "Two."},
        [user("How many?\n\nTABLE ports")],
        "Two.",
    ),
    "a context after a prompt": (
        {"prompt": "How many?", "context": "TABLE ports", "completion": "Two."},
        [user("How many?\n\nTABLE ports")],
        "Two.",
    ),
    "a context that the prompt quotes": (
        {"prompt": "TABLE ports\nHow many?", "context": "TABLE ports", "completion": "Two."},
        [user("TABLE ports\nHow many?")],
        "Two.",
    ),
    "a context that a message quotes": (
        {"messages": [system("Know: TABLE ports"), *CHAT], "context": "TABLE ports"},
        [system("Know: TABLE ports"), user("Hi?")],
        "Hello.",
    ),
    "a request in the input": (
        {"instruction": "", "input": "Name a fruit.", "output": "A cherry."},
        [user("Name a fruit.")],
        "A cherry.",
    ),
    "a blank cell of another format": (
        {"prompt": "", "question": "Who?", "answer": "Ada."},
        [user("Who?")],
        "Ada.",
    ),
    "an input that is NaN": (
        {"instruction": "Name a fruit.", "input": math.nan, "output": "A cherry."},
        [user("Name a fruit.")],
        "A cherry.",
    ),
    "an answer that is a whole number": ({"question": "2 + 2?", "answer": 4}, [user("2 + 2?")], "4"),
    "an answer that is a fraction": ({"question": "1 / 2?", "answer": 0.5}, [user("1 / 2?")], "0.5"),
    "a message that is a number": ({"messages": [user(7), assistant(0)]}, [user("7")], "0"),
    "messages as JSON text": ({"messages": json.dumps(CHAT)}, [user("Hi?")], "Hello."),
    "each message as JSON text": ({"messages": [*map(json.dumps, CHAT)]}, [user("Hi?")], "Hello."),
    "a prompt and its completion as JSON text": (
        {"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])},
        [user("Hi?")],
        "Hello.",
    ),
    "an answer that is JSON itself": (
        {"prompt": "As messages, please.", "completion": json.dumps(CHAT)},
        [user("As messages, please.")],
        json.dumps(CHAT),
    ),
    "a system message that is told twice": (
        {"system_prompt": "Be terse.", "messages": [system("Be terse."), *CHAT]},
        [system("Be terse."), user("Hi?")],
        "Hello.",
    ),
    "a history after the system message of a conversation": (
        {"history": [["1?", "One."]], "messages": [system("Be terse."), *CHAT]},
        [system("Be terse."), user("1?"), assistant("One."), user("Hi?")],
        "Hello.",
    ),
    "an answer marked as a good one": (
        {"question": "Who?", "answer": "Ada.", "label": "1"},
        [user("Who?")],
        "Ada.",
    ),
    "flags that say yes, and those of others": (
        {"messages": [{**user("Hi?"), "train": False}, assistant("Hello.", loss=True, weight=1)]},
        [user("Hi?")],
        "Hello.",
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_row_is_read_whole(case, tmp_path):
    row, prompt, answer = READ[case]
    (read,) = load_rows(written(tmp_path, row))
    assert (read.prompt, read.answer, read.unread) == (prompt, answer, ())


NO = [False, 0, "false", "False", "0"]
# A row that is refused, and what is said of it.
REFUSED = [
    *(({"question": "Who?", "answer": "x", "label": no}, "its answer is marked as a bad one") for no in NO),
    ({"messages": CHAT, "label": 0}, "its answer is marked as a bad one"),
    ({"prompt": CHAT[:1], "chosen": "x", "label": False}, "its answer is marked as a bad one"),
    *(({"messages": [user("Hi?"), assistant("x", train=no)]}, "a message has train") for no in NO),
    ({"messages": [user("Hi?"), assistant("x", weight="0")]}, 'a message has weight "0"'),
    ({"messages": [user("Hi?"), assistant("x", weight=0.5)]}, "a message has weight 0.5"),
    ({"messages": [user("Hi?"), assistant("x", loss=False), *CHAT]}, "a message has loss false"),
    ({"messages": [user("Hi?"), assistant("x", trainable=False)]}, "a message has trainable false"),
    ({"messages": CHAT, "images": ["buoy.png"]}, " has images"),
    ({"text": "x", "audio": {"path": "a.wav"}}, " has audio"),
    ({"messages": [{**user("Hi?"), "images": ["buoy.png"]}, CHAT[1]]}, "a message has images"),
    ({"messages": [{**system("x"), "tools": [TOOL]}, *CHAT]}, "a message has tools"),
    (
        {"messages": [user("Hi?"), assistant("x", thinking="a", reasoning="b")]},
        "a message has two different thoughts",
    ),
    ({"system": "a", "system_prompt": "b", "question": "Who?"}, "system and system_prompt have different"),
    ({"system": "a", "messages": [system("b"), *CHAT]}, "system and the conversation have different"),
    ({"messages": CHAT, "context": "TABLE ports"}, "context would not be shown to the model"),
    ({"prompt": CHAT[:1], "context": ["a", "b"]}, "context would not be shown to the model"),
    ({"question": "Who?", "context": ["a", "b"]}, "context is a list, not text"),
    ({"instruction": "Who?", "input": ["a"], "output": "x"}, "input is a list, not text"),
    ({"text": "x", "system": "Be terse."}, "system would not be shown to the model"),
    ({"text": "x", "tools": [TOOL]}, "tools would not be shown to the model"),
    ({"question": "Who?", "answer": math.inf}, "answer is a number, not text"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_would_be_lost_is_refused_with_its_line(number, tmp_path):
    row, words = REFUSED[number]
    path = written(tmp_path, {"text": "good"}, row)
    with pytest.raises(UsageError) as refused:
        load_rows(path)
    assert refused.value.message.startswith(f"{path}:2")
    assert words in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_thought_is_the_same_by_each_of_its_names(name, tmp_path):
    (read,) = load_rows(
        written(tmp_path, {"messages": [user("Hi?"), assistant("Hello.", **{name: "Greet."})]})
    )
    assert {*read.reply.values()} == {"Greet."}
    assert {"reasoning_content", "thinking", "reasoning"} == read.reply.keys()


def test_the_rest_is_named_with_its_count(tmp_path):
    rows = [
        {"messages": [{**user("Hi?"), "name": "Bo"}, CHAT[1]], "id": 0, "source": "web", "url": None},
        {"question": "Who?", "answer": "Ada.", "id": 1, "source": "", "label": "person"},
        {"text": "Ada signs.", "label": 0, "answer": "Ada."},
        {"prompt": "Who?", "label": 0},
    ]
    read = load_rows(written(tmp_path, *rows))
    assert [row.unread for row in read] == [
        ("id", "source", "messages.name"),
        ("id", "label"),
        ("label", "answer"),
        ("label",),
    ]
    assert unread("my.jsonl", read) == (
        "my.jsonl: 5 fields are not read: label (3 rows), id (2 rows), source (1 row), "
        "messages.name (1 row), answer (1 row)"
    )
    assert unread("my.jsonl", load_rows(written(tmp_path, {"text": "x"}))) == ""


def test_a_note_on_many_fields_stays_short(tmp_path):
    row = {"text": "x"} | {f"field {i} {'x' * 200}\n": i for i in range(40)}
    note = unread("my.jsonl", load_rows(written(tmp_path, row)))
    assert note.startswith("my.jsonl: 40 fields are not read: field 0 xxx")
    assert note.endswith("and 32 more")
    assert len(note) < 600


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Bergen"}}}
OTHER = {"type": "function", "function": {"name": "g", "arguments": {"a": 1, "b": {"c": [1, 2]}}}}


def tool(name, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_parquet_and_datasets_add_no_nulls_to_tools_and_arguments(tmp_path):
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in (CALL, OTHER)]
    rows = [
        {"messages": [user("?"), call], "tools": [tool("f", "city"), tool("g", "a", "b")]} for call in calls
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    assert '"a": null' in json.dumps(table[0])
    plain = load_rows(written(tmp_path, *rows))
    in_memory = check_lines("".join(f"{json.dumps(row)}\n" for row in table), "data")
    for others in (load_rows(str(tmp_path / "rows.parquet")), in_memory):
        assert [(row.key(), row.reply) for row in others] == [(row.key(), row.reply) for row in plain]
    assert plain[0].reply["tool_calls"] == [CALL]


def test_an_argument_that_is_null_counts_as_absent_in_any_file(tmp_path):
    arguments = {"city": "Bergen", "unit": None}
    for given in (arguments, json.dumps(arguments)):
        call = {"type": "function", "function": {"name": "f", "arguments": given}}
        row = {"messages": [user("?"), {"role": "assistant", "tool_calls": [call]}]}
        (read,) = load_rows(written(tmp_path, row))
        assert read.reply["tool_calls"][0]["function"]["arguments"] == {"city": "Bergen"}


def test_tools_and_their_parts_are_read_from_json_text(tmp_path):
    parts = tool("f", "city")
    parts["function"]["parameters"]["properties"] = json.dumps({"city": {"type": "string"}})
    plain = {"messages": CHAT, "tools": [tool("f", "city")]}
    texts = [json.dumps(plain["tools"]), [json.dumps(plain["tools"][0])], [parts]]
    expected, *others = load_rows(written(tmp_path, plain, *({**plain, "tools": text} for text in texts)))
    assert [row.tools for row in others] == [expected.tools] * 3


def test_numbers_are_the_same_text_in_csv_json_and_parquet(tmp_path):
    rows = [{"question": "How many?", "answer": n} for n in (0.5, 2.0, 1e-7, 12345678.25)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    files = [written(tmp_path, *rows), str(tmp_path / "rows.csv"), str(tmp_path / "rows.parquet")]
    answers = [[row.answer for row in load_rows(file)] for file in files]
    assert answers[0] == answers[1] == answers[2] == ["0.5", "2.0", "1e-07", "12345678.25"]


def test_named_columns_leave_the_others_that_are_known(tmp_path):
    row = {
        "dialog": CHAT,
        "tools": [TOOL],
        "system": "Be terse.",
        "chat_template_kwargs": {"enable_thinking": True},
        "group": "code",
        "cluster": "one",
        "teacher": "base",
        "text": "another format",
        "id": 7,
    }
    (read,) = load_rows(written(tmp_path, row), columns={"messages": "dialog"})
    assert read.prompt == [system("Be terse."), user("Hi?")]
    assert (read.tools, read.variables) == ([TOOL], {"enable_thinking": True})
    assert (read.group, read.cluster, read.teacher) == ("code", "one", "base")
    assert read.unread == ("id", "text")


def test_named_columns_may_be_beside_those_of_our_names(tmp_path):
    row = {"question": "How many?", "answer": "Two.", "passage": "Two ports.", "topic": "ports"}
    columns = {"context": "passage", "cluster": "topic"}
    (read,) = load_rows(written(tmp_path, row), columns=columns)
    assert read.prompt == [user("How many?\n\nTwo ports.")]
    assert (read.answer, read.cluster, read.unread) == ("Two.", "ports", ())


def test_a_bad_label_is_refused_under_named_columns_too(tmp_path):
    path = written(tmp_path, {"Frage": "Wer?", "answer": "Ada.", "label": False})
    with pytest.raises(UsageError, match="its answer is marked as a bad one"):
        load_rows(path, columns={"question": "Frage"})
