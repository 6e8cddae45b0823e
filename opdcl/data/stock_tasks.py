"""lm-eval's own tasks: found by name, checked, with a local file in place of their dataset."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError

_NAME = re.compile(
    rb"""^["']?(task|group)["']?[ \t]*:[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?\r?$""", re.MULTILINE
)


@functools.cache
def _files() -> dict[str, dict[str, Path]]:
    """Return the files of lm-eval's tasks and groups: kind -> name -> file."""
    import lm_eval.tasks

    files: dict[str, dict[str, Path]] = {"task": {}, "group": {}}
    # lm-eval's index parses all of its 14,000 files, which takes 20 seconds; this takes one.
    for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
        for kind, name in _NAME.findall(file.read_bytes()):
            files[kind.decode()].setdefault(name.decode(), file)
    return files


def stock_file(name: str) -> Path | None:
    """Return the file that defines a task of lm-eval, or None."""
    return _files()["task"].get(name)


def stock_names() -> list[str]:
    """Return the names of all tasks and groups of lm-eval."""
    return [*_files()["task"], *_files()["group"]]


def tasks_beside(group: str) -> list[str]:
    """Return the tasks that lie in the folder of a group of lm-eval; none if it is no group."""
    file = _files()["group"].get(group)
    if file is None:
        return []
    return [name for name, place in _files()["task"].items() if file.parent in place.parents]


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
    try:
        # Read first without importing the task's functions: those of HumanEval run code as they are imported.
        refuse_unsafe(name, bool(load_yaml(file, resolve_func=False).get("unsafe_code")))
        settings = load_yaml(file, resolve_func=True)
    except UsageError:
        raise
    except Exception as fault:  # a task's own code: a package is missing, or a metric has to be downloaded
        hint = f"install what the message names, such as pip install 'lm-eval[math]', or correct {file.name}"
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


def with_local_data(
    settings: dict[str, Any], path: str, records: list[tuple[dict[str, Any], str]]
) -> dict[str, Any]:
    """Return the settings of a task with the records of a local file in place of its dataset.

    Examples in its prompts (few-shot) come from the same file, never the row that is asked.
    """
    name, shots = settings["task"], settings.get("num_fewshot") or 0
    if "class" in settings:
        message = f"suite {name!r} loads its data in its own code, not from a file"
        raise UsageError(message, "leave --data out")
    # An inline task does not inherit the stock task of its name, so its settings are copied.
    settings = {key: value for key, value in settings.items() if not key.startswith("dataset_")}
    split = settings.get("test_split") or settings.get("validation_split") or "test"
    fewshot = settings.get("fewshot_config") or {}
    if "samples" not in fewshot:
        # lm-eval's other samplers show the first rows, even to themselves.
        fewshot = {**fewshot, "split": split, "sampler": "default"}
        settings |= {"fewshot_split": split, "fewshot_config": fewshot}
        if shots >= len(records):
            message = f"suite {name!r} shows {shots} other rows of the file, which has {len(records)}"
            raise UsageError(message, f"{path} needs at least {shots + 1} rows")

    def load(**kwargs: Any) -> dict[str, Any]:
        return {split: _dataset(records)}

    splits = {"training_split": None, "validation_split": None, "test_split": split}
    return settings | splits | {"custom_dataset": load}


def _dataset(records: list[tuple[dict[str, Any], str]]) -> Any:
    """Return records as a dataset with the columns of all of them."""
    from datasets import Dataset
    from pyarrow import ArrowException

    rows, places = zip(*records, strict=True)
    columns: dict[str, None] = dict.fromkeys(key for row in rows for key in row)
    first = columns | rows[0]
    try:
        return Dataset.from_list([first, *rows[1:]])
    except ArrowException:
        for row, where in zip(rows, places, strict=True):
            try:
                Dataset.from_list([first, row])
            except ArrowException as fault:
                message = f"{where} holds other kinds of values than {places[0]}: {fault}"
                raise UsageError(message, "give each column values of one kind") from fault
        raise
