"""Load rows and check them one by one; every error names the file and line.

A row is `messages`, `prompt` with or without `completion`, `question` with or without `answer`, or plain
`text`. It comes from a shipped set, a JSONL, CSV or Parquet file, a folder of documents, or a Hub dataset.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opdcl.config.shipped import package_folder
from opdcl.errors import UsageError
from opdcl.hub import Repository, parse, snapshot

MAX_ROW_CHARS = 200_000

SHIPPED = ("handbook", "handbook/staff", "handbook/site", "everyday")

FIELDS_HINT = "a row has messages, prompt (and completion), question (and answer), or text"

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One checked row: a conversation that ends with the user and its answer if any, or plain text.

    `where` names its file and line, `teacher` the teacher of completions on it ("": the stream's own), and
    `cluster` the fact or person that it is about, if several rows are.
    """

    prompt: list[Message]
    answer: str | None
    text: str | None
    where: str
    teacher: str = ""
    cluster: str = ""

    def with_context(self, context: str, answer: str, feedback: str = "") -> Row:
        """Return the row with its last message replaced by `context`, whose placeholders are filled in."""
        *before, last = self.prompt
        values = {"{prompt}": last["content"], "{answer}": answer, "{feedback}": feedback}
        content = re.sub(r"\{(?:prompt|answer|feedback)\}", lambda m: values[m[0]], context)
        return replace(self, prompt=[*before, {**last, "content": content}])


def load_rows(source: str, split: str = "train") -> list[Row]:
    """Load and check all rows of `source`; `split` picks a part of a shipped or Hub set."""
    rows = [_with_cluster(_check(row, where), row) for row, where in _raw(source, split)]
    if not rows:
        raise UsageError(f"{source} has no rows", FIELDS_HINT)
    return rows


def check_lines(text: str, name: str) -> list[Row]:
    """Check the rows of a JSONL text; errors call them by `name`."""
    rows = [(json.loads(line), f"{name} row {n}") for n, line in enumerate(text.split("\n"), 1) if line]
    return [_with_cluster(_check(row, where), row) for row, where in rows]


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
    records = list(_raw(path, "train"))
    for record, where in records:
        if not isinstance(record, dict):
            raise UsageError(f"{where} is {_kind(record)}, not an object", "one JSON object per line")
    if not records:
        raise UsageError(f"{path} has no rows", "one JSON object per line")
    return records


def source_files(source: str) -> list[Path]:
    """Return the local files behind a source; none for a Hub set."""
    if source in SHIPPED:
        return [_shipped_file(source)]
    if os.path.isdir(source):
        return sorted(p for p in Path(source).rglob("*") if p.suffix in (".md", ".txt"))
    return [Path(source)] if os.path.isfile(source) else []


def pinned(source: str) -> str:
    """Return a source as it is recorded: a Hub set with the commit that is read, any other by its name."""
    dataset = on_hub(source)
    return f"{source.partition('@')[0]}@{snapshot(dataset).name}" if dataset else source


def on_hub(source: str) -> Repository | None:
    """Return the Hub dataset that a source names. A name with a file ending is one only with a revision."""
    if source in SHIPPED or os.path.exists(source) or (Path(source).suffix and "@" not in source):
        return None
    return parse("dataset", source)


def _shipped_file(name: str) -> Path:
    if name.startswith("handbook"):
        return package_folder("evals") / "handbook" / "facts.jsonl"
    return package_folder("workflows") / "data" / f"{name}.jsonl"


def _raw(source: str, split: str) -> Iterator[tuple[Any, str]]:
    path, repository = Path(source), on_hub(source)
    if source not in SHIPPED and not os.path.exists(source) and repository is None:
        hint = f"a file, a folder, a Hub id as owner/name@revision, or one of: {', '.join(SHIPPED)}"
        raise UsageError(f"data {source!r} does not exist", hint)
    if source.startswith("handbook") and source in SHIPPED:
        halves = json.loads(_text(_shipped_file(source).with_name("halves.json")))
        documents = halves.get(source.removeprefix("handbook/"))
        for fact, where in read_json_lines(_shipped_file(source)):
            if documents is None or fact["document"] in documents:
                for question in fact["train"]:
                    yield {"question": question, "answer": fact["answer"]}, where
    elif source == "everyday":
        rows = read_json_lines(_shipped_file(source))
        yield from ((row, where) for row, where in rows if row["split"] == split)
    elif os.path.isdir(path):
        for file in source_files(source):
            if text := _text(file).strip():
                yield {"text": text}, str(file)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from read_json_lines(path)
    elif path.suffix == ".csv":
        yield from _csv(path)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, ValueError) as fault:
            raise UsageError(f"{path} is not a Parquet file: {fault}", FIELDS_HINT) from fault
        yield from ((row, f"{path} row {n}") for n, row in enumerate(table.to_pylist(), 1))
    elif os.path.exists(path):
        message = f"{path}: cannot tell the format of {path.suffix or 'a file without an ending'}"
        raise UsageError(message, "use .jsonl, .csv, .parquet, or a folder of .md and .txt")
    else:
        yield from _hub(source, repository, split)


