"""Check a finished run: are its files, adapters and results those that it recorded?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.hashes import ADAPTER, SEAL, adapter_hash, check, seal
from opdcl.rundir.layout import STATE_OF, RunDir


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    what: str
    ok: bool
    finding: str


def seal_run(run: RunDir) -> None:
    """Record the hashes of a run's configuration, results and adapters; reports can be made again."""
    files = [p for p in sorted(run.evals.rglob("*.json*")) if not p.name.startswith(".")]
    for stage in run.stages():
        prompts = sorted(stage.path.glob("*prompts.jsonl"))
        parts = stage.record, stage.metrics, *prompts, *sorted(stage.adapter.glob("*"))
        files += [p for p in parts if p.is_file()]
    seal(run.path, [*files, run.config])


def verify(run: RunDir) -> list[Finding]:
    """Compare a run with what it recorded about its files, adapters, results and base weights."""
    return [*_check_files(run), *_check_adapters(run), *_check_results(run), *_check_base(run)]


def _check_files(run: RunDir) -> Iterator[Finding]:
    if not (run.path / SEAL).exists():
        yield Finding(SEAL, False, "missing: the run is not finished, or a version without seals made it")
        return
    for name, digest in sorted(read_json(run.path / SEAL).items()):
        problem = check(run.path / name, digest)
        yield Finding(name, not problem, problem or "as recorded")


def _check_adapters(run: RunDir) -> Iterator[Finding]:
    for stage in run.stages():
        if stage.is_done():
            intact = _adapter_hash(stage.adapter) == stage.state().get("adapter_sha256")
            finding = "as its stage recorded" if intact else "not the adapter that its stage recorded"
            yield Finding(f"adapter of {stage.path.name}", intact, finding)


def _check_results(run: RunDir) -> Iterator[Finding]:
    hashes = dict.fromkeys(STATE_OF.values()) | {
        state: _adapter_hash(folder) for state, folder in run.adapters().items()
    }
    for file in sorted(run.evals.glob("*/*.json")):
        result = read_json(file)
        name, state = f"{file.parent.name}/{file.stem}", result.get("state")
        measured = (result.get("model") or {}).get("adapter_sha256")
        same = state not in hashes or measured == hashes[state]
        yield Finding(f"result {name}", same, f"measured with {'this' if same else 'another'} adapter")
        answers = len(read_jsonl(run.eval_samples(file.parent.name, file.stem)))
        if answers != result.get("n"):
            yield Finding(f"answers {name}", False, f"{answers} answers for n = {result.get('n')}")


def _check_base(run: RunDir) -> Iterator[Finding]:
    base = run.read_manifest().get("base") or {}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before and after:
        same = before == after
        yield Finding("base weights", same, "unchanged" if same else "changed during the run")


def _adapter_hash(folder: Path) -> str | None:
    return adapter_hash(folder) if (folder / ADAPTER).is_file() else None
