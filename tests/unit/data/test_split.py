"""Rows that are set aside as a test: whole groups, by their content, and nothing that a learned row says."""

import json
import random

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project

from opdcl.data.split import FEWEST, split_rows
from opdcl.errors import UsageError
from opdcl.rundir.layout import RunDir

NAMES = [
    f"{a}{b}" for a in ("Ola", "Bri", "Cor", "Dun", "Fen", "Gal") for b in ("mar", "vane", "noch", "wick")
]


def rows() -> list[tuple[dict, str]]:
    """Two wordings of a question each, one answer in words of its own, and many rows answered alike."""
    texts = []
    for name in NAMES:
        texts += [(f"Who signs the {name} form?", "Ida"), (f"The {name} form: who must sign?", "Ida")]
        texts.append((f"Where is {name}?", f"North of {name} bridge, {name} mill and {name} lake"))
        texts.append((f"Directions to {name}, please", f"{name} lake, {name} mill: north of {name} bridge"))
    return [({"question": q, "answer": a}, f"row {i}") for i, (q, a) in enumerate(texts)]


def questions(text: str) -> list[str]:
    return [json.loads(line)["question"] for line in text.splitlines()]


def test_rows_that_say_nearly_the_same_stay_together_and_none_is_lost():
    split = split_rows(rows(), {}, 0.25)
    asked, learned = questions(split.test), questions(split.learned)
    assert len(asked) == 24
    assert sorted(asked + learned) == sorted(record["question"] for record, _ in rows())
    for name in NAMES:
        for group in (("signs", "must sign"), ("Where", "Directions")):
            sides = [any(name in q and word in q for q in asked) for word in group]
            assert len({*sides}) == 1, (name, group)


def test_the_choice_is_of_the_content_and_not_of_the_order():
    mixed = rows()
    random.Random(1).shuffle(mixed)
    assert {*questions(split_rows(mixed, {}, 0.25).test)} == {*questions(split_rows(rows(), {}, 0.25).test)}


@pytest.mark.parametrize(
    ("records", "share", "problem"),
    [
        (rows()[:40], 0.1, "4 of 40 rows would be set aside, and fewer than 10"),
        ([({"question": "Why?", "answer": "So."}, f"row {i}") for i in range(40)], 0.5, "only 0 of 40 rows"),
        ([({"text": "A document."}, "row 1")], 0.1, "row 1 is plain text"),
        (rows(), 0.9, "--test-share 0.9 is not above 0"),
        ([*rows(), ({"nothing": 1}, "row 97")], 0.1, "row 97: the row has only nothing"),
    ],
)
def test_what_cannot_be_split_is_refused(records, share, problem):
    with pytest.raises(UsageError, match=problem) as refused:
        split_rows(records, {}, share)
    assert refused.value.hint


def test_a_fine_tune_sets_rows_aside_and_an_evaluation_asks_them(tmp_path, tiny_model):
    make_project(tmp_path, tiny_model)
    lines = [json.dumps(record) + "\n" for record, _ in rows()]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    settings = {"finetune.lora.r": 4, "model.dtype": "float32", "finetune.learning_rate": 0.01}
    options = [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]
    words = [
        "finetune",
        "rows.jsonl",
        "-o",
        "run",
        "--base",
        tiny_model,
        "--epochs",
        1,
        "--replay",
        0,
        *options,
    ]
    words += ["--test-share", 0.25]
    made, again = (opdcl(*words, cwd=tmp_path) for _ in range(2))
    assert (made.returncode, again.returncode) == (0, 0), made.stderr + again.stderr
    assert "run/data/test-rows.jsonl: 24 of 96 rows are set aside" in made.stderr
    assert made.stdout.startswith("Fine-tuned: 5 steps, loss ")
    assert "nothing to do" in again.stderr
    assert str(tmp_path) not in made.stderr + again.stderr, "a path below the working directory is short"
    aside = RunDir(tmp_path / "run").rows_set_aside()
    assert len(aside.read_text().splitlines()) == 24
    sizes = ["--limit", 2, "--set", "eval.max_new_tokens=4", "--set", "eval.closeness=null"]
    measured = opdcl("eval", "run", *sizes, "--json", cwd=tmp_path)
    assert "test-rows" in json.loads(measured.stdout)["suites"], measured.stderr
    other = opdcl(*words[:-1], 0.5, cwd=tmp_path)
    assert (other.returncode, "content of data" in other.stderr) == (2, True)
    assert len({*questions(aside.read_text())}) >= FEWEST
