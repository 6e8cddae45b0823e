"""What a folder of rows or documents holds: the files to read, the parts of a data set, and what is left out.

A part is what `datasets` calls a split: the rows to train on, for validation, or to test with.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl.config.shipped import split_part
from opdcl.data.files import DOCUMENTS, READERS, ending, is_regular, read_text
from opdcl.errors import UsageError, listed

# Words in the names of files and folders -> the part of a data set that they name.
PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "tests", "testing", "eval", "evaluation", "holdout", "heldout", "held"), "test"),
}
# What `datasets` and the Hub write beside the rows about them.
ABOUT_ROWS = ("dataset_infos.json", "dataset_info.json")
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
    for about, one in (("state.json", ""), ("dataset_dict.json", "['train']")):
        if (folder / about).is_file():
            hint = f"in Python: datasets.load_from_disk('{folder}'){one}.to_json('rows.jsonl')"
            raise UsageError(f"{folder} is what save_to_disk wrote, which is not read", hint)
    files, left_out = _walk(folder)
    parts = _parts_of_card(folder, files)
    if parts:
        used = parts[_chosen(folder, parts, part or ("train" if "train" in parts else ""))]
    elif part or any(ending(file) not in DOCUMENTS for file in files):
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
        wanted = PARTS.get(wanted, wanted)
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
            if word.lower() in PARTS:
                return PARTS[word.lower()]
    return ""


def _parts_of_card(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files of each part that the head of a README names, as the Hub reads it; {} if none.

    Raises:
        UsageError: It cannot be read, has several subsets, or names files that are not there.
    """
    from ruamel.yaml import YAML, YAMLError

    card = folder / "README.md"
    head = re.match(r"---\n(.*?)\n---", read_text(card), re.DOTALL) if is_regular(card) else None
    if head is None or "configs:" not in head[1]:
        return {}
    parts: dict[str, list[Path]] = {}
    try:
        subsets = YAML(typ="safe").load(head[1]).get("configs") or []
        chosen = [one for one in subsets if one.get("default") or one.get("config_name") == "default"]
        if len(subsets) > 1 and len(chosen) != 1:
            names = listed([str(one.get("config_name")) for one in subsets])
            hint = "keep the subset that you mean in a folder of its own, or mark it there with default: true"
            raise UsageError(f"{card} names several subsets: {names}", hint)
        for one in chosen or subsets:
            for part, pattern in _patterns(one.get("data_files") or []):
                placed = {*folder.glob(f"{one.get('data_dir') or '.'}/{pattern}")}
                found = [file for file in files if file in placed]
                if not found:
                    hint = "bring these files here, or remove them from configs"
                    raise UsageError(f"{card} names {pattern}, and no file here is read by that name", hint)
                known = parts.setdefault(part, [])
                known += [file for file in found if file not in known]
    except (YAMLError, AttributeError, KeyError, TypeError, ValueError, NotImplementedError) as fault:
        hint = "write configs as the Hub wants them, or remove configs"
        raise UsageError(f"{card}: its configs cannot be read: {str(fault)[:200]}", hint) from fault
    return parts


def _patterns(data_files: Any) -> Iterator[tuple[str, str]]:
    """Yield the part and the name of each entry; files without a part are to train on."""
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        part, paths = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        for path in paths if isinstance(paths, list) else [paths]:
            yield str(part), str(path)


def _is_about(file: Path) -> bool:
    """Tell whether a file is about the rows that lie beside it."""
    name = file.name.lower()
    is_text = ending(file) in DOCUMENTS and name.startswith(("readme", "license", "licence"))
    return is_text or name in ABOUT_ROWS


def _walk(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files that have a reader, in order, and the names of all others. Hidden ones have none."""
    files: list[Path] = []
    left_out: list[str] = []
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        closed = [name for name in folders if name.startswith(".") or name in FOREIGN]
        left_out += [f"{inside / name}/" for name in closed]
        folders[:] = [name for name in folders if name not in closed]
        for name in names:
            file = folder / inside / name
            if name.startswith(".") or ending(file) not in READERS or not is_regular(file):
                left_out.append(str(inside / name))
            else:
                files.append(file)
    return sorted(files), left_out


def _refuse_mixture(folder: Path, files: list[Path]) -> None:
    kinds = Counter("documents" if ending(file) in DOCUMENTS else ending(file) for file in files)
    if len(kinds) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        hint = "name one file, or move the others into a folder of their own"
        raise UsageError(f"{folder} holds files of several kinds: {found}", hint)
