"""Arguments of the verbs as settings. Rows in memory become files of the run, so that it can be resumed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from opdcl.errors import UsageError

PathLike = str | Path
Settings = Mapping[str, Any] | Sequence[str] | None
# What names data, or is data: a list of dicts, a `datasets.Dataset`.
Data: TypeAlias = PathLike | Iterable[Mapping[str, Any]]


class Options(TypedDict, total=False):
    """What `run`, `finetune`, `recover` and `evaluate` have in common.

    settings: The keys of `opdcl config schema`: a mapping, or "KEY=VALUE" strings. Arguments take precedence.
    dry_run: Return the plan of the run, and write nothing.
    force: Repeat stages whose settings or data have changed, instead of refusing to start.
    quiet: Print errors only. Otherwise progress goes to stderr.
    """

    settings: Settings
    dry_run: bool
    force: bool
    quiet: bool


# Settings that name data, or whose value may be rows.
DATA = re.compile(
    r"finetune\.data|recover\.(general|domain|teachers\.[^.]+\.prompts)|eval\.(closeness|data\.[^.]+)"
)
ROWS = "a list of dicts, one split of a datasets.Dataset, dataframe.to_dict('records'), or the path of a file"
# The suite of rows that `evaluate` is given without a name.
UNNAMED = "domain"


def as_folder(place: PathLike) -> Path:
    """Return the path of a folder to be written; no shell need have replaced `~` in it."""
    return Path(os.path.expanduser(place))


def as_settings(
    settings: Settings, chosen: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Return `KEY=VALUE` overrides, settings by key, and rows in memory by key, as the text of JSONL files.

    `chosen` has a verb's own arguments by the keys of their settings: they take precedence, and None means
    not given. A setting with rows in memory becomes the name of a file, whose folder the run decides.
    """
    overrides = [] if settings is None or isinstance(settings, Mapping) else [*settings]
    flags: dict[str, Any] = {**settings} if isinstance(settings, Mapping) else {}
    flags |= {key: value for key, value in chosen.items() if value is not None}
    rows = {}
    for key, value in flags.items():
        names = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
        if isinstance(value, Path):
            flags[key] = str(value)
        elif DATA.fullmatch(key) and not (names or isinstance(value, str | None)):
            rows[key] = "".join(f"{line}\n" for line in _json_lines(value, key))
            if not rows[key]:
                raise UsageError(f"{key} has no rows", ROWS)
            flags[key] = f"{key}.jsonl"
    return overrides, flags, rows


def _json_lines(rows: Any, key: str) -> Iterable[str]:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise UsageError(f"{key}: {type(rows).__name__} is neither a path nor rows", ROWS)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UsageError(f"{key} row {number} is {type(row).__name__}, not a dict", ROWS)
        try:
            yield json.dumps(dict(row), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as fault:
            raise UsageError(
                f"{key} row {number}: {fault}", "rows hold text and lists of messages"
            ) from fault


def question_suites(domain: Any, data: Mapping[str, Data] | None) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the domain suites, and the data of those that are files or rows, by name.

    `domain` is rows in memory, the name of a suite, the path of a file of questions, or several of the
    latter two; `data` gives further suites their file or rows. A file's suite has the name of the file.

    Raises:
        UsageError: Two suites would have the same name.
    """
    sources: dict[str, Any] = {}
    for name, source in (data or {}).items():
        sources[name] = str(Path(source).resolve()) if isinstance(source, str | Path) else source
    if _is_rows(domain):
        sources[UNNAMED] = domain
        return [UNNAMED], sources
    given = strings(domain)
    suites = []
    for suite in given:
        if _is_question_file(suite):
            file = Path(suite)
            name, place = file.stem, str(file.resolve())
            if file.suffix.lower() == ".gz":
                name = Path(name).stem
            if name in given or sources.get(name, place) != place:
                hint = "give one of them another name: --domain NAME --data NAME=PATH"
                raise UsageError(f"{suite} and another would be the same suite {name!r}", hint)
            sources[name] = place
            suites.append(name)
        else:
            suites.append(suite)
    return list(dict.fromkeys(suites)), sources


def _is_rows(domain: Any) -> bool:
    """Return whether the domain is rows in memory, not the names of suites or files."""
    if isinstance(domain, str | Path):
        return False
    return not isinstance(domain, Sequence) or any(isinstance(one, Mapping) for one in domain)


def _is_question_file(suite: str) -> bool:
    from opdcl.config.load import FILE_ENDINGS  # it imports the schema, which takes time
    from opdcl.config.shipped import is_task_file

    path = Path(suite)
    if is_task_file(suite):
        return False
    if path.suffix.lower() in FILE_ENDINGS and not path.is_file():
        hint = "give a file of questions and answers, or the name of a suite"
        raise UsageError(f"domain questions {suite!r} do not exist", hint)
    return bool(path.suffix) and path.is_file()


def strings(value: PathLike | Sequence[PathLike]) -> list[str]:
    """Return one path or several as a list of text."""
    return [str(value)] if isinstance(value, str | Path) else [str(one) for one in value]
