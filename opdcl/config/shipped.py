"""What names in a workflow stand for: shipped recipes, suites and data, and a user's own tasks of lm-eval."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError, nearest, nearest_path

# The recipes that most users need, in this order.
FIRST = (
    "quickstart",
    "own-data",
    "repair",
    "handbook",
    "qwen3-1.7b-24gb",
    "qwen3-8b-80gb",
    "recover-thinking",
)

SHIPPED_DATA = (
    *("handbook", "handbook/staff", "handbook/site", "handbook/quick", "contradictions"),
    *("everyday", "requests", "requests_quick"),
)


# How the names of files with rows end.
ROW_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")

# What a suite shows of a model, in the order in which suites are measured.
ROLES = ("retention", "domain", "control")
ENDINGS = (".yaml", ".yml")


def package_folder(name: str) -> Path:
    """Return the shipped folder `workflows` or `evals`, in the installed package or in a checkout."""
    here = Path(__file__).parents[1]
    return here / name if (here / name).is_dir() else here.parent / name


def workflow_files() -> dict[str, Path]:
    """Return the shipped recipes, name -> file, in the order of use: first steps, own work, comparisons."""
    files = sorted(package_folder("workflows").glob("*.yaml"))
    files.sort(key=lambda file: (FIRST.index(file.stem) if file.stem in FIRST else len(FIRST), file.stem))
    return {file.stem: file for file in files}


def shipped_suites() -> dict[str, Path]:
    """Return the shipped suites, name -> file."""
    return {p.stem: p for p in sorted(package_folder("evals").glob("*/*.yaml"))}


def described_suites() -> dict[str, tuple[str, str]]:
    """Return the shipped suites with role and purpose, as the comment at the head of each file has them."""
    described: dict[str, tuple[str, str]] = {}
    for name, file in shipped_suites().items():
        lines = itertools.takewhile(
            lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines()
        )
        role, _, text = " ".join(line.lstrip("# ") for line in lines).partition(": ")
        purpose = re.split(r" Headline:|(?<=\.) ", text)[0].rstrip(".").replace("`", "")
        described[name] = role.lower(), purpose
    roles = list(dict.fromkeys([*ROLES, *(role for role, _ in described.values())]))
    return dict(sorted(described.items(), key=lambda item: roles.index(item[1][0])))


def split_part(source: str) -> tuple[str, str]:
    """Split `FOLDER@PART`, a part of the data set in a folder; of any other source, all is the name."""
    folder, mark, part = source.rpartition("@")
    return (folder, part) if mark and os.path.isdir(folder) and not os.path.exists(source) else (source, "")


def find_workflow(source: str) -> Path:
    path = Path(source)
    if os.path.isfile(path):  # Path.is_file raises on names that no file can have
        if path.suffix.lower() in ROW_FILES:
            raise UsageError(f"{source} holds rows, not a workflow", f"opdcl finetune {source} -o runs/mine")
        return path
    shipped = workflow_files()
    if source in shipped:
        return shipped[source]
    near = nearest_path(source) or nearest(source, shipped)
    hint = f"did you mean {near}?" if near else f"name a file, or one of: {', '.join(shipped)}"
    raise UsageError(f"no workflow {source!r}", hint)


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
