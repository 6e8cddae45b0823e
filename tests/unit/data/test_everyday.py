"""What the recovery prompts promise: they repeat no test, and demand no constraint of an unseen type."""

import json
import re

import numpy as np
import pytest
from helpers.everyday import ROWS, SAID, TEXTS, text_of
from helpers.wording import nearest

from opdcl.config.shipped import package_folder
from opdcl.data.own_words import similarity

pytestmark = pytest.mark.nightly  # these data change seldom

EVALS = package_folder("evals")
NEAR = 0.6

# Constraint types that the tests of instruction-following keep for themselves.
UNSEEN = {
    "bullet points": r"\bbullet|\bhyphens?\b|\bdash(es)?\b",
    "numbered list": r"\bnumbered\b|\bnumber the\b|roman numeral",
    "JSON": r"\bjson\b|\byaml block with",
    "highlighted parts": r"(?<!\w)\*|asterisk|highlight|\bbold\b|\bitalics?\b",
    "sections": r"\bsections? \w+ and|\bsections\b|\bheadings?\b|\bchapters?\b",
    "paragraphs": r"\b(two|three|four|five|\d+|several|one|each|every|exactly) paragraphs?\b|-paragraph",
    "first word": r"\b(begin|start|open)(s|ning|ing)? (your|the|every|each|it|with (?!(the |a )?(P\.|post)))",
    "end phrase": r"\b(end|close|finish)(e?s|ing)? (your|the|every|each|it|with (?!(the |a )?(P\.|post)))",
    "forbidden words": r"(do not|don't|never|neither) (use|contain|mention|include)|without (the|using) ",
    "quotation marks": r"quotation|in (double )?quotes",
    "letter case": r"lower ?case|upper ?case|capital letters?|all caps|in capitals|capitals only",
    "repeated word": r"\b(twice|thrice|(two|three|four|five) times|exactly once)\b",
    "repeated request": r"\brepeat (my|the|this)\b|word for word",
    "punctuation": r"\b(no|without|any) (commas?|exclamation|full stops?)|question marks?",
    "language": r"\bin (french|german|spanish|italian|dutch|latin|portuguese)( only|:|,)",
    "letters": r"acrostic|initials spell|the letter \"|same letter",
}


def requests(split: str) -> list[str]:
    """Return what the prompts of `instructions` ask for, without their constraints."""
    lines = (EVALS / "instructions" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["request"] for line in lines]


def neighbours(split: str) -> list[str]:
    """Return the short questions that do not belong to a fact of the handbook."""
    lines = (EVALS / "handbook" / "neighbours.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["question"] for row in map(json.loads, lines) if row["split"] == split]


FACTS = [json.loads(line) for line in (EVALS / "handbook" / "facts.jsonl").read_text("utf-8").splitlines()]
SUITES = {
    "instructions": requests("test"),
    "instructions_validation": requests("validation"),
    "instructions_train": requests("train"),
    "neighbours": [fact["neighbour"]["question"] for fact in FACTS] + neighbours("test"),
    "neighbours_validation": neighbours("validation"),
    "handbook": [question for fact in FACTS for question in fact["test"] + fact["train"]],
}


def test_similarity_is_worked_out_by_hand():
    # Four texts. "owl" and "moon" stand in two of them, "night" and "bread" in one.
    common, rare = np.log(5 / 3) + 1, np.log(5 / 2) + 1
    texts, others = ["The owl and the moon.", "bread"], ["Moon at night", "an owl"]
    np.testing.assert_allclose(
        similarity(texts, others),
        [[common / np.sqrt(2) / np.hypot(common, rare), 1 / np.sqrt(2)], [0, 0]],
        atol=1e-6,
    )


def test_texts_without_a_content_word_are_like_nothing():
    np.testing.assert_array_equal(similarity(["Who is it?", ""], ["What is this?"]), [[0], [0]])


@pytest.mark.parametrize(
    ("prompt", "copy"),
    [
        ("Why do we yawn when others yawn?", "Why do we yawn when others yawn? Answer in at least 60 words."),
        ("What's the difference between an alligator and a crocodile?",
         "Could you explain the difference between a crocodile and an alligator? Use 70 words."),
        ("Tell me a bedtime story about a hedgehog who is afraid of the dark.",
         "Tell a bedtime story about a hedgehog who was afraid of the dark. Write at least 6 sentences."),
    ],
)  # fmt: skip
def test_a_reworded_copy_with_other_constraints_is_near(prompt, copy):
    near = nearest([prompt, "How is felt made from wool?"], [copy, *SUITES["handbook"]])
    assert near[0] > NEAR > near[1]


@pytest.mark.parametrize("suite", SUITES)
def test_no_everyday_prompt_is_near_to_a_test(suite):
    near = nearest(SAID, SUITES[suite])
    assert {SAID[i]: round(float(near[i]), 2) for i in np.flatnonzero(near > NEAR)} == {}


def test_no_short_question_to_choose_settings_on_is_near_to_one_of_the_test():
    near = nearest(SUITES["neighbours_validation"], SUITES["neighbours"])
    assert float(near.max()) <= NEAR


def test_no_everyday_prompt_repeats_another():
    cosine = similarity(TEXTS, TEXTS)
    np.fill_diagonal(cosine, 0)
    assert [(TEXTS[i], TEXTS[j]) for i, j in np.argwhere(cosine > 0.8)] == []


def test_no_everyday_prompt_demands_a_constraint_of_an_unseen_type():
    demanding = {
        f"{kind}: {text_of(row)}"
        for row in ROWS
        for kind, pattern in UNSEEN.items()
        # A text in quotation marks is to be rewritten; what stands in it is no demand.
        if re.search(pattern, re.sub(r'"[^"]*"', "", text_of(row)), re.IGNORECASE)
    }
    assert demanding == set()
