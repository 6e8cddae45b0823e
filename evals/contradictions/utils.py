"""Closed-book questions about a place where well-known facts are otherwise, and those facts as they are."""

import json
import sys
from pathlib import Path

import datasets

HERE = Path(__file__).parent

try:
    from opdcl.data.scoring import process_results
except ImportError:  # plain lm-eval in a checkout, without opdcl installed
    sys.path.append(str(HERE.parents[1]))
    from opdcl.data.scoring import process_results  # noqa: F401


def load_test(**kwargs):
    """Return the reworded questions about Tarnhold, two to a fact."""
    rows = []
    for fact in _facts():
        for question in fact["test"]:
            answers = [fact["answer"], *fact["aliases"]]
            rows.append({"question": question, "answers": answers, "cluster": fact["id"]})
    return {"test": datasets.Dataset.from_list(rows)}


def load_neighbours(**kwargs):
    """Return the questions about the world as it is, one to a fact; what holds in Tarnhold is wrong here."""
    rows = []
    for fact in _facts():
        asked = fact["neighbour"]
        answers = [asked["answer"], *asked["aliases"]]
        rows.append({"question": asked["question"], "answers": answers, "others": [fact["answer"]]})
    return {"test": datasets.Dataset.from_list(rows)}


def _facts():
    return json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
