"""Files as people have them: each is read whole, or refused with a sentence that says what it holds."""

import gzip
import json
import os
import socket

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from opdcl.data import files
from opdcl.data.files import READERS
from opdcl.data.formats import Row
from opdcl.data.rows import left_out, load_rows, read_rows, source_files
from opdcl.errors import UsageError

ROWS = [
    {"question": "Who signs the form?", "answer": "Ada — née Byron."},
    {"question": "Where is it kept?\nAnd since when?", "answer": "In the vault, since 1843."},
    {"question": "Which form?", "answer": "12\u2028b"},
]
CHATS = [
    [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    for row in ROWS
]
SHAREGPT = [[{"from": "human", "value": r["question"]}, {"from": "gpt", "value": r["answer"]}] for r in ROWS]


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def csv(rows) -> bytes:
    quoted = [f'"{row["question"]}","{row["answer"]}"' for row in rows]
    return "\n".join(["question,answer", *quoted]).encode()


def parquet(rows) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def as_bytes(value, indent=None) -> bytes:
    return json.dumps(value, indent=indent).encode()


def write(folder, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def said(rows: list[Row]) -> list[tuple]:
    return [(row.prompt, row.answer, row.text) for row in rows]


# More forms are in test_one_row_any_file.py.
SAME_ROWS = {
    "rows.ndjson": lines(ROWS),
    "no_last_line_feed.jsonl": lines(ROWS).rstrip(),
    "mark.jsonl": b"\xef\xbb\xbf" + lines(ROWS),
    "list.jsonl": as_bytes(ROWS, 1),
    "chats.jsonl": lines(CHATS),
    "chats.json": as_bytes(CHATS, 2),
    "sharegpt.jsonl": lines(SHAREGPT),
    "messages.jsonl": lines({"messages": chat} for chat in CHATS),
    "rows.csv": csv(ROWS),
    "rows.tsv": csv(ROWS).replace(b'","', b'"\t"').replace(b"question,answer", b"question\tanswer"),
    "rows.json.gz": gzip.compress(as_bytes(ROWS, 2)),
    "ROWS.CSV.GZ": gzip.compress(csv(ROWS)),
    "two_parts.jsonl.gz": gzip.compress(lines(ROWS[:1])) + gzip.compress(lines(ROWS[1:])),
    "rows.PARQUET": parquet(ROWS),
}


@pytest.mark.parametrize("name", SAME_ROWS)
def test_the_same_rows_in_every_file_are_the_same(tmp_path, name):
    write(tmp_path, {name: SAME_ROWS[name]})
    rows = load_rows(str(tmp_path / name))
    expected = [(chat[:1], chat[1]["content"], None) for chat in CHATS]
    assert said(rows) == expected
    assert all(row.where.startswith(str(tmp_path / name)) for row in rows)
    # One file of a folder is read as if it were named.
    assert said(load_rows(str(tmp_path))) == expected
    assert source_files(str(tmp_path)) == [tmp_path / name]


SAME_FOLDERS = {
    "parts of JSONL": {"a/2.jsonl": lines(ROWS[1:]), "a/1.jsonl": lines(ROWS[:1])},
    "shards": {"train-1.parquet": parquet(ROWS[:2]), "train-2.parquet": parquet(ROWS[2:])},
    "a card beside the rows": {
        "README.md": b"# Rows",
        "LICENSE.txt": b"Free.",
        ".gitattributes": b"*",
        "data/train-1.csv": csv(ROWS),
    },
    "compressed parts": {"1.jsonl": lines(ROWS[:1]), "2.jsonl.gz": gzip.compress(lines(ROWS[1:]))},
}


@pytest.mark.parametrize("name", SAME_FOLDERS)
def test_the_files_of_a_folder_are_read_in_order(tmp_path, name):
    write(tmp_path, SAME_FOLDERS[name])
    assert [row.answer for row in load_rows(str(tmp_path))] == [row["answer"] for row in ROWS]


def test_what_datasets_saves_is_read(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "parts")
    for place in (tmp_path / "saved", f"{tmp_path / 'parts'}@train"):
        assert [row.answer for row in load_rows(str(place))] == [row["answer"] for row in ROWS]
        assert "state.json" in left_out(str(place))
    assert len(load_rows(str(next((tmp_path / "saved").glob("*1-of*.arrow"))))) == 1


def test_a_document_is_read_alone_and_compressed(tmp_path):
    write(tmp_path, {"page.txt.gz": gzip.compress(b"\nThe flag is green.\n"), "Page.MD": b"Blue."})
    assert said(load_rows(str(tmp_path / "page.txt.gz"))) == [([], None, "The flag is green.")]
    assert said(load_rows(str(tmp_path / "Page.MD"))) == [([], None, "Blue.")]


def test_a_folder_of_documents_skips_hidden_copies_and_names_all_that_it_leaves_out(tmp_path):
    texts = ("a.md", "B.TXT", "c/d.markdown", "c/e.rst")
    others = ("picture.png", "c/table.xlsx", ".hidden.md", ".ipynb_checkpoints/a-checkpoint.md")
    write(tmp_path, {name: name.encode() for name in (*texts, *others)})
    os.mkfifo(tmp_path / "pipe.txt")
    rows = load_rows(str(tmp_path))
    assert sorted(row.text for row in rows) == sorted(texts)
    others = ".hidden.md, .ipynb_checkpoints/, c/table.xlsx, picture.png, pipe.txt"
    assert left_out(str(tmp_path)) == f"{tmp_path}: 5 left out: {others}"
    write(tmp_path, {f"{number}.png": b"" for number in range(30)})
    assert left_out(str(tmp_path)).endswith(" and 25 more")


def test_folders_that_programs_made_and_files_about_rows_are_left_out_by_name(tmp_path):
    names = ("a.md", "node_modules/pkg/README.md", "_build/index.txt")
    write(tmp_path, dict.fromkeys(names, b"text"))
    assert len(load_rows(str(tmp_path))) == 1
    assert left_out(str(tmp_path)).endswith(": 2 left out: _build/, node_modules/")
    write(tmp_path / "rows", {"train.jsonl": lines(ROWS), "dataset_infos.json": b"{}"})
    assert len(load_rows(str(tmp_path / "rows"))) == len(ROWS)


# Names of files to train on and to test with, of which the first row of a folder's test rows says so.
NAMED_PARTS = [
    ("keys_train.jsonl", "keys_test.jsonl"),
    ("my-train.csv", "my-eval.csv"),
    ("rows.jsonl", "test.jsonl"),
    ("rows.jsonl", "rows.holdout.jsonl"),
    ("KeysTrain.jsonl", "KeysTest.jsonl"),
    ("fit/rows.parquet", "validation/rows.parquet"),
    ("data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"),
    ("a/train.json", "a/dev2.json"),
]


@pytest.mark.parametrize(("learned", "tested"), NAMED_PARTS)
def test_test_rows_are_known_by_any_word_of_a_name(tmp_path, learned, tested):
    form = {".jsonl": lines, ".csv": csv, ".parquet": parquet, ".json": as_bytes}[os.path.splitext(tested)[1]]
    write(tmp_path, {learned: form(ROWS[:1]), tested: form(ROWS[1:])})
    with pytest.raises(UsageError, match="holds several parts of a data set: ") as caught:
        load_rows(str(tmp_path))
    assert tested in caught.value.message
    assert caught.value.hint == f"name the one that you mean: {tmp_path}@train"
    assert [row.answer for row in load_rows(f"{tmp_path}@train")] == [ROWS[0]["answer"]]
    assert tested in left_out(f"{tmp_path}@train")
    with pytest.raises(UsageError, match="has no part 'tset'"):
        load_rows(f"{tmp_path}@tset")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sep.csv", "sep=;\nquestion;answer;a,b,c\nWho?;Ada, née B.;x"),
        ("bar.csv", "\ufeffSEP=|\r\nquestion|answer\r\nWho?|Ada, née B."),
        ("quoted.csv", '"a, b, c\nand d";question;answer\nx;Who?;Ada, née B.'),
        ("tabs.tsv", "a, b, c\tquestion\tanswer\nx\tWho?\tAda, née B."),
        ("inch.csv", '5" pipe;question;answer\nx;Who?;Ada, née B.'),
        ("commas.tsv", 'question,answer\nWho?,"Ada, née B."'),
    ],
)
def test_the_separator_is_what_the_file_says_it_is(tmp_path, name, text):
    write(tmp_path, {name: text.encode()})
    (row,) = load_rows(str(tmp_path / name))
    assert row.answer == "Ada, née B."
    assert row.where.endswith(f":{text.count(chr(10)) + 1}")


