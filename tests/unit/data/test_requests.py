"""The shipped prompts of closeness: many groups, balanced from the beginning, and near to no other prompt."""

from collections import Counter

import pytest
from helpers.command import ROOT
from helpers.everyday import SAID
from helpers.wording import nearest

from opdcl.data.files import read_file
from opdcl.data.rows import load_rows

pytestmark = pytest.mark.nightly  # these data change seldom

# Above this cosine of wording two prompts ask for nearly the same.
NEAR = 0.65


@pytest.fixture(scope="module")
def requests():
    return load_rows("requests")


def text_of(row):
    return "\n".join(message["content"] for message in row.prompt)


def near_to(others, requests):
    """Return the requests that ask for nearly the same as one of the others, and how near they are."""
    prompts = [text_of(row) for row in requests]
    return {p: float(n) for p, n in zip(prompts, nearest(prompts, others), strict=True) if n > NEAR}


def test_prompts_on_one_text_are_a_cluster(requests):
    given = [row for row in requests if row.group in ("text", "extract")]
    clusters = Counter(row.cluster for row in given)
    assert "" not in clusters
    assert set(clusters.values()) == {3}
    assert {row.cluster for row in requests if row not in given} == {""}


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("evals/instructions/train.jsonl", "prompt"),
        ("evals/instructions/validation.jsonl", "prompt"),
        ("evals/instructions/test.jsonl", "prompt"),
        ("evals/handbook/neighbours.jsonl", "question"),
        ("evals/ifeval/prompts.jsonl", "prompt"),
    ],
)
def test_none_is_near_to_a_prompt_of_another_test(requests, file, field):
    assert near_to([row[field] for row, _ in read_file(ROOT / file)], requests) == {}


def test_none_is_near_to_a_prompt_of_the_recovery(requests):
    assert near_to(SAID, requests) == {}


def test_none_is_near_to_a_question_of_the_handbook(requests):
    facts = [fact for fact, _ in read_file(ROOT / "evals" / "handbook" / "facts.jsonl")]
    for questions in ([f["neighbour"]["question"] for f in facts], [q for f in facts for q in f["test"]]):
        assert near_to(questions, requests) == {}


def test_none_is_written_in_the_grammar_of_instructions(requests):
    marks = ("<<", "P.S", "postscript", "nclude the word", "Use the word", "Avoid the word", "sentences", "[")
    told = [row for row in requests if row.group not in ("code", "translation")]
    found = [(mark, text_of(row)) for row in told for mark in (*marks, "[") if mark in text_of(row)]
    assert found == []
