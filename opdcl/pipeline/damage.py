"""Refuse to go on with a run whose files have changed since they were made, or repeat what they belong to."""

from __future__ import annotations

import shutil
from pathlib import Path

from opdcl.errors import UsageError
from opdcl.pipeline.job import read_records
from opdcl.rundir.layout import STATE_OF, RunDir
from opdcl.rundir.seals import changes, final_files, forget


def refuse_damaged(run: RunDir) -> None:
    """Refuse a run of which a sealed file has changed: sealed again, the change would count as a result.

    Raises:
        UsageError: A file has changed or is missing, or there is no seal that could tell.
    """
    found = {name: problem for name, problem in changes(run).items() if not is_made_again(run, name)}
    if found:
        (name, problem), *others = found.items()
        more = f", and so have {len(others)} more files" if len(others) > 1 else ""
        more = f", and so has {others[0][0]}" if len(others) == 1 else more
        message = f"{run.path / name} {problem} since opdcl wrote it{more}"
        raise UsageError(message, "restore from a copy, or --force repeats the stages and results concerned")
    if not run.seal.exists() and _has_finished(run):
        message = f"{run.seal} is missing, so nothing shows that what is finished is unchanged"
        raise UsageError(message, "restore it from a copy, or --force repeats them")


def discard_damaged(run: RunDir) -> list[str]:
    """Remove the stages and results whose files have changed, so that they are made again; name the files."""
    try:
        names = [name for name in changes(run) if not is_made_again(run, name)]
        sealed = run.seal.exists()
    except UsageError:
        names, sealed = [], False
    if not sealed:  # nothing can be told from damage
        names = [file.relative_to(run.path).as_posix() for file in final_files(run)]
        run.seal.unlink(missing_ok=True)
        names = names if _has_finished(run) else []
    for name in names:
        _remove(run, _belongings(run, name))
    return names


def forget_removed(run: RunDir) -> None:
    """Forget the hashes of stages and results that were deleted: they are made again."""
    gone = [name for name in changes(run) if is_made_again(run, name)]
    for name in gone:
        _remove(run, _belongings(run, name))


def is_made_again(run: RunDir, name: str) -> bool:
    """Return whether a sealed file belongs to a stage or a result that somebody has deleted."""
    top, *inner = Path(name).parts
    if top == "stages":
        return not (run.path / top / inner[0]).exists()
    return top == "evals" and not _result_of(run.path / name).exists()


def _has_finished(run: RunDir) -> bool:
    """Return whether a run has a finished stage or a result; one with an unreadable record counts."""
    try:
        records = read_records(run)
    except UsageError:
        return True
    return bool(records.results) or any(stage.done for stage in records.stages.values())


def _belongings(run: RunDir, name: str) -> list[Path]:
    """Return what has to be made again if a file has changed: files and folders."""
    top, *inner = Path(name).parts
    if top == "stages":
        stage = run.path / top / inner[0]
        state = STATE_OF.get(inner[0].split("-", 1)[-1])
        return [stage, run.evals / state] if state else [stage]
    if top == "evals":
        result = _result_of(run.path / name)
        return [result, result.with_name(f"{result.stem}.samples.jsonl")]
    return [run.path / name]


def _result_of(file: Path) -> Path:
    """Return the result to which a file in `evals` belongs: itself, or that of the samples."""
    return file.with_name(f"{file.name.removesuffix('.samples.jsonl').removesuffix('.json')}.json")


def _remove(run: RunDir, places: list[Path]) -> None:
    forget(run, *places)
    for place in places:
        # The settings are written anew by every command; without them, this is no run.
        if place in (run.config, run.workflow):
            continue
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
