"""What an answer adds to its prompt: the words that the prompt does not have."""

from __future__ import annotations

import re

from opdcl.data.similarity import STOP_WORDS, stem, words

WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")


def own_text(prompt: str, answer: str) -> str:
    """Return an answer without the words of its prompt, in whatever form, and without lone marks."""
    said = {stem(word) for word in words(prompt)}
    text = WORD.sub(lambda found: "" if {stem(w) for w in words(found[0])} <= said else found[0], answer)
    return " ".join(part for part in text.split() if WORD.search(part))


def own_words(prompt: str, answer: str) -> set[str]:
    """Return the stems of the content words that an answer adds to its prompt."""
    said = {stem(word) for word in words(prompt)}
    return {stem(word) for word in words(answer) if word not in STOP_WORDS and not word.isdigit()} - said


def copied_run(prompt: str, answer: str) -> int:
    """Return how many words of the prompt, at most, stand in the answer one after the other."""
    asked, said = words(prompt), words(answer)
    longest, ending = 0, [0] * (len(asked) + 1)
    for word in said:
        # From the back, so that each place still holds the run that ended before this word.
        for i in range(len(asked), 0, -1):
            ending[i] = ending[i - 1] + 1 if asked[i - 1] == word else 0
        longest = max(longest, *ending)
    return longest
