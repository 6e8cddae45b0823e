"""General knowledge with four options: which one a model finds likeliest, and how sure it is of it.

Its probabilities are the softmax of the options' log-likelihoods.
"""

import json
import math
from pathlib import Path

import datasets

HERE = Path(__file__).parent


def load_test(**kwargs):
    """Return the questions; `answer` is the number of the right option."""
    lines = (HERE / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def process_results(doc, results):
    """Score one question by the log-likelihoods of its options, `results`.

    `brier` is the squared distance of the probabilities from the truth, between 0 and 2 (Brier 1950). The
    mean of `overconfidence` is by how much a model is surer of its choices than right; below 0, less sure.
    """
    likelihoods, answer = [likelihood for likelihood, _ in results], doc["answer"]
    highest = max(likelihoods)
    weights = [math.exp(likelihood - highest) for likelihood in likelihoods]
    probabilities = [weight / sum(weights) for weight in weights]
    right = float(likelihoods.index(highest) == answer)
    return {
        "acc": right,
        "brier": sum((p - (i == answer)) ** 2 for i, p in enumerate(probabilities)),
        "overconfidence": max(probabilities) - right,
    }
