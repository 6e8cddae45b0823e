"""Load evaluation suites: shipped, lm-eval's own, or made from a file of questions."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import EvalConfig
from opdcl.config.own_tasks import is_task_file
from opdcl.config.shipped import shipped_suites
from opdcl.data.chat import render, request_ids, tool_row
from opdcl.data.floors import content_free
from opdcl.data.learned import call_text
from opdcl.data.nltk_tables import ensure_punkt
from opdcl.data.own_tasks import own_task
from opdcl.data.questions import question_task, repeated, shown
from opdcl.data.rows import Row, load_records, load_rows
from opdcl.data.stock_tasks import (
    columns,
    group_tasks,
    one_by_one,
    refuse_unsafe,
    stock_file,
    stock_names,
    stock_settings,
    with_local_data,
)
from opdcl.errors import UsageError, nearest
from opdcl.hub import fail_fast

# A log-likelihood, and whether greedy decoding would give the same text.
SURE, IMPOSSIBLE = (0.0, True), (-1000.0, False)

# Content-free answer, or `chance` -> the scores of each document, by metric.
FloorScores = dict[str, list[dict[str, Any]]]

# Documents, an answer to each, and its scores -> the scores after a model has read the answers.
Judge = Callable[[list[dict], list[str], list[dict[str, Any]]], list[dict[str, Any]]]


class Suite:
    """A loaded suite: its lm-eval tasks, its metrics (the headline first), and its floors.

    `loaded` is what `lm_eval.evaluator.evaluate` runs: one task, or those of a group.
    """

    generative = True
    """Whether the model writes answers; otherwise the likelihoods of given ones are compared."""
    fewshot_seed = 0

    def __init__(self, name: str, loaded: Any):
        self.name, self.loaded = name, loaded
        self.tasks = [*loaded["tasks"].values()]
        self.task = self.tasks[0]
        self.metrics: list[str] = list(self.task.aggregation())
        self.content = bool((self.task.config.metadata or {}).get("content"))
        """Whether an answer counts only if base finds it to be about its prompt."""
        self._floors: dict[int | None, FloorScores] = {}

    def documents(self, limit: int | None) -> list[dict]:
        """Return the first `limit` documents of each task, or all."""
        return [doc for task in self.tasks for _, doc in task.doc_iterator(limit=limit)]

    def prompts(self, limit: int | None) -> list[str]:
        """Return the prompts of the first `limit` documents, or of all, without few-shot examples."""
        return [str(_prompt_of(self.task, doc)) for doc in self.documents(limit)]

    def floors(self, limit: int | None, answers: list[str], judge: Judge | None = None) -> FloorScores:
        """Score answers without content on the first `limit` documents.

        They are those of `content_free`, and `answers`, each to another prompt. `judge` amends the scores
        where a model is needed to tell.
        """
        docs = self.documents(limit)

        def scores(texts: list[str]) -> list[dict[str, Any]]:
            found = self._score(docs, texts)
            return judge(docs, texts, found) if judge else found

        if limit not in self._floors:
            clusters = [str(doc.get("cluster") or number) for number, doc in enumerate(docs)]
            tools = [str(doc.get("tools") or "") for doc in docs]
            targets = [_text(self.task.doc_to_target(doc)) for doc in docs]
            # In a conversation only the last question counts; an answer may repeat earlier turns.
            asked = [str(self.task.doc_to_text(doc)) for doc in docs]
            texts = content_free(asked, targets, clusters, tools) | repeated(docs)
            self._floors[limit] = {name: scores(answers) for name, answers in texts.items()}
        if len(docs) == 1:
            return self._floors[limit]
        # Half the suite away: neighbours are often about the same fact.
        half = len(docs) // 2
        return self._floors[limit] | {"shuffled": scores(answers[half:] + answers[:half])}

    def record(self, task: Any, row: dict[str, Any]) -> dict[str, Any]:
        """Return prompt, response and target as they are stored, from a sample of lm-eval.

        A conversation has its last question besides, by which a reader knows it from others.
        """
        prompt, question = _prompt_of(task, row["doc"]), task.doc_to_text(row["doc"])
        stored = {"prompt": prompt, "response": row["resps"][0][0], "target": row["target"] or None}
        return stored if question == prompt else {**stored, "question": question}

    def lengths(self, limit: int | None, tokenizer: Any) -> list[int]:
        """Return the length of each prompt in tokens, as `encode`."""
        return [*map(len, self.encode(limit, tokenizer))]

    def encode(self, limit: int | None, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, as it is asked: with its few-shot examples.

        Raises:
            UsageError: The documents offer tools, and the chat template leaves them out, or writes calls in a
                form that the scorer does not read.
        """

        def template(messages: list[dict], add_generation_prompt: bool = True) -> str:
            return str(render(tokenizer, messages, add_generation_prompt, tokenize=False))

        self.task.set_fewshot_seed(self.fewshot_seed)
        options: Any = {"apply_chat_template": True, "chat_template": template}
        self.task.build_all_requests(limit=limit, rank=0, world_size=1, **options)
        encoded = [request_ids(request, tokenizer) for request in self.task.instances]
        for doc in (request.doc for request in self.task.instances):
            row = tool_row(doc, [{"role": "user", "content": self.task.doc_to_text(doc)}], self.name)
            if row.tools and doc.get("group") == "one call":
                text = call_text(row, doc["target"], tokenizer)
                if not self._score([doc], [text])[0][self.metrics[0]]:
                    where = f"suite {self.name!r}"
                    message = f"{where} does not read tool calls as this chat template writes them: {text!r}"
                    raise UsageError(message, "it reads JSON, alone or in <tool_call> tags")
                break
        return encoded

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

    def blank(self, doc: dict) -> dict[str, Any]:
        """Return the scores of an empty answer."""
        return self._score([doc], [""])[0]

    def check(self, limit: int | None, lines: list[str]) -> None:
        """Score an empty answer to the first `limit` documents, or to all; `lines` says where they stand.

        Raises:
            UsageError: A document lacks a field, or a score is not a number for each prompt.
        """
        config = self.task.config
        fields = [f for f in (config.doc_to_text, config.doc_to_choice) if isinstance(f, str)]
        hint = f"lm-eval's task {self.name} must be able to read each row, and score each by a number"
        for number, doc in enumerate(self.documents(limit), 1):
            try:
                # lm-eval takes the name of a column that is missing for the prompt itself.
                if lacking := [f for f in fields if f.isidentifier() and doc.get(f) in (None, "")]:
                    raise KeyError(lacking[0])
                self.task.doc_to_text(doc)
                scores = self.blank(doc)
            except Exception as fault:  # whatever lm-eval's templates and functions raise on other columns
                row = lines[number - 1] if number <= len(lines) else f"row {number}"
                message = f"{row} of suite {self.name!r} cannot be scored: {_reason(fault)}"
                raise UsageError(message, hint) from fault
            try:
                self.means([scores])
            except (KeyError, TypeError, ValueError) as fault:
                message = f"suite {self.name!r} does not score prompt by prompt (as BLEU does not)"
                raise UsageError(f"{message}, which is not supported", hint) from fault

    def means(self, scores: list[dict[str, Any]]) -> dict[str, float]:
        """Return the mean of each metric; one without a score, which is an empty list, is left out."""
        means = {}
        for metric in self.metrics:
            column = [row[metric] for row in scores]
            scored = [score for score in column if score or not isinstance(score, list)]
            if scored:
                means[metric] = mean_score(scored)
        return means


