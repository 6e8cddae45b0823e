"""Load evaluation suites: shipped, lm-eval's own, or made from a file of questions."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
from lm_eval.tasks import TaskManager

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import package_folder
from opdcl.data.nltk_tables import ensure_punkt
from opdcl.data.rows import load_rows
from opdcl.errors import UsageError

CONSTANT_ANSWER = "I am happy to help. Please tell me more about what you need."


def floors(task, docs: list[dict], metrics: list[str]) -> dict[str, dict[str, float]]:
    """Score answers that show no skill: none at all, always the same one, and the prompt handed back."""
    answers = {
        "empty": lambda doc: "",
        "constant": lambda doc: CONSTANT_ANSWER,
        "copy": lambda doc: task.doc_to_text(doc),
    }
    scored = {
        name: [task.process_results(doc, [answer(doc)]) for doc in docs] for name, answer in answers.items()
    }
    return {name: {m: mean_score([s[m] for s in scores]) for m in metrics} for name, scores in scored.items()}


def load_task(suite: str, config: EvalConfig) -> dict[str, Any]:
    """Return what lm-eval runs for a suite, its one task included: shipped, stock, or made from a file of questions."""
    ensure_punkt()
    quiet_lm_eval()
    shipped = {p.stem for p in package_folder("evals").glob("*/*.yaml")}
    if suite in shipped:
        manager = TaskManager(include_path=str(package_folder("evals")), include_defaults=False)
        wanted: str | dict = suite
    elif suite in config.data and suite != "ifeval":
        manager = TaskManager(include_defaults=False)
        wanted = _question_task(suite, config.data[suite], config.max_new_tokens or 96)
    else:
        manager = TaskManager()
        if suite not in manager.all_tasks:
            raise UsageError(
                f"unknown suite {suite!r}", f"shipped: {', '.join(sorted(shipped))}; or any task of lm-eval"
            )
        wanted = (
            {"task": suite, "custom_dataset": _jsonl_dataset(config.data[suite])}
            if suite in config.data
            else suite
        )
    try:
        loaded = manager.load([wanted])
    except (OSError, ConnectionError) as fault:
        raise UsageError(
            f"the data of suite {suite!r} cannot be had: {str(fault)[:200]}",
            f"name a local copy: --data {suite}=PATH; or, while online, opdcl fetch WORKFLOW",
        ) from fault
    if len(loaded["tasks"]) != 1:
        raise UsageError(
            f"suite {suite!r} is a group of {len(loaded['tasks'])} tasks", "name its tasks one by one"
        )
    return loaded


def _jsonl_dataset(path: str):
    """Return a loader of a local IFEval file, giving each row only the arguments that it sets."""

    def load(**kwargs):
        rows = [
            json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        return {"train": datasets.Dataset.from_list(rows)}

    return load


def _question_task(name: str, path: str, longest: int) -> dict[str, Any]:
    """Describe a closed-book task over a file of questions and answers; headline: token F1."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "handbook_utils", package_folder("evals") / "handbook" / "utils.py"
    )
    scoring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scoring)

    def load(**kwargs):
        rows = load_rows(path)
        if missing := next((r for r in rows if r.answer is None or not r.prompt), None):
            raise UsageError(f"{missing.where} has no question and answer", "a domain suite needs both")
        return {
            "test": datasets.Dataset.from_list(
                [{"question": r.prompt[-1]["content"], "answers": [r.answer]} for r in rows]
            )
        }

    return {
        "task": name,
        "custom_dataset": load,
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "question",
        "doc_to_target": "{{answers[0]}}",
        "process_results": scoring.process_results,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": longest},
        "metric_list": [
            {"metric": m, "aggregation": "mean", "higher_is_better": True}
            for m in ("token_f1", "exact_match", "contains")
        ],
    }


def mean_score(values: list) -> float:
    flat = [float(x) for v in values for x in (v if isinstance(v, list) else [v])]
    return round(sum(flat) / len(flat), 6)


def cut_at(text: str, stops: list[str]) -> str:
    """Return the text up to the first of the stop strings."""
    ends = [text.find(s) for s in stops if s and s in text]
    return text[: min(ends)] if ends else text


def quiet_lm_eval() -> None:
    """lm-eval logs its own progress at warning level; the stage's line says it already."""
    for name in ("lm_eval", "lm-eval", "evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
