"""Rows as other trainers and data sets write them, in files as their own documentation shows them."""

import json
from pathlib import Path

import pytest

from opdcl.data.messages import FIELDS_HINT
from opdcl.data.rows import load_rows, recognised
from opdcl.errors import UsageError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


# Format -> file, its content, and of its last row the prompt and the answer.
DOCUMENTED = {
    # github.com/tatsu-lab/stanford_alpaca: one list, an input that may be empty.
    "alpaca": (
        "alpaca_data.json",
        """[
    {
        "instruction": "Give three tips for staying healthy.",
        "input": "",
        "output": "1.Eat a balanced diet. 2. Exercise regularly. 3. Get enough sleep."
    },
    {
        "instruction": "Identify the odd one out.",
        "input": "Twitter, Instagram, Telegram",
        "output": "Telegram"
    }
]
""",
        [user("Identify the odd one out.\n\nTwitter, Instagram, Telegram")],
        "Telegram",
    ),
    # LLaMA-Factory's alpaca: system and history beside the instruction.
    "alpaca with history": (
        "data.json",
        """[
  {
    "instruction": "And in winter?",
    "input": "",
    "output": "At eight.",
    "system": "You are a porter.",
    "history": [
      ["When does the gate open?", "At seven."]
    ]
  }
]""",
        [
            system("You are a porter."),
            user("When does the gate open?"),
            assistant("At seven."),
            user("And in winter?"),
        ],
        "At eight.",
    ),
    # databricks-dolly-15k.
    "dolly": (
        "dolly.jsonl",
        '{"instruction": "When did Virgin Australia start operating?", "context": "Virgin Australia '
        'commenced services on 31 August 2000.", "response": "On 31 August 2000."}\n',
        [
            user(
                "When did Virgin Australia start operating?\n\n"
                "Virgin Australia commenced services on 31 August 2000."
            )
        ],
        "On 31 August 2000.",
    ),
    # FastChat, axolotl's `type: chat_template`, LLaMA-Factory's sharegpt.
    "ShareGPT": (
        "sharegpt.jsonl",
        '{"id": "identity_0", "system": "Be brief.", "conversations": [{"from": "human", "value": '
        '"Who are you?"}, {"from": "gpt", "value": "I am Vicuna."}, {"from": "human", '
        '"value": "Have a nice day!"},'
        ' {"from": "gpt", "value": "You too!"}]}\n',
        [system("Be brief."), user("Who are you?"), assistant("I am Vicuna."), user("Have a nice day!")],
        "You too!",
    ),
    # OpenAI's fine-tuning guide.
    "OpenAI messages": (
        "openai.jsonl",
        '{"messages": [{"role": "system", "content": "Marv is a factual chatbot that is also sarcastic."},'
        ' {"role": "user", "content": "What is the capital of France?"},'
        ' {"role": "assistant", "content": "Paris, as if everyone does not know that already."}]}\n',
        [system("Marv is a factual chatbot that is also sarcastic."), user("What is the capital of France?")],
        "Paris, as if everyone does not know that already.",
    ),
    "OpenAI messages in parts": (
        "openai.jsonl",
        '{"messages": [{"role": "developer", "content": "Be kind."},'
        ' {"role": "user", "content": [{"type": "text", "text": "Hello."}]},'
        ' {"role": "assistant", "content": "Hi."}]}\n',
        [system("Be kind."), user("Hello.")],
        "Hi.",
    ),
    # TRL's dataset formats.
    "prompt and completion": (
        "trl.jsonl",
        '{"prompt": "The sky is", "completion": " blue."}\n',
        [user("The sky is")],
        " blue.",
    ),
    "prompt and response": (
        "rows.jsonl",
        '{"prompt": "What color is the sky?", "response": "It is blue."}\n',
        [user("What color is the sky?")],
        "It is blue.",
    ),
    "input and output": (
        "rows.jsonl",
        '{"input": "What color is the sky?", "output": "It is blue."}\n',
        [user("What color is the sky?")],
        "It is blue.",
    ),
    # ms-swift.
    "query and response": (
        "swift.jsonl",
        '{"system": "00000", "query": "55555", "response": "66666", "history": [["11111", "22222"]]}\n',
        [system("00000"), user("11111"), assistant("22222"), user("55555")],
        "66666",
    ),
    # OpenOrca.
    "OpenOrca": (
        "orca.jsonl",
        '{"id": "t0.1", "system_prompt": "You are an AI assistant.", "question": "Is water wet?",'
        ' "response": "Yes."}\n',
        [system("You are an AI assistant."), user("Is water wet?")],
        "Yes.",
    ),
    # TRL's preference data, with an explicit prompt, and as conversations.
    "preference": (
        "dpo.jsonl",
        '{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}\n',
        [user("The sky is")],
        " blue.",
    ),
    "preference turns": (
        "dpo.jsonl",
        '{"prompt": [{"role": "user", "content": "What color is the sky?"}],'
        ' "chosen": [{"role": "assistant", "content": "It is blue."}],'
        ' "rejected": [{"role": "assistant", "content": "It is green."}]}\n',
        [user("What color is the sky?")],
        "It is blue.",
    ),
    "preference conversations": (
        "dpo.jsonl",
        '{"chosen": [{"role": "user", "content": "What color is the sky?"},'
        ' {"role": "assistant", "content": "It is blue."}],'
        ' "rejected": [{"role": "user", "content": "What color is the sky?"},'
        ' {"role": "assistant", "content": "It is green."}]}\n',
        [user("What color is the sky?")],
        "It is blue.",
    ),
    # LLaMA-Factory's sharegpt preference.
    "ShareGPT preference": (
        "dpo.json",
        '[{"conversations": [{"from": "human", "value": "What color is the sky?"}],'
        ' "chosen": {"from": "gpt", "value": "It is blue."},'
        ' "rejected": {"from": "gpt", "value": "It is green."}}]',
        [user("What color is the sky?")],
        "It is blue.",
    ),
    # UltraFeedback binarized: the chosen conversation twice.
    "UltraFeedback": (
        "dpo.jsonl",
        '{"prompt": "Hi?", "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": '
        '"Hello!"}], "chosen": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": '
        '"Hello!"}]}\n',
        [user("Hi?")],
        "Hello!",
    ),
    "text": ("pages.jsonl", '{"text": "The sky is blue."}\n', [], None),
    "semicolons": ("rows.csv", 'question;answer\n"Red; or blue?";Blue\n', [user("Red; or blue?")], "Blue"),
    "tabs": ("rows.tsv", "question\tanswer\nRed, or blue?\tBlue\n", [user("Red, or blue?")], "Blue"),
}


