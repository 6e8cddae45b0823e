"""Rows without an answer and rows over the limit: refused with their number, left out, or cut."""

import copy

import pytest
from helpers.learning import encode_example

from opdcl.config.finetune import FinetuneConfig
from opdcl.data import rows
from opdcl.data.examples import read_examples, with_answers
from opdcl.data.formats import check_row
from opdcl.data.rows import Row
from opdcl.errors import UsageError


def row(number: int, answer: str | None, question: str = "What is it?") -> Row:
    return Row([{"role": "user", "content": question}], answer, None, f"rows.jsonl:{number}")


ROWS = [row(1, "Seven"), row(2, "word " * 300), row(3, "Eight"), row(4, "word " * 400)]


@pytest.fixture
def read(loaded):
    tokenizer = copy.deepcopy(loaded.tokenizer)

    def read(rows: list[Row], replay=(), max_length=100, tell=None, **settings):
        config = FinetuneConfig(data="rows.jsonl", max_length=max_length, **settings)
        return read_examples(with_answers(rows, config), config, tokenizer, replay, tell)

    read.tokenizer = tokenizer
    return read


def test_long_rows_are_refused_together_with_their_number_the_first_and_the_longest(read):
    longest = len(encode_example(ROWS[3], read.tokenizer, 100)[0].ids)
    with pytest.raises(UsageError) as caught:
        read(ROWS)
    assert caught.value.message.startswith("2 rows are longer than 100 tokens (first: rows.jsonl:2 with ")
    assert f"the longest row has {longest} tokens" in caught.value.hint
    for word in ("finetune.max_length", "finetune.long_rows=skip", "=cut"):
        assert word in caught.value.hint
    with pytest.raises(UsageError, match="1 row is longer"):
        read(ROWS[:2])


def test_a_large_data_set_replays_no_more_than_is_allowed_and_says_so(read):
    rows = [row(number, "Nine") for number in range(9)]

    def notes_of(most: int) -> list[str]:
        config = FinetuneConfig(data="rows.jsonl", replay={"share": 0.7, "most": most})
        assert config.replayed(9) == most
        return read_examples(with_answers(rows, config), config, read.tokenizer, [row(1, None)], None).notes

    assert notes_of(21) == []  # exactly as many as the share asks for
    assert notes_of(5) == ["5 rows are replayed, 36 % of all: finetune.replay.most allows no more"]


def test_prompts_to_replay_that_leave_no_room_for_an_answer_are_counted(read):
    replay = [row(1, None), row(2, None, "word " * 40)]
    assert len(read(ROWS[:1], replay, 400).replay) == 2
    examples = read(ROWS[:1], replay, 190)
    assert len(examples.replay) == 1
    assert examples.notes[0].startswith("1 of 2 prompts to replay leave no room for an answer; left out")
    with pytest.raises(UsageError, match="2 of 2 prompts to replay") as caught:
        read(ROWS[:1], replay, 128)
    assert "finetune.replay.share=0" in caught.value.hint


def test_an_answer_whose_indent_the_template_takes_off_is_named(read):
    indented, plain = [row(1, "    x = 1\n    y = 2\n")], [row(1, "x = 1\n    y = 2\n")]
    assert read(indented).notes == read(plain).notes == []
    template = read.tokenizer.chat_template
    read.tokenizer.chat_template = template.replace("message['content']", "message['content'] | trim")
    assert read(plain).notes == []
    (note,) = read(indented).notes
    assert note.startswith("1 row has an answer without the blanks that it begins with (first: rows.jsonl:1)")


def test_who_waits_for_many_rows_is_told_how_many_are_done(read, monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "EVERY", 0.0)
    (tmp_path / "r.jsonl").write_text('{"text": "a"}\n' * 2)
    told = []
    rows.read_rows(str(tmp_path / "r.jsonl"), tell=told.append)
    read([ROWS[0]] * 2, tell=told.append)
    read_rows, encoded = f"{tmp_path}/r.jsonl: read", "of 2 rows, encoded"
    assert told == [f"{what} {done} rows so far" for what in (read_rows, encoded) for done in (0, 1)]


def test_long_rows_can_be_left_out(read):
    examples = read(ROWS, long_rows="skip")
    assert [r.where for r in examples.rows] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert len(examples.encoded) == 2
    assert examples.longest[1] == "rows.jsonl:4"
    assert examples.notes[0].startswith("2 rows are longer than 100 tokens")
    assert examples.notes[0].endswith("left out")


def test_long_rows_can_be_cut_unless_no_answer_remains(read):
    all_prompt = row(5, "Nine", question="word " * 300)
    examples = read([*ROWS, all_prompt], long_rows="cut")
    whole = encode_example(ROWS[1], read.tokenizer, 100)[0]
    assert [r.where for r in examples.rows] == [r.where for r in ROWS]
    assert examples.encoded[1].ids == whole.ids[:100]
    assert examples.encoded[1].learned == whole.learned[:100]
    assert examples.notes[0].endswith("cut, 1 left out because no answer remained")


def test_plain_text_is_split_and_never_too_long(read):
    text = Row([], None, "word " * 400, "page.md")
    examples = read([text])
    assert examples.notes == []
    assert len(examples.rows) == 1
    assert {len(e.ids) for e in examples.encoded[:-1]} == {100}


def test_rows_that_the_chat_template_refuses_are_left_out_with_the_first_and_its_reason(read):
    read.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    told = check_row({"system": "Be brief.", "question": "Who?", "answer": "Ada."}, "rows.jsonl:9")
    with pytest.raises(UsageError, match="no system turn"):
        read([*ROWS[:1], told])
    examples = read([*ROWS[:1], told], bad_rows="skip")
    assert [r.where for r in examples.rows] == ["rows.jsonl:1"]
    [note] = examples.notes
    assert note.startswith("1 row cannot be used (first: rows.jsonl:9")
    assert note.endswith("; left out")
    with pytest.raises(UsageError, match="no row to learn from: 1 row cannot be used"):
        read([told], bad_rows="skip")


def test_no_row_left_is_an_error_that_says_why(read):
    with pytest.raises(UsageError, match=r"no row to learn from: 1 row is longer than 100 tokens"):
        read(ROWS[1:2], long_rows="skip")


@pytest.mark.parametrize("answer", ["", None])
def test_bad_rows_are_refused_together_or_left_out(answer):
    rows = [row(1, "Seven"), row(2, answer), row(3, answer)]
    config = FinetuneConfig(data="rows.jsonl")
    with pytest.raises(UsageError) as caught:
        with_answers(rows, config)
    assert caught.value.message == "2 rows have no answer to learn (first: rows.jsonl:2)"
    assert "finetune.bad_rows=skip" in caught.value.hint
    skipping = config.model_copy(update={"bad_rows": "skip"})
    kept = with_answers(rows, skipping)
    assert (kept.usable, kept.count) == (rows[:1], 3)
    assert kept.notes == ["2 rows have no answer to learn (first: rows.jsonl:2); left out"]
    with pytest.raises(UsageError):
        with_answers(rows[1:], skipping)


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        ({"question": "Who?", "anwser": "Ada."}, "did you mean answer instead of anwser? fine-tune rows"),
        ({"question": "Who?", "answer": "", "answers": 2, "question_id": 7}, "fine-tune rows need"),
    ],
)
def test_a_row_without_an_answer_names_the_column_that_may_hold_it(columns, hint):
    with pytest.raises(UsageError, match=r"no answer to learn \(first: rows\.csv:2\)") as refused:
        with_answers([check_row(columns, "rows.csv:2")], FinetuneConfig(data="rows.csv"))
    assert refused.value.hint.startswith(hint)
