"""Rows: every format that is read, and complaints that name the file and line."""

import json
from pathlib import Path

import pytest

from opdcl.data.rows import load_prompts, load_rows
from opdcl.errors import UsageError

USER = {"role": "user", "content": "Who?"}
ASSISTANT = {"role": "assistant", "content": "Ada."}
SYSTEM = {"role": "system", "content": "Be brief."}


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def complaint(source: str, read=load_rows) -> str:
    with pytest.raises(UsageError) as caught:
        read(source)
    assert caught.value.hint, "every complaint says what to do next"
    return caught.value.message


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "text"),
    [
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], "Ada.", None),
        ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, [USER, ASSISTANT, USER], "Ada.", None),
        ({"messages": [USER]}, [USER], None, None),
        ({"prompt": "Who?", "completion": "Ada."}, [USER], "Ada.", None),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, USER], "Ada.", None),
        ({"prompt": [USER], "completion": "Ada."}, [USER], "Ada.", None),
        ({"prompt": "Who?"}, [USER], None, None),
        ({"question": "Who?", "answer": "Ada."}, [USER], "Ada.", None),
        ({"question": "Who?"}, [USER], None, None),
        ({"question": "Who?", "answer": None}, [USER], None, None),
        ({"text": "Ada wrote it."}, [], None, "Ada wrote it."),
        ({"question": "Who?", "answer": "Ada.", "id": 7, "tags": ["x"]}, [USER], "Ada.", None),
    ],
)
def test_each_shape_of_row_is_read(tmp_path, row, prompt, answer, text):
    [checked] = load_rows(jsonl(tmp_path / "rows.jsonl", row))
    assert (checked.prompt, checked.answer, checked.text) == (prompt, answer, text)


def test_a_row_knows_its_line_also_after_blank_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": "b"}')
    assert [row.where for row in load_rows(str(path))] == [f"{path}:2", f"{path}:4"]


def test_a_unicode_line_separator_inside_a_string_does_not_end_the_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one\u2028two"}\n{"text": "three"}\n', encoding="utf-8")
    assert [row.text for row in load_rows(str(path))] == ["one\u2028two", "three"]


def test_csv_is_read_with_quoted_line_breaks_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        '\ufeffquestion,answer\r\n"Who, and\nwhen?",Ada.\r\nWhere?,London\r\n', encoding="utf-8", newline=""
    )
    rows = load_rows(str(path))
    assert [row.prompt[0]["content"] for row in rows] == ["Who, and\nwhen?", "Where?"]
    assert [row.answer for row in rows] == ["Ada.", "London"]
    assert rows[1].where == f"{path}:4"


def test_csv_with_an_empty_field_names_the_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nWho?,Ada.\n,London\n")
    assert complaint(str(path)) == f"{path}:3: question is empty"


@pytest.mark.parametrize("row", [{"question": "Who?", "answer": "Ada."}, {"messages": [USER, ASSISTANT]}])
def test_parquet_is_read(tmp_path, row):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    rows = load_rows(str(path))
    assert [(row.prompt, row.answer) for row in rows] == [([USER], "Ada.")] * 2
    assert "row 2" in rows[1].where


def test_a_broken_parquet_file_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    assert "is not a Parquet file" in complaint(str(path))


def test_a_folder_gives_one_text_per_document_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "b.md").write_text("# Second\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c.md").write_text("third")
    (tmp_path / "blank.md").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    rows = load_rows(str(tmp_path))
    assert [row.text for row in rows] == ["first", "# Second", "third"]
    assert rows[2].where == str(tmp_path / "inner" / "c.md")


