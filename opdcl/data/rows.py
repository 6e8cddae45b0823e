"""Load rows and check them one by one; every error names the file and line.

They come from a shipped set, a file, a folder of files of one kind, or a Hub dataset. A folder may hold parts
of a data set, which `datasets` calls splits: the rows to train on, for validation, or to test with.
`opdcl.data.formats` has the formats that a row may have.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from opdcl.config.shipped import SHIPPED_DATA, is_task_file, package_folder, split_part
from opdcl.data.files import (
    BATCH,
    DOCUMENTS,
    READERS,
    PlacedRows,
    format_ending,
    is_regular,
    read_document,
    read_file,
    rows_of,
)
from opdcl.data.formats import DECIDING, BadRow, Row, check_row
from opdcl.data.messages import DECODER, FIELDS_HINT, is_missing, json_kind
from opdcl.data.stock_tasks import task_files
from opdcl.errors import UsageError, listed, nearest, nearest_path
from opdcl.hub import Repository, parse, snapshot

# Words in the names of files and folders -> the part of a data set that they name.
PART_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "tests", "testing", "eval", "evaluation", "holdout", "heldout", "held"), "test"),
}
# What `datasets` and the Hub write beside the rows about them.
ABOUT_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
# Folders that hold what programs made or brought.
FOREIGN = ("node_modules", "_build", "__pycache__", "site-packages")

# Seconds after which a reader of many rows says how many there have been.
EVERY = 10.0

Tell = Callable[[str], None]
T = TypeVar("T")


class CheckedRows(NamedTuple):
    """The rows of a source, in order: those that can be used, and the others."""

    usable: list[Row]
    bad: list[BadRow]

    def all(self) -> list[Row]:
        """Return the rows; raise the UsageError of the first one that cannot be used."""
        if self.bad:
            raise self.bad[0].error()
        return self.usable


def load_rows(source: str, split: str = "train", columns: Mapping[str, str] | None = None) -> list[Row]:
    """Load all rows of `source` as `read_rows`; none may be bad."""
    return read_rows(source, split, columns).all()


def read_rows(
    source: str, split: str = "train", columns: Mapping[str, str] | None = None, tell: Tell | None = None
) -> CheckedRows:
    """Load and check all rows of `source`; `split` picks a part of a shipped or Hub set.

    `columns` names the source's columns where they are not ours: `{"question": "Frage"}`. `tell` is told
    every few seconds how many rows have been read.

    Raises:
        UsageError: A source cannot be read, or has no rows.
    """
    raw = telling(read_source(source, split), f"{source}: read", tell)
    checked = check_all(raw, columns or {})
    if not any(checked):
        others = left_out(source).removeprefix(source)
        raise UsageError(f"{source} has no rows{others}", FIELDS_HINT)
    return checked


def telling(items: Iterable[T], done: str, tell: Tell | None) -> Iterator[T]:
    """Yield the items; every few seconds, tell how many are done."""
    due = time.monotonic() + EVERY
    for number, item in enumerate(items):
        if tell and time.monotonic() >= due:
            tell(f"{done} {number:,} rows so far")
            due = time.monotonic() + EVERY
        yield item


def check_lines(text: str, name: str, columns: Mapping[str, str] | None = None) -> CheckedRows:
    """Check the rows of a JSONL text as `read_rows` does; errors call them by `name`."""
    return check_all(records_in(text, name), columns or {})


def records_in(text: str, name: str) -> list[tuple[dict[str, Any], str]]:
    """Return the rows of a JSONL text as they are, each with its place."""
    lines = enumerate(text.split("\n"), 1)
    return [(DECODER.decode(line), f"{name} row {number}") for number, line in lines if line]


def check_all(rows: Iterable[tuple[Any, str]], columns: Mapping[str, str]) -> CheckedRows:
    """Check rows as they are written, each with its place, as `read_rows` does."""
    checked = CheckedRows([], [])
    for row, where in rows:
        if isinstance(row, BadRow):
            checked.bad.append(row)
            continue
        try:
            checked.usable.append(_checked(row, columns, where))
        except UsageError as fault:
            checked.bad.append(BadRow(where, fault.message, fault.hint))
    return checked


def _checked(row: Any, columns: Mapping[str, str], where: str) -> Row:
    """Check a row, in which named columns take the place of ours; one that has none of them is read as usual.

    Other columns of ours that it has are read too, unless they would make it a row of another format.
    """
    theirs = {*columns.values()}
    if not isinstance(row, dict) or not row.keys() & theirs:
        return check_row(row, where)
    named = {}
    for ours, name in columns.items():
        if name in row:
            named[ours] = row[name]
        elif ours != "answer":  # prompts need no answers
            raise UsageError(f"the row has no column {name!r}", f"its columns are {listed(row)}")
    passed_over = named.keys() | (DECIDING if DECIDING & named.keys() else set())
    kept = {key: value for key, value in row.items() if key not in theirs | passed_over}
    unread = [key for key in row if key in passed_over - theirs and not is_missing(row[key])]
    checked = check_row(kept | named, where)
    return replace(checked, unread=(*checked.unread, *unread), renamed=(*named,))


def recognised(source: str, rows: list[Row]) -> str:
    """Describe rows for the user: how many of which format, and the first one."""
    counts = Counter(row.format for row in rows)
    formats = ", ".join(f"{count} of {name}" for name, count in counts.items())
    first = rows[0]
    parts = [f"{message['role']}: {message['content']}" for message in first.prompt]
    if first.answer is not None:
        parts.append(f"assistant: {first.answer}")
    example = shortened(first.text or " ".join(parts), 160)
    return f"{source}: {formats}, such as {example}"


def unread(source: str, rows: list[Row]) -> str:
    """Name the fields of rows that are not read, the most frequent first; "" without any."""
    counts = Counter(name for row in rows for name in row.unread).most_common()
    if not counts:
        return ""
    names = [f"{shortened(name, 40)} ({count} row{'s' * (count > 1)})" for name, count in counts]
    fields = "1 field is" if len(names) == 1 else f"{len(names)} fields are"
    return f"{source}: {fields} not read: {listed(names, 8)}"


def shortened(text: str, limit: int) -> str:
    """Return a text on one line, cut to a length."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def load_prompts(source: str, split: str = "train") -> list[Row]:
    """Load rows for sampling: each must have a prompt."""
    return check_prompts(load_rows(source, split))


