"""Find the rows in JSON: lines of JSON (JSONL), or one document that holds them in one of the usual ways."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opdcl.data.formats import COLUMNS, CONVERSATIONS
from opdcl.errors import UsageError, listed

ONE_PER_LINE = "one JSON object per line, or one list of objects"

BLANK = re.compile(r"\s*")
SEPARATOR = re.compile(r"[\s,]*")


def read_json(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield each row of a JSON or JSONL text with its file and line.

    In place of a line that is not JSON, its error is yielded: it is for the caller to raise.

    Raises:
        UsageError: A document of several lines is not valid JSON, or it is unclear what its rows are.
    """
    start = _after(BLANK, text, 0)
    if start == len(text):
        return
    end = text.find("\n", start)
    next_line = _after(BLANK, text, end) if end >= 0 else len(text)
    if next_line < len(text) and _is_own_line(text, start, end, next_line):
        yield from _lines(text, path)
        return
    value, end = _decode(text, start, path)
    rest = _after(BLANK, text, end)
    if rest == len(text):
        yield from _document(text, start, value, path)
    else:  # objects one after the other, each over several lines
        yield from _values(text, start, path)


def _is_own_line(text: str, start: int, end: int, next_line: int) -> bool:
    """Tell whether the first line is a row, valid or not, and not the beginning of a longer document."""
    if text[start] not in "{[":
        return True
    try:
        json.loads(text[start:end])
        return True
    except (ValueError, RecursionError):
        return _is_broken_row(text, start, end, next_line)


def _is_broken_row(text: str, start: int, end: int, next_line: int) -> bool:
    """Tell whether a first line that is not JSON by itself is a row with a fault."""
    if text[start] != "{" or text[next_line] != "{":
        return False
    with contextlib.suppress(ValueError, RecursionError):
        json.JSONDecoder().raw_decode(text[start:end])
        return True  # a whole object, and something after it
    # A document that goes on would end the line like this.
    return not text[start:end].rstrip().endswith(("[", "{", ",", ":"))


def _lines(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield as_row(json.loads(line)), where
        except (ValueError, RecursionError) as fault:  # valid JSON may be too deep, or a number too long
            yield UsageError(f"{where} is not valid JSON: {fault}", ONE_PER_LINE), where


def _document(text: str, start: int, value: Any, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of one JSON value, which begins at `start`."""
    where = f"{path}:{_line(text, start)}"
    if isinstance(value, list) and not is_conversation(value):
        yield from _items(text, start, len(value), path)
    elif not isinstance(value, dict) or _is_row(value, path):
        yield as_row(value), where
    else:
        lists = [key for key, part in value.items() if _is_list_of_rows(part)]
        if len(lists) > 1:
            message = f"{where} holds several lists of rows: {listed(lists)}"
            raise UsageError(message, "write the list that you mean into a file of its own")
        if lists:
            (name,) = lists
            (place,) = [place for key, place, _ in _members(text, start, path) if key == name][-1:]
            yield from _items(text, place, len(value[name]), path)
        elif all(isinstance(part, dict) for part in value.values()):  # rows by their names
            line, counted = 1, 0
            for _, place, part in _members(text, start, path):
                line += text.count("\n", counted, place)
                counted = place
                yield part, f"{path}:{line}"
        else:
            yield value, where


def _is_row(value: dict[str, Any], path: Path) -> bool:
    """Tell whether an object is a row itself.

    Raises:
        UsageError: It holds all values of a column under the column's name.
    """
    if not value.keys() & COLUMNS:
        return not value
    if value.keys() & CONVERSATIONS.keys():
        return True
    parts = [*value.values()]
    numbered = all(isinstance(part, dict) for part in parts)
    listed_values = all(isinstance(part, list) and part for part in parts)
    objects = [entry for part in parts if isinstance(part, list) for entry in part if isinstance(entry, dict)]
    if numbered or (listed_values and not objects):
        message = f"{path} holds columns, not rows: {listed(value)}"
        raise UsageError(message, "with pandas: table.to_json(FILE, orient='records', lines=True)")
    return True


def is_conversation(value: Any) -> bool:
    """Tell whether a value is a list of messages, as OpenAI or ShareGPT write them."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    as_openai = "role" in value and ("content" in value or "tool_calls" in value)
    as_sharegpt = "from" in value and "value" in value
    return as_openai or as_sharegpt


def _is_list_of_rows(value: Any) -> bool:
    if not isinstance(value, list) or not value or is_conversation(value):
        return False
    return all(isinstance(entry, dict) or is_conversation(entry) for entry in value)


def as_row(value: Any) -> Any:
    """Return a list of messages as the row that they are; any other value as it is."""
    if not is_conversation(value):
        return value
    return {"messages" if "role" in value[0] else "conversations": value}


def _items(text: str, start: int, count: int, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the values of a list that begins at `start`, each with its line."""
    position, line = start + 1, _line(text, start)
    counted = start
    for _ in range(count):
        place = _after(SEPARATOR, text, position)
        line += text.count("\n", counted, place)
        counted = place
        value, position = _decode(text, place, path)
        yield as_row(value), f"{path}:{line}"


def _values(text: str, start: int, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield values that stand one after the other, each with its line."""
    position, line, counted = start, 1, 0
    while position < len(text):
        line += text.count("\n", counted, position)
        counted = position
        value, end = _decode(text, position, path)
        yield as_row(value), f"{path}:{line}"
        position = _after(BLANK, text, end)


def _members(text: str, start: int, path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield key, place and value of each member of an object that begins at `start`."""
    position = _after(SEPARATOR, text, start + 1)
    while text[position] != "}":
        key, end = _decode(text, position, path)
        colon = _after(BLANK, text, end)
        place = _after(BLANK, text, colon + 1)
        value, end = _decode(text, place, path)
        yield key, place, value
        position = _after(SEPARATOR, text, end)


def _decode(text: str, position: int, path: Path) -> tuple[Any, int]:
    """Return the value that begins at a position, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except json.JSONDecodeError as fault:
        raise UsageError(f"{path}:{fault.lineno} is not valid JSON: {fault.msg}", ONE_PER_LINE) from fault
    except (ValueError, RecursionError) as fault:  # valid JSON may be too deep, or a number too long
        where = f"{path}:{_line(text, position)}"
        raise UsageError(f"{where} is not valid JSON: {fault}", ONE_PER_LINE) from fault


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return where the match of a pattern that may be empty ends."""
    match = pattern.match(text, position)
    return match.end() if match else position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
