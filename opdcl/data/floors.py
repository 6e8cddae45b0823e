"""Answers without content: what a suite gives to a text that nobody thought about.

A suite shows something of a model only as far as the model is above the best of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
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
    quotes = [_quotes_of(prompt) for prompt in prompts]
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


def _quotes_of(prompt: str) -> list[str]:
    """Return what stands in quotation marks in a prompt."""
    return ["".join(found) for found in QUOTED.findall(prompt)]


def _in_form(prompt: str, request: str) -> str:
    """Return the request with a title and a postscript, if the prompt shows what they look like."""
    title, postscript = "<<A>>\n" * ("<<" in prompt), "\n\nP.S. A" * ("P.S." in prompt)
    return f"{title}{request}{postscript}"


def _frequent_targets(
    prompts: Sequence[str], targets: Sequence[str], clusters: Sequence[str]
) -> dict[str, list[str]]:
    """Return the most frequent target, and a list of frequent ones: of all prompts, and by first words.

    What is frequent for a prompt is counted on the parts of the suite that its cluster is not in.
    """
    numbers = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    parts = [numbers[cluster] % PARTS for cluster in clusters]
    openings = [_openings(prompt) for prompt in prompts]
    # Part -> opening -> how often each target follows it in the other parts; every prompt has the opening "".
    counts: list[dict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(PARTS)]
    for opening, target, part in zip(openings, targets, parts, strict=True):
        for other in range(PARTS):
            if other == part:
                continue
            for start in opening:
                counts[other][start][target] += 1
    answers: dict[str, list[str]] = defaultdict(list)
    for opening, part in zip(openings, parts, strict=True):
        known = counts[part]
        always = known.get("", Counter())
        by_words = next((known[start] for start in opening if start in known), Counter())
        answers["frequent target"].append(_listed(always, 1))
        answers["frequent targets"].append(_listed(always, LISTED))
        answers["target by question word"].append(_listed(by_words, 1))
        answers["targets by question word"].append(_listed(by_words, LISTED))
    return dict(answers)


def _openings(prompt: str) -> list[str]:
    """Return the first two words of a prompt, its first one, and none."""
    first = words(prompt)[:2]
    return [" ".join(first), " ".join(first[:1]), ""]


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
