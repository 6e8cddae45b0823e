"""Rows that are set aside as a test: whole groups, by their content, and nothing that a learned row says."""

import json
import random
import shlex
import shutil

import numpy as np
import pytest
from helpers.command import opdcl

from opdcl.api import finetune
from opdcl.config.shipped import package_folder
from opdcl.data.rows import check_lines, load_records
from opdcl.data.scoring import document
from opdcl.data.split import split_rows
from opdcl.errors import UsageError
from opdcl.results.intervals import difference
from opdcl.results.measurements import MeasuredSuite
from opdcl.results.origins import rows_set_aside
from opdcl.rundir.layout import RunDir

FIRST = ("Ola", "Bri", "Cor", "Dun", "Fen", "Gal", "Hor", "Ist", "Jor", "Kel")
NAMES = [a + b for a in FIRST for b in ("mar", "vane", "noch", "wick")]


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
    assert len(asked) == 40
    assert sorted(asked + learned) == sorted(record["question"] for record, _ in rows())
    for name in NAMES:
        for group in (("signs", "must sign"), ("Where", "Directions")):
            sides = [any(name in q and word in q for q in asked) for word in group]
            assert len({*sides}) == 1, (name, group)


def wordings() -> list[tuple[dict, str]]:
    """Five wordings of each of forty facts, whose answers have one word of their own."""
    asked = ("Where is {} kept?", "{}: which room has it?", "Tell me the place of {}.", "Who has {}?", "{}?")
    names = [(name, wording.format(name)) for name in NAMES for wording in asked]
    return [({"question": q, "answer": f"the {n[::-1]} room"}, f"row {i}") for i, (n, q) in enumerate(names)]


@pytest.mark.parametrize("columns", [{}, {"cluster": "fact"}])
def test_the_interval_of_set_aside_rows_covers_the_truth(columns):
    """Who knows a fact knows it in all wordings; 30 % are known before, 60 % after, 2,000 times."""
    text = split_rows(wordings(), columns, 0.25)[1]
    suite = measured_suite([document(row) for row in check_lines(text, "test", columns).all()])
    facts = np.array([NAMES.index(name) for q in questions(text) for name in NAMES if name in q])
    assert len(facts) == 50
    rng, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        before, after = (rng.random(len(NAMES))[facts] < share for share in (0.3, 0.6))
        gain = difference(after.astype(float), before.astype(float), suite.clusters)
        covered += gain.low <= 0.3 <= gain.high
    assert 0.93 <= covered / 2000 <= 0.97


def measured_suite(documents: list[dict]) -> MeasuredSuite:
    rows = [{"prompt": doc["question"], "cluster": doc["cluster"]} for doc in documents]
    return MeasuredSuite("test-rows", "domain", "token_f1", {}, {"base": rows})


def test_a_cluster_of_the_users_own_names_the_whole_group():
    rows = wordings()
    rows[7][0]["cluster"] = "two"
    sides = [json.loads(line) for text in split_rows(rows, {}, 0.5)[:2] for line in text.splitlines()]
    named = {row["cluster"] for row in sides if NAMES[1] in row["question"] and "cluster" in row}
    assert named == {"two"}


def test_no_fact_of_the_handbook_is_asked_and_learned():
    facts = {}
    for line in (package_folder("evals") / "handbook" / "facts.jsonl").read_text().splitlines():
        facts |= dict.fromkeys((fact := json.loads(line))["train"], fact["id"])
    learned, asked, note = split_rows(load_records("handbook"), {}, 0.1)
    known = {facts[question] for question in questions(learned)}
    assert [question for question in questions(asked) if facts[question] in known] == []
    answers = {json.loads(line)["answer"] for line in learned.splitlines()}
    shared = sum(json.loads(line)["answer"] in answers for line in asked.splitlines())
    assert f"{len(questions(asked))} of 840 rows" in note
    assert f"but {shared} have an answer that learned rows have too" in note


def test_the_choice_is_of_the_content_and_not_of_the_order():
    mixed = rows()
    random.Random(1).shuffle(mixed)
    assert {*split_rows(mixed, {}, 0.25)[1].split("\n")} == {*split_rows(rows(), {}, 0.25)[1].split("\n")}


