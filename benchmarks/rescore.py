"""Score the stored answers of finished runs with today's suites, and write their reports again.

    python benchmarks/rescore.py runs/start/*        then pieces.py takes their rows into the record

The models are not asked: only base reads the answers of suites that want it. `opdcl eval RUN` does the same
for a run of this version. Runs of an earlier version, whose training it would repeat, are scored here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from opdcl import report
from opdcl.config.model import ModelConfig
from opdcl.config.shipped import shipped_suites
from opdcl.data.suites import Suite, load_suite
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_json, read_jsonl, write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.rundir.lock import locked
from opdcl.rundir.seals import forget, refuse_damaged, seal_new
from opdcl.stages.answers import json_lines
from opdcl.stages.evaluate import score_again

# Answers that runs share, as base's: suite and texts -> scored samples, means and those of the floors.
Scored = dict[tuple[str, ...], tuple[list[dict[str, Any]], dict[str, float], dict[str, Any]]]


def rescore(run: RunDir, state: str, suite: Suite, backbone: Backbone, scored: Scored) -> tuple[float, float]:
    """Score a state's answers again; return what the suite's metric was and is.

    Raises:
        UsageError: The answers are to other prompts than the suite asks today.
    """
    result_file, samples_file = run.eval_result(state, suite.name), run.eval_samples(state, suite.name)
    result, samples = read_json(result_file), read_jsonl(samples_file)
    asked = [suite.prompt_of(doc) for doc in suite.documents(len(samples))]
    if [row["prompt"] for row in samples] != asked:
        raise UsageError(f"{samples_file} answers other prompts than {suite.name} asks", "evaluate it again")
    texts = (suite.name, *(row["response"] for row in samples))
    if texts not in scored:
        scored[texts] = (samples, *score_again(suite, samples, backbone))
    samples, metrics, floor = scored[texts]
    before = result["metrics"].get(suite.metrics[0], float("nan"))
    forget(run, result_file, samples_file)
    write_atomic(samples_file, json_lines(samples))
    write_json(result_file, result | {"metric": suite.metrics[0], "metrics": metrics, "floor": floor})
    return before, metrics[suite.metrics[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--suites", nargs="+", help="default: all shipped ones that a run has measured")
    options = parser.parse_args()
    backbone = Backbone.load(ModelConfig())
    scored: Scored = {}
    for path in options.runs:
        run = RunDir(path)
        with locked(run, print):
            refuse_damaged(run)
            for file in sorted(run.evals.glob("*/*.json")):
                state, name = file.parent.name, file.stem
                if name in (options.suites or shipped_suites()):
                    before, now = rescore(run, state, load_suite(name), backbone, scored)
                    print(f"{path}: {name} {state} {100 * before:.1f} -> {100 * now:.1f} %", flush=True)
            seal_new(run)
        report(path, update=True)


if __name__ == "__main__":
    main()
