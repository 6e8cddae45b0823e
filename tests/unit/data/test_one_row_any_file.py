"""The same awkward rows are learned alike from every format that is read, or refused with their line."""

import csv
import gzip
import io
import json
import random
from datetime import datetime
from decimal import Decimal

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers.families import FAMILIES, make_tokenizer
from helpers.learning import encode_example
from unit.data.test_files import parquet

from opdcl.config.load import load
from opdcl.data.formats import check_row
from opdcl.data.rows import left_out, load_records, load_rows
from opdcl.data.split import split_rows

# Texts that one format or another is known to change.
AWKWARD = [
    *('"', '""', 'He said "no".', "5\" pipe, 'x'", '"quoted"', "a,b;c\td", "=1+1", "#", "\\", "\\n", '\\"'),
    *("a\nb", "a\r\nb", "a\rb", "\n\nindented", "tail\n", " blank before", "blank after  ", "\ta\t"),
    *("0.10", "0.1", "1e5", "1E+5", "-0", "-0.0", "007", "1,000", "2.50", "0.00001", "1e400"),
    *("null", "NULL", "NaN", "None", "true", "N/A", "[1, 2]", '{"a": 1, "a": 2}', "- x", "@x", "~", "1_000"),
    *("12345678901234567890", "\u2028", "a\u0085b", "\u00a0", "e\u0301", "\ufeffx", "\U0001d518 🙂"),
    *("你好", "\x1f", "x" * 33_000, "---\n"),
]
# Numbers as JSON may spell them; as text in other formats.
SPELLINGS = ["0.10", "1e5", "1E+05", "-0", "-0.0", "0.00001", "2.50", "1e400", "3", "123456789012345678901"]


def as_csv(rows, **options):
    sink = io.StringIO()
    writer = csv.DictWriter(sink, [*rows[0]], **options)
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def as_arrow(rows):
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def as_lines(rows, end="\n", **options):
    return "".join(json.dumps(row, **options) + end for row in rows).encode()


FORMS = {
    "rows.jsonl": as_lines,
    "crlf.jsonl": lambda rows: as_lines(rows, "\r\n", ensure_ascii=False),
    "list.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "mark.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows, ensure_ascii=False).encode(),
    "rows.jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "rows.csv": as_csv,
    "quoted.csv": lambda rows: as_csv(rows, quoting=csv.QUOTE_ALL, lineterminator="\n"),
    "old.csv": lambda rows: as_csv(rows, quoting=csv.QUOTE_ALL, lineterminator="\r"),
    "semicolons.csv": lambda rows: b"sep=;\r\n" + as_csv(rows, delimiter=";"),
    "rows.tsv": lambda rows: as_csv(rows, delimiter="\t"),
    "rows.csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    "rows.parquet": parquet,
    "rows.arrow": as_arrow,
}


def awkward(draw):
    """Return rows whose cells are drawn from the awkward texts, alone and joined."""

    def cell():
        text = "".join(draw.choice(AWKWARD) for _ in range(draw.choice((1, 1, 2, 3))))
        return text if text.strip() else f"x{text}"

    return [{"question": f"{number}: {cell()}", "answer": cell()} for number in range(draw.randint(1, 5))]


def nested(draw):
    """Return rows whose cells hold a conversation with a call, as JSON text, which every format can hold."""
    rows = []
    for row in awkward(draw):
        arguments = json.dumps({"n": draw.choice([1, 0.5, 10**20, None]), "text": row["question"]})
        call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
        turns = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": row["answer"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        tool = {"type": "function", "function": {"name": "find", "description": row["answer"]}}
        rows.append({"messages": json.dumps(turns), "tools": json.dumps([tool])})
    return rows


def learned(rows):
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    return [[(one.ids, one.learned) for one in encode_example(row, tokenizer, 10**6)] for row in rows]


@pytest.mark.parametrize("make", [awkward, nested])
def test_the_same_rows_are_learned_alike_from_every_format(make, tmp_path):
    draw = random.Random(76)
    for _ in range(40 if make is awkward else 15):
        rows = make(draw)
        expected = learned(check_row(row, "r") for row in rows)
        for name, form in FORMS.items():
            (tmp_path / name).write_bytes(form(rows))
            assert learned(load_rows(str(tmp_path / name))) == expected, name