def test_malformed_json_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"\n')
    assert complaint(str(path)).startswith(f"{path}:3 is not valid JSON")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "Ada."}, "has only answer"),
        ({}, ":2: the row is empty"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ([1, 2], "is a list, not an object"),
        ("words", "is text, not an object"),
        ({"text": ""}, "text is empty"),
        ({"text": " \n "}, "text is empty"),
        ({"prompt": "", "completion": "c"}, "prompt is empty"),
        ({"question": "Who?", "answer": False}, "answer is true or false, not text"),
        ({"prompt": {"a": 1}}, "prompt is an object, not text"),
        ({"text": ["a"]}, "text is a list, not text"),
        ({"messages": "Who?"}, "messages is text, not a list"),
        ({"messages": [ASSISTANT]}, "no user message"),
        ({"messages": ["Who?"]}, "message role None"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": ""}]}, "user content is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "user content is null, not text"),
        ({"text": "x" * 200_001}, "200001 characters"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, row, said):
    path = tmp_path / "rows.jsonl"
    message = complaint(jsonl(path, {"text": "good"}, row))
    assert message.startswith(f"{path}:2")
    assert said in message


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Who?", "answer": ""},
        {"question": "Who?", "answer": " "},
        {"prompt": [USER], "completion": ""},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
    ],
)
def test_whether_an_answer_may_be_empty_is_left_to_its_use(tmp_path, row):
    [checked] = load_rows(jsonl(tmp_path / "rows.jsonl", row))
    assert (checked.prompt, checked.answer) == ([USER], "")


@pytest.mark.parametrize(
    ("name", "content"),
    [("r.jsonl", ""), ("r.jsonl", "\n \n"), ("r.csv", "question,answer\n"), ("r.csv", "")],
)
def test_data_without_rows_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert complaint(str(tmp_path / name)) == f"{tmp_path / name} has no rows"


def test_a_folder_without_documents_is_refused(tmp_path):
    assert "has no rows" in complaint(str(tmp_path))


@pytest.mark.parametrize(("name", "named"), [("rows.xlsx", ".xlsx"), ("rows", "without an ending")])
def test_an_unknown_ending_is_refused(tmp_path, name, named):
    (tmp_path / name).write_text("x")
    assert named in complaint(str(tmp_path / name))


@pytest.mark.parametrize("source", ["nowhere.jsonl", "./nowhere", "nowhere", "a/b/c", "/nowhere/rows.csv"])
def test_a_file_that_does_not_exist_is_refused_without_asking_the_hub(source):
    assert complaint(source) == f"data {source!r} does not exist"


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    assert "is not UTF-8 text (byte 13)" in complaint(str(path))


def test_plain_text_cannot_be_a_prompt(tmp_path):
    path = tmp_path / "rows.jsonl"
    message = complaint(jsonl(path, {"prompt": "Who?"}, {"text": "Ada wrote it."}), load_prompts)
    assert message.startswith(f"{path}:2")


def test_the_shipped_handbook_has_five_wordings_of_each_fact():
    rows = load_rows("handbook")
    assert len(rows) == 840
    assert all(row.prompt[-1]["role"] == "user" and row.answer for row in rows)


def test_the_shipped_everyday_prompts_are_many_and_their_validation_split_is_apart():
    train, validation = (
        [row.prompt[0]["content"] for row in load_prompts("everyday", s)] for s in ("train", "validation")
    )
    assert len(train) >= 800
    assert len(validation) >= 50
    assert len({*train}) == len(train)
    assert not {*train} & {*validation}


def test_the_shipped_everyday_prompts_have_no_answers():
    assert all(
        row.answer is None for split in ("train", "validation") for row in load_rows("everyday", split)
    )


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_shipped_everyday_conversations_come_whole(split):
    rows = load_prompts("everyday", split)
    assert all(row.group for row in rows)
    assert {row.group for row in rows if len(row.prompt) > 1} == {"conversation"}
    assert {row.prompt[-1]["role"] for row in rows} == {"user"}


def test_a_csv_row_may_hold_line_separators_and_commas_in_quotes(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'question,answer\n"One,\u2028two",yes\nplain\u2028text,no\n', encoding="utf-8", newline=""
    )
    rows = load_rows(str(path))
    assert [(r.prompt[0]["content"], r.answer) for r in rows] == [
        ("One,\u2028two", "yes"),
        ("plain\u2028text", "no"),
    ]


def test_a_csv_row_with_too_many_fields_names_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\na,b\nc,d,e\n")
    assert f"{path}:3 has more fields" in complaint(str(path))