class LikelihoodSuite(Suite):
    """A suite that compares log-likelihoods of given texts: multiple choice, or how a text goes on.

    Its metrics are means over documents: first `acc_norm`, since `acc` favours short choices, last those that
    are good when low. Its floor is chance. Prompts have no chat template, as by default in lm-eval.

    Raises:
        UsageError: No score is a mean over documents.
    """

    generative = False
    fewshot_seed = 1234  # lm-eval's own
    max_tokens = 0

    def __init__(self, name: str, loaded: Any):
        from lm_eval.api.metrics import mean

        super().__init__(name, loaded)
        for task in self.tasks:
            means, better = task.aggregation(), task.higher_is_better()
            self.metrics = [m for m in self.metrics if means.get(m) is mean]
        self.metrics.sort(key=lambda metric: (not better.get(metric, True), metric != "acc_norm"))
        if not self.metrics or not better.get(self.metrics[0], True):
            message = f"suite {name!r} has no score that is a mean over prompts and good when high"
            raise UsageError(message, "choose another task")

    def floors(self, limit: int | None, answers: list[str], judge: Judge | None = None) -> FloorScores:
        """Return the expected scores of a guess on the first `limit` documents."""
        if limit not in self._floors:
            docs = [(task, doc) for task in self.tasks for _, doc in task.doc_iterator(limit=limit)]
            self._floors[limit] = {"chance": [self._chance(task, doc) for task, doc in docs]}
        return self._floors[limit]

    def _chance(self, task: Any, doc: dict) -> dict[str, float]:
        """Return the mean scores over the choices, each taken for certain; a single text is never certain."""
        if task.OUTPUT_TYPE == "loglikelihood":
            return task.process_results(doc, [IMPOSSIBLE])
        count = len(task.doc_to_choice(doc))
        prior = [SURE] * count if "acc_mutual_info" in task.aggregation() else []
        totals = dict.fromkeys(self.metrics, 0.0)
        for choice in range(count):
            certain = [IMPOSSIBLE] * count
            certain[choice] = SURE
            scores = task.process_results(doc, certain + prior)
            for metric in self.metrics:
                totals[metric] += scores[metric]
        return {metric: float(total) / count for metric, total in totals.items()}

    def blank(self, doc: dict) -> dict[str, Any]:
        """Return the scores of a guess.

        Raises:
            ValueError: The document has no two choices that are texts, or none of them is right.
        """
        target = self.task.doc_to_target(doc)
        if self.task.OUTPUT_TYPE == "loglikelihood":
            if not target:
                raise ValueError("the text that should follow is empty")
            return self._chance(self.task, doc)
        choices = self.task.doc_to_choice(doc)
        if not isinstance(choices, list) or len(choices) < 2:
            raise ValueError("it needs a list of at least two choices")
        if not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise ValueError("a choice is empty or no text")
        scores = self._chance(self.task, doc)
        if not scores[self.metrics[0]]:
            raise ValueError(f"the answer {target!r} is none of its {len(choices)} choices")
        return scores

    def prompts(self, limit: int | None) -> list[str]:
        """Return the prompts of the first `limit` documents of each task, or of all."""
        return [self._prompt(task, doc) for task in self.tasks for _, doc in task.doc_iterator(limit=limit)]

    def _prompt(self, task: Any, doc: dict) -> str:
        """Return the text before the choices; if they begin the text or are all of it, one in each line."""
        if task.multiple_input:
            return "\n".join(f"{choice} {task.doc_to_target(doc)}" for choice in task.doc_to_choice(doc))
        prompt = str(task.doc_to_text(doc))
        all_in_choices = task.config.doc_to_choice and not prompt.strip()
        return "\n".join(task.doc_to_choice(doc)) if all_in_choices else prompt

    def record(self, task: Any, row: dict[str, Any]) -> dict[str, Any]:
        """Return prompt, target, log-likelihoods and, for multiple choice, the likeliest choice."""
        doc, likelihoods = row["doc"], [answers[0][0] for answers in row["resps"]]
        stored = {"prompt": self._prompt(task, doc), "response": None, "target": row["target"]}
        if task.OUTPUT_TYPE == "multiple_choice":
            choices = task.doc_to_choice(doc)
            sizes = [len(choice) if self.metrics[0] == "acc_norm" else 1 for choice in choices]
            stored["response"] = choices[max(range(len(choices)), key=lambda i: likelihoods[i] / sizes[i])]
            # With several beginnings, the text is the number of the right one, and the target the common end.
            right = task.doc_to_text(doc) if task.multiple_input else row["target"]
            right = right if isinstance(right, list) else [right]
            stored["target"] = " | ".join(str(choices[one] if isinstance(one, int) else one) for one in right)
        return stored | {"likelihoods": likelihoods}

    def lengths(self, limit: int | None, tokenizer: Any) -> list[int]:
        """Return the length in tokens of every text whose likelihood is asked for, with its examples."""
        texts: list[str] = []
        for task in self.tasks:
            task.set_fewshot_seed(self.fewshot_seed)
            task.build_all_requests(limit=limit, rank=0, world_size=1)
            texts += ["".join(request.args) for request in task.instances]
        return [len(ids) for ids in tokenizer(texts)["input_ids"]]