def test_a_number_is_learned_as_the_file_spells_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": {n}, "answer": {n}}}\n' for n in SPELLINGS))
    (tmp_path / "list.json").write_text(
        "[" + ",\n".join(f'{{"question": {n}, "answer": {n}}}' for n in SPELLINGS) + "]"
    )
    (tmp_path / "rows.csv").write_bytes(as_csv([{"question": n, "answer": n} for n in SPELLINGS]))
    (tmp_path / "turns.jsonl").write_text(
        "".join(
            f'{{"messages": [{{"role": "user", "content": {n}}}, {{"role": "assistant", "content": {n}}}]}}\n'
            for n in SPELLINGS
        )
    )
    for name in ("rows.jsonl", "list.json", "rows.csv", "turns.jsonl"):
        rows = load_rows(str(tmp_path / name))
        assert [(row.prompt[0]["content"], row.answer) for row in rows] == [(n, n) for n in SPELLINGS], name


def test_a_number_that_is_set_aside_keeps_its_spelling(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"question": "Price {i}?", "answer": {i}.10}}\n' for i in range(40)))
    texts = split_rows(load_records(str(file)), {}, 0.5)[:2]
    found = {row["answer"] for text in texts for row in map(json.loads, text.splitlines())}
    assert found == {f"{i}.10" for i in range(40)}


TYPED = {
    "float32": (pyarrow.array([0.1, 12.5, None], pyarrow.float32()), ["0.1", "12.5"]),
    "float16": (pyarrow.array([0.5, 2, None], pyarrow.float16()), ["0.5", "2.0"]),
    "decimal": (pyarrow.array([Decimal("0.10"), Decimal("12.50"), None]), ["0.10", "12.50"]),
    "timestamp": (
        pyarrow.array([datetime(2026, 3, 1, 8), datetime(2026, 3, 2, 8, 30), None]),
        ["2026-03-01 08:00:00", "2026-03-02 08:30:00"],
    ),
    "dictionary": (pyarrow.array(["x", "y", None]).dictionary_encode(), ["x", "y"]),
}


@pytest.mark.parametrize("name", TYPED)
def test_typed_columns_are_read_as_a_text_file_would_have_them(name, tmp_path):
    column, expected = TYPED[name]
    table = pyarrow.table({"question": ["a", "b", "c"], "answer": column})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert [row.answer for row in load_rows(str(tmp_path / "rows.parquet"))] == [*expected, None]


def test_a_class_is_learned_by_its_name(tmp_path):
    kinds = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.ClassLabel(names=["refund", "repair"])}
    )
    rows = datasets.Dataset.from_dict({"question": ["a", "b", "c"], "answer": [1, 0, -1]}, features=kinds)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    for place in ("rows.parquet", "saved"):
        assert [row.answer for row in load_rows(str(tmp_path / place))] == ["repair", "refund", None]


def test_each_linked_folder_is_read_once_and_every_other_one_is_named(tmp_path):
    for place in ("data/a", "elsewhere/b"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "rows.jsonl").write_text(f'{{"text": "{place}"}}\n')
    for link, target in {"b": "elsewhere/b", "again": "elsewhere/b", "a2": "data/a", "loop": "data"}.items():
        (tmp_path / "data" / link).symlink_to(tmp_path / target)
    (tmp_path / "elsewhere" / "b" / "loop").symlink_to(tmp_path / "elsewhere")
    folder = str(tmp_path / "data")
    assert sorted(row.text for row in load_rows(folder)) == ["data/a", "elsewhere/b"]
    for name in ("a2/", "loop/"):
        assert name in left_out(folder)


def test_the_parts_of_openais_responses_are_text(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Ada."}]},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    (row,) = load_rows(str(tmp_path / "rows.jsonl"))
    assert (row.prompt, row.answer) == ([{"role": "user", "content": "Who?"}], "Ada.")


def test_a_byte_order_mark_reaches_no_prompt_and_no_template(tmp_path):
    (tmp_path / "system.txt").write_text("\ufeffBe brief.\r\n", encoding="utf-8")
    (tmp_path / "mine.jinja").write_text("\ufeff{{ messages }}", encoding="utf-8")
    settings = (f"model.chat_template={tmp_path / 'mine.jinja'}", f"eval.system='@{tmp_path / 'system.txt'}'")
    flow, _ = load([], settings)
    assert (flow.model.chat_template, flow.eval.system) == ("{{ messages }}", "Be brief.")