def test_names_that_only_hold_the_letters_of_a_part_name_none(tmp_path):
    write(tmp_path, dict.fromkeys(("latest.jsonl", "retrain.jsonl", "devices.jsonl"), lines(ROWS)))
    assert len(load_rows(str(tmp_path))) == 3 * len(ROWS)


HEAD = "---\nconfigs:\n- config_name: default\n  data_files:\n{}\n---\n# Keys"
CONFIGS = {
    "parts": "  - split: train\n    path: fit.jsonl\n  - {split: unseen, path: ['hold*.jsonl']}",
    "one list": "  - fit.jsonl",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_that_a_readme_names_are_read_as_the_hub_does(tmp_path, name):
    write(tmp_path, {"fit.jsonl": lines(ROWS[:1]), "holdout.jsonl": lines(ROWS[1:])})
    write(tmp_path, {"README.md": HEAD.format(CONFIGS[name]).encode()})
    ours = [row.answer for row in load_rows(str(tmp_path))]
    theirs = datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / ".cache"))
    assert ours == theirs["answer"][:] == [ROWS[0]["answer"]]
    assert left_out(str(tmp_path)).endswith("README.md, holdout.jsonl")
    if name == "parts":
        assert len(load_rows(f"{tmp_path}@unseen")) == 2


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            "  - {split: train, path: none.jsonl}",
            "configs names files that cannot be read: Unable to find .*none.jsonl",
        ),
        (
            "  - {split: train, path: ../other.jsonl}",
            "configs names files that cannot be read: .*/other.jsonl",
        ),
        ("  - {split: train, path: https://a.b/c.jsonl}", "configs names files elsewhere"),
        ("  - {split: train}", "configs names files that cannot"),
        ("  - [", "configs names files that cannot"),
        ("  - fit.jsonl\n- config_name: other", "configs names files that cannot be read: .* 'other'"),
    ],
)
def test_a_readme_whose_parts_are_not_here_is_refused(tmp_path, entries, words):
    head = HEAD.replace("default", "one") if "other" in words else HEAD
    write(tmp_path / "keys", {"fit.jsonl": lines(ROWS), "README.md": head.format(entries).encode()})
    write(tmp_path, {"other.jsonl": lines(ROWS)})
    with pytest.raises(UsageError, match=f"README.md:2: {words}") as caught:
        load_rows(str(tmp_path / "keys"))
    assert caught.value.hint


