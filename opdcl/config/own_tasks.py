"""Tasks of lm-eval that a user has written: their files, named by path in place of a suite."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError, listed

ROLES = ("retention", "domain", "control")
ENDINGS = (".yaml", ".yml")
_LINE = re.compile(r"""^(task|group)[ \t]*:[ \t]*["']?([^\s"'#\[]*)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_MOST_CHARS = 1_000_000


def is_task_file(place: str) -> bool:
    """Tell whether a path names the file of a task."""
    return place.lower().endswith(ENDINGS)


def is_task_path(place: str) -> bool:
    """Return whether an entry of a list of suites is a file or folder; no suite's name looks like one."""
    return is_task_file(place) or ("/" in place and os.path.isdir(place))


def name_own_tasks(tree: dict[str, Any]) -> None:
    """Replace each path in the lists of suites by the task's name, whose data is then that path.

    Raises:
        UsageError: A file does not exist or names no task, or two suites would have the same name.
    """
    evaluation = tree.get("eval")
    if not isinstance(evaluation, dict):
        return
    data = evaluation.get("data")
    files = dict(data) if isinstance(data, dict) else {}
    found: dict[str, str] = {}
    for role in ROLES:
        suites = evaluation.get(role)
        suites = [suites] if isinstance(suites, str) else suites
        if not isinstance(suites, list) or not any(isinstance(s, str) and is_task_path(s) for s in suites):
            continue
        names = []
        for suite in suites:
            if isinstance(suite, str) and is_task_path(suite):
                name, file = _task_of(Path(suite))
                if found.setdefault(name, file) != file:
                    raise _same_name(name, file, found[name])
                suite = name
            names.append(suite)
        evaluation[role] = names
    for name, file in found.items():
        listings = [suite for role in ROLES for suite in (evaluation.get(role) or []) if suite == name]
        if len(listings) > 1 and files.get(name, file) != file:
            raise _same_name(name, file, files[name])
    if found:
        evaluation["data"] = files | found


def _same_name(name: str, file: str, other: str) -> UsageError:
    return UsageError(f"{file} and {other} would be the same suite {name!r}", "change the name of one task")


def _task_of(path: Path) -> tuple[str, str]:
    """Return the name of a task and its file; a folder must hold the file of one task."""
    if not path.is_dir():
        return _name_in(path), str(path)
    files = sorted(file for file in path.iterdir() if is_task_file(file.name) and _name_in(file, ""))
    if len(files) != 1:
        found = f"the tasks {listed(file.name for file in files)}" if files else "no file of a task"
        raise UsageError(f"{path} holds {found}", f"name one file, such as {path}/TASK.yaml")
    return _name_in(files[0]), str(files[0])


def _name_in(file: Path, otherwise: str | None = None) -> str:
    """Return the name of the task in a file; without one, `otherwise`, or an error without that."""
    if not os.path.isfile(file):
        hint = "give the path of a task of lm-eval, or the name of a suite"
        raise UsageError(f"the task file {str(file)!r} does not exist", hint)
    try:
        with open(file, encoding="utf-8") as opened:
            lines = _LINE.findall(opened.read(_MOST_CHARS))
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"{file} cannot be read: {fault}", "check that it is text in UTF-8") from fault
    kinds = dict(reversed(lines))
    if kinds.get("task") and "group" not in kinds:
        return str(kinds["task"])
    if otherwise is not None:
        return otherwise
    if "group" in kinds:
        raise UsageError(f"{file} is a group of tasks, which is not supported", "name the files of its tasks")
    raise UsageError(f"{file} names no task of lm-eval", "it needs a line such as task: my_task")
