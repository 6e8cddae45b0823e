"""Tasks of lm-eval that a user has written: their files, named by path in place of a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl.errors import UsageError

# What a suite shows of a model, in the order in which suites are measured.
ROLES = ("retention", "domain", "control")
ENDINGS = (".yaml", ".yml")


def is_task_file(place: str) -> bool:
    """Tell whether a path names the file of a task."""
    return place.lower().endswith(ENDINGS)


def name_own_tasks(tree: dict[str, Any]) -> None:
    """Replace each path in the lists of suites by the file's name without its ending; its data is the path.

    Raises:
        UsageError: A file does not exist, or two suites would have the same name.
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
        if isinstance(suites, list) and any(isinstance(s, str) and is_task_file(s) for s in suites):
            evaluation[role] = [_named(suite, found) for suite in suites]
    for name, file in found.items():
        listings = [suite for role in ROLES for suite in (evaluation.get(role) or []) if suite == name]
        if len(listings) > 1 and files.get(name, file) != file:
            raise _same_name(name, file, files[name])
    if found:
        evaluation["data"] = files | found


def _named(suite: Any, found: dict[str, str]) -> Any:
    """Return the name of a suite, and add its file to `found` if it is a path."""
    if not isinstance(suite, str) or not is_task_file(suite):
        return suite
    file = Path(suite)
    if not file.is_file():
        hint = "give the path of a task of lm-eval, or the name of a suite"
        raise UsageError(f"the task file {str(file)!r} does not exist", hint)
    if found.setdefault(file.stem, str(file)) != str(file):
        raise _same_name(file.stem, str(file), found[file.stem])
    return file.stem


def _same_name(name: str, file: str, other: str) -> UsageError:
    return UsageError(f"{file} and {other} would be the same suite {name!r}", "rename one file")
