"""lm-eval's own tasks: found by name, checked, and with a local file in place of their dataset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from opdcl.data.rows import load_records
from opdcl.errors import UsageError

_TASK = re.compile(rb"""^["']?task["']?[ \t]*:[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?\r?$""", re.MULTILINE)
# Task -> the file that defines it; filled at the first look.
_files: dict[str, Path] = {}


def stock_file(name: str) -> Path | None:
    """Return the file that defines a task of lm-eval, or None."""
    if not _files:
        import lm_eval.tasks

        # lm-eval's index parses all of its 14,000 files, which takes 20 seconds; this takes one.
        for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
            for match in _TASK.finditer(file.read_bytes()):
                _files.setdefault(match[1].decode(), file)
    return _files.get(name)


def stock_names() -> list[str]:
    """Return the names of all tasks of lm-eval."""
    stock_file("")
    return [*_files]


def stock_settings(name: str, file: Path) -> dict[str, Any]:
    """Return the settings of a task.

    Raises:
        UsageError: The task is not generative, samples several answers, or needs a missing package.
    """
    import langdetect
    from lm_eval.tasks._yaml_loader import load_yaml

    # IFEval asks it for the language of an answer; without a seed, the same answer scores by chance.
    langdetect.DetectorFactory.seed = 0
    try:
        settings = load_yaml(file, resolve_func=True)
    except Exception as fault:  # a task's own code: a package is missing, or a metric has to be downloaded
        hint = "install what the message names, such as pip install 'lm-eval[math]'"
        raise UsageError(f"suite {name!r} cannot be used here: {str(fault)[:200]}", hint) from fault
    hint = f"choose another task; for questions and answers of your own, another name than {name}"
    kind = settings.get("output_type", "generate_until")
    if kind != "generate_until":
        what = "compares log-likelihoods" if "likelihood" in kind or kind == "multiple_choice" else kind
        raise UsageError(f"suite {name!r} is not generative ({what}), which is not supported", hint)
    if settings.get("repeats", 1) > 1:
        raise UsageError(f"suite {name!r} samples several answers per prompt, which is not supported", hint)
    return settings


def with_local_data(settings: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the settings of a task with the rows of a local file in place of its dataset.

    Examples in its prompts (few-shot) come from the same file, never the row that is asked.
    """
    import datasets

    name, shots = settings["task"], settings.get("num_fewshot") or 0
    if "class" in settings:
        raise UsageError(
            f"suite {name!r} loads its data in its own code, not from a file", "leave --data out"
        )
    records = load_records(path)
    # An inline task does not inherit the stock task of its name, so its settings are copied.
    settings = {k: v for k, v in settings.items() if not k.startswith("dataset_")}
    split = settings.get("test_split") or settings.get("validation_split") or "test"
    fewshot = dict(settings.get("fewshot_config") or {})
    if "samples" not in fewshot:
        settings |= {"fewshot_split": split, "fewshot_config": fewshot | {"split": split}}
        if shots >= len(records):
            message = f"suite {name!r} shows {shots} other rows of the file, which has {len(records)}"
            raise UsageError(message, f"{path} needs at least {shots + 1} rows")

    def load(**kwargs: Any) -> dict[str, Any]:
        columns = dict.fromkeys(key for record, _ in records for key in record)
        table = {key: [record.get(key) for record, _ in records] for key in columns}
        return {split: datasets.Dataset.from_dict(table)}

    splits = {"training_split": None, "validation_split": None, "test_split": split}
    return settings | splits | {"custom_dataset": load}
