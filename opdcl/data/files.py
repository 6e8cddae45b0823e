"""Read files of rows: JSON, JSONL, CSV, Parquet or documents, compressed or not.

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
from itertools import islice
from pathlib import Path
from typing import Any

from opdcl.data.formats import BadRow
from opdcl.data.messages import DECODER, MAX_ROW_CHARS, are_messages
from opdcl.errors import UsageError, listed

PlacedRows = Iterator[tuple[Any, str]]

# A file of a few megabytes can unpack to any size, so what is read has a limit in every format, in
# unpacked bytes.
MAX_SIZE = 1_000_000_000
PIECE = 1 << 20
# Rows of Parquet that are unpacked at once.
BATCH = 1024
# What ends a line.
BREAK = r"\r\n|\r|\n"

DOCUMENTS = (".md", ".txt", ".markdown", ".rst")
COMPRESSED = ".gz"

FILES_HINT = (
    "use .jsonl, .json, .csv, .txt, .md, also with .gz; .parquet, .arrow; or a folder of one kind of them"
)


def format_ending(path: Path) -> str:
    """Return the ending that names a file's format, in lower case, without that of its compression."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def is_compressed(path: Path) -> bool:
    """Tell whether a file's name says that it is compressed."""
    return path.suffix.lower() == COMPRESSED


