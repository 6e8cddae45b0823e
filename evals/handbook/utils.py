"""Closed-book questions about a company that does not exist, and neighbours that must keep their answers."""

import json
import sys
from pathlib import Path

import datasets

HERE = Path(__file__).parent

try:
    from opdcl.data.scoring import normalise, process_results
except ImportError:  # plain lm-eval in a checkout, without opdcl installed
    sys.path.append(str(HERE.parents[1]))
    from opdcl.data.scoring import normalise, process_results  # noqa: F401


def load_test(part=None, **kwargs):
    """Return the reworded questions, three to a fact, of the whole handbook or of one part."""
    documents = json.loads((HERE / "parts.json").read_text(encoding="utf-8")).get(part)
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


def load_quick(**kwargs):
    """Return the reworded questions of the quarter about people, leave and travel."""
    return load_test("quick")


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
    """Return the short questions about general knowledge: one to a fact, and as many others."""
    return _as_test([*(fact["neighbour"] for fact in _facts()), *_others("test")])


def load_neighbours_quick(**kwargs):
    """Return the questions about general knowledge that resemble one about a fact, one to a fact."""
    return _as_test(fact["neighbour"] for fact in _facts())


def load_neighbours_validation(**kwargs):
    """Return questions about general knowledge on which settings are chosen."""
    return _as_test(_others("validation"))


def _as_test(rows):
    """Return questions with their answers; `others` answer questions of the same kind, and are wrong here."""
    rows, documents = [*rows], []
    for row in rows:
        answers = [row["answer"], *row["aliases"]]
        right = f" {normalise(' '.join([row['question'], *answers]))} "
        same = {other["answer"] for other in rows if _opening(other) == _opening(row)}
        others = sorted(other for other in same if f" {normalise(other)} " not in right)
        documents.append({"question": row["question"], "answers": answers, "others": others})
    return {"test": datasets.Dataset.from_list(documents)}


def _opening(row):
    return row["question"].split()[:2]


def _others(split):
    lines = (HERE / "neighbours.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


def _facts():
    return [json.loads(line) for line in (HERE / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
