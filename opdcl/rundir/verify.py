"""Seals: the hashes of what was written, to tell later what is damaged, missing or changed.

opdcl verify runs/mine
"""

from __future__ import annotations

from dataclasses import dataclass

from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.hashes import ADAPTER, file_hash
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import SEAL, seal


@dataclass(frozen=True)
class Finding:
    """What became of one thing that the run recorded."""

    what: str
    ok: bool
    finding: str


def seal_run(run: RunDir) -> None:
    """Record the hashes of a run's results and adapters, the report apart: it can be written anew at any time."""
    files = [p for p in sorted(run.evals.rglob("*.json*")) if not p.name.startswith(".")]
    for stage in run.stages():
        files += [p for p in (stage.record, stage.metrics, *sorted(stage.adapter.glob("*"))) if p.is_file()]
    seal(run.path, [*files, run.config])


def verify(run: RunDir) -> list[Finding]:
    """Hash everything again, and compare it with what the run recorded when it was made."""
    found = []
    if (run.path / SEAL).exists():
        for name, digest in sorted(read_json(run.path / SEAL).items()):
            file = run.path / name
            state = (
                "missing" if not file.is_file() else "as recorded" if file_hash(file) == digest else "changed"
            )
            found.append(Finding(name, state == "as recorded", state))
    else:
        found.append(Finding(SEAL, False, "missing: the run is not finished, or older than seals"))
    adapters = {}
    for stage in run.stages():
        record = stage.state()
        weights = stage.adapter / ADAPTER
        if record.get("status") == "done":
            digest = file_hash(weights) if weights.is_file() else None
            adapters[stage.path.name.split("-", 1)[1]] = digest
            ok = digest == record.get("adapter_sha256")
            found.append(
                Finding(
                    f"adapter of {stage.path.name}",
                    ok,
                    "as its stage recorded" if ok else "not the one that the stage made",
                )
            )
    owner = {"tuned": adapters.get("finetune"), "recovered": adapters.get("recover")}
    for result in sorted(run.evals.glob("*/*.json")):
        measured = read_json(result)
        name, state = f"{result.parent.name}/{result.stem}", measured.get("state")
        belongs = state not in owner or (measured.get("model") or {}).get("adapter_sha256") == owner[state]
        found.append(
            Finding(
                f"result {name}",
                belongs,
                "measured on this adapter" if belongs else "measured on another adapter",
            )
        )
        rows = len(read_jsonl(run.eval_samples(result.parent.name, result.stem)))
        if rows != measured.get("n"):
            found.append(Finding(f"answers {name}", False, f"{rows} answers for n = {measured.get('n')}"))
    base = (read_json(run.manifest) if run.manifest.exists() else {}).get("base") or {}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before and after:
        found.append(
            Finding(
                "base weights",
                before == after,
                "the same before and after" if before == after else "changed during the run",
            )
        )
    return found