def load_suite(
    name: str,
    config: EvalConfig | None = None,
    read_rows: Callable[[str], list[Row]] = load_rows,
    trusted: bool = False,
) -> Suite:
    """Load a shipped suite, a task or group of lm-eval, or what `config.data` names: a file of questions or a
    task of the user's own, whose code runs only if it is `trusted`.

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
    own = is_task_file(path or "")
    stock = None if shipped or own else stock_file(name)
    settings = stock_settings(name, stock) if stock else {}
    records = load_records(path) if stock and path else []
    if shipped:
        task: str | dict[str, Any] = name
    elif path and own:
        task = own_task(name, Path(path), trusted)
    elif stock:
        if not path:
            fail_fast()
        task = with_local_data(settings, path, records) if path else str(stock)
    elif path:
        task = question_task(name, functools.partial(read_rows, path), config.max_new_tokens or 96)
    elif members := group_tasks(name):
        return _group(name, [load_suite(member, config, read_rows) for member in members])
    else:
        raise _unknown(name)
    try:
        loaded = manager.load([task])
        refuse_unsafe(name, any(getattr(one, "UNSAFE_CODE", False) for one in loaded["tasks"].values()))
        (kind,) = (one.OUTPUT_TYPE for one in loaded["tasks"].values())
        suite = (LikelihoodSuite if kind in ("multiple_choice", "loglikelihood") else Suite)(name, loaded)
    except UsageError:
        raise
    except Exception as fault:  # lm-eval asks the first row for all that it needs
        raise _not_loaded(name, path, records, settings, fault) from fault
    if stock or own:
        lines = [where for _, where in records]
        # A task may leave rows of its data out; then lines and documents do not correspond.
        suite.check(None if path else 1, lines if len(lines) == len(suite.task.eval_docs) else [])
    return suite


def _not_loaded(
    name: str,
    path: str | None,
    records: list[tuple[dict[str, Any], str]],
    settings: dict[str, Any],
    fault: Exception,
) -> UsageError:
    """Return what kept lm-eval from loading a suite as an error; `path` is the user's file for it, if any."""
    if is_task_file(path or ""):
        hint = "check dataset_path, dataset_kwargs, the splits and the templates in it"
        return UsageError(f"suite {name!r} cannot be loaded from {path}: {_reason(fault)}", hint)
    if path:
        hint = f"{path} must have the columns of lm-eval's data for the task {name}{columns(settings)}"
        place = records[0][1] if records and "process_docs" not in settings else path
        return UsageError(f"suite {name!r} cannot read {place}: {_reason(fault)}", hint)
    # lm-eval reads the cache of `datasets`, which `hf download` does not fill.
    dataset = f"dataset {settings['dataset_path']}" if "dataset_path" in settings else "its data"
    hint = (
        f"name a local copy: --data {name}=PATH; or, while online, a dry run of this command caches {dataset}"
    )
    return UsageError(f"could not load the data of suite {name!r}: {str(fault)[:200]}", hint)


def _group(name: str, parts: list[Suite]) -> Suite:
    """Return the suites of a group's tasks as one."""
    if any(part.generative for part in parts):
        message = f"the group {name!r} has generative tasks, which is not supported"
        raise UsageError(message, one_by_one([part.name for part in parts]))
    return LikelihoodSuite(name, {"tasks": {part.name: part.task for part in parts}})


def _prompt_of(task: Any, doc: dict) -> Any:
    """Return what a document asks: of a user's row, the whole conversation."""
    whole = shown(doc)
    return task.doc_to_text(doc) if whole is None else whole


def _text(target: Any) -> str:
    """Return a target as text: of several accepted ones, the first."""
    return str((target or [""])[0] if isinstance(target, list) else target)


def _reason(fault: Exception) -> str:
    return f"no column {fault}" if isinstance(fault, KeyError) else str(fault)[:200]


def _unknown(name: str) -> UsageError:
    shipped = [*shipped_suites()]
    near = nearest(name, [*shipped, *stock_names()])
    known = f"shipped: {', '.join(shipped)}; or a task or group of lm-eval"
    return UsageError(f"unknown suite {name!r}", f"did you mean {near}?" if near else known)


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
