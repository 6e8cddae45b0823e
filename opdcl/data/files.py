"""Read files of rows: JSON, JSONL, CSV, Parquet, Arrow or documents, compressed or not.

Readers yield each row with its file and line. In place of one that cannot be read they yield a `BadRow`, and
go on; what makes a whole file unreadable is raised.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from opdcl.data.formats import COLUMNS, CONVERSATIONS, BadRow
from opdcl.data.messages import MAX_ROW_CHARS, are_messages
from opdcl.errors import UsageError, listed

Rows = Iterator[tuple[Any, str]]

# A file of a few megabytes can unpack to any size, so what is read has a limit in every format, in
# unpacked bytes.
MAX_SIZE = 1_000_000_000
PIECE = 1 << 20
# Rows of Parquet and Arrow that are unpacked at once.
BATCH = 1024

DOCUMENTS = (".md", ".txt", ".markdown", ".rst")
COMPRESSED = (".gz", ".zst")

FILES_HINT = (
    "use .jsonl, .json, .csv, .txt or .md, also with .gz or .zst; .parquet or .arrow; "
    "or a folder of files of one kind"
)


def ending(path: Path) -> str:
    """Return the ending that tells a file's format, in lower case and without that of its compression."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        return Path(path.stem).suffix.lower()
    return suffix


def is_compressed(path: Path) -> bool:
    """Tell whether a file's name says that it is compressed."""
    return path.suffix.lower() in COMPRESSED


def is_regular(path: Path) -> bool:
    """Tell whether a path is a file that can be read again and again: no pipe, device or socket."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_file(path: Path) -> Rows:
    """Yield the rows of a file with their places.

    Raises:
        UsageError: The file is no regular file, has an unknown format, or is damaged.
    """
    if not is_regular(path):
        message = f"{path} is not a regular file"
        raise UsageError(message, "save it as a file first: a run reads its rows again when it is resumed")
    reader = READERS.get(ending(path))
    if reader is None or (is_compressed(path) and reader is _table):
        unknown = "".join(path.suffixes[-2:]) if is_compressed(path) else path.suffix
        message = f"{path}: cannot tell the format of {unknown or 'a file without an ending'}"
        raise UsageError(message, FILES_HINT)
    yield from reader(path)


def read_text(path: Path) -> str:
    """Return a text file, unpacked, with every line break as a line feed.

    Raises:
        UsageError: It cannot be read, is damaged, is not UTF-8, or holds more than `MAX_SIZE` bytes.
    """
    pieces, size = [], 0
    try:
        with _open(path) as stream:
            while piece := stream.read(PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_SIZE:
                    raise _too_large(path)
        text = b"".join(pieces).decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path} is not UTF-8 text (byte {fault.start})", "save it as UTF-8") from fault
    except (OSError, EOFError, zlib.error) as fault:
        if is_compressed(path) and not getattr(fault, "errno", None):
            message = f"{path} is damaged or not compressed: {fault}"
            raise UsageError(message, "compress it again, or give the file without compression") from fault
        reason = getattr(fault, "strerror", None) or fault
        raise UsageError(f"{path} cannot be read: {reason}", "check its permissions") from fault
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open(path: Path) -> Any:
    """Open a file as bytes, decompressed if its name says that it is compressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path)
    if suffix == ".zst":
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    return open(path, "rb")


def _too_large(path: Path) -> UsageError:
    message = f"{path} holds more than {MAX_SIZE:,} bytes, which is the most that is read"
    return UsageError(message, "write the rows that you need into a smaller file")


def _document(path: Path) -> Rows:
    if text := read_text(path).strip():
        yield {"text": text}, str(path)


def _json(path: Path) -> Rows:
    """Yield the rows of lines of JSON (JSONL), or of one document that holds them in a usual way."""
    text = read_text(path)
    start = len(text) - len(text.lstrip())
    if start == len(text):
        return
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as fault:  # valid JSON may be too deep, or a number too long
        if ending(path) == ".json":
            line = getattr(fault, "lineno", _line(text, start))
            raise _not_json(f"{path}:{line}", fault).error() from fault
        end = start
    if not text[start:end] or text[end:].strip():
        yield from _lines(text, path)
    elif isinstance(value, list) and not are_messages(value):
        yield from _entries(text, start, path)
    elif isinstance(value, dict) and value and not value.keys() & COLUMNS:
        yield from _rows_within(text, start, value, path)
    else:
        where = f"{path}:{_line(text, start)}"
        _refuse_columns(value, path)
        yield _as_row(value), where


def _lines(text: str, path: Path) -> Rows:
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        try:
            if line.strip():
                yield _as_row(json.loads(line)), where
        except (ValueError, RecursionError) as fault:
            yield _not_json(where, fault), where


def _rows_within(text: str, start: int, value: dict[str, Any], path: Path) -> Rows:
    """Yield the rows that an object holds: a list of them under one of its keys, or each under its name."""
    where = f"{path}:{_line(text, start)}"
    lists = [key for key, part in value.items() if _is_list_of_rows(part)]
    if len(lists) > 1:
        message = f"{where} holds several lists of rows: {listed(lists)}"
        raise UsageError(message, "write the list that you mean into a file of its own")
    if lists:
        places = {key: place for key, place, _ in _members(text, start)}
        yield from _entries(text, places[lists[0]], path)
    elif all(isinstance(part, dict) for part in value.values()):
        yield from _entries(text, start, path)
    else:
        yield value, where


def _entries(text: str, start: int, path: Path) -> Rows:
    """Yield the values of the list or object that begins at `start`, each with its line."""
    line, counted = 1, 0
    for _, place, value in _members(text, start):
        line += text.count("\n", counted, place)
        counted = place
        yield _as_row(value), f"{path}:{line}"


