"""Record what a recovery reaches: pool runs that differ only in their seeds, and write proof.json.

    python benchmarks/proof.py quickstart present runs/present-0 runs/present-1 runs/present-2
    make records                                         # rewrites the tables of the pages from the record

One call records one method on one data set and keeps what other calls recorded. The pages name the last
method of each data set as the present one. Scores, intervals, R and D come from opdcl.results: this script
only chooses which to keep.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.results import stats, writing
from opdcl.results.arms import Arm, Member, load_arms
from opdcl.results.scores import STATES, Suite, section
from opdcl.rundir.files import read_json, write_json
from opdcl.rundir.layout import RunDir

RECORD = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data_set")
    parser.add_argument("method")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    record = read_json(options.out) if options.out.exists() else {}
    record.setdefault(options.data_set, {})[options.method] = measure([RunDir(run) for run in options.runs])
    write_json(options.out, record)


def measure(runs: list[RunDir]) -> dict[str, Any]:
    """Return the pooled results of finished runs that differ only in their seeds."""
    arms = load_arms(runs)
    if len(arms) > 1 or len(arms[0].pooled) < len(runs):
        sys.exit("these runs are not one finished arm: they must differ in their seeds only")
    members = arms[0].members
    seed = int(section(runs[0], "eval").get("seed") or 0)
    by_name = [{s.name: s for s in (*m.suites.values(), *m.further.values())} for m in members]
    shared = [name for name in by_name[0] if all(name in suites for suites in by_name)]
    pooled = {name: [suites[name] for suites in by_name] for name in shared}
    manifests = [run.read_manifest() for run in runs]
    return {
        "date": date.today().isoformat(),
        "command": manifests[0].get("command"),
        "machine": manifests[0].get("device"),
        "versions": manifests[0].get("versions"),
        "seeds": [member.seeds for member in members],
        "minutes": [round(manifest["seconds"] / 60, 1) for manifest in manifests if "seconds" in manifest],
        "peak_memory_gib": [peak_memory(member) for member in members],
        "suites": {
            name: suite_record(arms[0], suites, seed)
            for name, suites in pooled.items()
            if all(suite.complete for suite in suites)
        },
    }


def peak_memory(member: Member) -> float:
    """Return the most memory that a stage of a run took, in GiB."""
    costs = member.summary["cost"].values()
    return round(max((cost.get("peak_memory_bytes") or 0 for cost in costs), default=0) / 2**30, 1)


def suite_record(arm: Arm, suites: list[Suite], seed: int) -> dict[str, Any]:
    """Return the scores of a suite over the runs; R and how it writes for retention, D for a domain."""
    first = suites[0]
    record: dict[str, Any] = {**first.description, "floor": max(s.floor or 0.0 for s in suites)}
    for state in STATES:
        scores = np.stack([suite.values(state) for suite in suites])
        record[state] = stats.mean(scores, seed).as_dict()
    if first.role == "retention":
        groups = sorted({row["group"] for row in first.rows["base"] if row.get("group")})
        record |= outcome(arm, "retention", suites, seed)
        record["groups"] = {name: outcome(arm, "retention", in_group(suites, name), seed) for name in groups}
        record["writing"] = {state: written(suites, state, seed) for state in STATES}
    elif first.role == "domain":
        record |= outcome(arm, "domain", suites, seed)
    return record


def outcome(arm: Arm, role: str, suites: list[Suite], seed: int) -> dict[str, Any]:
    """Return the project's own outcome of an arm whose one suite is this."""
    members = [
        dataclasses.replace(member, suites={role: suite})
        for member, suite in zip(arm.members, suites, strict=True)
    ]
    one = Arm(arm.name, members)
    found = stats.outcome(one.states("retention"), one.states("domain"), seed)
    wanted = ("domain_retention",) if role == "domain" else ("status", "recovery", "recovery_raw")
    return {"n": len(suites[0].prompts)} | {key: found[key] for key in wanted if key in found}


def in_group(suites: list[Suite], group: str) -> list[Suite]:
    """Return the suites with only the prompts of a group."""
    kept = [i for i, row in enumerate(suites[0].rows["base"]) if row.get("group") == group]
    return [
        dataclasses.replace(
            suite, rows={state: [rows[i] for i in kept] for state, rows in suite.rows.items()}
        )
        for suite in suites
    ]


def written(suites: list[Suite], state: str, seed: int) -> dict[str, dict[str, float]]:
    """Return how the answers of a state are written, by measure: see `opdcl.results.writing`."""
    values = [writing.values(suite, state) for suite in suites]
    measures = [name for name in values[0] if all(name in found for found in values)]
    return {
        name: stats.mean(np.stack([found[name] for found in values]), seed).as_dict() for name in measures
    }


if __name__ == "__main__":
    main()
