"""Every measured number in the pages comes from a record: benchmarks/{records,*_tables}.py."""

import json
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from helpers.command import ROOT
from helpers.scripts import load_script
from helpers.synthetic import write

from opdcl.results.render import summarise
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

BENCHMARKS = ROOT / "benchmarks"
# Records that no block of a page names, and what checks them instead.
ELSEWHERE = {
    "durations": "make test RECORD=benchmarks/durations.json writes it",
    "quickstart": "test_the_picture_of_the_quickstart_shows_its_record",
}
# What each table of the pages is made from; other tables have the name of their record.
MADE_FROM = {
    "growth-rows": "scaling",
    "quotes": "quote",
    "verdict-errors": "coverage",
    "cheats": "instructions",
    "start-pairs": "start",
    "sizes": "quickstart_time",
    "how-large": "sizes",
}


def script(name: str):
    return load_script(ROOT / "benchmarks" / f"{name}.py")


@pytest.fixture(scope="module")
def records():
    return script("records")


@pytest.fixture(scope="module")
def tables():
    return script("page_tables")


@pytest.mark.parametrize("page", script("records").PAGES)
def test_every_measured_number_of_a_page_is_in_its_record(records, page):
    assert records.find_faults((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.json")))
def test_each_record_is_used(records, name):
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in records.PAGES)
    tables = {MADE_FROM.get(table, table) for table in records.TABLE.findall(text)}
    marks = [rest for _, rest in records.MARK.findall(text)]
    is_used = name in tables or any(f"benchmarks/{name}.json" in rest for rest in marks)
    assert is_used != (name in ELSEWHERE)


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("`slab` wrote 164 tokens/s on 100 prompts.", []),
        ("`slab` wrote 165 tokens/s on 100 prompts.", ["165 is not in record.json"]),
        ("It passes 41.2 %, 8,863 tokens, in 2.97 GB.", []),
        ("It passes 41.3 %, 8,864 tokens, in 2.98 GB.", ["41.3", "8,864", "2.98"]),
        ("The rest is 1.2e-5 and -0.5, [-0.5, 41.2].", []),
        ("The rest is 1.3e-5 and -0.6.", ["1.3e-5", "-0.6"]),
        ("| arm | **0.45** |", ["0.45"]),
    ],
)
def test_a_number_that_is_not_in_its_record_is_a_fault(records, tmp_path, sentence, wrong):
    values = {"rate": 164.396, "pass": 0.41234, "tokens": 8863}
    values |= {"bytes": 2971869184, "gap": 1.23e-5, "low": -0.5}
    write(tmp_path / "record.json", {"a": [values], "b": 165})
    faults = records.find_faults(f"<!-- record: record.json a/0; given 100 -->\n\n{sentence}", tmp_path)
    assert [fault[: len(start)] for fault, start in zip(faults, wrong, strict=True)] == wrong


def test_a_measured_number_without_a_record_is_a_fault(records):
    measured = ["It scored 41.2 % [35.9, 46.8].", "R = 0.91 came back.", "A step took 20.0 s."]
    measured += ["KL fell to 3 nats.", "It writes 164 tokens/s."]
    measured += ["| arm | 0.25 |", "It takes **0.45** of it."]
    for sentence in measured:
        assert len(records.find_faults(f"First words.\n\n{sentence}\n\nLast words.")) == 1, sentence
        assert records.find_faults(f"<!-- no record: definitions -->\n\n{sentence}") == []


def test_a_table_that_was_changed_by_hand_is_a_fault(records):
    text = (ROOT / "docs" / "larger-machines.md").read_text(encoding="utf-8")
    changed = text.replace("| opdcl | 20.0 |", "| opdcl | 10.0 |")
    assert changed != text
    assert records.find_faults(changed) == ["table throughput is out of date: make records"]
    assert records.with_tables(changed) == text


def test_five_domains_in_a_row_share_no_fact(tmp_path):
    script("rounds").main(tmp_path / "rounds")
    learned = [read_jsonl(tmp_path / "rounds" / f"d{n}.jsonl") for n in range(1, 6)]
    tests = [read_jsonl(tmp_path / "rounds" / f"d{n}-test.jsonl") for n in range(1, 6)]
    facts = [{row["cluster"] for row in rows} for rows in learned]
    assert [len(ids) for ids in facts] == [28] * 5
    assert len(set.union(*facts)) == 5 * 28
    for rows, tested in zip(learned, tests, strict=True):
        assert not {row["question"] for row in rows} & {row["question"] for row in tested}


def test_finished_runs_become_rows_that_a_later_measurement_replaces(finished, tmp_path, monkeypatch):
    pieces, record = script("pieces"), tmp_path / "methods.json"
    folders = [tmp_path / f"ours-{seed}" for seed in range(3)]
    for folder in folders:
        shutil.copytree(finished, folder)
    (folders[2] / "report.html").unlink()  # not finished
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["pieces.py", str(record), *map(str, folders)])
        pieces.main()
    assert len(record.read_text().splitlines()) == 2 + 2  # one line a run
    first, second = json.loads(record.read_text())["rows"]
    assert (first["arm"], first["seed"], second["seed"]) == ("ours", 0, 1)
    summary = summarise(RunDir(finished))
    suite = summary["suites"]["instructions"]
    assert first["suites"]["instructions"]["base"] == suite["base"]["value"]
    passed = sum(first["prompts"]["instructions"]["base"]["score"])
    assert passed == round(suite["base"]["value"] * suite["n"])
    assert {"general teacher", "domain teacher"} <= first["written_by"].keys()
    assert first["verdict"] == summary["verdict"]


# -- the README's tables