def check_prompts(rows: list[Row]) -> list[Row]:
    """Return the rows if each has a prompt to sample on."""
    for row in rows:
        if not row.prompt:
            hint = "recovery needs prompt, question or messages"
            raise UsageError(f"{row.where}: plain text cannot be a prompt", hint)
    return rows


def load_records(path: str) -> list[tuple[dict[str, Any], str]]:
    """Load the rows of a file as they are, each with its file and line."""
    records = list(read_source(path, "train"))
    hint = "one JSON object per line"
    for record, where in records:
        if isinstance(record, BadRow):
            raise record.error()
        if not isinstance(record, dict):
            raise UsageError(f"{where} is {json_kind(record)}, not an object", hint)
    if not records:
        raise UsageError(f"{path} has no rows", hint)
    return records


def read_source(source: str, split: str) -> PlacedRows:
    """Yield the rows of a source as they are written, each with its place; `split` is a part of a set.

    Raises:
        UsageError: There is no such source, or it cannot be read.
    """
    if repository := on_hub(source):
        yield from _hub(source, repository, split)
    elif not _is_here(source):
        hint = f"a file, a folder, a Hub id as owner/name@revision, or one of: {', '.join(SHIPPED_DATA)}"
        if near := nearest_path(source) or nearest(source, SHIPPED_DATA, 0.8):
            hint = f"did you mean {near}?"
        raise UsageError(f"data {source!r} does not exist", hint)
    elif source in SHIPPED_DATA:
        yield from _shipped(source, split)
    else:
        folder = list_folder(source)
        for file in folder.files if folder else [Path(source)]:
            yield from read_file(file)


def _shipped(source: str, split: str) -> PlacedRows:
    files = _shipped_files(source)
    rows = itertools.chain.from_iterable(map(read_file, files))
    if source == "everyday":
        for row, where in rows:
            if row["split"] == split:
                yield row, where
    elif source.startswith("requests"):
        # Every beginning of the file has all groups of prompts.
        yield from itertools.islice(rows, 40 if source == "requests_quick" else None)
    else:
        documents = None
        if "/" in source:
            parts = json.loads(files[0].with_name("parts.json").read_text(encoding="utf-8"))
            documents = parts[source.partition("/")[2]]
        for fact, where in rows:
            if documents is None or fact["document"] in documents:
                for question in fact["train"]:
                    yield {"question": question, "answer": fact["answer"]}, where


