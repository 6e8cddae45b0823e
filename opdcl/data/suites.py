"""Load evaluation suites: shipped, lm-eval's own, or made from a file of questions."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import is_task_file, shipped_suites
from opdcl.data.chat import render_request, request_ids
from opdcl.data.formats import PACKED_ROW, Row
from opdcl.data.own_words import content_free
from opdcl.data.rows import load_records, load_rows
from opdcl.data.scoring import Scores, question_task, score_answers
from opdcl.data.stock_tasks import (
    Answering,
    answering_of,
    ensure_punkt,
    own_task,
    refuse_unsafe,
    stock_file,
    stock_names,
    stock_settings,
    tasks_beside,
    with_local_data,
)
from opdcl.errors import UsageError, listed, nearest
from opdcl.hub import go_offline_if_unreachable

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

# A log-likelihood, and whether greedy decoding would give the same text.
SURE, IMPOSSIBLE = (0.0, True), (-1000.0, False)

# The metric with one score for each constraint of a prompt.
PER_CONSTRAINT = "inst_level_strict_acc"

# The seed with which lm-eval draws the examples in prompts.
FEWSHOT_SEED = 1234

# Scores by which the function of a mean is known: one for each prompt, or one for each part of it.
MEAN_PROBES: tuple[list[Any], ...] = ([1.0, 0.0, 0.0, 0.25], [[1.0, 0.0], [0.25]])

# Tokens of an answer to a question of a user's file, unless `eval.max_new_tokens` says otherwise.
ANSWER_TOKENS = 96

# Content-free answer, or `chance` -> the scores of each document.
FloorScores = dict[str, list[Scores]]

# Documents and an answer to each -> the scores of each.
Grade = Callable[[list[dict], list[str]], list[Scores]]


class Suite:
    """A loaded suite: its lm-eval task, its metrics (the headline first), and its floors.

    Metrics are those that are means over prompts; those that are good when low come last.

    Raises:
        UsageError: No metric is a mean over prompts and good when high, or answers are written in a way that
            we do not support.
    """

    generative = True
    """Whether the model writes answers; otherwise the likelihoods of given ones are compared."""
    system: str | None = None
    """System prompt of the prompts that bring none."""

    def __init__(self, name: str, task: Any):
        self.name, self.task = name, task
        self.metrics = _headline_first(name, self.task)
        if self.generative and len(task._filters) > 1:
            self.metrics = [f"{one},{chain.name}" for one in self.metrics for chain in task._filters]
        self.lines: list[str] = []
        """The file and line of each document, if all rows of a local file are documents."""
        metadata = self.task.config.metadata or {}
        self.content = bool(metadata.get("content"))
        """Whether an answer counts only if base finds it to be about its prompt."""
        self.ordered = bool(metadata.get("ordered"))
        """Whether an answer counts only if base finds it more likely than its words in random order."""
        if self.generative:
            _ = self.answering  # which refuses what we do not support

    @property
    def answering(self) -> Answering:
        """How the task has its answers written."""
        return answering_of(self.task.config.generation_kwargs, self.name)

    @property
    def asking(self) -> dict[str, Any]:
        """How lm-eval is to build the prompts: as its own command does with a chat template."""
        return {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": self.system}

    def place(self, number: int) -> str:
        """Return the place of a document: its file and line, if they are known."""
        doc = self.task.eval_docs[number]
        if PACKED_ROW in doc:
            return Row.unpacked(doc[PACKED_ROW]).where
        return self.lines[number] if self.lines else f"document {number} of suite {self.name!r}"

    def documents(self, limit: int | None) -> list[dict]:
        """Return the first `limit` documents, or all."""
        return [doc for _, doc in self.task.doc_iterator(limit=limit)]

    def floors(self, limit: int | None, answers: list[str], grade: Grade | None = None) -> FloorScores:
        """Score answers without content on the first `limit` documents, like any answers.

        They are those of `content_free`, and `answers`, each to another prompt. `grade` scores them, or else
        the suite's rules do.
        """
        docs, grade = self.documents(limit), grade or self.scores
        # In a conversation only the last question counts; an answer may repeat earlier turns.
        asked = [str(self.task.doc_to_text(doc)) for doc in docs]
        targets = [_text(self.task.doc_to_target(doc)) for doc in docs]
        clusters = [str(doc.get("cluster") or number) for number, doc in enumerate(docs)]
        answers_of = content_free(asked, targets, clusters)
        if len(docs) > 1:
            # Half the suite away: neighbours are often about the same fact.
            half = len(docs) // 2
            answers_of["shuffled"] = answers[half:] + answers[:half]
        return {name: grade(docs, texts) for name, texts in answers_of.items()}

    def prompt_of(self, doc: dict) -> str:
        """Return what a document asks, for a reader: of a user's row, the whole conversation."""
        if PACKED_ROW in doc:
            return Row.unpacked(doc[PACKED_ROW]).shown()
        return str(self.task.doc_to_text(doc))

    def record(self, doc: dict, answers: list[Any]) -> dict[str, Any]:
        """Return prompt, response and target of a document as they are stored.

        A conversation also has its last question, by which a reader knows it from others; a prompt with
        constraints has these, so that a reader sees which one an answer violates.
        """
        prompt, question = self.prompt_of(doc), self.task.doc_to_text(doc)
        stored = {"prompt": prompt, "response": answers[0], "target": self.task.doc_to_target(doc) or None}
        if question != prompt:
            stored["question"] = question
        if PER_CONSTRAINT in self.metrics:
            stored["constraints"] = constraints_of(doc)
        return stored

    def requests(self, limit: int | None, tokenizer: Any) -> list[Instance]:
        """Return the requests for the first `limit` documents, few-shot examples included, in document order.

        Raises:
            UsageError: Several answers to one document are asked for.
        """
        # Unseeded, lm-eval would draw other examples for each state.
        self.task.set_fewshot_seed(FEWSHOT_SEED)
        template = functools.partial(render_request, tokenizer)
        options: Any = {"limit": limit, "rank": 0, "world_size": 1, "chat_template": template}
        self.task.build_all_requests(**options, **self.asking)
        requests: list[Instance] = self.task.instances
        if self.generative and len({request.doc_id for request in requests}) < len(requests):
            message = f"suite {self.name!r} asks for several answers to one document, which is not supported"
            raise UsageError(message, "choose another task")
        return requests

    def encode(self, limit: int | None, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, as it is asked."""
        return [request_ids(request, tokenizer) for request in self.requests(limit, tokenizer)]

    def scores(self, docs: list[dict], answers: list[str]) -> list[Scores]:
        return score_answers(self.task, docs, answers)

    def blank(self, doc: dict) -> Scores:
        """Return the scores of an empty answer."""
        return self.scores([doc], [""])[0]

    def check(self, limit: int | None) -> None:
        """Write the prompt of the first `limit` documents, or of all, and score an empty answer to each.

        Raises:
            UsageError: A document lacks a field, or a score is not a number for each prompt.
        """
        hint = f"lm-eval's task {self.name} must be able to read each row, and score each by a number"
        self.task.set_fewshot_seed(FEWSHOT_SEED)
        for number, doc in enumerate(self.documents(limit), 1):
            try:
                self._refuse_lacking(doc)
                prefix, config = self.task.doc_to_prefix(doc), self.task.config
                if number == 1:  # once is enough for the templates of the examples in a prompt
                    self.task.fewshot_context(doc, num_fewshot=config.num_fewshot or 0, gen_prefix=prefix)
                else:
                    self.task.doc_to_text(doc)
                    self.task.resolve_field(doc, config.description)
                scores = self.blank(doc)
            except Exception as fault:  # on other columns, lm-eval's templates and functions raise anything
                row = self.lines[number - 1] if self.lines else f"row {number}"
                message = f"{row} of suite {self.name!r} cannot be scored: {_reason(fault)}"
                raise UsageError(message, hint) from fault
            try:
                self.means([scores])
            except (KeyError, TypeError, ValueError) as fault:
                message = f"suite {self.name!r} does not score prompt by prompt (as BLEU does not)"
                raise UsageError(f"{message}, which is not supported", hint) from fault

    def _refuse_lacking(self, doc: dict) -> None:
        """Raise a KeyError for a missing column, whose name lm-eval would take for the prompt itself."""
        for field in (self.task.config.doc_to_text, self.task.config.doc_to_choice):
            if isinstance(field, str) and field.isidentifier() and doc.get(field) in (None, ""):
                raise KeyError(field)

    def means(self, scores: list[Scores]) -> dict[str, float]:
        """Return the mean of each metric; one without a score, which is an empty list, is left out."""
        means = {}
        for metric in self.metrics:
            column = [row[metric] for row in scores]
            scored = [score for score in column if not isinstance(score, list) or score]
            if scored:
                means[metric] = mean_score(scored)
        return means


class LikelihoodSuite(Suite):
    """A suite that compares log-likelihoods of given texts: multiple choice, or how a text goes on.

    Its first metric is `acc_norm` if it has that, since `acc` favours short choices. Its floor is chance.
    Prompts have no chat template, as by default in lm-eval.
    """

    generative = False

    @property
    def asking(self) -> dict[str, Any]:
        return {}

    def floors(self, limit: int | None, answers: list[str], grade: Grade | None = None) -> FloorScores:
        """Return the expected scores of a guess on the first `limit` documents."""
        return {"chance": [self._chance(doc) for doc in self.documents(limit)]}

    def _chance(self, doc: dict) -> Scores:
        """Return the mean scores over the choices, each taken for certain; a single text is never certain."""
        if self.task.OUTPUT_TYPE == "loglikelihood":
            return self.task.process_results(doc, [IMPOSSIBLE])
        count = len(self.task.doc_to_choice(doc))
        prior = [SURE] * count if "acc_mutual_info" in self.task.aggregation() else []
        totals = dict.fromkeys(self.metrics, 0.0)
        for choice in range(count):
            certain = [IMPOSSIBLE] * count
            certain[choice] = SURE
            scores = self.task.process_results(doc, certain + prior)
            for metric in self.metrics:
                totals[metric] += scores[metric]
        return {metric: float(total) / count for metric, total in totals.items()}

    def blank(self, doc: dict) -> Scores:
        """Return the scores of a guess.

        Raises:
            ValueError: The document has no two choices that are texts, or none of them is right.
        """
        target = self.task.doc_to_target(doc)
        if self.task.OUTPUT_TYPE == "loglikelihood":
            if not target:
                raise ValueError("the text that should follow is empty")
            return self._chance(doc)
        choices = self.task.doc_to_choice(doc)
        if not isinstance(choices, list) or len(choices) < 2:
            raise ValueError("it needs a list of at least two choices")
        if not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise ValueError("a choice is empty or no text")
        scores = self._chance(doc)
        if not scores[self.metrics[0]]:
            raise ValueError(f"the answer {target!r} is none of its {len(choices)} choices")
        return scores

    def prompt_of(self, doc: dict) -> str:
        """Return the text before the choices; if they begin the text or are all of it, one in each line."""
        if self.task.multiple_input:
            end = self.task.doc_to_target(doc)
            return "\n".join(f"{choice} {end}" for choice in self.task.doc_to_choice(doc))
        prompt = str(self.task.doc_to_text(doc))
        if self.task.config.doc_to_choice and not prompt.strip():
            return "\n".join(self.task.doc_to_choice(doc))
        return prompt

    def record(self, doc: dict, answers: list[Any]) -> dict[str, Any]:
        """Return prompt, target, log-likelihoods and, for multiple choice, the likeliest choice."""
        likelihoods, target = [likelihood for likelihood, _ in answers], self.task.doc_to_target(doc)
        stored = {"prompt": self.prompt_of(doc), "response": None, "target": target}
        if self.task.OUTPUT_TYPE == "multiple_choice":
            choices = self.task.doc_to_choice(doc)
            by_length = self.metrics[0] == "acc_norm"
            weighed = []
            for choice, likelihood in zip(choices, likelihoods, strict=False):
                weighed.append(likelihood / len(choice) if by_length else likelihood)
            stored["response"] = choices[weighed.index(max(weighed))]
            # With several beginnings, the text is the number of the right one, and the target the common end.
            right = self.task.doc_to_text(doc) if self.task.multiple_input else target
            right = right if isinstance(right, list) else [right]
            stored["target"] = " | ".join(str(choices[one] if isinstance(one, int) else one) for one in right)
        return stored | {"likelihoods": likelihoods}


def _headline_first(name: str, task: Any) -> list[str]:
    """Return the metrics of a task that are means over prompts: the headline first, last those good when low.

    Raises:
        UsageError: None of them is good when high.
    """
    better = task.higher_is_better()
    low = {metric for metric in task.aggregation() if better.get(metric) is False}
    means = [metric for metric, aggregate in task.aggregation().items() if _is_mean(aggregate)]
    chosen = task.OUTPUT_TYPE == "multiple_choice"
    metrics = sorted(means, key=lambda metric: (metric in low, chosen and metric != "acc_norm"))
    if not metrics:
        message = f"suite {name!r} does not score prompt by prompt (as BLEU does not), which is not supported"
        raise UsageError(
            message, f"choose a task with a score whose aggregation is mean, not {listed(better)}"
        )
    if metrics[0] in low:
        message = f"suite {name!r} has no score that is good when high: less {listed(metrics)} is better"
        hint = (
            "choose another task; in one of your own, score the opposite (1 minus it), higher_is_better: true"
        )
        raise UsageError(message, hint)
    return metrics


def _is_mean(aggregate: Callable[[list], Any]) -> bool:
    """Tell whether a function of scores is their mean, as verdicts and intervals take it to be."""
    for probe in MEAN_PROBES:
        try:
            if round(float(aggregate(list(probe))), 6) == mean_score(probe):
                return True
        except Exception:  # a function of the task's own, which wants other scores
            continue
    return False


def constraints_of(doc: dict[str, Any]) -> list[str]:
    """Return the constraints that `PER_CONSTRAINT` scores, of `instructions` or IFEval, in words."""
    if kinds := doc.get("instruction_id_list"):
        # Such as `keywords:forbidden_words`.
        return [kind.rpartition(":")[2].replace("_", " ") for kind in kinds]
    return [constraint["text"] for constraint in json.loads(doc.get("constraints", "[]"))]


def load_suite(
    name: str,
    config: EvalConfig | None = None,
    read_rows: Callable[[str], list[Row]] = load_rows,
    trusted: bool = False,
) -> Suite:
    """Load a shipped suite, a task of lm-eval, or what `config.data` names: a file of questions or a task of
    the user's own, which is code and must be `trusted`.

    Raises:
        UsageError: The suite is unknown or not supported, or its data could not be loaded or do not fit.
    """
    config = config or EvalConfig()
    ensure_punkt()
    quiet_lm_eval()
    shipped, path = shipped_suites().get(name), config.data.get(name)
    if shipped and path:
        raise UsageError(f"suite {name!r} is shipped with its data", f"give {path} another name")
    if shipped:
        return _load(
            name, name, f"suite {name!r} cannot be loaded", "install opdcl again", shipped.parents[1]
        )
    if path and is_task_file(path):
        message = f"suite {name!r} cannot be loaded from {path}"
        hint = "check dataset_path, dataset_kwargs, the splits and the templates in it"
        suite = _load(name, own_task(name, Path(path), trusted), message, hint)
        suite.check(None)
        return suite
    stock = stock_file(name)
    if stock:
        return _load_stock(name, stock, path)
    if path:
        task = question_task(name, functools.partial(read_rows, path), config.max_new_tokens or ANSWER_TOKENS)
        return _load(name, task, f"suite {name!r} cannot read {path}", "give rows of questions and answers")
    raise _unknown(name)


def _load_stock(name: str, file: Path, path: str | None) -> Suite:
    """Load a task of lm-eval, with a local file in place of its dataset if one is given."""
    settings = stock_settings(name, file)
    if path is None:
        go_offline_if_unreachable()
        # lm-eval reads the cache of `datasets`, which `hf download` does not fill.
        data = f"dataset {settings['dataset_path']}" if "dataset_path" in settings else "its data"
        online = f"while online, a dry run of this command caches {data}"
        hint = f"name a local copy: --data {name}=PATH; or, {online}"
        suite = _load(name, settings, f"could not load the data of suite {name!r}", hint)
        suite.check(1)
        return suite
    records = load_records(path)
    place = path if "process_docs" in settings else records[0][1]
    hint = f"{path} must have the columns of lm-eval's data for the task {name}"
    task = with_local_data(settings, path, records)
    suite = _load(name, task, f"suite {name!r} cannot read {place}", hint)
    # A task may leave rows of its data out; then lines and documents do not correspond.
    lines = [where for _, where in records]
    suite.lines = lines if len(lines) == len(suite.task.eval_docs) else []
    suite.check(None)
    return suite


def _load(
    name: str, task: str | dict[str, Any], message: str, hint: str, folder: Path | None = None
) -> Suite:
    """Let lm-eval load a task; `folder` holds it if it is only named, `message` is for what fails.

    Raises:
        UsageError: lm-eval cannot load it, or it runs code that a model writes.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder) if folder else None, include_defaults=False)
    try:
        (one,) = manager.load([task])["tasks"].values()
        refuse_unsafe(name, getattr(one, "UNSAFE_CODE", False))
        if one.OUTPUT_TYPE in ("multiple_choice", "loglikelihood"):
            return LikelihoodSuite(name, one)
        return Suite(name, one)
    except UsageError:
        raise
    except Exception as fault:  # lm-eval asks the first row for all that it needs
        raise UsageError(f"{message}: {_reason(fault)}", hint) from fault


