"""The runs of a folder, a line each."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError
from opdcl.faults import translate
from opdcl.results.format import MISSING, NATS, Table, value
from opdcl.results.render import run_document
from opdcl.results.status import STATES
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir
from opdcl.rundir.lock import owner_of

LISTED = ["run", "state", "R", "D", "distance, nats", "begun"]


def list_runs(folder: Path) -> tuple[Table, list[dict[str, Any]]]:
    """Return the runs in a folder, as a table and as plain data, the latest first. A damaged one says so.

    Raises:
        UsageError: There is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "opdcl run quickstart  # makes runs/quickstart")
    found = []
    for run in map(RunDir, sorted(folder.iterdir())):
        if run.is_run():
            try:
                found.append(_line(run))
            except Exception as fault:  # one folder must not hide the others
                error = translate(fault)
                cells = [str(run.path), f"damaged: {error}", *[MISSING] * 3, ""]
                found.append((cells, {"run": str(run.path), "damaged": str(error)}))
    found.sort(key=lambda line: line[1].get("begun", ""), reverse=True)
    return Table("", LISTED, [cells for cells, _ in found]), [data for _, data in found]


def _line(run: RunDir) -> tuple[list[str], dict[str, Any]]:
    """Return a run's cells, and its data: R, D and distance as in `opdcl report RUN --json`."""
    results = Results(run)
    summary, state = results.summary, state_of(results)
    begun, document = run.read_manifest().get("created") or "", run_document(summary)
    distance = None
    if near := summary.closeness:
        distance = next(found["distance"] for state in reversed(STATES) if (found := near.states[state]))
    ratios = [summary.findings.recovery, summary.findings.domain_retention]
    cells = [str(run.path), state, *(value(ratio) if ratio else MISSING for ratio in ratios)]
    cells.append(value(distance, NATS) if distance else MISSING)
    cells.append(f"{datetime.fromisoformat(begun):%Y-%m-%d %H:%M}" if begun else "")
    data = {"run": str(run.path), "state": state, "begun": begun}
    data |= {key: document[key] for key in ("verdict", "recovery", "domain_retention")}
    return cells, data | {"distance": distance.value if distance else None}


def state_of(results: Results) -> str:
    """Return what a run is doing, where it stopped, or which adapter it has last."""
    is_running = bool(owner_of(results.run))
    for stage in results.run.stages():
        if not stage.is_done():
            return f"{'running' if is_running else 'stopped in'} {stage.name}, {stage.progress()}"
    if is_running:
        return "running eval"
    if results.alone:
        return "base alone"
    return next(reversed(results.run.adapters()), "not begun")
