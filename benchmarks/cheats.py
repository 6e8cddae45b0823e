"""Answers of a cheat, who understands no prompt, or spoils an answer of somebody who does.

`fit` bends any text until it keeps the constraints of `instructions`, and reads them from the data, where a
cheat would need regular expressions. What is left to fail is content: that a text is about its prompt, in
words of its own, and says something.
"""

import random
import re
from collections.abc import Callable
from typing import Any

TITLE, CLOSING = "Notes", "P.S. Thank you for reading."
GENERIC = "The {topic} is a very interesting thing, and a lot of us like to talk about it every day."
TEMPLATE = (
    "When it comes to {nouns}, it helps to consider several factors, such as quality, cost and effort, "
    "because each of them has advantages and disadvantages."
)
LONG_ANSWER = (
    "Thank you for your message. This is an important question, and there are several things to say about "
    "it. First, it helps to take some time and to look at it from more than one side. Second, it is a good "
    "idea to talk with other people, because they may see what we overlook. Third, small steps often lead "
    "further than large plans. In many cases the best way depends on the situation, so please consider what "
    "matters most to you. I hope that this is helpful. If you have any further questions, please let me "
    "know, and I will be happy to help."
)
PADDING = (
    "This is a good question, and there are several things to say about it. It helps to take a while and to "
    "look at it from more than one side before you come to a conclusion of your own."
)


REFUSAL = "I'm sorry, but I can't help with that."
SENTENCE = "The old house at the end of the street has a green door and a garden full of roses."
PRAISE = "What a wonderful question! I am glad that you asked, because many people would like to know it."
DIGITS = str.maketrans("aeiost", "431057")
ACCENTS = str.maketrans("aeiouc", "\u00e1\u00e9\u00ed\u00f3\u00fa\u00e7")


def cheats(prompts: list[str], requests: list[str], answers: list[str]) -> dict[str, list[str]]:
    """Return the cheats by name, one answer per prompt.

    Args:
        prompts: What is asked.
        requests: Each prompt without its constraints.
        answers: A model's own answers, which are spoilt, or given to other prompts.
    """
    from opdcl.data.own_words import content_free

    count, half = len(prompts), len(prompts) // 2
    others = answers[half:] + answers[:half]
    first = content_free(prompts)["first sentence"]
    pairs = [*zip(answers, others, strict=True)]
    return content_free(prompts) | {
        "the request, last letters doubled": [
            each_word(text, lambda word: word + word[-1]) for text in first
        ],
        "the request, all letters doubled": [each_word(text, doubled) for text in first],
        "the request, with accents": [text.translate(ACCENTS) for text in first],
        "the request, with hyphens": [each_word(text, hyphenated) for text in first],
        "the request in capitals": [text.upper() for text in first],
        "the request, words reversed": [each_word(text, lambda word: word[::-1]) for text in first],
        "the request without vowels": [re.sub(r"(?<=\w)[aeiou]", "", text) for text in first],
        "the request, letters apart": [" ".join(text.replace(" ", "")) for text in first],
        "the request in Pig Latin": [
            each_word(text, lambda word: f"{word[1:]}{word[0]}ay") for text in first
        ],
        "the request, digits for letters": [text.translate(DIGITS) for text in first],
        "the request, other endings": [each_word(text, lambda word: word + "like") for text in first],
        "the request, invisible marks": [each_word(text, "\u200b".join) for text in first],
        "the request in another order": [shuffled_words(request) for request in requests],
        "the request, said back": [
            f"You would like an answer to this: {text} Many people do." for text in first
        ],
        "nothing": [""] * count,
        "a list without content": ["1. First\n2. Second\n3. Third"] * count,
        "a refusal": [REFUSAL] * count,
        "a well-formed sentence": [SENTENCE] * count,
        "praise of the question": [PRAISE] * count,
        "a long constant": [LONG_ANSWER] * count,
        "a sentence about the topic's word": [GENERIC.format(topic=topic(request)) for request in requests],
        "a template with the request's words": [
            TEMPLATE.format(nouns=" and ".join(long_words(request)[-3:])) for request in requests
        ],
        "answers to other prompts": others,
        "the answer to the nearest prompt": nearest_answers(requests, answers),
        "own answer, words shuffled": [shuffled_words(text, keep_case=True) for text in answers],
        "own answer, words sorted": [" ".join(sorted(text.split())) for text in answers],
        "own answer, backwards": [" ".join(text.split()[::-1]) for text in answers],
        "own answer, pairs of words shuffled": [shuffled_pieces(text, 2) for text in answers],
        "own answer, every other word another's": [mixed(own, other) for own, other in pairs],
        "half of own answer, half of another": [halves(own, other) for own, other in pairs],
    }