def test_bad_rows_are_values_in_the_order_of_the_file(tmp_path):
    bad = [b'{"text": ', b"[1]", b'{"prompt": ""}', b'{"answers": "x"}']
    write(tmp_path, {"rows.jsonl": b"\n".join([b'{"text": "a"}', *bad, b'{"text": "b"}'])})
    read = read_rows(str(tmp_path / "rows.jsonl"))
    assert [row.text for row in read.usable] == ["a", "b"]
    assert [row.place for row in read.bad] == [f"{tmp_path}/rows.jsonl:{line}" for line in range(2, 6)]
    assert all(row.problem and row.hint for row in read.bad)
    with pytest.raises(UsageError) as caught:
        read.all()
    assert (caught.value.message, caught.value.hint) == (read.bad[0].message, read.bad[0].hint)


FIELD, TWICE = ": the field that begins here", ": not valid JSON: an object has the key"
SENTENCES = {
    "data.json": (as_bytes({"version": "1", "data": ROWS}, 2), ":1: the row has only version, data"),
    "by_id.json": (as_bytes({f"i{i}": row for i, row in enumerate(ROWS)}), ":1: the row has only i0, i1"),
    "columns.json": (as_bytes({"question": {"0": "a"}, "answer": {"0": "b"}}), ":1: question is an object"),
    "comma.json": (b'[\n{"text": "a"},\n]', ":3: not valid JSON"),
    "indented.jsonl": (b"\n".join(as_bytes(row, 2) for row in ROWS), ":1: not valid JSON"),
    "commas.jsonl": (b'{"text": "a"},\n{"text": "b"},\n', ":1: not valid JSON: Extra data"),
    "deep.json": (b"[" * 100_000, ":1: not valid JSON: maximum recursion depth"),
    "half.jsonl.gz": (gzip.compress(lines(ROWS))[:-9], " is damaged or not compressed"),
    "plain.jsonl.gz": (lines(ROWS), " is damaged or not compressed"),
    "rows.jsonl.zst": (b"x", ": cannot tell the format of .zst"),
    "rows.arrow": (b"x", " is not a file of Arrow"),
    "rows.parquet.gz": (gzip.compress(parquet(ROWS)), ": cannot tell the format of .parquet.gz"),
    "half.parquet": (parquet(ROWS)[:200], " is not a file of Parquet"),
    "twice.csv": (b"question,answer,answer\na,b,c\n", ":1 has several columns of the same name: answer"),
    "fields.csv": (b"question,answer\na,b\nc,d,e\n", ":3: the row has more fields than the header"),
    "blank.csv": (b"question,answer\nWho?,Ada.\n,London\n", ":3: question is empty"),
    "third.jsonl": (b'{"text": "a"}\n{"text": "b"}\n{"text": "c"\n', ":3: not valid JSON"),
    "list.json": (b'[\n{"text": "a"},\n{"text": "b"\n]', ":4: not valid JSON"),
    "lists.json": (b'[{"text": "a"}]\n[{"text": "b"}]', ":1: the row is a list, not an object"),
    "open.json": (b'{\n"text": "a"\n', ":3: not valid JSON"),
    "lines.csv": (b'question,answer\na,b\n"c\nd",x\ne,"unclosed\nf,g\nh,i\n', f":5{FIELD}"),
    "crlf.csv": (b'question,answer\r\na,b\r\n\r\n"two\r\nlines","unclosed\r\nf,"g"\r\n', f":5{FIELD}"),
    "inside.csv": (b'sep=;\nquestion;answer\n"a" b;c\n', f":3{FIELD}"),
    "endless.csv": (b'question,answer\na,"' + b"unclosed" * 30_000 + b"\n", f":2{FIELD}"),
    "begun.tsv": (b'question\tanswer\na\tb\n"No" means no.\tc\nd\te\n', f":3{FIELD}"),
    "header_quote.csv": (b'question,"answer\na,b\n', f":1{FIELD}"),
    "again.jsonl": (
        b'{"text": "a"}\n{"answer": "x", "answer": "y", "question": "z"}',
        f":2{TWICE} 'answer' twice",
    ),
    "again.json": (
        b'[{"text": "a"},\n{"messages": [{"role": "user", "role": "x"}]}]',
        f":2{TWICE} 'role' twice",
    ),
    "one.json": (b'{"text": "a", "text": "b"}', f":1{TWICE} 'text' twice"),
    "number.json": (b"[1]", ":1: the row is a number, not an object"),
    "empty.json": (b"[]", " has no rows"),
    "empty.jsonl": (b"\n \n", " has no rows"),
    "empty.csv": (b"", " has no rows"),
    "header.csv": (b"question,answer\n", " has no rows"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', " is not UTF-8 text (byte 13)"),
    "rows.xlsx": (b"x", ": cannot tell the format of .xlsx"),
    "rows": (b"x", ": cannot tell the format of a file without an ending"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_file_that_is_not_read_says_what_it_holds(tmp_path, name):
    content, words = SENTENCES[name]
    write(tmp_path, {name: content})
    with pytest.raises(UsageError) as caught:
        load_rows(str(tmp_path / name))
    assert caught.value.message.startswith(f"{tmp_path / name}{words}")
    assert caught.value.hint
    assert "quote" in caught.value.hint or not words.endswith(FIELD)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.jsonl", "b.csv"], "holds files of several kinds: 1 .csv, 1 .jsonl"),
        (["a.jsonl", "b.md", "c.txt"], "holds files of several kinds: 1 .jsonl, 2 documents"),
        (["train.jsonl", "test.jsonl"], "holds several parts of a data set: "),
        (["train/1.jsonl", "validation/1.jsonl"], "holds several parts of a data set: "),
        (["picture.png", "b.xlsx"], "has no rows: 2 left out: b.xlsx, picture.png"),
        ([], "has no rows"),
    ],
)
def test_a_folder_that_is_not_read_says_what_it_holds(tmp_path, names, words):
    write(tmp_path, dict.fromkeys(names, lines(ROWS)))
    with pytest.raises(UsageError) as caught:
        load_rows(str(tmp_path))
    assert words in caught.value.message
    assert caught.value.hint


LINES = {
    "chats.json": (as_bytes(CHATS, 2), ["2", "12", "22"]),
    "list.json": (b'\n[\n {"text": "a"},\n {\n  "text": "b"\n }, {"text": "c"}\n]\n', ["3", "4", "6"]),
    "blank.jsonl": (b'\n{"text": "a"}\n\n{"text": "b"}', ["2", "4"]),
    "marked.csv": (b'\xef\xbb\xbfquestion,answer\r\n"Who, and\nwhen?",Ada.\r\nWhere?,London\r\n', ["3", "4"]),
    "signs.csv": (b'question;answer\n"Red; or blue?";Blue\n', ["2"]),
}


@pytest.mark.parametrize("name", LINES)
def test_each_row_knows_its_line(tmp_path, name):
    content, lines = LINES[name]
    write(tmp_path, {name: content})
    assert [row.where.rpartition(":")[2] for row in load_rows(str(tmp_path / name))] == lines


@pytest.mark.parametrize("source", ["nowhere.jsonl", "./nowhere", "nowhere", "a/b/c", "/nowhere/rows.csv"])
def test_a_file_that_does_not_exist_is_refused_without_asking_the_hub(source):
    with pytest.raises(UsageError) as caught:
        load_rows(source)
    assert caught.value.message == f"data {source!r} does not exist"
    assert caught.value.hint


def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.csv"))
        for place in (tmp_path / "pipe.jsonl", tmp_path / "socket.csv", "/dev/zero", "/dev/null"):
            with pytest.raises(UsageError, match="is not a regular file"):
                load_rows(str(place))


@pytest.mark.parametrize("name", [name for name in SAME_ROWS if name.islower()])
def test_a_bomb_is_refused_by_one_rule_in_every_format(tmp_path, name, monkeypatch):
    write(tmp_path, {name: SAME_ROWS[name]})
    monkeypatch.setattr(files, "MAX_SIZE", 100)
    with pytest.raises(UsageError, match="holds more than 100 bytes"):
        load_rows(str(tmp_path / name))


def test_a_small_file_of_very_many_columns_is_refused_at_once(tmp_path):
    names = [f"queston{number}" for number in range(30_000)]
    write(tmp_path, {"wide.jsonl": lines([dict.fromkeys(names, 1)]), "wide.csv": ",".join(names).encode()})
    with open(tmp_path / "wide.csv", "ab") as file:
        file.write(b"\n" + b"1," * 29_999 + b"1\n")
    for name in ("wide.jsonl", "wide.csv"):
        with pytest.raises(UsageError, match=r"has only queston0, queston1, .* and 29,990 more") as caught:
            load_rows(str(tmp_path / name))
        assert len(caught.value.message) < 1000
    write(tmp_path, {"long.jsonl": lines([{"questio" + "n" * 5_000_000: 1}])})
    with pytest.raises(UsageError, match="has only questionnn") as caught:
        load_rows(str(tmp_path / "long.jsonl"))
    assert len(caught.value.message) < 1000


def test_the_page_on_data_names_every_ending_that_is_read():
    from helpers.command import ROOT

    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert [name for name in (*READERS, files.COMPRESSED) if f"`{name}`" not in page] == []