def written(tmp_path: Path, name: str, content: str) -> str:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return str(tmp_path / name)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_file_as_its_documentation_shows_it_is_read(name, tmp_path):
    file, content, prompt, answer = DOCUMENTED[name]
    row = load_rows(written(tmp_path, file, content))[-1]
    assert (row.prompt, row.answer) == (prompt, answer)
    assert row.text == (None if prompt else "The sky is blue.")
    assert "rejected" not in repr(row)
    assert "green" not in repr(row)


def test_rows_of_a_list_know_their_lines(tmp_path):
    content = '\n[\n  {"text": "a"},\n  {\n    "text": "b"\n  }, {"text": "c"}\n]\n'
    rows = load_rows(written(tmp_path, "rows.json", content))
    assert [row.where.rpartition(":")[2] for row in rows] == ["3", "4", "6"]


def test_an_earlier_answer_has_its_own_call_and_not_that_of_the_last(tmp_path):
    calls = [{"id": str(i), "type": "function", "function": {"name": "f", "arguments": {}}} for i in range(2)]
    asks = [{**assistant(""), "tool_calls": [call]} for call in calls]
    result = {"role": "tool", "tool_call_id": "0", "content": "yes"}
    messages = [user("1?"), asks[0], result, assistant("one"), user("2?"), asks[1]]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = json.dumps({"messages": messages, "tools": tools})
    (row,) = load_rows(written(tmp_path, "rows.jsonl", text))
    names = [[call["id"] for call in turn.reply.get("tool_calls", [])] for turn in row.turns()]
    assert names == [["0"], [], ["1"]]


