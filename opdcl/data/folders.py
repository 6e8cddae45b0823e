"""The files of a folder of rows or documents, and those that are left out."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opdcl.data.files import DOCUMENTS, READERS, ending, is_regular
from opdcl.errors import UsageError, listed

# What the files, or folders, of the parts of a data set are called.
SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")
# Documents about the rows that lie beside them.
ABOUT = ("readme", "license", "licence")


@dataclass(frozen=True)
class Folder:
    """The files of a folder, in order, and the names of what lies there besides."""

    files: list[Path]
    left_out: list[str]


def list_folder(folder: Path) -> Folder:
    """Return the files to read: all documents, or all files of rows of one format.

    Hidden files and folders are left out, and what is no regular file or has another ending.

    Raises:
        UsageError: The files are of several kinds, or of several parts of a data set.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        if len(splits) != 1:
            message = f"{folder} holds several parts of a data set: {listed(splits)}"
            raise UsageError(message, f"name one of them: {folder}/{splits[0] if splits else 'PART'}")
        return list_folder(folder / splits[0])
    if (folder / "state.json").is_file():
        return Folder(_saved_files(folder), [])
    files, left_out = _walk(folder)
    rows = [file for file in files if ending(file) not in DOCUMENTS]
    if rows:
        about = [file for file in files if file not in rows and file.stem.lower().startswith(ABOUT)]
        files = [file for file in files if file not in about]
        left_out += [str(file.relative_to(folder)) for file in about]
        _refuse_mixture(folder, files)
        _refuse_splits(folder, files)
    return Folder(files, sorted(left_out))


def _walk(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files that have a reader, in order, and the names of all others. Hidden ones have none."""
    files, left_out = [], []
    for place, folders, names in os.walk(folder):
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if name not in hidden]
        left_out += [f"{(Path(place) / name).relative_to(folder)}/" for name in hidden]
        for name in names:
            file = Path(place) / name
            if name.startswith(".") or ending(file) not in READERS or not is_regular(file):
                left_out.append(str(file.relative_to(folder)))
            else:
                files.append(file)
    return sorted(files), left_out


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `datasets` wrote with `save_to_disk`, in the order of their rows."""
    try:
        entries = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        files = [folder / Path(entry["filename"]).name for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        message = f"{folder}/state.json does not list the files of a saved data set"
        raise UsageError(message, "save it again with save_to_disk, or give its .arrow file") from fault
    if missing := [file for file in files if not is_regular(file)]:
        raise UsageError(f"{missing[0]} is missing", "save the data set again with save_to_disk")
    return files


def _refuse_mixture(folder: Path, files: list[Path]) -> None:
    kinds = Counter("documents" if ending(file) in DOCUMENTS else ending(file) for file in files)
    if len(kinds) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        hint = "name one file, or move the others into a folder of their own"
        raise UsageError(f"{folder} holds files of several kinds: {found}", hint)


def _refuse_splits(folder: Path, files: list[Path]) -> None:
    """Refuse to learn from the test rows that lie beside the rows for training."""
    splits: dict[str, str] = {}
    for file in files:
        for part in file.relative_to(folder).parts:
            word = re.split(r"[-_.]", part.lower())[0]
            if word in SPLITS:
                splits.setdefault(word, str(file))
    if len(splits) > 1:
        message = f"{folder} holds several parts of a data set: {listed(splits)}"
        raise UsageError(message, f"name one file, such as {next(iter(splits.values()))}")
