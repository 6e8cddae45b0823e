"""Load a task of lm-eval that a user has written. A task is code: nothing of it runs without consent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opdcl.config.shipped import ENDINGS
from opdcl.data.files import READERS, format_ending, is_regular
from opdcl.data.stock_tasks import stock_settings
from opdcl.errors import UsageError


def own_task(name: str, file: Path, trusted: bool) -> dict[str, Any]:
    """Return the settings of a task, whose templates, functions and data may run as code.

    Raises:
        UsageError: The user has not `trusted` it, or it is not supported or damaged, or is made of files that
            `task_files` does not know.
    """
    if not trusted:
        message = f"suite {name!r} is a task of your own, {file}, and a task is code"
        hint = "read it, and what it names; if you trust it, --set model.trust_remote_code=true lets it run"
        raise UsageError(message, hint)
    settings = stock_settings(name, file)
    if "group" in settings:
        raise UsageError(f"{file} is a group of tasks, which is not supported", "name the files of its tasks")
    known = task_files(file)
    _refuse_elsewhere(file.resolve(), known)
    kwargs = settings.get("dataset_kwargs")
    if isinstance(kwargs, dict) and "data_files" in kwargs:
        placed = _placed(kwargs["data_files"], file.resolve().parent, known)
        settings["dataset_kwargs"] = kwargs | {"data_files": placed}
    return settings | {"task": name}


def task_files(file: Path) -> list[Path]:
    """Return the files on which a task's scores depend: tasks, Python and rows in its folder; none is opened.

    Like lm-eval, it follows a link first: the folder is where the file really lies.
    """
    kinds = {*ENDINGS, ".py", *READERS}
    beside = sorted(Path(os.path.realpath(file)).parent.iterdir())
    return [path for path in beside if format_ending(path) in kinds and is_regular(path)]


def _refuse_elsewhere(file: Path, known: list[Path]) -> None:
    """Refuse a task that includes files of another folder, except lm-eval's: nobody would see them change."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    stock = Path(lm_eval.tasks.__file__).resolve().parent
    included = load_yaml(file, resolve_func=False, recursive=False).get("include") or []
    for name in included if isinstance(included, list) else [included]:
        part = (file.parent / name).resolve()
        if part in known:
            _refuse_elsewhere(part, known)
        elif not part.is_relative_to(stock):
            raise UsageError(f"{file} includes {part}, of another folder", "copy it beside the task")


def _placed(value: Any, folder: Path, known: list[Path]) -> Any:
    """Return local data files by their paths; those of another folder are refused."""
    if isinstance(value, dict):
        return {key: _placed(part, folder, known) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, folder, known) for part in value]
    place = Path(os.path.normpath(folder / str(value)))
    if place in known:
        return str(place)
    if place.is_file() or os.path.isfile(str(value)):
        message = f"the data file {value} is not among the rows beside the task"
        raise UsageError(message, f"copy it to {folder}")
    return value
