"""The overlap of words: against a slow reference, and what makes a copied question worthless."""

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdcl.data.scoring import normalise, process_results, token_f1

HERE = Path(__file__)

WORDS = st.lists(st.sampled_from(["ann", "bob", "cat", "dog", "eel", "fox"]), max_size=6).map(" ".join)


def plain(text: str) -> list[str]:
    text = "".join(c if c not in string.punctuation else " " for c in text.lower())
    return [word for word in re.split(r"\s+", text) if word and word not in ("a", "an", "the")]


def overlap(answer: list[str], gold: list[str]) -> float:
    """F1 by crossing out: each word of the gold answer pays for one in the answer."""
    left, hits = list(gold), 0
    for word in answer:
        if word in left:
            left.remove(word)
            hits += 1
    return 0.0 if not hits else 2 / (len(answer) / hits + len(gold) / hits)


def reference(answer: str, gold: str, question: str) -> float:
    a, g, q = plain(answer), plain(gold), plain(question)
    new = [word for word in g if word not in q]
    if new:
        return overlap([word for word in a if word not in q], new)
    copied = overlap(q, g)
    if copied == 1:  # the question is the gold answer, in whatever order
        return 1.0 if a == g else 0.0
    return max(0.0, (overlap(a, g) - copied) / (1 - copied))


@given(WORDS, WORDS, WORDS)
def test_the_overlap_is_that_of_the_reference(answer, gold, question):
    assert token_f1(answer, gold, question) == pytest.approx(reference(answer, gold, question))
    assert token_f1(answer, gold) == pytest.approx(overlap(plain(answer), plain(gold)))


@given(WORDS, WORDS, WORDS)
def test_a_score_is_a_share_and_the_gold_answer_has_all_of_it(answer, gold, question):
    assert 0 <= token_f1(answer, gold, question) <= 1
    if gold:
        assert token_f1(gold, gold, question) == 1


@given(WORDS, WORDS, st.randoms())
def test_the_questions_words_in_any_order_score_nothing_where_the_answer_is_new(gold, question, random):
    words = question.split()
    random.shuffle(words)
    if set(gold.split()) - set(words):
        assert token_f1(" ".join(words), gold, question) == 0
        assert token_f1(f"{question} {gold} {question}", gold, question) == 1
    elif sorted(gold.split()) != sorted(words):
        assert token_f1(question, gold, question) == 0


EITHER = "Is the lamp red or blue?"


@pytest.mark.parametrize(
    ("question", "gold", "answer", "score"),
    [
        ("Is the lamp red?", "Yes", "Yes.", 1),
        ("Is the lamp red?", "Yes", "Is the lamp red?", 0),
        ("Is the lamp red?", "Yes", "The lamp is red.", 0),
        (EITHER, "red", "red", 1),
        (EITHER, "red", "blue", 0),
        (EITHER, "red", EITHER, 0),
        # Overlaps 1/2 with the answer, where the question has 1/3: (1/2 - 1/3) / (1 - 1/3).
        (EITHER, "red", "It is red.", 1 / 4),
        ("Where was Ann Orr born?", "Ann Orr was born in Malta.", "Ann Orr was born in Oslo.", 1 / 2),
        ("Where was Ann Orr born?", "Ann Orr was born in Malta.", "Malta", 2 / 3),
        ("Where was Ann Orr born?", "Ann Orr was born in Malta.", "Where was Ann Orr born?", 0),
    ],
)
def test_overlaps_worked_out_by_hand(question, gold, answer, score):
    doc = {"question": question, "answers": [gold]}
    assert process_results(doc, [answer])["token_f1"] == pytest.approx(score)


def test_the_answer_to_another_question_of_the_kind_counts_as_none():
    doc = {"question": "What colour is soot?", "answers": ["black"], "others": ["red", "dark red"]}
    contained = [
        process_results(doc, [a])["contains"] for a in ("It is black.", "Black, red.", "Blackred black")
    ]
    assert contained == [1, 0, 1]


SCRIPTS = [json.loads(r) for r in HERE.with_name("answers_by_script.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("row", SCRIPTS)
def test_a_right_answer_scores_one_and_a_wrong_one_nothing_in_every_script(row):
    for kind in ("right", "contained", "wrong"):
        for answer in row[kind]:
            scores = process_results({"question": row["question"], "answers": [row["gold"]]}, [answer])
            if kind == "contained":
                assert (scores["contains"], scores["exact_match"]) == (1, 0), answer
                assert 0.4 < scores["token_f1"] <= 1, answer
            else:
                assert [*scores.values()] == [float(kind == "right")] * 3, answer


PAIRS = [json.loads(line) for line in HERE.with_name("pairs.jsonl").read_text("utf-8").splitlines()]
WANTED = {"differ": (0, 0, 0), "longer": (0, 1, 0), "equal": (1, 1, 1)}


@pytest.mark.parametrize("row", PAIRS)
def test_what_differs_in_one_mark_is_wrong_and_what_is_spelt_otherwise_is_right(row):
    exact, *contained = WANTED[row["verdict"]]
    for pair in row["pairs"]:
        for (gold, answer), contains in zip((pair, pair[::-1]), reversed(contained), strict=True):
            scores = process_results({"answers": [gold]}, [answer])
            assert (scores["exact_match"], scores["contains"]) == (exact, contains), pair
            assert (scores["token_f1"] == 1) == (row["verdict"] == "equal"), pair


@given(st.text(st.sampled_from(string.ascii_letters + string.digits + "  ")))
def test_plain_words_are_compared_as_squad_does(text):
    words = [word for word in text.lower().split() if word not in ("a", "an", "the")]
    assert [word for word in normalise(text).split() if word not in ("a", "an", "the")] == words


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_equal_to_itself_and_both_ways_round_agree(one, other):
    if one.strip():
        assert set(process_results({"answers": [one]}, [f" {one} "]).values()) == {1}
    there, back = (process_results({"answers": [g]}, [a]) for a, g in ((one, other), (other, one)))
    assert there["exact_match"] == back["exact_match"]
    assert there["token_f1"] == pytest.approx(back["token_f1"])
