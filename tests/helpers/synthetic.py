"""Run directories with invented results, so that every number of a report is known in advance."""

import json
from pathlib import Path

from opdcl.rundir.layout import RunDir

N = 40
METRIC = "accuracy"

# Scores shared by the compared runs: the numbers of the prompts that pass.
BASE = {"instructions": range(32), "handbook": range(4)}
TUNED = {"instructions": range(8), "handbook": range(36)}


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in value) if isinstance(value, list) else json.dumps(value)
    )


def measure(
    run: RunDir, state: str, passes: dict, n: int = N, prompt: str = "Prompt", metric: str = METRIC
) -> None:
    """Write evaluations in which the prompts with these numbers are passed; suite name -> numbers."""
    for suite, passed in passes.items():
        role = "domain" if suite in ("handbook", "manual") else "retention"
        rows = [
            {"doc_id": i, "prompt": f"{prompt} {i}", "scores": {metric: i in set(passed)}} for i in range(n)
        ]
        result = {
            "suite": suite,
            "role": role,
            "metric": metric,
            "metrics": {metric: len(passed) / n},
            "floor": {},
        }
        write(run.eval_result(state, suite), result)
        write(run.eval_samples(state, suite), rows)


def workflow(**recover) -> dict:
    return {
        "name": "any",
        "description": "any",
        "model": {"id": "smollm2-135m"},
        "finetune": {"data": "handbook", "seed": 0, "lora": {"r": 32}},
        "recover": {"method": "alternating", "steps": 48, "save_steps": 8, "seed": 0} | recover,
        "eval": {"retention": ["instructions"], "domain": ["handbook"], "data": {}, "limit": None, "seed": 0},
        "gates": {"recovery": None},
    }


def change(run: RunDir, section: str, **values) -> None:
    config = json.loads(run.config.read_text())
    config["workflow"][section] = config["workflow"][section] | values
    write(run.config, config)
