"""Keep finished runs of a comparison as rows of a record, so that an interrupted comparison loses nothing.

    python benchmarks/pieces.py benchmarks/methods.json runs/methods/*     # again whenever a run has finished

A row says what its run was (arm, seed, version, machine), what its report says, and who wrote the steps. A
run that is measured again takes the place of its row. Means over the rows of an arm are made by
`arm_tables.py`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from opdcl.results.summary import summarise
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

RATIOS = ("recovery", "domain_retention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    record = read_json(options.record) if options.record.exists() else {"rows": []}
    rows = {(row["arm"], row["seed"]): row for row in record["rows"]}
    for run in options.runs:
        if (run / "report.html").exists():
            row = piece(run)
            rows[row["arm"], row["seed"]] = row
            record["suites"] = {suite["role"]: name for name, suite in row["suites"].items()}
    ordered = record["rows"] = [rows[key] for key in sorted(rows)]
    options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{options.record}: {len(ordered)} rows")


def piece(run: Path) -> dict[str, Any]:
    """Return the row of a finished run, whose name ends with its seed."""
    summary, manifest = summarise(RunDir(run)), read_json(run / "manifest.json")
    arm, _, seed = run.name.rpartition("-")
    row: dict[str, Any] = {"arm": arm, "seed": int(seed), "machine": manifest["device"]["name"]}
    row |= {key: manifest.get(key) for key in ("created", "opdcl", "seconds")}
    row["suites"] = {
        name: {
            "role": suite["role"],
            "n": suite["n"],
            "floor": suite["floor"],
            **{s: suite[s]["value"] for s in states(suite)},
            **({"metrics": suite["metrics"]} if suite["role"] == "control" else {}),
        }
        for name, suite in summary["suites"].items()
    }
    row |= {key: summary[key] for key in RATIOS}
    row["peak_memory_bytes"] = max(spent.get("peak_memory_bytes", 0) for spent in summary["cost"].values())
    row["stages"] = {
        stage: spent["seconds"] for stage, spent in summary["cost"].items() if "seconds" in spent
    }
    row["verdict"] = summary["verdict"]
    if near := summary["closeness"]:
        row["closeness"] = {key: near[key] for key in ("n", "value", "low", "high", "floor", "writing")}
        row["closeness"]["distance"] = {s: near[s]["distance"] for s in states(near)}
        row["closeness"]["written"] = {
            s: {key: near[s][key]["value"] for key in ("length", "ended", "repetition")} for s in states(near)
        }
    stages = sorted(run.glob("stages/*recover/metrics.jsonl"))
    steps = [step for file in stages for step in read_jsonl(file) if "author" in step]
    row["written_by"] = dict(
        Counter(" ".join(step[k] for k in ("phase", "stream", "author")) for step in steps)
    )
    return row


def states(values: dict[str, Any]) -> list[str]:
    return [state for state in ("base", "tuned", "recovered") if values.get(state)]


if __name__ == "__main__":
    main()
