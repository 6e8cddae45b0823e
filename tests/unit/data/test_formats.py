"""What a row of any format holds is read, refused with its line, or named as unread."""

import json
import math

import datasets
import pytest

from opdcl.data.messages import FIELDS_HINT
from opdcl.data.rows import check_lines, load_prompts, load_rows, recognised, unread
from opdcl.errors import UsageError


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def sharegpt(*turns):
    return [{"from": name, "value": text} for name, text in turns]


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


CHAT = [user("Hi?"), assistant("Hello.")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
YES_FLAGS = [{**user("Hi?"), "train": False}, assistant("Hello.", loss=True, weight=1)]
IN_PARTS = [{"role": "developer", "content": "Be kind."}, user([{"type": "text", "text": "Hi?"}]), CHAT[1]]
PORTER = {"system": "Porter.", "history": [["When?", "At seven."]]}

# fmt: off
# Rows as the documentation of trainers and data sets shows them, what is read of each, and its format.
DOCUMENTED = [
    ({"instruction": "Odd one?", "input": "X, Y", "output": "Y"}, "u: Odd one?\n\nX, Y | a: Y", "alpaca"),
    ({"instruction": "Three tips.", "input": "", "output": "1."}, "u: Three tips. | a: 1.", "alpaca"),
    ({"instruction": "And in winter?", "output": "At eight.", **PORTER},
     "s: Porter. | u: When? | a: At seven. | u: And in winter? | a: At eight.", "alpaca"),
    ({"instruction": "Since when?", "context": "It began in 2000.", "response": "2000."},
     "u: Since when?\n\nIt began in 2000. | a: 2000.", "alpaca"),  # dolly
    ({"system": "Be brief.", "conversations": sharegpt(("human", "Who?"), ("gpt", "V."), ("human", "Bye!"))},
     "s: Be brief. | u: Who? | a: V. | u: Bye!", "ShareGPT"),
    ({"messages": [system("Marv."), user("Capital?"), assistant("Paris.")]},
     "s: Marv. | u: Capital? | a: Paris.", "OpenAI messages"),
    ({"messages": IN_PARTS}, "s: Be kind. | u: Hi? | a: Hello.", "OpenAI messages"),
    ({"messages": [*CHAT, user("Bye!")]}, "u: Hi? | a: Hello. | u: Bye!", "OpenAI messages"),
    ({"prompt": "The sky is", "completion": " blue."}, "u: The sky is | a:  blue.", "prompt and completion"),
    ({"prompt": "Sky?", "response": "Blue."}, "u: Sky? | a: Blue.", "prompt and completion"),
    ({"prompt": [system("S."), *CHAT[:1]], "completion": CHAT[1:]}, "s: S. | u: Hi? | a: Hello.",
     "prompt and completion"),
    ({"prompt": CHAT[:1], "completion": "Hello."}, "u: Hi? | a: Hello.", "prompt and completion"),
    ({"prompt": "Sky?"}, "u: Sky?", "prompt and completion"),
    ({"question": "Who?", "answer": "Ada."}, "u: Who? | a: Ada.", "question and answer"),
    ({"question": "Who?", "answer": None}, "u: Who?", "question and answer"),
    ({"system_prompt": "Be kind.", "question": "Wet?", "response": "Yes."}, "s: Be kind. | u: Wet? | a: Yes.",
     "question and answer"),  # OpenOrca
    ({"input": "Sky?", "output": "Blue."}, "u: Sky? | a: Blue.", "input and output"),
    ({"query": "5", "response": "6", **PORTER}, "s: Porter. | u: When? | a: At seven. | u: 5 | a: 6",
     "query and response"),  # ms-swift
    ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "u: The sky is | a:  blue.",
     "prompt and completion, the chosen answer"),
    ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [assistant("Go.")]}, "u: Hi? | a: Hello.",
     "prompt and completion, the chosen answer"),
    ({"chosen": CHAT, "rejected": [*CHAT[:1], assistant("Go.")]}, "u: Hi? | a: Hello.",
     "preference, the chosen conversation"),
    ({"conversations": sharegpt(("human", "Hi?")), "chosen": sharegpt(("gpt", "Hello."))[0], "rejected": {}},
     "u: Hi? | a: Hello.", "ShareGPT"),  # LLaMA-Factory
    ({"messages": CHAT[:1], "chosen": "Hello.", "rejected": "Go."}, "u: Hi? | a: Hello.", "OpenAI messages"),
    ({"text": "The sky is blue."}, "p: The sky is blue.", "text"),
    # In a few other words.
    ({"question": "How many?", "context": "TABLE", "answer": "Two."}, "u: How many?\n\nTABLE | a: Two.",
     "question and answer"),
    ({"prompt": "TABLE\nHow many?", "context": "TABLE", "completion": "2"}, "u: TABLE\nHow many? | a: 2",
     "prompt and completion"),
    ({"messages": [system("Know: TABLE"), *CHAT], "context": "TABLE"}, "s: Know: TABLE | u: Hi? | a: Hello.",
     "OpenAI messages"),
    ({"instruction": "", "input": "A fruit.", "output": "Fig."}, "u: A fruit. | a: Fig.", "input and output"),
    ({"instruction": "A fruit.", "input": math.nan, "output": "Fig."}, "u: A fruit. | a: Fig.", "alpaca"),
    ({"prompt": "", "question": "Who?", "answer": "Ada."}, "u: Who? | a: Ada.", "question and answer"),
    ({"question": "2 + 2?", "answer": 4}, "u: 2 + 2? | a: 4", "question and answer"),
    ({"question": "1 / 2?", "answer": 0.5}, "u: 1 / 2? | a: 0.5", "question and answer"),
    ({"messages": [user(7), assistant(0)]}, "u: 7 | a: 0", "OpenAI messages"),
    ({"question": "10^400?", "answer": 10**400}, f"u: 10^400? | a: {10**400}", "question and answer"),
    ({"messages": json.dumps(CHAT)}, "u: Hi? | a: Hello.", "OpenAI messages"),
    ({"messages": [*map(json.dumps, CHAT)]}, "u: Hi? | a: Hello.", "OpenAI messages"),
    ({"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}, "u: Hi? | a: Hello.",
     "prompt and completion"),
    ({"prompt": "As JSON?", "completion": json.dumps(CHAT)}, f"u: As JSON? | a: {json.dumps(CHAT)}",
     "prompt and completion"),
    ({"system_prompt": "S.", "messages": [system("S."), *CHAT]}, "s: S. | u: Hi? | a: Hello.",
     "OpenAI messages"),
    ({"history": [["1?", "One."]], "messages": [system("S."), *CHAT]},
     "s: S. | u: 1? | a: One. | u: Hi? | a: Hello.", "OpenAI messages"),
    ({"question": "Who?", "answer": "Ada.", "label": "1"}, "u: Who? | a: Ada.", "question and answer"),
    ({"messages": YES_FLAGS}, "u: Hi? | a: Hello.", "OpenAI messages"),
    # Whether an answer may be empty is for its use to say.
    ({"question": "Who?", "answer": " "}, "u: Who? | a: ", "question and answer"),
    ({"prompt": CHAT[:1], "completion": ""}, "u: Hi? | a: ", "prompt and completion"),
    ({"messages": [user("Hi?"), assistant("")]}, "u: Hi? | a: ", "OpenAI messages"),
]

