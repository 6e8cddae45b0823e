"""The fields of rows as file formats write them: missing values, JSON as text, numbers, no in many spellings.

The same row must be read alike from JSONL, CSV, Parquet and `datasets`, which write these differently.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import date, time
from decimal import Decimal
from typing import Any

FLAGS = {
    **dict.fromkeys(("true", "yes", "good", "1", "1.0"), 1),
    **dict.fromkeys(("false", "no", "bad", "rejected", "0", "0.0", "-1", "-1.0"), 0),
}


class Spelled(float):
    """A number of a JSON text, which is learned as it is spelled there: 0.10, 1e5."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {name[:60]!r} twice")
    return found


# Reads a JSON text so that nothing is lost: no spelling of a number, no value of a key.
DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=Spelled, parse_int=lambda n: Spelled(n) if n == "-0" else int(n)
)


def is_missing(value: Any) -> bool:
    """Return whether a value stands for nothing: null, NaN, blank text, or an empty list or object."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value in ([], {})


class Fields:
    """The fields of a row or a message but null and NaN; it remembers which of them were read.

    Blank text is kept, so that an empty answer can be reported.
    """

    def __init__(self, row: dict):
        self.given: dict[Any, Any] = {}
        for key, value in row.items():
            if isinstance(value, str) or not is_missing(value):
                self.given[key] = value
        self.read: set[str] = set()

    def has(self, name: str) -> bool:
        return not is_missing(self.given.get(name))

    def take(self, name: str) -> Any:
        self.read.add(name)
        return self.given.get(name)

    def unread(self) -> list[str]:
        """Return the fields that hold something and were not read."""
        return [str(name) for name in self.given if name not in self.read and self.has(name)]


def as_flag(value: Any) -> bool | None:
    """Return a flag that says yes or no in some way, also as text as in a CSV file; None for others."""
    found = FLAGS.get(str(float(value) if isinstance(value, float) else value).strip().lower())
    return None if found is None else bool(found)


def from_json_text(value: Any) -> Any:
    """Return the list or object that a text holds as JSON; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        decoded = DECODER.decode(value)
    except (ValueError, RecursionError):
        return value
    return decoded


def number_as_text(value: Any) -> Any:
    """Return a finite number, date or time as a CSV file would write it, and any other value unchanged."""
    if isinstance(value, Spelled | Decimal | date | time):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return json.dumps(value) if isinstance(value, int) or math.isfinite(value) else value


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of its objects that are null, at any depth.

    Parquet and `datasets` give every object of a column the fields of all others, filled with null. So a null
    and a missing field cannot be told apart, and count as the same in all files.

    Raises:
        RecursionError: It is nested too deeply.
    """
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value
