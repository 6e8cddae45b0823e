"""Check a finished run: are its files, adapters and results those that it recorded?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opdcl.errors import UsageError
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.hashes import ADAPTER, SEAL, adapter_hash, check, damage, read_seal
from opdcl.rundir.layout import STATE_OF, RunDir
from opdcl.rundir.records import read_config, read_result
from opdcl.rundir.seals import is_done, unsealed

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