def each_word(text: str, change: Callable[[str], str]) -> str:
    return re.sub(r"[^\W_]+", lambda found: change(found[0]), text)


def doubled(word: str) -> str:
    return "".join(2 * letter for letter in word)


def hyphenated(word: str) -> str:
    middle = len(word) // 2
    return f"{word[:middle]}-{word[middle:]}" if middle else word


def shuffled_pieces(text: str, length: int) -> str:
    words = text.split()
    pieces = [" ".join(words[i : i + length]) for i in range(0, len(words), length)]
    return " ".join(random.Random(text).sample(pieces, len(pieces)))


def mixed(own: str, other: str) -> str:
    """Return an answer of which every other word is another answer's."""
    words, others = own.split(), other.split()
    return " ".join(others[i] if i % 2 and i < len(others) else word for i, word in enumerate(words))


def halves(own: str, other: str) -> str:
    words, others = own.split(), other.split()
    return " ".join(words[: len(words) // 2] + others[len(others) // 2 :])


def long_words(request: str) -> list[str]:
    return [word for word in re.findall(r"[\w'-]+", request) if len(word) > 3] or [request.rstrip(".?!")]


def topic(request: str) -> str:
    return max(long_words(request), key=len).lower()


def shuffled_words(text: str, keep_case: bool = False) -> str:
    words = re.findall(r"[\w'-]+", text)
    shuffled = " ".join(random.Random(text).sample(words, len(words)))
    return (shuffled if keep_case else shuffled.lower().capitalize()) + "."


def nearest_answers(requests: list[str], answers: list[str]) -> list[str]:
    """Return the model's answer to the other request that is nearest to each."""
    from opdcl.data.own_words import similarity

    if len(requests) < 2:
        return answers
    alike = similarity(requests, requests)
    alike[range(len(requests)), range(len(requests))] = -1
    return [answers[i] for i in alike.argmax(axis=1)]


def fit(text: str, constraints: list[dict[str, Any]]) -> str:
    """Bend a text until it keeps the constraints."""
    by_type = {c["type"]: c for c in constraints}
    text = re.sub(r"<<[^<>]*>>|\bP\.S\.|^\s*(\d+[.)]|[-*\u2022])\s*|\n", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\s+", " ", text).strip()
    for word in by_type.get("forbidden", {}).get("words", []):
        text = re.sub(rf"(?i)\b{re.escape(word)}\b", "it", text)
    if "sentence_count" in by_type or "title" in by_type:
        text = re.split(r"(?<=[.?!])\s", text)[0]
    if "word_count" in by_type:
        text = " ".join(f"{text} {PADDING}".split()[: by_type["word_count"]["most"] - 10])
    for word in by_type.get("words", {}).get("words", []):
        if not re.search(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", text):
            text = f"{text.rstrip('.?! ')} {word}.".strip()
    if "first" in by_type:
        text = f"{by_type['first']['phrase']} {text}"
    if "numbered" in by_type:
        text = listed(text, by_type["numbered"]["count"])
    if "title" in by_type:
        text = f"<<{TITLE}>>\n{text or 'This.'}"
    return f"{text or 'This.'}\n\n{CLOSING}" if "postscript" in by_type else text


def listed(text: str, count: int) -> str:
    """Return a text cut into a numbered list of so many points."""
    words = text.split() + ["this"] * max(0, count - len(text.split()))
    size = len(words) / count
    parts = [words[round(i * size) : round((i + 1) * size)] for i in range(count)]
    return "\n".join(f"{i + 1}. {' '.join(part)}" for i, part in enumerate(parts))
