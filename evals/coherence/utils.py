"""Stories of three sentences: in which of the six orders does a model find each likeliest?

A story in another order has the same words, so that only what hangs together tells them apart (Barzilay and
Lapata 2008, "Modeling Local Coherence").
"""

import json
from itertools import permutations
from pathlib import Path

import datasets

HERE = Path(__file__).parent


def load_test(**kwargs):
    """Return the stories; `answer` is the number of the order in which each was written."""
    lines = (HERE / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([story(json.loads(line), i) for i, line in enumerate(lines)])}


def story(row, number):
    """Return a story with all orders of its sentences; the place of the right one changes from row to row."""
    orders = [" ".join(order) for order in permutations(row["sentences"])]
    answer = number % len(orders)
    return {
        "name": row["name"],
        "orders": orders[-answer:] + orders[:-answer] if answer else orders,
        "answer": answer,
    }
