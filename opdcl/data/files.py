"""Read one file of rows: JSON, JSONL, CSV, Parquet, Arrow or a document, compressed or not.

Readers yield each row with its file and line. In place of a row that cannot be read they yield its error, so
that the rows after it can be read; what makes a whole file unreadable is raised.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from opdcl.data.json_rows import read_json
from opdcl.data.messages import MAX_ROW_CHARS
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
    if reader is None or (is_compressed(path) and reader in (_parquet, _arrow)):
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
        with _unpacked(path) as stream:
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


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes] | Any]:
    """Open a file as bytes, decompressed if its name says that it is compressed."""
    with open(path, "rb") as file:
        suffix = path.suffix.lower()
        if suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as stream:
                yield stream
        elif suffix == ".zst":
            import pyarrow

            with pyarrow.input_stream(file, compression="zstd") as stream:
                yield stream
        else:
            yield file


def _too_large(path: Path) -> UsageError:
    message = f"{path} holds more than {MAX_SIZE:,} bytes, which is the most that is read"
    return UsageError(message, "write the rows that you need into a smaller file")


def _document(path: Path) -> Rows:
    if text := read_text(path).strip():
        yield {"text": text}, str(path)


def _json(path: Path) -> Rows:
    yield from read_json(read_text(path), path)


def _csv(path: Path) -> Rows:
    csv.field_size_limit(MAX_ROW_CHARS + 1)
    text = read_text(path)
    # The separator is the one that the header has most of.
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        _refuse_repeated(reader.fieldnames or [], f"{path}:{reader.line_num}")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:
                hint = f"quote fields that hold a {separator!r}"
                yield UsageError(f"{where} has more fields than the header", hint), where
            else:
                yield row, where
    except csv.Error as fault:
        hint = f"a field has at most {MAX_ROW_CHARS} characters"
        raise UsageError(f"{path}:{reader.line_num + 1}: {fault}", hint) from fault


def _parquet(path: Path) -> Rows:
    import pyarrow.parquet

    with _faults_of_arrow(path, "a Parquet file"):
        file = pyarrow.parquet.ParquetFile(path)
        _refuse_repeated(file.schema_arrow.names, str(path))
        _refuse_too_large(file.iter_batches(batch_size=BATCH), path)
        yield from _rows_of_batches(file.iter_batches(batch_size=BATCH), path)


def _arrow(path: Path) -> Rows:
    with _faults_of_arrow(path, "an Arrow file"), open(path, "rb") as file:
        names, batches = _open_arrow(file)
        _refuse_repeated(names, str(path))
        _refuse_too_large(batches, path)
        _, batches = _open_arrow(file)
        yield from _rows_of_batches(batches, path)


def _open_arrow(file: IO[bytes]) -> tuple[list[str], Iterable[Any]]:
    """Return the names of the columns and the batches of an open file, in either of Arrow's two formats."""
    import pyarrow

    file.seek(0)
    has_index = file.read(6) == b"ARROW1"
    file.seek(0)
    if not has_index:
        stream = pyarrow.ipc.open_stream(file)
        return stream.schema.names, stream
    reader = pyarrow.ipc.open_file(file)
    return reader.schema.names, (reader.get_batch(number) for number in range(reader.num_record_batches))


def _refuse_too_large(batches: Iterable[Any], path: Path) -> None:
    """Refuse columns that unpack to more than `MAX_SIZE` bytes; counting them keeps no row."""
    import pyarrow

    size = 0
    for whole in batches:
        for start in range(0, whole.num_rows, BATCH):
            for column in whole.slice(start, BATCH).columns:
                # A text that many rows share is stored once, and read for each of them.
                shared = pyarrow.types.is_dictionary(column.type)
                size += (column.dictionary_decode() if shared else column).nbytes
            if size > MAX_SIZE:
                raise _too_large(path)


def _rows_of_batches(batches: Iterable[Any], path: Path) -> Rows:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH):
            for row in batch.slice(start, BATCH).to_pylist():
                number += 1
                yield row, f"{path} row {number}"


@contextlib.contextmanager
def _faults_of_arrow(path: Path, what: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as fault:
        raise UsageError(f"{path} is not {what}: {str(fault)[:200]}", "write it again") from fault


def _refuse_repeated(names: Iterable[str], where: str) -> None:
    """Refuse a table in which one column would hide another one of the same name."""
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        message = f"{where} has several columns of the same name: {listed(repeated)}"
        raise UsageError(message, "rename or remove all but one")


READERS: dict[str, Callable[[Path], Rows]] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), _json),
    **dict.fromkeys((".csv", ".tsv"), _csv),
    ".parquet": _parquet,
    ".arrow": _arrow,
    **dict.fromkeys(DOCUMENTS, _document),
}