def _members(text: str, start: int) -> Iterator[tuple[str, int, Any]]:
    """Yield the key, the place and the value of all in the valid list or object that begins at `start`.

    In a list, the key is "".
    """
    decoder = json.JSONDecoder()
    key, place = "", _next(text, start + 1)
    while text[place] not in "]}":
        if text[start] == "{":
            key, end = decoder.raw_decode(text, place)
            place = _next(text, end)
        value, end = decoder.raw_decode(text, place)
        yield key, place, value
        place = _next(text, end)


def _next(text: str, position: int) -> int:
    """Return where something begins that is no blank and separates nothing."""
    while text[position] in " \n\t,:":
        position += 1
    return position


def _refuse_columns(value: Any, path: Path) -> None:
    """Refuse an object that holds all values of a column under its name, as a list or by their numbers."""
    if not isinstance(value, dict) or value.keys() & CONVERSATIONS.keys():
        return
    for part in value.values():
        holds_values = isinstance(part, list) and part and not isinstance(part[0], dict)
        if not holds_values and not isinstance(part, dict):
            return
    if value:
        message = f"{path} holds columns, not rows: {listed(value)}"
        raise UsageError(message, "with pandas: table.to_json(FILE, orient='records', lines=True)")


def _is_list_of_rows(value: Any) -> bool:
    if not isinstance(value, list) or not value or are_messages(value):
        return False
    if all(isinstance(entry, dict) and "role" in entry for entry in value):
        return False  # turns of one conversation, in whatever form
    return all(isinstance(entry, dict) or are_messages(entry) for entry in value)


def _as_row(value: Any) -> Any:
    """Return a list of messages as the row that they are; any other value as it is."""
    if not are_messages(value):
        return value
    return {"messages" if "role" in value[0] else "conversations": value}


def _not_json(where: str, fault: Exception) -> BadRow:
    reason = f"{fault.msg} at column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else fault
    return BadRow(where, f"not valid JSON: {reason}", "one JSON object per line, or one list of objects")


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _csv(path: Path) -> Rows:
    csv.field_size_limit(MAX_ROW_CHARS + 1)
    text = read_text(path)
    first, _, rest = text.partition("\n")
    # Excel reads and writes a line before the header that names the separator.
    named = re.fullmatch("(?i)sep=(.)", first)
    text = rest if named else text
    separator = named[1] if named else _separator(text, ending(path))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        _refuse_repeated(reader.fieldnames or [], f"{path}:{reader.line_num + bool(named)}")
        for row in reader:
            where = f"{path}:{reader.line_num + bool(named)}"
            if None in row:
                hint = f"quote fields that hold a {separator!r}"
                yield BadRow(where, "the row has more fields than the header", hint), where
            else:
                yield row, where
    except csv.Error as fault:
        hint = f"a field has at most {MAX_ROW_CHARS} characters"
        raise UsageError(f"{path}:{reader.line_num + bool(named) + 1}: {fault}", hint) from fault


def _separator(text: str, form: str) -> str:
    """Return what the header has most of outside quotes; a tab in a .tsv file that has one."""
    header = re.match(r'(?:"[^"]*"|[^"\n])*', text)
    bare = re.sub('"[^"]*"', "", header[0] if header else "")
    if form == ".tsv" and "\t" in bare:
        return "\t"
    counted = bare if re.search("[,;\t]", bare) else text.partition("\n")[0]
    return max(",;\t", key=counted.count)


def _table(path: Path) -> Rows:
    """Yield the rows of a Parquet or Arrow file."""
    import pyarrow

    number = size = 0
    try:
        with open(path, "rb") as file:
            names, batches = _open_table(file, ending(path))
            _refuse_repeated(names, str(path))
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH):
                    part = batch.slice(start, BATCH)
                    size += sum(map(_unpacked_size, part.columns))
                    if size > MAX_SIZE:
                        raise _too_large(path)
                    for row in part.to_pylist():
                        number += 1
                        yield row, f"{path} row {number}"
    except (pyarrow.ArrowException, OSError, ValueError) as fault:
        what = "a Parquet file" if ending(path) == ".parquet" else "an Arrow file"
        raise UsageError(f"{path} is not {what}: {str(fault)[:200]}", "write it again") from fault


def _open_table(file: IO[bytes], form: str) -> tuple[list[str], Iterable[Any]]:
    """Return the names of the columns and the batches of a Parquet file, or of one of Arrow's two formats."""
    import pyarrow.parquet

    if form == ".parquet":
        parquet = pyarrow.parquet.ParquetFile(file)
        return parquet.schema_arrow.names, parquet.iter_batches(batch_size=BATCH)
    has_index = file.read(6) == b"ARROW1"
    file.seek(0)
    if not has_index:
        stream = pyarrow.ipc.open_stream(file)
        return stream.schema.names, stream
    reader = pyarrow.ipc.open_file(file)
    return reader.schema.names, (reader.get_batch(number) for number in range(reader.num_record_batches))


def _unpacked_size(column: Any) -> int:
    import pyarrow

    # A text that many rows share is stored once, and read for each of them.
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.nbytes


def _refuse_repeated(names: Iterable[str], where: str) -> None:
    """Refuse a table in which one column would hide another one of the same name."""
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        message = f"{where} has several columns of the same name: {listed(repeated)}"
        raise UsageError(message, "rename or remove all but one")


READERS: dict[str, Callable[[Path], Rows]] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), _json),
    **dict.fromkeys((".csv", ".tsv"), _csv),
    **dict.fromkeys((".parquet", ".arrow"), _table),
    **dict.fromkeys(DOCUMENTS, _document),
}