def test_arms_are_compared_by_means_over_the_same_seeds(tables, tmp_path, monkeypatch):
    monkeypatch.setattr("page_cells.HERE", tmp_path)

    def row(arm, seed, followed, ended, end):
        """A run that ends in a state: without a recovery in tuned."""
        roles = {"instructions_quick": "retention", "handbook_quick": "domain", "neighbours_quick": "control"}
        suites = {x: {"role": roles[x], "base": 0.5, "tuned": 0.1, end: followed} for x in roles}
        writing = {"base": {"length": 80, "ended": 0.25}, "tuned": {"length": 4, "ended": 1.0}}
        writing[end] = {"length": 70, "ended": ended}
        distance = {"base": {"value": 0.0}, "tuned": {"value": 4.0}, end: {"value": 0.5}}
        near = {"written": writing, "distance": distance}
        training = {"stages": {"finetune": 20.0, "eval": 9.0}, "written_by": {"domain teacher": 16}}
        if end == "recovered":
            training["stages"]["recover"] = 20.0 + 10 * seed
            training["written_by"] |= {"general teacher": 8, "general student": 8}
        return {"arm": arm, "seed": seed, "suites": suites, "closeness": near, **training}

    rows = [row("half", seed, followed, 0.35, "recovered") for seed, followed in enumerate((0.2, 0.3, 0.4))]
    rows += [row("mix-kl", seed, 0.26, 0.15, "tuned") for seed in range(2)]
    write(tmp_path / "decided.json", {"rows": rows})
    _, _, base, tuned, ours, mixed = tables.TABLES["decided"]().replace("\u00a0", " ").splitlines()
    assert base == "| base | 3 | 0 |  | 0.00 | 50 | 50 | 50.0 | 80 | 25 |"
    assert tuned.startswith("| a plain fine-tune | 3 | 0 | 20 s | 4.00 | 10 |")
    # t of two degrees of freedom is 4.303, and 10 / sqrt(3) the standard error.
    assert "| 3 | 128 | 50 s | 0.50 | 30 [5, 55] |" in ours
    # 90 of 300 rows, 30 %, in each of four epochs.
    start = "| a fine-tune with 30 % replay, no recovery | 2 | 360 | 20 s |"
    assert mixed == f"{start} 0.50 | 26 | 26 | 26.0 | 70 | 15 |"
    # Of the two seeds that both have: 20 - 26 and 30 - 26; both ends lie ten points from base's.
    (pair,) = tables.TABLES["decided-pairs"]().replace("\u00a0", " ").splitlines()[2:]
    assert pair.startswith("| recovery - 30 % replay alone | 2 | 0.00 | -6, 4 |")
    assert pair.endswith("| 0 | 0 |")


def test_three_seeds_are_one_row_with_their_mean(tables, tmp_path, monkeypatch):
    rows = []
    for row in json.loads((BENCHMARKS / "fast.json").read_text(encoding="utf-8"))["rows"]:
        for seed, score in enumerate((0.2, 0.3, 0.4)):
            of_suite = row["suites"]["instructions_quick"] | {"tuned": score, "recovered": score}
            suites = row["suites"] | {"instructions_quick": of_suite}
            rows.append(row | {"seed": seed, "suites": suites})
    write(tmp_path / "fast.json", {"rows": rows})
    monkeypatch.setattr("page_cells.HERE", tmp_path)
    lines = tables.TABLES["fast"]().replace("\u00a0", " ").splitlines()
    assert len(lines) == 2 + 7
    assert lines[5].startswith("| **the same, projected, no training**; 3 seeds | 0 |")
    assert "| 30 [5, 55] |" in lines[5]
    # The same answers in all three seeds: the difference of one, without a spread.
    (pair, _) = tables.TABLES["fast-pairs"]().replace("\u00a0", " ").splitlines()[2:]
    assert pair.startswith("| projected - scaled, no training | 3 seeds | -1.16 |")


def test_a_quoted_answer_cannot_break_the_table(tables, tmp_path, monkeypatch):
    answers = {state: {"text": "a|b <c>", "ended": state != "tuned"} for state in tables.STATES}
    write(tmp_path / "quote.json", {"quotes": [{"prompt": "p\n\nq", **answers}]})
    monkeypatch.setattr("page_cells.HERE", tmp_path)
    assert "| p q | a\\|b &lt;c> | a\\|b &lt;c> … | a\\|b &lt;c> |" in tables.quotes()


# -- pictures


def drawn(file: Path) -> list[str]:
    """Return the words of a picture, and the places of its marks in whole points."""
    found = []
    for element in ET.fromstring(file.read_text(encoding="utf-8")).iter():
        if element.tag.endswith("}text"):
            found.append(element.text)
        if element.tag.endswith("}use"):
            found.append(f"{float(element.get('x')):.0f} {float(element.get('y')):.0f}")
    return found


def test_the_pictures_show_their_records(tmp_path):
    pictures = script("pictures")
    shown = {arm for _, _, arms in pictures.LINES.values() for arm in arms} | {*pictures.MEANS}
    record = json.loads((BENCHMARKS / "frontier.json").read_text(encoding="utf-8"))
    assert {row["arm"] for row in record["rows"]} <= shown
    pictures.draw(tmp_path)
    assert drawn(tmp_path / "frontier.svg") == drawn(ROOT / "docs" / "images" / "frontier.svg")


# -- the picture of the quickstart


def test_the_picture_of_the_quickstart_shows_its_record():
    record = json.loads((BENCHMARKS / "quickstart.json").read_text(encoding="utf-8"))
    picture = (ROOT / "docs" / "images" / "quickstart.svg").read_text(encoding="utf-8")
    lines = "".join("".join([f"$ {record['command']}", *record["lines"]]).split())
    shown = [text.text for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "".join("".join(shown).split()) == lines