def test_a_conversation_has_a_prompt_for_each_answer_to_the_user(tmp_path):
    turns = [system("S"), assistant("Hello."), user("1?"), assistant("one"), assistant("more"), user("2?")]
    row, answered = load_rows(
        written(
            tmp_path,
            "rows.jsonl",
            f"{json.dumps({'messages': turns, 'teacher': 't', 'cluster': 'c'})}\n"
            f"{json.dumps({'messages': [*turns, assistant('two')]})}\n",
        )
    )
    assert [(r.prompt, r.answer) for r in row.turns()] == [(turns[:3], "one"), (turns, None)]
    assert [(r.prompt, r.answer) for r in answered.turns()] == [(turns[:3], "one"), (turns, "two")]
    assert {(r.teacher, r.cluster, r.where) for r in row.turns()} == {("t", "c", row.where)}
    single = load_rows(written(tmp_path, "one.jsonl", '{"prompt": "1?", "completion": "one"}'))[0]
    assert single.turns() == [single]
    assert all(row.turns() == [row] for row in load_rows(written(tmp_path, "t.jsonl", '{"text": "x"}')))


# A malformed file, and the words of its complaint.
MALFORMED = {
    "a speaker that nobody knows": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "message role 'narrator'",
    ),
    "a tool call in ShareGPT": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{}"}]},
        "a message has the role 'function_call'",
    ),
    "a tool call in messages": (
        {"messages": [user("x"), {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "a tool call has no name or no object of arguments",
    ),
    "a call of former versions of OpenAI's interface": (
        {"messages": [user("x"), {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
        "a message has function_call",
    ),
    "tools": ({"messages": [user("x"), assistant("y")], "tools": "f(x)"}, "tools is not made of objects"),
    "variables of the chat template": (
        {"messages": [user("x"), assistant("y")], "chat_template_kwargs": ["thinking"]},
        "chat_template_kwargs is not made of objects",
    ),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, assistant("y")]},
        "a part of type image_url",
    ),
    "thoughts": (
        {"messages": [user("x"), {**assistant("y"), "reasoning_content": 4}]},
        "a thought is a number, not text",
    ),
    "an answer that is not to be learned": (
        {"messages": [user("x"), {**assistant("y"), "weight": 0}]},
        "a message has weight 0",
    ),
    "a conversation that is text": ({"conversations": "Human: x"}, "conversations is text, not a list"),
    "a history without pairs": (
        {"query": "x", "response": "y", "history": ["z"]},
        "history is not a list of pairs",
    ),
    "a history that is a number": (
        {"query": "x", "response": "y", "history": 5},
        "history is a number, not a list",
    ),
    "a teacher that is a number": ({"question": "x", "teacher": 0}, "teacher is a number, not text"),
    "a call of a tool without a name": (
        {"messages": [user("x"), {"role": "assistant", "tool_calls": [{"name": 5, "arguments": {}}]}]},
        "a tool call has no name or",
    ),
    "half a character in a call": (
        {
            "messages": [
                user("x"),
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]},
            ]
        },
        "arguments holds half of a surrogate pair",
    ),
    "preferences without a prompt": (
        {"chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "z"},
        "has only chosen, rejected",
    ),
    "a bad completion": (
        {"prompt": "x", "completion": "y", "label": False},
        "its answer is marked as a bad one (label: false)",
    ),
    "an empty instruction": ({"instruction": " ", "output": "y"}, "instruction is empty"),
    "an answer that is true": ({"instruction": "x", "output": True}, "output is true or false, not text"),
    "columns of other names": ({"Frage": "x", "Antwort": "y"}, "has only Frage, Antwort"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_row_is_refused_with_its_line_and_reason(fault, tmp_path):
    row, words = MALFORMED[fault]
    lines = [json.dumps({"text": "good"}), json.dumps(row)]
    for name, content, line in (
        ("rows.jsonl", "\n".join(lines), 2),
        ("rows.json", "[\n" + ",\n".join(lines) + "]", 3),
    ):
        path = written(tmp_path, name, content)
        with pytest.raises(UsageError) as refused:
            load_rows(path)
        assert refused.value.message.startswith(f"{path}:{line}")
        assert words in refused.value.message
        assert refused.value.hint


def test_each_fault_has_an_error_of_its_own():
    assert len(MALFORMED) >= 10
    assert len({words for _, words in MALFORMED.values()}) == len(MALFORMED)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[\n{"text": "a"},\n{"text": "b"\n]', ":4 is not valid JSON"),
        ('[{"text": "a"}]\n[{"text": "b"}]', ":1: the row is a list, not an object"),
        ('{\n"text": "a"\n', ":3 is not valid JSON"),
        ("[1]", ":1: the row is a number, not an object"),
        ("[]", " has no rows"),
    ],
)
def test_a_malformed_list_is_refused_with_its_line(content, words, tmp_path):
    path = written(tmp_path, "rows.json", content)
    with pytest.raises(UsageError) as refused:
        load_rows(path)
    assert refused.value.message.startswith(path + words)


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
    path = written(tmp_path, "rows.jsonl", f"{json.dumps({'text': 'good'})}\n{json.dumps(row)}")
    with pytest.raises(UsageError, match=r"rows\.jsonl:2: the row ") as refused:
        load_rows(path)
    assert refused.value.hint == hint + FIELDS_HINT


COLUMNS = {"question": "Frage", "answer": "Antwort"}


def test_named_columns_take_the_place_of_ours(tmp_path):
    path = written(tmp_path, "rows.csv", "Nr;Frage;Antwort;text\n1;Wer?;Ada.;unused\n")
    (row,) = load_rows(path, columns=COLUMNS)
    assert (row.prompt, row.answer) == ([user("Wer?")], "Ada.")


def test_prompts_need_no_column_of_answers_and_other_files_keep_their_names(tmp_path):
    (row,) = load_rows(written(tmp_path, "a.csv", "Nr;Frage\n1;Wer?\n"), columns=COLUMNS)
    assert (row.prompt, row.answer) == ([user("Wer?")], None)
    (row,) = load_rows(written(tmp_path, "b.jsonl", '{"prompt": "Who?"}'), columns=COLUMNS)
    assert row.prompt == [user("Who?")]


def test_a_named_column_that_is_missing_is_refused_with_the_line_and_the_columns(tmp_path):
    path = written(tmp_path, "rows.csv", "Nr;Frage;Antwort\n1;Wer?;Ada.\n")
    with pytest.raises(UsageError, match=r"rows.csv:2 has no column 'Fragen'") as refused:
        load_rows(path, columns={"question": "Fragen", "answer": "Antwort"})
    assert refused.value.hint == "its columns are Nr, Frage, Antwort"


def test_what_was_recognised_is_told_with_an_example(tmp_path):
    rows = load_rows(written(tmp_path, "rows.json", DOCUMENTED["alpaca"][1]))
    assert recognised("rows.json", rows) == (
        "rows.json: 2 of alpaca; the first: user: Give three tips for staying healthy. assistant: "
        "1.Eat a balanced diet. 2. Exercise regularly. 3. Get enough sleep."
    )
    long = load_rows(written(tmp_path, "long.jsonl", json.dumps({"text": "word " * 900})))
    assert len(recognised("long.jsonl", long)) < 200
