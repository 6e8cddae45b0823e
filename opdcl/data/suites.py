"""Load evaluation suites: shipped, lm-eval's own, or made from a file of questions."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable
from typing import Any

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import shipped_suites
from opdcl.data.nltk_tables import ensure_punkt
from opdcl.data.rows import Row, load_rows
from opdcl.data.scoring import process_results
from opdcl.data.stock_tasks import stock_file, stock_names, stock_settings, with_local_data
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

    def prompts(self, limit: int | None) -> list[str]:
        """Return the prompts of the first `limit` documents, or of all, without few-shot examples."""
        return [str(self.task.doc_to_text(doc)) for doc in self.documents(limit)]

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
        from lm_eval.api.instance import Instance

        # What counts is the part of an answer that the task's first filter leaves, such as a number.
        instances = [
            Instance("generate_until", doc, ("", {}), 0, resps=[answer])
            for doc, answer in zip(docs, answers, strict=True)
        ]
        first = self.task._filters[0]
        first.apply(instances)
        return [self.task.process_results(i.doc, [i.filtered_resps[first.name]]) for i in instances]

    def check(self, limit: int | None) -> None:
        """Score an empty answer to the first `limit` documents, or to all.

        Raises:
            UsageError: A document lacks a field, or a score is not a number for each prompt.
        """
        field = self.task.config.doc_to_text
        hint = f"lm-eval's task {self.name} must be able to read each row, and score each by a number"
        for number, doc in enumerate(self.documents(limit), 1):
            try:
                # lm-eval takes the name of a column that is missing for the prompt itself.
                if isinstance(field, str) and field.isidentifier() and not doc.get(field):
                    raise KeyError(field)
                self.task.doc_to_text(doc)
                (scores,) = self._score([doc], [""])
            except Exception as fault:  # whatever lm-eval's templates and functions raise on other columns
                message = f"row {number} of suite {self.name!r} cannot be scored: {_reason(fault)}"
                raise UsageError(message, hint) from fault
            try:
                self.means([scores])
            except (KeyError, TypeError, ValueError) as fault:
                message = f"suite {self.name!r} does not score prompt by prompt (as BLEU does not)"
                raise UsageError(f"{message}, which is not supported", hint) from fault

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
        UsageError: The suite is unknown or not supported, or its data could not be loaded or do not fit.
    """
    from lm_eval.tasks import TaskManager

    config = config or EvalConfig()
    ensure_punkt()
    quiet_lm_eval()
    shipped, path = shipped_suites().get(name), config.data.get(name)
    if shipped and path:
        raise UsageError(f"suite {name!r} is shipped with its data", f"give {path} another name")
    manager = TaskManager(include_path=str(shipped.parents[1]) if shipped else None, include_defaults=False)
    stock = None if shipped else stock_file(name)
    if shipped:
        task: str | dict[str, Any] = name
    elif stock:
        settings = stock_settings(name, stock)
        if not path:
            fail_fast()
        task = with_local_data(settings, path) if path else str(stock)
    elif path:
        task = _question_task(name, functools.partial(read_rows, path), config.max_new_tokens or 96)
    else:
        raise _unknown(name)
    try:
        suite = Suite(name, manager.load([task]))
    except UsageError:
        raise
    except Exception as fault:  # lm-eval asks the first row for all that it needs
        if path:
            hint = f"{path} must have the columns of lm-eval's data for the task {name}"
            raise UsageError(
                f"the rows of {path} do not fit suite {name!r}: {_reason(fault)}", hint
            ) from fault
        hint = f"name a local copy: --data {name}=PATH; or, while online, opdcl fetch WORKFLOW"
        raise UsageError(f"could not load the data of suite {name!r}: {str(fault)[:200]}", hint) from fault
    if stock:
        suite.check(None if path else 1)
    return suite


def _reason(fault: Exception) -> str:
    return f"no column {fault}" if isinstance(fault, KeyError) else str(fault)[:200]


def _unknown(name: str) -> UsageError:
    shipped = [*shipped_suites()]
    near = difflib.get_close_matches(name, [*shipped, *stock_names()], 1)
    known = f"shipped: {', '.join(shipped)}; or one generative task of lm-eval, not a group"
    return UsageError(f"unknown suite {name!r}", f"did you mean {near[0]}?" if near else known)


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