NO = [False, 0, "false", "False", "0", -1, "bad", "-1.0"]
# Rows that are refused, and the words that follow their place.
REFUSED = [
    ({"answer": "Ada."}, "the row has only answer"),
    ({"Frage": "x", "Antwort": "y"}, "the row has only Frage, Antwort"),
    ({"chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "z"}, "the row has only chosen, rejected"),
    ({}, "the row is empty"),
    ([1, 2], "the row is a list, not an object"),
    ("words", "the row is text, not an object"),
    ({"prompt": "\ud800"}, "prompt holds half of a surrogate pair"),
    ({"text": " \n "}, "text is empty"),
    ({"text": ["a"]}, "text is a list, not text"),
    ({"text": "x" * 200_001}, "text has 200001 characters"),
    ({"prompt": "", "completion": "c"}, "prompt is empty"),
    ({"instruction": " ", "output": "y"}, "instruction is empty"),
    ({"prompt": {"a": 1}}, "prompt is an object, not text"),
    ({"question": "Who?", "answer": False}, "answer is true or false, not text"),
    ({"question": "Who?", "answer": math.inf}, "answer is a number, not text"),
    ({"question": "x", "teacher": 0}, "teacher is a number, not text"),
    ({"query": "x", "response": "y", "history": ["z"]}, "history is not a list of pairs"),
    ({"query": "x", "response": "y", "history": 5}, "history is a number, not a list"),
    ({"messages": "Who?"}, "messages is text, not a list"),
    ({"conversations": "Human: x"}, "conversations is text, not a list"),
    ({"messages": CHAT[1:]}, "no user message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "no user message"),
    ({"conversations": ["Who?", "Ada."]}, "a message is text, not an object"),
    ({"conversations": sharegpt(("narrator", "x"))}, "message role 'narrator'"),
    ({"messages": [user("")]}, "user content is empty"),
    ({"messages": [user(None)]}, "user content is null, not text"),
    ({"messages": [user([{"type": "image_url"}]), CHAT[1]]}, "a message holds a part of type image_url"),
    ({"messages": [{**user("Hi?"), "images": ["a.png"]}, CHAT[1]]}, "a message has images, which is no text"),
    ({"messages": CHAT, "images": ["a.png"]}, "the row has images, which is no text"),
    ({"text": "x", "audio": {"path": "a.wav"}}, "the row has audio, which is no text"),
    ({"conversations": sharegpt(("human", "x"), ("function_call", "{}"))},
     "a message has the role 'function_call'"),
    ({"messages": [user("x"), assistant(None, function_call={"name": "f"})]}, "a message has function_call"),
    ({"messages": [user("x"), assistant(None, tool_calls=[{"id": "1"}])]}, "a tool call has no name"),
    ({"messages": [user("x"), assistant("", tool_calls=[{"name": 5, "arguments": {}}])]},
     "a tool call has no name"),
    ({"messages": [user("x"), assistant("", tool_calls=[{"name": "f", "arguments": "x=1"}])]},
     "the arguments of f are text, not an object"),
    ({"messages": CHAT, "tools": [{"type": "web_search"}]}, "a tool is no function with a name: it has type"),
    ({"messages": CHAT, "tools": [{"functionDeclarations": [{"name": "f"}]}]},
     "a tool is no function with a name: it has functionDeclarations"),
    ({"messages": [user("x"), assistant("<think>\nAdd. Four.")]}, "a thought in an answer never ends"),
    ({"question": "x", "answer": "<|channel|>analysis<|message|>y"}, "a thought in an answer never ends"),
    ({"messages": [user("x"), assistant("", tool_calls=[{"name": "f", "arguments": '{"a": "\\ud800"}'}])]},
     "arguments holds half of a surrogate pair"),
    ({"messages": CHAT, "tools": "f(x)"}, "tools is not made of objects"),
    ({"messages": [{**system("x"), "tools": [TOOL]}, *CHAT]}, "a message has tools"),
    ({"messages": CHAT, "chat_template_kwargs": ["thinking"]}, "chat_template_kwargs is not made of objects"),
    ({"messages": [user("x"), assistant("y", reasoning_content=4)]}, "a thought is a number, not text"),
    ({"messages": [user("x"), assistant("y", thinking="a", reasoning="b")]},
     "a message has two different thoughts"),
    *(({"messages": [user("x"), assistant("y", train=no)]}, "a message has train") for no in NO),
    ({"messages": [user("x"), assistant("y", weight="0")]}, 'a message has weight "0"'),
    ({"messages": [user("x"), assistant("y", weight=0.5)]}, "a message has weight 0.5"),
    ({"messages": [user("x"), assistant("y", loss=False), *CHAT]}, "a message has loss false"),
    ({"messages": [user("x"), assistant("y", learn=False), *CHAT]}, "a message has learn false"),
    ({"messages": [user("x"), assistant("y", mask=True), *CHAT]}, "a message has mask true"),
    *(({"question": "x", "answer": "y", "label": no}, "its answer is marked as a bad one") for no in NO),
    ({"messages": CHAT, "label": 0}, "its answer is marked as a bad one (label: 0)"),
    ({"prompt": CHAT[:1], "chosen": "x", "label": False}, "its answer is marked as a bad one (label: false)"),
    ({"system": "a", "system_prompt": "b", "question": "Who?"}, "system and system_prompt have different"),
    ({"system": "a", "messages": [system("b"), *CHAT]}, "system and the conversation have different"),
    ({"messages": CHAT, "context": "TABLE"}, "context would not be shown to the model"),
    ({"prompt": CHAT[:1], "context": ["a", "b"]}, "context would not be shown to the model"),
    ({"question": "Who?", "context": ["a", "b"]}, "context is a list, not text"),
    ({"instruction": "Who?", "input": ["a"], "output": "x"}, "input is a list, not text"),
    ({"text": "x", "system": "Be terse."}, "system would not be shown to the model"),
    ({"text": "x", "tools": [TOOL]}, "tools would not be shown to the model"),
]
# fmt: on


@pytest.mark.parametrize("number", range(len(DOCUMENTED)))
def test_a_row_is_read_whole(number, tmp_path):
    row, conversation, form = DOCUMENTED[number]
    (read,) = load_rows(written(tmp_path, row))
    assert (said(read), read.format, read.unread) == (conversation, form, ())


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_malformed_or_would_be_lost_is_refused_with_its_line(number, tmp_path):
    row, words = REFUSED[number]
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
    rows = load_rows(written(tmp_path, DOCUMENTED[1][0], DOCUMENTED[0][0]))
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
    rows = [
        {"Nr": 1, "Frage": "Wer?", "Antwort": "Ada.", "text": "unused"},
        {"Frage": "Wer?"},
        {"prompt": "Who?"},
    ]
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
    assert said(read) == "s: Be terse. | u: Hi? | a: Hello."
    assert (read.tools, read.variables) == ([TOOL], {"enable_thinking": True})
    assert (read.group, read.cluster, read.teacher) == ("code", "one", "base")
    assert read.unread == ("id", "text")
    row = {"question": "How many?", "answer": "Two.", "passage": "Two ports.", "topic": "ports"}
    (read,) = load_rows(written(tmp_path, row), columns={"context": "passage", "cluster": "topic"})
    assert (said(read), read.cluster, read.unread) == ("u: How many?\n\nTwo ports. | a: Two.", "ports", ())
