"""Prompts with verifiable constraints, scored by the verifiers of lm-eval's IFEval task."""

import json
from pathlib import Path

import datasets

HERE = Path(__file__).parent


def load_test(**kwargs):
    """Return the test split, under the name that the task scores."""
    return {"test": _split("test")}


def load_validation(**kwargs):
    """Return the validation split, under the name that the task scores."""
    return {"test": _split("validation")}


def load_train(**kwargs):
    """Return the prompts for reward training, under the name that the task scores."""
    return {"test": _split("train")}


def _split(name):
    rows = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    # Arrow would give every row the union of all keyword arguments; as text they stay as they are.
    return datasets.Dataset.from_list([{**row, "kwargs": json.dumps(row["kwargs"])} for row in rows])


def _verifiers():
    try:
        from opdcl.data.nltk_tables import ensure_punkt

        ensure_punkt()
    except ImportError:  # plain lm-eval without opdcl: NLTK downloads its tables
        pass
    import langdetect
    from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    return utils


def process_results(doc, results):
    """Score one answer by all four official metrics."""
    return _verifiers().process_results({**doc, "kwargs": json.loads(doc["kwargs"])}, results)


def feedback(doc, answer):
    """Name the constraints that an answer violates, in words that a model can act on."""
    _verifiers()
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    violated = []
    for name, kwargs in zip(doc["instruction_id_list"], json.loads(doc["kwargs"]), strict=True):
        constraint = INSTRUCTION_DICT[name](name)
        description = constraint.build_description(**kwargs)
        if not (answer.strip() and constraint.check_following(answer)):
            violated.append(description)
    return f"Not kept: {' '.join(violated)}" if violated else "Every constraint is kept."


def agg_inst_level_acc(items):
    """Average over instructions, not over prompts."""
    return _verifiers().agg_inst_level_acc(items)