def _hub(source: str, repository: Repository, split: str) -> PlacedRows:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    folder = snapshot(repository)
    try:
        # From the cached files, not by id: offline, `datasets` would take the version it has seen last.
        dataset = load_dataset(str(folder), repository.subset, split=split)
    except Exception as fault:  # datasets raises a dozen kinds; each means that its files are unusable
        hint = f"owner/name:subset names a subset; check that it has a split {split!r}"
        raise UsageError(f"dataset {source!r} cannot be read: {str(fault)[:200]}", hint) from fault
    tables = dataset.with_format("arrow").iter(BATCH)
    rows = (row for table in tables for row in rows_of(table))
    for number, row in enumerate(rows, 1):
        yield row, f"{source} row {number}"


def is_shipped(row: Row) -> bool:
    """Return whether a row is one of the shipped everyday prompts or requests."""
    files = [*_shipped_files("everyday"), *_shipped_files("requests")]
    return row.where.startswith(tuple(f"{file}:" for file in files))


@functools.cache
def _shipped_files(source: str) -> list[Path]:
    name, evals = source.partition("/")[0], package_folder("evals")
    requests = [evals / "closeness" / file for file in ("prompts.jsonl", "conversations.jsonl")]
    files = {
        "handbook": [evals / "handbook" / "facts.jsonl"],
        "contradictions": [evals / "contradictions" / "facts.json"],
        "requests": requests,
        "requests_quick": requests[:1],
    }
    return files.get(name) or [package_folder("workflows") / "data" / f"{name}.jsonl"]


def source_files(source: str) -> list[Path]:
    """Return the local files behind a source; none for a Hub set."""
    if source in SHIPPED_DATA:
        return _shipped_files(source)
    if is_task_file(source) and os.path.isfile(source):
        return task_files(Path(source))
    if folder := list_folder(source):
        return folder.files
    return [Path(source)] if os.path.isfile(source) else []


def left_out(source: str) -> str:
    """Name what a folder of rows or documents holds and is not read; "" if nothing."""
    folder = list_folder(source)
    if not (folder and folder.left_out):
        return ""
    return f"{source}: {len(folder.left_out)} left out: {listed(folder.left_out)}"


def pinned(source: str) -> str:
    """Return a source as it is recorded: a Hub set with the commit that is read, any other by its name."""
    dataset = on_hub(source)
    return f"{source.partition('@')[0]}@{snapshot(dataset).name}" if dataset else source


def on_hub(source: str) -> Repository | None:
    """Return the Hub dataset that a source names. A name with a file ending is one only with a revision."""
    is_file_name = Path(source).suffix and "@" not in source
    return None if _is_here(source) or is_file_name else parse("dataset", source)


def _is_here(source: str) -> bool:
    return source in SHIPPED_DATA or os.path.exists(split_part(source)[0])


@dataclass(frozen=True)
class Folder:
    """The files of a folder that are read, in order, and the names of everything else in it."""

    files: list[Path]
    left_out: list[str]


def list_folder(source: str) -> Folder | None:
    """Return the files to read of a folder, or of `FOLDER@PART`: documents, or files of rows of one format.

    None is returned for a source that is no folder.

    Hidden files and folders are left out, and so are files with other endings, pipes and devices. If a README
    names the parts of a folder, as on the Hub, the part `train` is read unless another one is named.

    Raises:
        UsageError: The files are of several kinds or parts, or there is no part of this name.
    """
    name, part = split_part(source)
    folder = Path(name)
    if source in SHIPPED_DATA or not os.path.isdir(folder):
        return None
    files, left_out = _walk(folder)
    parts = _parts_of_card(folder, files)
    if parts:
        used = parts[_chosen(folder, parts, part or ("train" if "train" in parts else ""))]
    elif part or any(format_ending(file) not in DOCUMENTS for file in files):
        # Any word of a path can name its part; files that name none are to train on.
        for file in files:
            if not _is_about(file):
                parts.setdefault(_part_of(file.relative_to(folder)) or "train", []).append(file)
        used = parts[_chosen(folder, parts, part)] if parts else []
    else:
        used = files
    _refuse_mixture(folder, used)
    others = [str(file.relative_to(folder)) for file in files if file not in used]
    return Folder(used, sorted(left_out + others))


