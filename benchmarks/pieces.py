"""Keep finished runs of a comparison as rows of a record, so that an interrupted comparison loses nothing.

    python benchmarks/pieces.py benchmarks/start.json runs/start/*     # again whenever a run has finished

A row says what its run was (arm, seed, commit, machine), what its report says, who wrote the steps, and how
every prompt was answered, so that other questions can be asked of it later. A run measured again takes
the place of its row. Means over the rows of an arm, and pairs of arms, are made by
`arm_tables.py` and `by_dose.py`.
Answers are not in the record but in the runs, where `opdcl eval RUN` scores them with today's suites.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opdcl.results.measurements import MeasuredSuite, load_closeness, load_suites, response_values
from opdcl.results.render import summarise
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

RATIOS = ("recovery", "domain_retention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--commit", default="", help="of the checkout that made them; default: this one's")
    options = parser.parse_args()
    record = read_json(options.record) if options.record.exists() else {"rows": []}
    rows = {(row["arm"], row["seed"]): row for row in record["rows"]}
    commit = options.commit or here()
    for run in options.runs:
        if (run / "report.html").exists():
            row = {**piece(run), "commit": commit}
            rows[row["arm"], row["seed"]] = row
            record["suites"] = {suite["role"]: name for name, suite in row["suites"].items()}
    ordered = record["rows"] = [rows[key] for key in sorted(rows)]
    options.record.write_text(text_of(record), encoding="utf-8")
    print(f"{options.record}: {len(ordered)} rows")


def here() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def text_of(record: dict[str, Any]) -> str:
    """Return a record as JSON with one line for each row."""
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    rest = {key: value for key, value in record.items() if key != "rows"}
    return f'{json.dumps(rest)[:-1]}{", " if rest else ""}"rows": [\n{rows}\n]}}\n'


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
    row["dose"] = {
        stage: {key: spent[key] for key in ("graded", "parts") if key in spent}
        for stage, spent in summary["cost"].items()
        if "graded" in spent
    }
    row["verdict"] = summary["verdict"]
    if near := summary["closeness"]:
        row["closeness"] = {key: near[key] for key in ("n", "value", "low", "high", "floor", "writing")}
        row["closeness"]["distance"] = {s: near[s]["distance"] for s in states(near)}
        row["closeness"]["written"] = {
            s: {key: near[s][key]["value"] for key in ("length", "ended", "repetition")} for s in states(near)
        }
    stages = sorted(run.glob("stages/*recover/metrics.jsonl"))
    metrics = [row for file in stages for row in read_jsonl(file)]
    steps = [step for step in metrics if "author" in step]
    row["written_by"] = dict(Counter(f"{step['stream']} {step['author']}" for step in steps))
    row["start"] = [step["start"] for step in metrics if "start" in step]
    suites = load_suites(RunDir(run))
    row["prompts"] = per_prompt(suites, load_closeness(RunDir(run)))
    # The fact or person that each prompt is about, where several prompts share one.
    row["clusters"] = {s.name: s.clusters.tolist() for s in suites if s.clusters is not None}
    return row


def per_prompt(
    suites: list[MeasuredSuite], near: MeasuredSuite
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return suite -> state -> measure -> a number for every prompt, in the order of the suite."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for suite in suites:
        found[suite.name] = {s: {"score": short(suite.values(s))} for s in suite.rows}
    found[near.name] = {}
    for state, rows in near.rows.items():
        found[near.name][state] = {"distance": short(row["scores"]["distance"] for row in rows)}
    for suite in [*suites, near]:
        for state in suite.rows:
            written = response_values(suite, state)
            found[suite.name][state] |= {name: short(written[name]) for name in written}
    return found


def short(numbers: Iterable[float]) -> list[float]:
    """Return numbers to four digits, whole ones without a point: a record has thousands of them."""
    rounded = (round(float(number), 4) for number in numbers)
    return [int(number) if number.is_integer() else number for number in rounded]


def states(values: dict[str, Any]) -> list[str]:
    return [state for state in ("base", "tuned", "recovered") if values.get(state)]


if __name__ == "__main__":
    main()
