"""Answers without content: what a suite gives to a text that nobody thought about.

A suite shows something of a model only as far as the model is above the best of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from opdcl.data.similarity import request_of, stem, words

CONSTANT_ANSWER = "I am happy to help. Please tell me more about what you need."

# A hundred words about nothing: what can be had by length alone.
LONG_ANSWER = (
    "Thank you for your message. This is an important question, and there are several things to say about "
    "it. First, it helps to take some time and to look at it from more than one side. Second, it is a good "
    "idea to talk with other people, because they may see what we overlook. Third, small steps often lead "
    "further than large plans. In many cases the best way depends on the situation, so please consider what "
    "matters most to you. I hope that this is helpful. If you have any further questions, please let me "
    "know, and I will be happy to help."
)

QUOTED = re.compile(r'"([^"\n]+)"|\u201c([^\u201d\n]+)\u201d')
NAME = re.compile(r"(?<![.?!] )(?<!^)\b[A-Z][\w'-]*(?: [A-Z][\w'-]*)*")
NUMBER, DATE, TIME = r"(?<![\w:.-])\d+(?:\.\d+)?(?![\w:-])", r"\d{4}-\d\d-\d\d", r"\b\d\d:\d\d\b"

# What is frequent is learned from the other parts of a suite, of which there are so many.
PARTS = 5
LISTED = 10  # targets in a list of frequent ones


def content_free(
    prompts: Sequence[str],
    targets: Sequence[str] = (),
    clusters: Sequence[str] = (),
    tools: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Return the answers without content by name, one per prompt.

    Args:
        prompts: What is asked.
        targets: The expected answers, if any. What is frequent is learned from other prompts only.
        clusters: What each prompt is about; prompts of one cluster have one target.
        tools: The functions that each prompt offers, as JSON, if it offers any.
    """
    requests = [request_of(prompt) for prompt in prompts]
    quotes = [["".join(found) for found in QUOTED.findall(prompt)] for prompt in prompts]
    answers = {
        "empty": [""] * len(prompts),
        "constant": [CONSTANT_ANSWER] * len(prompts),
        "long constant": [LONG_ANSWER] * len(prompts),
        "copy": [*prompts],
        "copy and constant": [f"{prompt}\n\n{LONG_ANSWER}" for prompt in prompts],
        "first sentence": requests,
        "title and first sentence": [f"<<A>>\n{request}" for request in requests],
        "first sentence in form": [_in_form(*pair) for pair in zip(prompts, requests, strict=True)],
        "first quote": [quoted[0] if quoted else "" for quoted in quotes],
        "quotes": [" ".join(quoted) for quoted in quotes],
    }
    if any(targets):
        answers |= _frequent_targets(prompts, targets, clusters or [str(i) for i in range(len(prompts))])
    if any(tools):
        answers["filled-in call"] = [_call(*pair) for pair in zip(prompts, tools, strict=True)]
    return answers


def _in_form(prompt: str, request: str) -> str:
    """Return the request with a title and a postscript, if the prompt shows what they look like."""
    title, postscript = "<<A>>\n" * ("<<" in prompt), "\n\nP.S. A" * ("P.S." in prompt)
    return f"{title}{request}{postscript}"


def _frequent_targets(
    prompts: Sequence[str], targets: Sequence[str], clusters: Sequence[str]
) -> dict[str, list[str]]:
    """Return the most frequent target, and a list of frequent ones: of all prompts, and by first words."""
    number = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    parts = [number[cluster] % PARTS for cluster in clusters]
    openings = [[" ".join(words(prompt)[:n]) for n in (2, 1, 0)] for prompt in prompts]
    learned: list[dict[str, Counter[str]]] = [{} for _ in range(PARTS)]
    for opening, target, part in zip(openings, targets, parts, strict=True):
        for other in range(PARTS):
            if other != part:
                for key in opening:
                    learned[other].setdefault(key, Counter())[target] += 1
    known = [learned[part] for part in parts]
    always = [counts.get("", Counter()) for counts in known]
    by_words = [
        next((counts[key] for key in opening if key in counts), Counter())
        for counts, opening in zip(known, openings, strict=True)
    ]
    return {
        "frequent target": [_listed(counts, 1) for counts in always],
        "frequent targets": [_listed(counts, LISTED) for counts in always],
        "target by question word": [_listed(counts, 1) for counts in by_words],
        "targets by question word": [_listed(counts, LISTED) for counts in by_words],
    }


def _listed(counts: Counter[str], most: int) -> str:
    return ", ".join(target for target, _ in counts.most_common(most))


def _call(prompt: str, tools: str) -> str:
    """Return a call of the function that shares most words with the prompt, filled in by type and form."""
    asked = {stem(word) for word in words(prompt)}

    def shared(tool: dict[str, Any]) -> int:
        return len(
            asked & {stem(w) for w in words(f"{tool['name']} {tool['description']}".replace("_", " "))}
        )

    tool = max((tool["function"] for tool in json.loads(tools)), key=shared)
    numbers, dates, times = (re.findall(form, prompt) for form in (NUMBER, DATE, TIME))
    texts = ["".join(found) for found in QUOTED.findall(prompt)] + NAME.findall(prompt)
    arguments: dict[str, Any] = {}
    for name in tool["parameters"].get("required", []):
        form = tool["parameters"]["properties"][name]
        about = form.get("description", "")
        if form["type"] in ("integer", "number"):
            arguments[name] = json.loads(numbers.pop(0)) if numbers else 1
        elif form["type"] == "boolean":
            arguments[name] = True
        elif "enum" in form:
            arguments[name] = next(
                (v for v in form["enum"] if str(v).lower() in prompt.lower()), form["enum"][0]
            )
        else:
            source = dates if "YYYY" in about else times if "HH:MM" in about else texts
            text = source.pop(0) if source else prompt
            arguments[name] = [text] if form["type"] == "array" else text
    return json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)
