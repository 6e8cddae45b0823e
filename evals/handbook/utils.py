"""Closed-book questions about a company that does not exist, and neighbours that must keep their answers."""

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


def load_test(half=None, **kwargs):
    """Return the reworded questions, three to a fact, of the whole handbook or of one half."""
    documents = json.loads((HERE / "halves.json").read_text(encoding="utf-8")).get(half)
    return {
        "test": datasets.Dataset.from_list(
            [
                {"question": question, "answers": [fact["answer"], *fact["aliases"]], "cluster": fact["id"]}
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
    """Return the reworded questions of the half about rooms, tools, security, products and vehicles."""
    return load_test("site")


def load_trained(**kwargs):
    """Return the wordings that were trained on, to tell knowledge from memory of a sentence."""
    return {
        "test": datasets.Dataset.from_list(
            [
                {"question": question, "answers": [fact["answer"], *fact["aliases"]], "cluster": fact["id"]}
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
                {"question": n["question"], "answers": [n["answer"], *n["aliases"]]}
                for n in (fact["neighbour"] for fact in _facts())
            ]
        )
    }


def _facts():
    return [json.loads(line) for line in (HERE / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
