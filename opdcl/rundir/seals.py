"""Seal a run: the hash of each file is recorded once, by the call that completed it, and only compared later.

A file that has changed since is refused; `--force` repeats the stage or the result that it belongs to. A call
that is about to change a file forgets its hash first, so a crash in between leaves a file without a hash,
never one with a wrong hash. The next call seals it. `verify` compares all of a run with what it recorded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opdcl.errors import UsageError
from opdcl.rundir.files import UNFINISHED, read_jsonl
from opdcl.rundir.hashes import (
    ADAPTER,
    SEAL,
    adapter_hash,
    check,
    damage,
    flushed_hash,
    read_seal,
    write_seal,
)
from opdcl.rundir.layout import STATE_OF, RunDir, read_config, read_result
from opdcl.rundir.stage import StageDir


def final_files(run: RunDir) -> list[Path]:
    """Return the files that no later call may change without a word: settings, data, stages and results.

    Left out are reports and cards, which are made from these again and again, logs, checkpoints, which have
    seals of their own, and the files of a stage that is not done.
    """
    files = [run.config, run.workflow, run.manifest]
    for folder in (run.data, run.evals):
        files += folder.rglob("*")
    for stage in run.stages():
        if is_done(stage):
            files += (file for file in stage.path.rglob("*") if stage.trainer not in file.parents)
    return sorted(file for file in files if file.is_file() and "/." not in f"/{_name(run, file)}")


def is_done(stage: StageDir) -> bool:
    """Return whether a stage is done, or was: an unreadable record is damage, not an unfinished stage."""
    try:
        return stage.is_done()
    except UsageError:
        return True


def seal_new(run: RunDir) -> None:
    """Record the hashes of the final files that have none yet."""
    hashes = read_seal(run.path) if run.seal.exists() else {}
    known = len(hashes)
    for file in final_files(run):
        name = _name(run, file)
        if name not in hashes:
            hashes[name] = flushed_hash(file)
    if len(hashes) > known or not run.seal.exists():
        write_seal(run.path, hashes)


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
    names = (_name(run, file) for file in final_files(run))
    return [name for name in names if name not in hashes]


def refuse_damaged(run: RunDir) -> None:
    """Refuse a run of which a sealed file has changed: sealed again, the change would count as a result.

    Raises:
        UsageError: A file has changed or is missing, or there is no seal that could tell.
    """
    found = {name: problem for name, problem in changes(run).items() if not _was_deleted(run, name)}
    if found:
        name, problem = next(iter(found.items()))
        others = f", as {len(found) - 1} other files have" if len(found) > 1 else ""
        message = f"{run.path / name} {problem} since opdcl wrote it{others}"
        raise UsageError(message, "restore from a copy, or --force repeats the stages and results concerned")
    if not run.seal.exists() and _has_finished(run):
        message = f"{run.seal} is missing, so nothing shows that what is finished is unchanged"
        raise UsageError(message, "restore it from a copy, or --force repeats them")


def discard_damaged(run: RunDir) -> list[str]:
    """Remove the stages and results whose files have changed, so that they are made again; name the files."""
    names: list[str] = []
    try:
        names = [name for name in changes(run) if not _was_deleted(run, name)]
        sealed = run.seal.exists()
    except UsageError:
        sealed = False
    if not sealed:  # nothing can be told from damage
        if _has_finished(run):
            names = [_name(run, file) for file in final_files(run)]
        run.seal.unlink(missing_ok=True)
    for name in names:
        _remove(run, name)
    return names


def forget_removed(run: RunDir) -> None:
    """Forget the hashes of stages and results that were deleted: they are made again."""
    for name in changes(run):
        if _was_deleted(run, name):
            _remove(run, name)


def _has_finished(run: RunDir) -> bool:
    return any(map(is_done, run.stages())) or any(run.evals.glob("*/*.json"))


def _belongings(run: RunDir, name: str) -> list[Path]:
    """Return what has to be made again if a file has changed: first the stage, result or file itself."""
    top, *inner = Path(name).parts
    if top == "stages":
        stage = run.path / top / inner[0]
        state = STATE_OF.get(inner[0].split("-", 1)[-1])
        return [stage, run.evals / state] if state else [stage]
    if top == "evals":
        suite = inner[-1].removesuffix(".samples.jsonl").removesuffix(".json")
        return [run.eval_result(inner[0], suite), run.eval_samples(inner[0], suite)]
    return [run.path / name]


def _was_deleted(run: RunDir, name: str) -> bool:
    """Return whether a sealed file belongs to a stage or a result that somebody has deleted."""
    return name.startswith(("stages/", "evals/")) and not _belongings(run, name)[0].exists()


def _remove(run: RunDir, name: str) -> None:
    places = _belongings(run, name)
    forget(run, *places)
    for place in places:
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        # Every command writes the settings again; without them, this is no run.
        elif place not in (run.config, run.workflow):
            place.unlink(missing_ok=True)


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
    problems = {}
    for name, digest in sorted(hashes.items()):
        if problem := check(run.path / name, digest):
            problems[name] = problem
    return problems


def _name(run: RunDir, file: Path) -> str:
    return file.relative_to(run.path).as_posix()


NOT_SEALED = "it has no seal: it was added by hand, or the command that wrote it was killed"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    what: str
    ok: bool
    finding: str


def verify(run: RunDir) -> list[Finding]:
    """Compare a run with what it recorded about its files, adapters, results and base weights."""
    findings = list(_check_files(run))
    for part in (_check_config, _check_stages, _check_results, _check_base):
        try:
            findings += part(run)
        except UsageError as fault:  # a record that cannot be read; the seal says so too
            findings.append(Finding(part.__name__.removeprefix("_check_"), False, fault.message))
    return findings


def _check_files(run: RunDir) -> Iterator[Finding]:
    if not run.seal.exists():
        yield Finding(SEAL, False, "missing: the run is not finished, or a version without seals made it")
        return
    try:
        hashes = read_seal(run.path)
    except UsageError as fault:
        yield Finding(SEAL, False, fault.message)
        return
    for name, digest in sorted(hashes.items()):
        problem = check(run.path / name, digest)
        yield Finding(name, not problem, problem or "as recorded")
    for name in unsealed(run):
        yield Finding(name, False, NOT_SEALED)


def _check_config(run: RunDir) -> Iterator[Finding]:
    read_config(run.config)
    yield from ()


def _check_stages(run: RunDir) -> Iterator[Finding]:
    for stage in run.stages():
        name = stage.path.name
        if not is_done(stage):
            yield Finding(f"stage {name}", False, "not finished: the same command resumes it")
            continue
        try:
            recorded = stage.state().get("adapter_sha256")
            intact = _adapter_hash(stage.adapter) == recorded
            finding = "as its stage recorded" if intact else "not the adapter that its stage recorded"
        except UsageError as fault:
            intact, finding = False, fault.message
        yield Finding(f"adapter of {name}", intact, finding)
        for folder in (*stage.checkpoints(), stage.best):
            if folder.exists():
                problem = damage(folder)
                yield Finding(f"{name}/trainer/{folder.name}", not problem, problem or "as recorded")


def _check_results(run: RunDir) -> Iterator[Finding]:
    hashes = dict.fromkeys(STATE_OF.values()) | {
        state: _adapter_hash(folder) for state, folder in run.adapters().items()
    }
    for file in sorted(run.evals.glob("*/*.json")):
        name = f"{file.parent.name}/{file.stem}"
        try:
            result = read_result(file)
            answers = len(read_jsonl(run.eval_samples(file.parent.name, file.stem)))
        except UsageError as fault:
            yield Finding(f"result {name}", False, fault.message)
            continue
        state = result.get("state")
        measured = (result.get("model") or {}).get("adapter_sha256")
        same = state not in hashes or measured == hashes[state]
        yield Finding(f"result {name}", same, f"measured with {'this' if same else 'another'} adapter")
        if answers != result["n"]:
            yield Finding(f"answers {name}", False, f"{answers} answers for n = {result['n']}")


def _check_base(run: RunDir) -> Iterator[Finding]:
    base = run.read_manifest().get("base") or {}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before and after:
        same = before == after
        yield Finding("base weights", same, "unchanged" if same else "changed during the run")


def _adapter_hash(folder: Path) -> str | None:
    return adapter_hash(folder) if (folder / ADAPTER).is_file() else None
