"""What an answer adds to its prompt, and how much of the prompt it copies."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdcl.data.own_words import copied_run, own_text, own_words, within

PROMPT = 'Describe a tower made of books. Use the word "tower".'


@pytest.mark.parametrize(
    ("answer", "text", "words"),
    [
        ("A tower of books leans, page by page.", "leans, page by page.", {"lean", "pag"}),
        ("TOWERS describing a book!", "", set()),
        ("<<Up>>\nIt stands.\n\n1. Old\n2) thin -", "<<Up>> It stands. 1. Old 2) thin", {"stand", "thin"}),
        ("It is the one that we all know.", "It is one that we all know.", set()),
        ("", "", set()),
    ],
)  # fmt: skip
def test_the_words_of_the_prompt_are_left_out_in_whatever_form(answer, text, words):
    assert own_text(PROMPT, answer) == text
    assert own_words(PROMPT, answer) == words


@pytest.mark.parametrize(
    "word",
    ["towwerr", "tovver", "towr", "TOW\u00c9R", "to-wer", "t\u200bower", "towers", "b00ks", "descrbie"],
)
def test_a_word_of_the_prompt_in_another_spelling_is_not_ones_own(word):
    assert own_words(PROMPT, f"{word} {word.upper()}") == set()
    assert own_text(PROMPT, f"The {word}, again.") == "again."


@pytest.mark.parametrize("word", ["river", "lower-lying", "garden"])
def test_a_word_that_only_resembles_a_word_of_the_prompt_a_little_is_ones_own(word):
    assert own_words(PROMPT, word)


LETTERS = st.text("abc", max_size=6)


@given(LETTERS, LETTERS, st.integers(0, 3))
def test_the_edits_are_those_of_the_reference(word, other, edits):
    @functools.cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        replaced = distance(i - 1, j - 1) + (word[i - 1] != other[j - 1])
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, replaced)

    assert within(word, other, edits) == (distance(len(word), len(other)) <= edits)


WORDS = st.lists(st.sampled_from(["ash", "elm", "oak"]), max_size=9).map(" ".join)


@given(WORDS, WORDS)
def test_the_longest_copied_run_is_that_of_the_reference(prompt, answer):
    asked, said = prompt.split(), answer.split()
    parts = [tuple(asked[i:j]) for i in range(len(asked)) for j in range(i + 1, len(asked) + 1)]
    held = {tuple(said[i:j]) for i in range(len(said)) for j in range(i + 1, len(said) + 1)}
    assert copied_run(prompt, answer) == max((len(part) for part in parts if part in held), default=0)
    assert copied_run(prompt, answer) == copied_run(answer, prompt)


def test_case_and_marks_do_not_hide_a_copy():
    assert copied_run(PROMPT, "<<A>>\ndescribe a TOWER, made of books") == 6
