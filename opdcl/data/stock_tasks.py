"""lm-eval's own tasks and groups: found by name, checked, with a local file in place of their dataset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError

_NAME = re.compile(
    rb"""^["']?(task|group)["']?[ \t]*:[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?\r?$""", re.MULTILINE
)
# Kind -> name -> the file that defines it; filled at the first look.
_files: dict[str, dict[str, Path]] = {"task": {}, "group": {}}


def stock_file(name: str) -> Path | None:
    """Return the file that defines a task of lm-eval, or None."""
    if not _files["task"]:
        import lm_eval.tasks

        # lm-eval's index parses all of its 14,000 files, which takes 20 seconds; this takes one.
        for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
            for match in _NAME.finditer(file.read_bytes()):
                _files[match[1].decode()].setdefault(match[2].decode(), file)
    return _files["task"].get(name)


def stock_names() -> list[str]:
    """Return the names of all tasks and groups of lm-eval."""
    stock_file("")
    return [*_files["task"], *_files["group"]]


def group_tasks(name: str) -> list[str]:
    """Return the tasks of a group of lm-eval, with those of the groups in it; none if it is no group.

    Raises:
        UsageError: The group's score is not the mean over the documents of its tasks as they are.
    """
    if stock_file(name) or name not in _files["group"]:
        return []
    from lm_eval.tasks._index import Entry, Kind, TaskIndex

    index: dict[str, Entry] = TaskIndex.build([_files["group"][name].parent])

    def members(one: Any) -> Iterator[str]:
        # Neither a group in another folder nor a task whose settings the group changes is in the index.
        entry = index.get(str(one), Entry("", Kind.UNKNOWN, None))
        group = entry.cfg or {}
        scores = group.get("aggregate_metric_list") or {"weight_by_size": False}
        scores = [scores] if isinstance(scores, dict) else scores
        if entry.kind is Kind.GROUP and all(score.get("weight_by_size", True) for score in scores):
            for child in group["task"]:
                yield from members(child)
        elif entry.kind is Kind.TAG:
            yield from sorted(entry.tags)
        elif entry.kind in (Kind.TASK, Kind.PY_TASK):
            yield entry.name
        else:
            message = f"the score of the group {name!r} is not the mean over its prompts"
            raise UsageError(
                f"{message}, which is not supported", one_by_one((index[name].cfg or {})["task"])
            )

    return [*dict.fromkeys(members(name))]


def one_by_one(tasks: list[Any]) -> str:
    """Return the hint to name the tasks of a group, of which it lists at most ten."""
    names = [str(one.get("task") or one.get("group")) if isinstance(one, dict) else one for one in tasks]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"name its tasks instead: {', '.join(names[:10])}{more}"


def stock_settings(name: str, file: Path) -> dict[str, Any]:
    """Return the settings of a task.

    Raises:
        UsageError: The task runs code that a model writes, measures perplexity, samples several answers, or
            needs a missing package.
    """
    import langdetect
    from lm_eval.tasks._yaml_loader import load_yaml

    # IFEval asks it for the language of an answer; without a seed, the same answer scores by chance.
    langdetect.DetectorFactory.seed = 0
    # Read first without importing the task's functions: those of HumanEval run code as they are imported.
    refuse_unsafe(name, bool(load_yaml(file, resolve_func=False).get("unsafe_code")))
    try:
        settings = load_yaml(file, resolve_func=True)
    except Exception as fault:  # a task's own code: a package is missing, or a metric has to be downloaded
        hint = "install what the message names, such as pip install 'lm-eval[math]'"
        raise UsageError(f"suite {name!r} cannot be used here: {str(fault)[:200]}", hint) from fault
    hint = f"choose another task; for questions and answers of your own, another name than {name}"
    if settings.get("output_type") == "loglikelihood_rolling":
        raise UsageError(f"suite {name!r} measures perplexity, which is no score of a prompt", hint)
    if settings.get("repeats", 1) > 1:
        raise UsageError(f"suite {name!r} samples several answers per prompt, which is not supported", hint)
    return settings


def refuse_unsafe(name: str, marked: bool) -> None:
    """Refuse a task that lm-eval marks as one that runs the code that a model writes."""
    if marked:
        message = f"suite {name!r} runs code that the model writes (lm-eval marks it as unsafe_code)"
        hint = (
            "choose another suite; or opdcl export RUN -o MODEL, then in a container lm-eval itself: "
            f"lm_eval run --model hf --model_args pretrained=MODEL --tasks {name} --confirm_run_unsafe_code"
        )
        raise UsageError(f"{message}, which is not supported", hint)


def columns(settings: dict[str, Any]) -> str:
    """List the columns that a task's templates read; "" for a task that reads them in code."""
    from jinja2 import Environment, meta

    parts = [settings.get(f"doc_to_{part}") for part in ("text", "choice", "target")]
    if "process_docs" in settings or any(callable(part) for part in parts):
        return ""
    texts = [f"{{{{{p}}}}}" if p.isidentifier() else p for p in parts if isinstance(p, str)]
    read = {name for text in texts for name in meta.find_undeclared_variables(Environment().parse(text))}
    return f": {', '.join(sorted(read))}" if read else ""


def with_local_data(
    settings: dict[str, Any], path: str, records: list[tuple[dict[str, Any], str]]
) -> dict[str, Any]:
    """Return the settings of a task with the records of a local file in place of its dataset.

    Examples in its prompts (few-shot) come from the same file, never the row that is asked.
    """
    import datasets
    import pyarrow

    name, shots = settings["task"], settings.get("num_fewshot") or 0
    if "class" in settings:
        raise UsageError(
            f"suite {name!r} loads its data in its own code, not from a file", "leave --data out"
        )
    # An inline task does not inherit the stock task of its name, so its settings are copied.
    settings = {k: v for k, v in settings.items() if not k.startswith("dataset_")}
    split = settings.get("test_split") or settings.get("validation_split") or "test"
    fewshot = dict(settings.get("fewshot_config") or {})
    if "samples" not in fewshot:
        # lm-eval's other samplers show the first rows, even to themselves.
        fewshot |= {"split": split, "sampler": "default"}
        settings |= {"fewshot_split": split, "fewshot_config": fewshot}
        if shots >= len(records):
            message = f"suite {name!r} shows {shots} other rows of the file, which has {len(records)}"
            raise UsageError(message, f"{path} needs at least {shots + 1} rows")

    def load(**kwargs: Any) -> dict[str, Any]:
        keys = dict.fromkeys(key for record, _ in records for key in record)
        table = {}
        for key in keys:
            table[key] = [record.get(key) for record, _ in records]
        try:
            return {split: datasets.Dataset.from_dict(table)}
        except pyarrow.ArrowException as fault:
            for record, where in records:
                try:
                    datasets.Dataset.from_list([records[0][0], record])
                except pyarrow.ArrowException:
                    message = f"{where} holds other kinds of values than {records[0][1]}: {fault}"
                    raise UsageError(message, "give each column values of one kind") from fault
            raise

    splits = {"training_split": None, "validation_split": None, "test_split": split}
    return settings | splits | {"custom_dataset": load}
