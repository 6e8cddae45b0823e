"""Closed-book questions about a company that does not exist, and neighbours that must keep their answers."""

import json
import re
import string
from collections import Counter
from pathlib import Path

import datasets

HERE = Path(__file__).parent


def load_test(half=None, **kwargs):
    """Return the reworded questions, three to a fact, of the whole handbook or of one half."""
    documents = json.loads((HERE / "halves.json").read_text(encoding="utf-8")).get(half)
    return {
        "test": datasets.Dataset.from_list(
            [
                {"question": question, "answers": [fact["answer"], *fact["aliases"]], "fact": fact["id"]}
                for fact in _facts()
                for question in fact["test"]
                if documents is None or fact["document"] in documents
            ]
        )
    }


def load_staff(**kwargs):
    """Return the reworded questions of the half about people, leave, travel, canteen, events and money."""
    return load_test("staff")


def load_site(**kwargs):
    """Return the reworded questions of the half about rooms, tools, security, products, workshop and vehicles."""
    return load_test("site")


def load_trained(**kwargs):
    """Return the wordings that were trained on, to tell knowledge from memory of a sentence."""
    return {
        "test": datasets.Dataset.from_list(
            [
                {"question": question, "answers": [fact["answer"], *fact["aliases"]], "fact": fact["id"]}
                for fact in _facts()
                for question in fact["train"][:3]
            ]
        )
    }


def load_neighbours(**kwargs):
    """Return the neighbours, one to a fact."""
    return {
        "test": datasets.Dataset.from_list(
            [
                {"question": n["question"], "answers": [n["answer"], *n["aliases"]], "fact": fact["id"]}
                for fact in _facts()
                for n in [fact["neighbour"]]
            ]
        )
    }


def _facts():
    return [json.loads(line) for line in (HERE / "facts.jsonl").read_text(encoding="utf-8").splitlines()]


def normalise(text):
    """Lower the case, drop punctuation and articles, and squeeze spaces, as SQuAD does."""
    text = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer, gold):
    """Return the harmonic mean of token precision and recall after normalisation."""
    a, g = normalise(answer).split(), normalise(gold).split()
    shared = sum((Counter(a) & Counter(g)).values())
    return 2 * shared / (len(a) + len(g)) if shared else 0.0


def process_results(doc, results):
    """Score one answer against the gold answer and its aliases; the best of them counts."""
    answer = results[0]
    said = f" {normalise(answer)} "
    return {
        "exact_match": max(float(normalise(answer) == normalise(g)) for g in doc["answers"]),
        "token_f1": max(token_f1(answer, g) for g in doc["answers"]),
        "contains": max(float(f" {normalise(g)} " in said) for g in doc["answers"]),
    }
