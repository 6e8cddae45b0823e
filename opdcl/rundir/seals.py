"""Seal a run: the hash of each file is recorded once, by the call that completed it, and only compared later.

A call that is about to change a file forgets its hash first, so a crash in between leaves a file without a
hash, never one with a wrong hash. The next call seals it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from opdcl.errors import UsageError
from opdcl.rundir.files import UNFINISHED
from opdcl.rundir.hashes import check, flushed_hash, read_seal, write_seal
from opdcl.rundir.layout import RunDir, StageDir


def final_files(run: RunDir) -> list[Path]:
    """Return the files that no later call may change without a word: settings, data, stages and results.

    Left out are reports and cards, which are made from these again and again, logs, checkpoints, which have
    seals of their own, and whatever belongs to a stage that is not done.
    """
    files = [run.config, run.workflow, run.manifest]
    for folder in (run.data, run.evals):
        files += folder.rglob("*")
    for stage in run.stages():
        if is_done(stage):
            files += (file for file in stage.path.rglob("*") if stage.trainer not in file.parents)
    return sorted(file for file in files if file.is_file() and not _is_temporary(file, run))


def is_done(stage: StageDir) -> bool:
    """Return whether a stage is done, or was: an unreadable record is damage, not a stage that goes on."""
    try:
        return stage.is_done()
    except UsageError:
        return True


def seal_new(run: RunDir) -> None:
    """Record the hashes of the final files that have none yet."""
    hashes = read_seal(run.path) if run.seal.exists() else {}
    new = [file for file in final_files(run) if _name(run, file) not in hashes]
    if new or not run.seal.exists():
        write_seal(run.path, hashes | {_name(run, file): flushed_hash(file) for file in new})


def forget(run: RunDir, *places: Path) -> None:
    """Remove the hashes of files, and of all files in folders, that are about to change."""
    if not run.seal.exists():
        return
    hashes = read_seal(run.path)
    kept = {}
    for name, digest in hashes.items():
        if not any((run.path / name).is_relative_to(place) for place in places):
            kept[name] = digest
    if kept != hashes:
        write_seal(run.path, kept)


def changes(run: RunDir) -> dict[str, str]:
    """Return name -> problem for the sealed files that are not as they were sealed.

    Raises:
        UsageError: The seal itself has changed.
    """
    if not run.seal.exists():
        return {}
    hashes = read_seal(run.path)
    problems = _problems(run, hashes)
    if problems:
        # A run in progress may have changed one since: then its hash is another one, or gone.
        now = read_seal(run.path)
        unchanged = {name: hashes[name] for name in problems if now.get(name) == hashes[name]}
        problems = _problems(run, unchanged)
    return problems


def unsealed(run: RunDir) -> list[str]:
    """Return the names of final files without a hash."""
    hashes = read_seal(run.path)
    names = [_name(run, file) for file in final_files(run)]
    return [name for name in names if name not in hashes]


def remove_unfinished(run: RunDir) -> None:
    """Remove what killed processes have left half-written; the caller holds the lock of the run."""
    reports = tuple(f".{file.name}{UNFINISHED}" for file in run.reports)  # `opdcl report` takes no lock
    for place in sorted(run.path.rglob(f".*{UNFINISHED}*")):
        if place.name.startswith(reports):
            continue
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)


def _problems(run: RunDir, hashes: dict[str, str]) -> dict[str, str]:
    checked = ((name, check(run.path / name, digest)) for name, digest in sorted(hashes.items()))
    return {name: problem for name, problem in checked if problem}


def _name(run: RunDir, file: Path) -> str:
    return file.relative_to(run.path).as_posix()


def _is_temporary(file: Path, run: RunDir) -> bool:
    return any(part.startswith(".") for part in file.relative_to(run.path).parts)
