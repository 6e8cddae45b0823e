"""What a folder of rows or documents holds: the files to read, the parts of a data set, and what is left out.

A part is what `datasets` calls a split: the rows to train on, for validation, or to test with.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opdcl.config.shipped import split_part
from opdcl.data.files import DOCUMENTS, READERS, format_ending, is_regular, read_document
from opdcl.errors import UsageError, listed

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


@dataclass(frozen=True)
class Folder:
    """The files of a folder that are read, in order, and the names of everything else in it."""

    files: list[Path]
    left_out: list[str]


def list_folder(source: str) -> Folder:
    """Return the files to read of a folder, or of `FOLDER@PART`: documents, or files of rows of one format.

    Hidden files and folders are left out, and so are files with other endings, pipes and devices. If a README
    names the parts of a folder, as on the Hub, the part `train` is read unless another one is named.

    Raises:
        UsageError: The files are of several kinds or parts, or there is no part of this name.
    """
    name, part = split_part(source)
    folder = Path(name)
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