def _hub(source: str, repository: Repository, split: str) -> Iterator[tuple[Any, str]]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    folder = snapshot(repository)
    try:
        # From the cached files, not by id: offline, `datasets` would take the version it has seen last.
        dataset = load_dataset(str(folder), repository.subset, split=split)
    except Exception as fault:  # datasets raises a dozen kinds; each means that its files are unusable
        hint = f"owner/name:subset names a subset; check that it has a split {split!r}"
        raise UsageError(f"dataset {source!r} cannot be read: {str(fault)[:200]}", hint) from fault
    yield from ((row, f"{source} row {n}") for n, row in enumerate(dataset, 1))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path} is not UTF-8 text (byte {fault.start})", "save it as UTF-8") from fault
    except OSError as fault:
        raise UsageError(f"{path} cannot be read: {fault.strerror}", "check its permissions") from fault


def _csv(path: Path) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(MAX_ROW_CHARS + 1)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    try:
        for row in reader:
            if None in row:
                message = f"{path}:{reader.line_num} has more fields than the header"
                raise UsageError(message, "quote fields that hold a comma")
            yield row, f"{path}:{reader.line_num}"
    except csv.Error as fault:
        hint = f"a field has at most {MAX_ROW_CHARS} characters"
        raise UsageError(f"{path}:{reader.line_num + 1}: {fault}", hint) from fault


def read_json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield each value of a JSONL file with its file and line."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line), f"{path}:{number}"
        except (json.JSONDecodeError, RecursionError) as fault:
            message = f"{path}:{number} is not valid JSON: {fault}"
            raise UsageError(message, "one JSON object per line") from fault


def _kind(value: Any) -> str:
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    kinds |= dict.fromkeys((int, float), "a number")
    return kinds.get(type(value), type(value).__name__)


def _check(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {_kind(row)}, not an object", FIELDS_HINT)
    # An empty cell of a CSV or Parquet file names no teacher.
    teacher = _string(row["teacher"], "teacher", where) if row.get("teacher") not in (None, "") else ""
    if row.get("messages"):
        return _check_messages(row["messages"], where, teacher)
    for asked, answered in (("prompt", "completion"), ("question", "answer")):
        if row.get(asked) is not None:
            answer = row.get(answered)
            if isinstance(row[asked], list):
                if answer is not None and not isinstance(answer, list):
                    content = _string(answer, answered, where, may_be_empty=True)
                    answer = [{"role": "assistant", "content": content}]
                return _check_messages([*row[asked], *(answer or [])], where, teacher)
            prompt = [{"role": "user", "content": _string(row[asked], asked, where)}]
            answer = None if answer is None else _string(answer, answered, where, may_be_empty=True)
            return Row(prompt, answer, None, where, teacher)
    if row.get("text") is not None:
        return Row([], None, _string(row["text"], "text", where), where, teacher)
    content = f"has only {', '.join(map(str, row))}" if row else "is empty"
    raise UsageError(f"{where} {content}", FIELDS_HINT)


def _with_cluster(checked: Row, row: dict) -> Row:
    cluster = row.get("cluster")
    return checked if cluster in (None, "") else replace(checked, cluster=str(cluster))


def _check_messages(messages: Any, where: str, teacher: str) -> Row:
    if not isinstance(messages, list):
        raise UsageError(f"{where}: messages is {_kind(messages)}, not a list", FIELDS_HINT)
    turns = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant"):
            raise UsageError(f"{where}: message role {role!r}", "roles are system, user and assistant")
        is_answer = role == "assistant" and number == len(messages)
        content = _string(message.get("content"), f"{role} content", where, may_be_empty=is_answer)
        turns.append({"role": role, "content": content})
    if not any(t["role"] == "user" for t in turns):
        raise UsageError(f"{where}: no user message", FIELDS_HINT)
    if turns[-1]["role"] == "assistant":
        return Row(turns[:-1], turns[-1]["content"], None, where, teacher)
    return Row(turns, None, None, where, teacher)


def _string(value: Any, name: str, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is {_kind(value)}, not text", FIELDS_HINT)
    if not value.strip():
        if may_be_empty:
            return ""
        raise UsageError(f"{where}: {name} is empty", FIELDS_HINT)
    if any("\ud800" <= char <= "\udfff" for char in value):
        message = f"{where}: {name} holds half of a surrogate pair, which is not a character"
        raise UsageError(message, "write the text as UTF-8")
    if len(value) > MAX_ROW_CHARS:
        message = f"{where}: {name} has {len(value)} characters, at most {MAX_ROW_CHARS} are read"
        raise UsageError(message, "split the row")
    return value