def _chosen(folder: Path, parts: dict[str, list[Path]], wanted: str) -> str:
    """Return the part of this name, or without a name the only one."""
    if wanted and wanted not in parts:
        wanted = PART_OF.get(wanted, wanted)
    if not wanted and len(parts) == 1:
        return next(iter(parts))
    found = [f"{name} ({files[0].relative_to(folder)})" for name, files in sorted(parts.items()) if files]
    if not wanted:
        learned = next((name for name in parts if _part_of(Path(name)) == "train"), "PART")
        message = f"{folder} holds several parts of a data set: {listed(found)}"
        raise UsageError(message, f"name the one that you mean: {folder}@{learned}")
    if wanted not in parts:
        raise UsageError(f"{folder} has no part {wanted!r}", f"it has {listed(found) or 'none'}")
    return wanted


def _part_of(place: Path) -> str:
    """Return the part that the last such word of a path names; "" if none does."""
    for name in reversed(place.parts):
        for word in reversed(re.findall("[A-Z]?[a-z]+|[A-Z]+", name)):
            if word.lower() in PART_OF:
                return PART_OF[word.lower()]
    return ""


def _parts_of_card(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files of each part that the head of a README names, as the Hub reads it; {} if none.

    Raises:
        UsageError: It cannot be read, has several subsets, or names files that are not there.
    """
    card = folder / "README.md"
    text = read_document(card) if is_regular(card) else ""
    head = re.match(r"---\n(.*?)^(configs:.*?)^---", text, re.DOTALL | re.MULTILINE)
    if head is None:
        return {}
    from datasets import load_dataset_builder

    where = f"{card}:{text.count(chr(10), 0, head.start(2)) + 1}"
    if "://" in head[2]:  # it would be asked what is there
        raise UsageError(f"{where}: configs names files elsewhere", "bring them here")
    here = {os.path.realpath(file): file for file in files}
    try:
        with tempfile.TemporaryDirectory() as cache:
            found = load_dataset_builder(os.path.abspath(folder), cache_dir=cache).config.data_files
        return {str(part): [here[os.path.realpath(name)] for name in names] for part, names in found.items()}
    except Exception as fault:  # datasets raises a dozen kinds; a KeyError is a file that is not read here
        hint = "bring its files here, keep one subset, write it as the Hub wants it, or name one file"
        reason = " ".join(str(fault).split())[:200]
        raise UsageError(f"{where}: configs names files that cannot be read: {reason}", hint) from fault


def _is_about(file: Path) -> bool:
    """Tell whether a file is about the rows that lie beside it."""
    name = file.name.lower()
    is_text = format_ending(file) in DOCUMENTS and name.startswith(("readme", "license", "licence"))
    return is_text or name in ABOUT_ROWS


def _walk(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files that have a reader, in order, and the names of all others. Hidden ones have none.

    A folder to which several links lead is entered once.
    """
    files: list[Path] = []
    left_out: list[str] = []
    entered = {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, followlinks=True):
        inside = Path(place).relative_to(folder)
        closed = []
        for name in sorted(folders, key=lambda name: os.path.islink(os.path.join(place, name))):
            real = os.path.realpath(os.path.join(place, name))
            if name.startswith(".") or name in FOREIGN or real in entered:
                closed.append(name)
            entered.add(real)
        left_out += [f"{inside / name}/" for name in closed]
        folders[:] = [name for name in folders if name not in closed]
        for name in names:
            file = folder / inside / name
            if name.startswith(".") or format_ending(file) not in READERS or not is_regular(file):
                left_out.append(str(inside / name))
            else:
                files.append(file)
    return sorted(files), left_out


def _refuse_mixture(folder: Path, files: list[Path]) -> None:
    kinds = Counter(
        "documents" if format_ending(file) in DOCUMENTS else format_ending(file) for file in files
    )
    if len(kinds) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        hint = "name one file, or move the others into a folder of their own"
        raise UsageError(f"{folder} holds files of several kinds: {found}", hint)
