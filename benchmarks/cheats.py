"""Answers that keep the constraints of `instructions` without understanding a prompt.

`fit` bends any text until it keeps the constraints, and reads them from the data, where a cheat would need
regular expressions. What is left to fail is content: that a text is about its prompt, in words of its own.
"""

import random
import re
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


def cheats(
    docs: list[dict], constraints: list[list[dict]], answers: list[str], others: list[tuple[str, str]]
) -> dict[str, list[str]]:
    """Return the cheats by name, one answer per document.

    Args:
        docs: The prompts, with their `request`.
        constraints: What each answer must keep.
        answers: A model's own answers, of which each is given to another prompt.
        others: Requests of the validation prompts, with the model's answers.
    """
    from opdcl.data.floors import content_free

    free = content_free([doc["prompt"] for doc in docs])
    requests = [doc["request"] for doc in docs]
    half = len(docs) // 2
    bodies = {
        "first sentence, bent": [free["first sentence"][i] for i in range(len(docs))],
        "required tokens": [""] * len(docs),
        "a constant, bent": [LONG_ANSWER] * len(docs),
        "a sentence about the topic's word": [GENERIC.format(topic=topic(request)) for request in requests],
        "a template with the prompt's words": [
            TEMPLATE.format(nouns=" and ".join(long_words(request)[-3:])) for request in requests
        ],
        "the prompt in another order": [shuffled_words(request) for request in requests],
        "answers to other prompts, bent": answers[half:] + answers[:half],
        "the answer to the nearest prompt, bent": nearest_answers(requests, others),
    }
    return free | {
        name: [fit(text, own) for text, own in zip(texts, constraints, strict=True)]
        for name, texts in bodies.items()
        if texts
    }


def long_words(request: str) -> list[str]:
    return [word for word in re.findall(r"[\w'-]+", request) if len(word) > 3] or [request.rstrip(".?!")]


def topic(request: str) -> str:
    return max(long_words(request), key=len).lower()


def shuffled_words(request: str) -> str:
    words = re.findall(r"[\w'-]+", request)
    return " ".join(random.Random(request).sample(words, len(words))).lower().capitalize() + "."


def nearest_answers(requests: list[str], others: list[tuple[str, str]]) -> list[str]:
    """Return the model's answer to the validation prompt that is nearest to each request."""
    from opdcl.data.similarity import similarity

    if not others:
        return []
    asked, answers = zip(*others, strict=True)
    return [answers[i] for i in similarity(requests, asked).argmax(axis=1)]


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