def _text(target: Any) -> str:
    """Return a target as text: of several accepted ones, the first."""
    return str((target or [""])[0] if isinstance(target, list) else target)


def _reason(fault: Exception) -> str:
    return f"no column {fault}" if isinstance(fault, KeyError) else str(fault)[:200]


def _unknown(name: str) -> UsageError:
    members = tasks_beside(name)
    if members:
        hint = f"name its tasks instead: {listed(members)}"
        return UsageError(f"suite {name!r} is a group of tasks, which is not supported", hint)
    shipped = [*shipped_suites()]
    near = nearest(name, [*shipped, *stock_names()])
    known = f"shipped: {', '.join(shipped)}; or a task of lm-eval"
    return UsageError(f"unknown suite {name!r}", f"did you mean {near}?" if near else known)


def mean_score(values: list) -> float:
    """Return the mean over prompts, or over all parts where a prompt has a list of scores."""
    parts: list[float] = []
    for value in values:
        parts += value if isinstance(value, list) else [value]
    return round(sum(map(float, parts)) / len(parts), 6)


def cut_at(text: str, stops: list[str]) -> str:
    """Return the text up to the stop strings, one after the other, as lm-eval cuts it."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def quiet_lm_eval() -> None:
    """Silence lm-eval's progress, which it logs at warning level: the stage reports it already."""
    import datasets

    for name in ("lm_eval", "lm-eval", "evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
