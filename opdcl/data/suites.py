"""Load evaluation suites: shipped, lm-eval's own, or made from a file of questions."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import shipped_suites
from opdcl.data.nltk_tables import ensure_punkt
from opdcl.data.rows import Row, load_rows, read_json_lines
from opdcl.data.scoring import process_results
from opdcl.errors import UsageError
from opdcl.hub import fail_fast

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

# Content-free answer -> the scores of each document, by metric.
FloorScores = dict[str, list[dict[str, Any]]]


class Suite:
    """A loaded suite: its lm-eval task, its metrics (the headline first), and its floors.

    `loaded` is what `lm_eval.evaluator.evaluate` runs.
    """

    def __init__(self, name: str, loaded: Any):
        self.name, self.loaded = name, loaded
        (self.task,) = loaded["tasks"].values()
        self.metrics: list[str] = list(self.task.aggregation())
        self._floors: dict[int | None, FloorScores] = {}

    def documents(self, limit: int | None) -> list[dict]:
        """Return the first `limit` documents, or all."""
        return [doc for _, doc in self.task.doc_iterator(limit=limit)]

    def floors(self, limit: int | None, answers: list[str]) -> FloorScores:
        """Score answers without content on the first `limit` documents.

        They are none, a constant one, a long one, the prompt, both, and `answers`, each to another prompt.
        """
        docs = self.documents(limit)
        if limit not in self._floors:
            texts = content_free([self.task.doc_to_text(doc) for doc in docs])
            self._floors[limit] = {name: self._score(docs, answers) for name, answers in texts.items()}
        if len(docs) == 1:
            return self._floors[limit]
        # Half the suite away: neighbours are often about the same fact.
        half = len(docs) // 2
        return self._floors[limit] | {"shuffled": self._score(docs, answers[half:] + answers[:half])}

    @property
    def max_tokens(self) -> int:
        """The longest answer that the suite asks for, in tokens."""
        return int((self.task.config.generation_kwargs or {}).get("max_gen_toks", 256))

    def _score(self, docs: list[dict], answers: list[str]) -> list[dict[str, Any]]:
        pairs = zip(docs, answers, strict=True)
        return [self.task.process_results(doc, [answer]) for doc, answer in pairs]

    def means(self, scores: list[dict[str, Any]]) -> dict[str, float]:
        """Return the mean of each metric."""
        return {m: mean_score([s[m] for s in scores]) for m in self.metrics}


def content_free(prompts: list[str]) -> dict[str, list[str]]:
    """Return the answers without content by name, one per prompt."""
    return {
        "empty": [""] * len(prompts),
        "constant": [CONSTANT_ANSWER] * len(prompts),
        "long constant": [LONG_ANSWER] * len(prompts),
        "copy": prompts,
        "copy and constant": [f"{prompt}\n\n{LONG_ANSWER}" for prompt in prompts],
    }


def load_suite(
    name: str, config: EvalConfig | None = None, read_rows: Callable[[str], list[Row]] = load_rows
) -> Suite:
    """Load a shipped suite, a task of lm-eval, or a file of questions that `config.data` names.

    Raises:
        UsageError: The suite is unknown or a group of tasks, or its data could not be loaded.
    """
    from lm_eval.tasks import TaskManager

    config = config or EvalConfig()
    ensure_punkt()
    quiet_lm_eval()
    shipped = shipped_suites()
    task: str | dict[str, Any] = name
    if name in shipped:
        manager = TaskManager(include_path=str(shipped[name].parents[1]), include_defaults=False)
    elif name in config.data and name != "ifeval":
        manager = TaskManager(include_defaults=False)
        rows = functools.partial(read_rows, config.data[name])
        task = _question_task(name, rows, config.max_new_tokens or 96)
    else:
        manager = TaskManager()
        if name not in manager.all_tasks:
            hint = f"shipped: {', '.join(shipped)}; or any task of lm-eval"
            raise UsageError(f"unknown suite {name!r}", hint)
        if name not in config.data:
            fail_fast()
        else:
            task = _with_local_data(manager.task_index[name].yaml_path, config.data[name])
    try:
        loaded = manager.load([task])
    except (OSError, ConnectionError) as fault:
        hint = f"name a local copy: --data {name}=PATH; or, while online, opdcl fetch WORKFLOW"
        raise UsageError(f"could not load the data of suite {name!r}: {str(fault)[:200]}", hint) from fault
    if len(loaded["tasks"]) != 1:
        message = f"suite {name!r} is a group of {len(loaded['tasks'])} tasks"
        raise UsageError(message, "name its tasks one by one")
    return Suite(name, loaded)


def _with_local_data(stock: Path, path: str) -> dict[str, Any]:
    """Return the settings of lm-eval's IFEval with a local JSONL file in place of its dataset."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    def load(**kwargs: Any) -> dict[str, Any]:
        return {"train": datasets.Dataset.from_list([row for row, _ in read_json_lines(Path(path))])}

    # An inline task does not inherit the stock task of its name, so its settings are copied.
    settings = load_yaml(stock, resolve_func=True)
    return {k: v for k, v in settings.items() if not k.startswith("dataset_")} | {"custom_dataset": load}


def _question_task(name: str, rows: Callable[[], list[Row]], max_tokens: int) -> dict[str, Any]:
    """Describe a closed-book task over rows of questions and answers; headline: token F1."""
    import datasets

    def load(**kwargs: Any) -> dict[str, Any]:
        docs = []
        for row in rows():
            if not row.answer or not row.prompt:
                raise UsageError(f"{row.where} has no question and answer", "a domain suite needs both")
            question = row.prompt[-1]["content"]
            docs.append({"question": question, "answers": [row.answer], "cluster": row.cluster})
        return {"test": datasets.Dataset.from_list(docs)}

    metrics = ("token_f1", "exact_match", "contains")
    return {
        "task": name,
        "custom_dataset": load,
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "question",
        "doc_to_target": "{{answers[0]}}",
        "process_results": process_results,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max_tokens},
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics],
    }


def mean_score(values: list) -> float:
    """Return the mean over prompts, or over all parts where a prompt has a list of scores."""
    parts = [float(x) for v in values for x in (v if isinstance(v, list) else [v])]
    return round(sum(parts) / len(parts), 6)


def cut_at(text: str, stops: list[str]) -> str:
    """Return the text up to the first stop string."""
    ends = [text.find(s) for s in stops if s and s in text]
    return text[: min(ends)] if ends else text


def quiet_lm_eval() -> None:
    """Silence lm-eval's progress, which it logs at warning level: the stage reports it already."""
    import datasets

    for name in ("lm_eval", "lm-eval", "evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