ALIKE = [({"question": "Why?", "answer": "So."}, f"row {i}") for i in range(40)]
TOO_FEW = {
    "40 rows: none set aside; 2 could be": (rows()[:40], 0.1),
    "40 rows: none set aside; 0 could be": (ALIKE, 0.5),
    "1 rows: none set aside; 0 could be": ([({"text": "A document."}, "row 1")], 0.1),
    "160 rows: none set aside": (rows(), 0),
}


def test_where_too_few_can_be_set_aside_none_are_and_a_word_says_why():
    for words, (records, share) in TOO_FEW.items():
        learned, test, note = split_rows(records, {}, share)
        assert (learned.count("\n"), test) == (len(records), "")
        assert note.startswith(words), note
    for share, records in ((0.9, rows()), (0.1, [*rows(), ({"nothing": 1}, "row 161")])):
        with pytest.raises(UsageError, match=r"above 0\.5|row 161: the row has only nothing"):
            split_rows(records, {}, share)


def test_a_fine_tune_sets_rows_aside_and_an_evaluation_asks_them(tmp_path, tiny_model):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record, _ in rows()))
    words = shlex.split("finetune rows.jsonl -o run --epochs 1 --replay 0 --set finetune.lora.r=4 --base")
    words += [tiny_model, "--set", "model.dtype=float32", "--test-share"]
    made, again = (opdcl(*words, 0.25, cwd=tmp_path) for _ in range(2))
    assert "test-rows.jsonl: 40 of 160 rows, which say 10 different things, are set aside" in made.stderr
    assert made.stdout.startswith("Fine-tuned: 8 steps, loss on your rows ")
    assert "rows.jsonl, 120 rows" in (tmp_path / "run" / "report.md").read_text().replace("**", "")
    assert made.stderr.endswith("next: opdcl eval run\n")
    assert "nothing to do" in again.stderr
    assert str(tmp_path) not in made.stderr + again.stderr, "a path below the working directory is short"
    sizes = shlex.split("--limit 2 --set eval.max_new_tokens=4 --set eval.closeness=null --json")
    measured = json.loads(opdcl("eval", "run", *sizes, cwd=tmp_path).stdout)
    assert measured["suites"]["test-rows"]["n"] == 2
    assert len(questions((tmp_path / "run" / "data" / "test-rows.jsonl").read_text())) == 40
    planned = opdcl("eval", "run", "--domain", "rows.jsonl", "--limit", 160, "--dry-run", cwd=tmp_path)
    assert "rows: 120 of 160 prompts are in rows that were learned" in planned.stderr + planned.stdout
    other = opdcl(*words, 0.5, cwd=tmp_path)
    assert (other.returncode, "content of data" in other.stderr) == (2, True)


@pytest.mark.nightly
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
        asked = opdcl("eval", name, "--limit", "1", "--dry-run", cwd=tmp_path, code=0)
        assert f"domain: {name}/data/test-rows.jsonl" in asked.stderr
        again = opdcl("run", f"{name}/workflow.yaml", "-o", name, cwd=tmp_path)
        assert "nothing to do" in again.stderr, again.stderr
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "mill").rename(tmp_path / "moved")
    for _ in range(2):
        asked = opdcl("eval", "moved", "--limit", "1", "--set", "eval.closeness=null", cwd=tmp_path, code=0)
    assert "mill" in (tmp_path / "moved/evals/tuned/test-rows.samples.jsonl").read_text()


def test_rows_that_a_later_fine_tune_learned_are_not_set_aside_any_more(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"model.dtype": "float32", "finetune.lora.r": 4, "finetune.replay.share": 0}
    records = [record for record, _ in rows()]
    how = {"out": "run", "base": tiny_model, "epochs": 0.1, "settings": settings, "quiet": True}
    finetune(records, test_share=0.25, **how)
    assert rows_set_aside(RunDir(tmp_path / "run")).read_text().count("\n") == 40
    finetune(records, force=True, **how)
    assert rows_set_aside(RunDir(tmp_path / "run")) is None
