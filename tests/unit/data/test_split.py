"""Rows that are set aside as a test: whole groups, by their content, and nothing that a learned row says."""

import json
import random
import shlex
import shutil

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project

from opdcl.data.split import split_rows
from opdcl.errors import UsageError

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
    learned, asked = map(questions, split_rows(rows(), {}, 0.25)[:2])
    assert len(asked) == 24
    assert sorted(asked + learned) == sorted(record["question"] for record, _ in rows())
    for name in NAMES:
        for group in (("signs", "must sign"), ("Where", "Directions")):
            sides = [any(name in q and word in q for q in asked) for word in group]
            assert len({*sides}) == 1, (name, group)


def test_the_choice_is_of_the_content_and_not_of_the_order():
    mixed = rows()
    random.Random(1).shuffle(mixed)
    assert {*split_rows(mixed, {}, 0.25)[1].split("\n")} == {*split_rows(rows(), {}, 0.25)[1].split("\n")}


ALIKE = [({"question": "Why?", "answer": "So."}, f"row {i}") for i in range(40)]
REFUSED = {
    r"4 of 40 rows can be set aside \(4 are wanted": (rows()[:40], 0.1),
    r"0 of 40 rows can be set aside \(20 are wanted": (ALIKE, 0.5),
    "row 1 is plain text": ([({"text": "A document."}, "row 1")], 0.1),
    "--test-share 0.9 is not above 0": (rows(), 0.9),
    "row 97: the row has only nothing": ([*rows(), ({"nothing": 1}, "row 97")], 0.1),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_split_is_refused(problem):
    records, share = REFUSED[problem]
    with pytest.raises(UsageError, match=problem):
        split_rows(records, {}, share)


def test_a_fine_tune_sets_rows_aside_and_an_evaluation_asks_them(tmp_path, tiny_model):
    make_project(tmp_path, tiny_model)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record, _ in rows()))
    words = shlex.split("finetune rows.jsonl -o run --epochs 1 --replay 0 --set finetune.lora.r=4 --base")
    words += [tiny_model, "--set", "model.dtype=float32", "--test-share"]
    made, again = (opdcl(*words, 0.25, cwd=tmp_path) for _ in range(2))
    assert "run/data/test-rows.jsonl: 24 of 96 rows are set aside" in made.stderr
    assert made.stdout.startswith("Fine-tuned: 5 steps, loss ")
    assert made.stderr.endswith("next: opdcl recover run\n")
    assert "nothing to do" in again.stderr
    assert str(tmp_path) not in made.stderr + again.stderr, "a path below the working directory is short"
    sizes = shlex.split("--limit 2 --set eval.max_new_tokens=4 --set eval.closeness=null --json")
    measured = json.loads(opdcl("eval", "run", *sizes, cwd=tmp_path).stdout)
    assert measured["suites"]["test-rows"]["n"] == 2
    assert len(questions((tmp_path / "run" / "data" / "test-rows.jsonl").read_text())) == 24
    other = opdcl(*words, 0.5, cwd=tmp_path)
    assert (other.returncode, "content of data" in other.stderr) == (2, True)


def test_a_moved_and_a_copied_run_ask_their_own_rows_whatever_lies_at_the_old_place(tmp_path, tiny_model):
    def rows(name):
        made = [{"question": f"Where is {name} {i}?", "answer": f"At {name} {i}"} for i in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        return f"{name}.jsonl"

    small = ("--base", tiny_model, "--set", "model.dtype=float32", "--replay", "0", "--epochs", "0.1")
    for name in ("mill", "pond"):
        made = ("finetune", rows(name), "-o", "run", *small, "--test-share", "0.5")
        assert opdcl(*made, cwd=tmp_path).returncode == 0
        shutil.copytree(tmp_path / "run", tmp_path / name)
        if name == "mill":
            shutil.rmtree(tmp_path / "run")
    for name in ("mill", "pond"):  # the run of the ponds lies where both were made
        asked = opdcl("eval", name, "--limit", "1", "--dry-run", cwd=tmp_path)
        assert asked.returncode == 0, asked.stderr
        assert f"domain: {name}/data/test-rows.jsonl" in asked.stderr
        again = opdcl("run", f"{name}/workflow.yaml", "-o", name, cwd=tmp_path)
        assert "nothing to do" in again.stderr, again.stderr
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "mill").rename(tmp_path / "moved")
    for _ in range(2):
        asked = opdcl("eval", "moved", "--limit", "1", "--set", "eval.closeness=null", cwd=tmp_path)
        assert asked.returncode == 0, asked.stderr
    assert "mill" in (tmp_path / "moved/evals/tuned/test-rows.samples.jsonl").read_text()
