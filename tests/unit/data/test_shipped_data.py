"""What the shipped handbook promises: questions that are worded apart, and answers that are verified."""

import re
from types import ModuleType

import pytest
from helpers.everyday import ROWS as EVERYDAY
from helpers.everyday import text_of
from helpers.scripts import load_script

from opdcl.config.shipped import package_folder
from opdcl.data.own_words import STOP_WORDS, stem, words
from opdcl.rundir.files import read_jsonl

pytestmark = pytest.mark.nightly  # these data change seldom

EVALS = package_folder("evals")


def module(name: str) -> ModuleType:
    """Load `evals/<name>/utils.py` as lm-eval does: from its file, as part of no package."""
    return load_script(EVALS / name / "utils.py")


FACTS = read_jsonl(EVALS / "handbook" / "facts.jsonl")


def content_words(question: str, subject: str) -> set[str]:
    """Return the stems that a question is about, without its subject's."""
    known = {stem(w) for w in words(subject)}
    return {stem(w) for w in words(question) if w not in STOP_WORDS} - known


def shared_wording(fact: dict) -> set[str]:
    """Return the content words that a test phrasing has from a training phrasing."""
    subject = f"{fact['subject']} {fact['name']} Quillmere Works"
    trained = set().union(*(content_words(q, subject) for q in fact["train"]))
    return trained & set().union(*(content_words(q, subject) for q in fact["test"]))


def runs(text: str, length: int = 8) -> set[tuple[str, ...]]:
    """Return all runs of `length` consecutive words."""
    tokens = words(text)
    return {tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)}


def test_every_fact_has_enough_phrasings_and_none_is_asked_twice():
    assert [f["id"] for f in FACTS if len({*f["train"]}) < 4 or len({*f["test"]}) < 3] == []
    questions = [" ".join(words(q)) for f in FACTS for q in f["train"] + f["test"]]
    assert len({*questions}) == len(questions)


def test_test_phrasings_share_no_wording_with_training_phrasings():
    assert {fact["id"]: shared for fact in FACTS if (shared := shared_wording(fact))} == {}


def test_every_phrasing_names_its_subject_and_none_gives_the_answer_away():
    for fact in FACTS:
        for question in fact["train"] + fact["test"]:
            assert fact["name"].lower() in question.lower(), (fact["id"], question)
            assert f" {' '.join(words(fact['answer']))} " not in f" {' '.join(words(question))} ", (
                fact["id"],
                question,
            )


def test_every_answer_stands_in_its_document_beside_its_subject():
    documents = {
        p.stem: " ".join(p.read_text(encoding="utf-8").split())
        for p in (EVALS / "handbook" / "documents").glob("*.md")
    }
    for fact in FACTS:
        text = documents[fact["document"]]
        assert re.search(rf"(?<!\w){re.escape(fact['answer'])}(?!\w)", text, re.IGNORECASE), fact["id"]
        assert fact["name"].lower() in text.lower(), fact["id"]


def test_there_is_a_neighbour_to_every_fact_and_it_is_about_something_else():
    neighbours = [fact["neighbour"] for fact in FACTS]
    assert len({" ".join(words(n["question"])) for n in neighbours}) == len(FACTS)
    names = {fact["name"].lower() for fact in FACTS}
    for neighbour in neighbours:
        assert neighbour["answer"].strip()
        assert not [n for n in names if re.search(rf"\b{re.escape(n)}\b", neighbour["question"].lower())]


def test_everyday_validation_prompts_are_not_trained_on():
    train = [text_of(row) for row in EVERYDAY if row["split"] == "train"]
    held_out = [text_of(row) for row in EVERYDAY if row["split"] == "validation"]
    seen = set().union(*map(runs, train))
    assert [p for p in held_out if p in train or runs(p) & seen] == []


@pytest.mark.parametrize(
    ("load", "per_fact", "questions"),
    [
        ("load_test", 3, [q for f in FACTS for q in f["test"]]),
        ("load_trained", 3, [q for f in FACTS for q in f["train"][:3]]),
        ("load_neighbours_quick", 1, [f["neighbour"]["question"] for f in FACTS]),
    ],
)
def test_the_handbook_suites_ask_what_they_say(load, per_fact, questions):
    docs = getattr(module("handbook"), load)()["test"]
    assert len(docs) == per_fact * len(FACTS)
    assert docs["question"][:] == questions


def test_half_of_the_neighbours_resemble_a_fact_and_the_settings_are_chosen_on_others():
    whole, quick, validation = (
        getattr(module("handbook"), f"load_neighbours{part}")()["test"]["question"][:]
        for part in ("", "_quick", "_validation")
    )
    assert whole[: len(quick)] == quick
    assert len(set(whole)) == len(whole) == 2 * len(quick) == 336
    assert len(set(validation)) == len(validation) >= 125
    assert not set(whole) & set(validation)


def test_every_gold_answer_scores_full_marks():
    utils = module("handbook")
    for load in ("load_test", "load_neighbours", "load_neighbours_validation"):
        for doc in getattr(utils, load)()["test"]:
            assert all(utils.process_results(doc, [gold])["exact_match"] == 1 for gold in doc["answers"]), doc
