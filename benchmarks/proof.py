"""Record what a recovery reaches: pool runs that differ only in their seeds, and write proof.json.

    python benchmarks/proof.py quickstart present runs/present-0 runs/present-1 runs/present-2
    make records                                         # rewrites the tables of the pages from the record

One call records one method on one data set and keeps what other calls recorded. The pages name the last
method of each data set as the present one. Scores, intervals, R and D come from opdcl.results: this script
only chooses which to keep.
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.results import stats, writing
from opdcl.results.arms import load_arms
from opdcl.results.scores import STATES, Suite, states_of
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
    by_name = [{s.name: s for s in (*m.headline.values(), *m.further.values())} for m in members]
    pooled = {name: [suites.get(name) for suites in by_name] for name in by_name[0]}
    manifests = [run.read_manifest() for run in runs]
    return {
        "date": date.today().isoformat(),
        "command": "; ".join(map(portable, manifests[0].get("commands", []))),
        "machine": manifests[0].get("device"),
        "versions": manifests[0].get("versions"),
        "seeds": [member.seeds for member in members],
        "minutes": [round(manifest["seconds"] / 60, 1) for manifest in manifests if "seconds" in manifest],
        "peak_memory_gib": [peak_memory(run) for run in runs],
        "suites": {
            name: suite_record(suites)
            for name, suites in pooled.items()
            if all(suite and suite.complete for suite in suites)
        },
    }


def portable(command: str) -> str:
    """Return a command without its run directory, and with names in place of absolute paths."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)+", "", re.sub(r" (-o|--out) \S+", "", command))


def peak_memory(run: RunDir) -> float:
    """Return the most memory that a training stage of a run took, in GiB."""
    costs = [run.stage_record(stage).get("cost") or {} for stage in ("finetune", "recover")]
    return round(max(cost.get("peak_memory_bytes") or 0 for cost in costs) / 2**30, 1)


def suite_record(suites: list[Suite]) -> dict[str, Any]:
    """Return the scores of one suite over the runs; R and how it writes for retention, D for a domain."""
    first, states = suites[0], states_of(suites)
    assert states
    floor = (
        max(suite.floor or 0.0 for suite in suites) if states.floor is None else float(states.floor.mean())
    )
    record: dict[str, Any] = {**first.description, "floor": round(floor, 6)}
    for name in STATES:
        record[name] = stats.mean(getattr(states, name), states.clusters).as_dict()
    if first.role == "retention":
        tests = writing.compared_with_base(suites)
        record |= stats.outcome(states, None, writing.alike(tests))
        record["status"] = record["retention_status"]
        record["groups"] = {}
        for group in first.groups:
            only = [suite.only(group) for suite in suites]
            record["groups"][group] = {"n": len(only[0].prompts), **stats.outcome(states_of(only), None)}
        record["writing"] = {name: written(suites, name) for name in STATES}
        record["writing_tests"] = tests
    elif first.role == "domain":
        of_domain = stats.outcome(None, states)
        record |= {
            key: of_domain[key] for key in ("domain_retention", "domain_retention_raw", "domain_status")
        }
    return record


def written(suites: list[Suite], state: str) -> dict[str, dict[str, float]]:
    """Return how the answers of a state are written, by measure: see `opdcl.results.writing`."""
    values = [writing.values(suite, state) for suite in suites]
    measures = [name for name in values[0] if all(name in found for found in values)]
    stacked = {name: np.stack([found[name] for found in values]) for name in measures}
    return {name: stats.mean(scores, suites[0].clusters).as_dict() for name, scores in stacked.items()}


if __name__ == "__main__":
    main()