def is_regular(path: Path) -> bool:
    """Tell whether a path is a file that can be read again and again: no pipe, device or socket."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_file(path: Path) -> PlacedRows:
    """Yield the rows of a file with their places.

    Raises:
        UsageError: The file is not a regular one, has an unknown format, or is damaged.
    """
    if not is_regular(path):
        message = f"{path} is not a regular file"
        raise UsageError(message, "save it as a file first: a run reads its rows again when it is resumed")
    reader = READERS.get(format_ending(path))
    if reader is None or (is_compressed(path) and reader is _table):
        unknown = "".join(path.suffixes[-2:]) if is_compressed(path) else path.suffix
        message = f"{path}: cannot tell the format of {unknown or 'a file without an ending'}"
        raise UsageError(message, FILES_HINT)
    yield from reader(path)


def read_document(path: Path) -> str:
    """Return a text file as `_decoded`, with every line break as a line feed."""
    return _decoded(path).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(path: Path) -> str:
    """Return a text file, unpacked, without a mark of its byte order.

    Raises:
        UsageError: It cannot be read, is damaged, is not UTF-8, or holds more than `MAX_SIZE` bytes.
    """
    pieces, size = [], 0
    try:
        with gzip.open(path) if is_compressed(path) else open(path, "rb") as stream:
            while piece := stream.read(PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_SIZE:
                    raise _too_large(path)
        return b"".join(pieces).decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path} is not UTF-8 text (byte {fault.start})", "save it as UTF-8") from fault
    except (OSError, EOFError, zlib.error) as fault:
        if is_compressed(path) and not getattr(fault, "errno", None):
            message = f"{path} is damaged or not compressed: {fault}"
            raise UsageError(message, "compress it again, or give the file without compression") from fault
        reason = getattr(fault, "strerror", None) or fault
        raise UsageError(f"{path} cannot be read: {reason}", "check its permissions") from fault


def _too_large(path: Path) -> UsageError:
    message = f"{path} holds more than {MAX_SIZE:,} bytes, which is the most that is read"
    return UsageError(message, "write the rows that you need into a smaller file")


def _document(path: Path) -> PlacedRows:
    if text := read_document(path).strip():
        yield {"text": text}, str(path)


def _json(path: Path) -> PlacedRows:
    """Yield the rows of lines of JSON (JSONL), of one list of them, or the only row."""
    text = read_document(path)
    start = len(text) - len(text.lstrip())
    if start == len(text):
        return
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as fault:  # valid JSON may be too deep, or a number too long
        if format_ending(path) == ".json":
            line = getattr(fault, "lineno", _line(text, start))
            raise _not_json(f"{path}:{line}", fault).error() from fault
        end = start
    if not text[start:end] or text[end:].strip():
        yield from _lines(text, path)
    elif isinstance(value, list) and not are_messages(value):
        yield from _entries(text, start, path)
    else:
        where = f"{path}:{_line(text, start)}"
        yield _row_in(text[start:end], where), where


def _lines(text: str, path: Path) -> PlacedRows:
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line.strip():
            yield _row_in(line, where), where


def _row_in(text: str, where: str) -> Any:
    """Return the row that a JSON text holds, or why it cannot be used."""
    try:
        return _as_row(DECODER.decode(text))
    except (ValueError, RecursionError) as fault:
        return _not_json(where, fault)


def _entries(text: str, start: int, path: Path) -> PlacedRows:
    """Yield the values of the valid list that begins at `start`, each with its line."""
    decoder = json.JSONDecoder()
    line, counted, place = 1, 0, _next(text, start + 1)
    while text[place] != "]":
        line += text.count("\n", counted, place)
        counted = place
        _, end = decoder.raw_decode(text, place)
        where = f"{path}:{line}"
        yield _row_in(text[place:end], where), where
        place = _next(text, end)


def _next(text: str, position: int) -> int:
    """Return where something begins that is no blank and separates nothing."""
    while text[position] in " \n\t,":
        position += 1
    return position


def _as_row(value: Any) -> Any:
    """Return a list of messages as a row, and any other value unchanged."""
    if not are_messages(value):
        return value
    return {"messages" if "role" in value[0] else "conversations": value}


def _not_json(where: str, fault: Exception) -> BadRow:
    reason = f"{fault.msg} at column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else fault
    return BadRow(where, f"not valid JSON: {reason}", "one JSON object per line, or one list; each key once")


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _csv(path: Path) -> PlacedRows:
    csv.field_size_limit(MAX_ROW_CHARS + 1)
    text = _decoded(path)  # a line break in a field is the field's own
    # Excel reads and writes a line before the header that names the separator.
    named = re.match(rf"(?i)sep=(.)(?:{BREAK}|\Z)", text)
    text = text[named.end() :] if named else text
    separator = named[1] if named else _separator(text, format_ending(path))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    read = 0  # lines of the rows before
    try:
        _refuse_repeated(reader.fieldnames or [], f"{path}:{reader.line_num + bool(named)}")
        read = reader.line_num
        for row in reader:
            read = reader.line_num
            where = f"{path}:{read + bool(named)}"
            hint = f"quote fields that hold a {separator!r}"
            bad = BadRow(where, "the row has more fields than the header", hint)
            yield bad if None in row else row, where
    except csv.Error as fault:
        rest = "".join(islice(io.StringIO(text, newline=""), read, None))
        mark = re.escape(separator)
        before = re.match(rf'[\r\n]*(?:(?:"(?:[^"]|"")*+"|(?!")[^{mark}\r\n]*+){mark})*+', rest)
        line = 1 + read + bool(named) + len(re.findall(BREAK, before[0] if before else ""))
        hint = (
            f'close its quote, write "" for one in the text; a field has at most {MAX_ROW_CHARS} characters'
        )
        message = f"{path}:{line}: the field that begins here cannot be read: {fault}"
        raise UsageError(message, hint) from fault


def _separator(text: str, form: str) -> str:
    """Return what the header has most of outside quotes; a tab in a .tsv file that has one."""
    header = re.match(r'(?:"[^"]*"|[^"\r\n])*', text)
    bare = re.sub('"[^"]*"', "", header[0] if header else "")
    if form == ".tsv" and "\t" in bare:
        return "\t"
    counted = bare if re.search("[,;\t]", bare) else re.split(BREAK, text, maxsplit=1)[0]
    return max(",;\t", key=counted.count)


def _table(path: Path) -> PlacedRows:
    """Yield the rows of a file of Parquet, or of Arrow as `datasets` saves it."""
    import pyarrow.parquet

    number = size = 0
    try:
        with pyarrow.OSFile(str(path)) as file:
            if format_ending(path) == ".arrow":
                batches = pyarrow.ipc.open_stream(file)
                names = batches.schema.names
            else:
                parquet = pyarrow.parquet.ParquetFile(file)
                batches, names = parquet.iter_batches(batch_size=BATCH), parquet.schema_arrow.names
            _refuse_repeated(names, str(path))
            for batch in batches:
                size += sum(map(_unpacked_size, batch.columns))
                if size > MAX_SIZE:
                    raise _too_large(path)
                for row in rows_of(pyarrow.Table.from_batches([batch])):
                    number += 1
                    yield row, f"{path} row {number}"
    except (pyarrow.ArrowException, OSError, ValueError, LookupError) as fault:
        message = f"{path} is not a file of {format_ending(path)[1:].capitalize()}: {str(fault)[:200]}"
        raise UsageError(message, "write it again") from fault


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table as a text file would have them.

    Numbers of 32 bits have their shortest spelling, 0.1 and not 0.10000000149011612. Classes have the
    names that `datasets` keeps in the schema.
    """
    import pyarrow

    for number, name in enumerate(table.column_names):
        if table.schema.types[number] in (pyarrow.float16(), pyarrow.float32()):
            table = table.set_column(number, name, table[name].cast("string").cast("double"))
    rows: list[dict[str, Any]] = table.to_pylist()
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    for name, feature in about.get("info", {}).get("features", {}).items():
        if feature.get("_type") == "ClassLabel":
            for row in rows:
                # -1 stands for an unknown one.
                row[name] = None if row[name] in (None, -1) else feature["names"][row[name]]
    return rows


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


READERS: dict[str, Callable[[Path], PlacedRows]] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), _json),
    **dict.fromkeys((".csv", ".tsv"), _csv),
    **dict.fromkeys((".parquet", ".arrow"), _table),
    **dict.fromkeys(DOCUMENTS, _document),
}
