"""Load a task of lm-eval that a user has written. A task is code: nothing of it runs without consent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opdcl.data.files import is_regular
from opdcl.data.stock_tasks import stock_settings
from opdcl.errors import UsageError

MOST_FILES = 100


def own_task(name: str, file: Path, trusted: bool) -> dict[str, Any]:
    """Return the settings of a task, whose templates, functions and data may run as code.

    Raises:
        UsageError: The user has not `trusted` it, or it is not supported or damaged.
    """
    if not trusted:
        message = f"suite {name!r} is a task of your own, {file}, and a task is code"
        hint = "read it, and what it names; if you trust it, --set model.trust_remote_code=true lets it run"
        raise UsageError(message, hint)
    _read(file, {})
    settings = stock_settings(name, file)
    if settings.get("task") != name:
        raise UsageError(f"{file} is the task {settings.get('task')!r}, not {name!r}", "give its path again")
    kwargs = settings.get("dataset_kwargs")
    if isinstance(kwargs, dict) and "data_files" in kwargs:
        placed = _placed(kwargs["data_files"], file.parent)
        return settings | {"dataset_kwargs": kwargs | {"data_files": placed}}
    return settings


def task_files(file: Path) -> list[Path]:
    """Return the files that a task's scores depend on, as far as its own file tells; nothing of it runs.

    These are the file itself, those that it includes, the Python files beside them, and local data.
    """
    parts: dict[Path, dict[str, Any]] = {}
    _read(file, parts)
    code: set[Path] = set()
    data: dict[Path, None] = {}
    for part, settings in parts.items():
        code.update(path for path in part.parent.glob("*.py") if path.is_file())
        kwargs = settings.get("dataset_kwargs")
        if isinstance(kwargs, dict):
            data |= dict.fromkeys(_local_files(kwargs.get("data_files"), file.parent))
    return [*parts, *sorted(code), *data]


def _read(file: Path, parts: dict[Path, dict[str, Any]]) -> None:
    """Add what a task's file says, and what those say that it includes, each under its path.

    Like lm-eval, it follows links first: what a file includes is named from where the file really lies.
    """
    import yaml

    file = Path(os.path.realpath(file))  # which, unlike `resolve`, raises nothing at links in a circle
    if file in parts:
        raise UsageError(f"{file} includes itself, or is included twice", "remove the line include")
    if len(parts) == MOST_FILES:
        message = f"{file} is one of more than {MOST_FILES} files of a task"
        raise UsageError(message, "write it in fewer files")
    if not is_regular(file):
        raise UsageError(f"{file} is not a regular file", "check the path in the task")
    try:
        # Every value is read as text, whatever its tag: a tag can name Python.
        loader = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader
        settings = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as fault:
        first = " ".join(str(fault).split())[:200]
        raise UsageError(f"{file} is not valid YAML: {first}", "fix the YAML") from fault
    if not isinstance(settings, dict):
        raise UsageError(f"{file} is no task of lm-eval", "it needs a line such as task: my_task")
    parts[file] = settings
    included = settings.get("include") or []
    for name in included if isinstance(included, list) else [included]:
        _read(file.parent / str(name), parts)


def _placed(value: Any, folder: Path) -> Any:
    """Return local data files, which lie beside the task or in the current folder, by their paths."""
    if isinstance(value, dict):
        return {key: _placed(part, folder) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, folder) for part in value]
    if isinstance(value, str) and (folder / value).is_file():
        return str((folder / value).resolve())
    return value


def _local_files(value: Any, folder: Path) -> list[Path]:
    """Return the files that lie here of a name, a list of names, or either of them for each split."""
    parts = value.values() if isinstance(value, dict) else [value]
    files = []
    for part in {id(part): part for part in parts}.values():  # YAML may name one list many times
        for name in part if isinstance(part, list) else [part]:
            place = Path(_placed(name, folder)) if isinstance(name, str) else folder
            if place.is_file():
                files.append(place.resolve())
    return files
