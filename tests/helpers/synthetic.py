"""Synthetic run directories: every number of their reports is known beforehand."""

import json
from pathlib import Path

import numpy as np

from helpers.command import ROOT
from opdcl.results import compare, render
from opdcl.results.status import STATES
from opdcl.results.summary import Results
from opdcl.rundir.layout import ADAPTER, RunDir

N = 40
METRIC = "accuracy"
STRICT = "prompt_level_strict_acc"

ROLES = {"handbook": "domain", "manual": "domain", "neighbours": "control"}

# The prompts that base and tuned pass in the compared runs.
BASE = {"instructions": range(32), "handbook": range(4)}
TUNED = {"instructions": range(8), "handbook": range(36)}


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in value) if isinstance(value, list) else json.dumps(value)
    )


def measure(run: RunDir, state: str, passes: dict, n: int = N, prompt="Prompt", metric=METRIC) -> None:
    """Write the evaluations of a state; `passes` is suite name -> numbers of the passed prompts."""
    for suite, passed in passes.items():
        role = ROLES.get(suite, "retention")
        rows = [{"doc_id": i, "prompt": f"{prompt} {i}", "scores": {metric: i in passed}} for i in range(n)]
        result = {
            "suite": suite,
            "role": role,
            "metric": metric,
            "n": n,
            "metrics": {metric: sum(row["scores"][metric] for row in rows) / n},
            "floor": {},
        }
        write(run.eval_result(state, suite), result)
        write(run.eval_samples(state, suite), rows)


def rewrite_samples(run: RunDir, state: str, suite: str, rows: list[dict]) -> None:
    """Replace the samples of a result, and its scores by theirs."""
    write(run.eval_samples(state, suite), rows)
    file = run.eval_result(state, suite)
    metric = json.loads(file.read_text())["metric"]
    parts = [np.ravel(row["scores"][metric]) for row in rows]
    alter(file, n=len(rows), metrics={metric: float(np.concatenate(parts).mean())})


def workflow(**recover) -> dict:
    return {
        "name": "any",
        "description": "any",
        "model": {"id": "smollm2-135m"},
        "finetune": {"data": "handbook", "seed": 0, "lora": {"r": 32}},
        "recover": {"method": "alternating", "steps": 48, "save_steps": 8, "seed": 0} | recover,
        "eval": {"retention": ["instructions"], "domain": ["handbook"], "data": {}, "limit": None},
        "gates": {"recovery": None},
    }


def alter(file: Path, **values) -> None:
    """Change values of a JSON file; those of a section that it has are added to it."""
    content = json.loads(file.read_text())
    for key, value in values.items():
        whole = isinstance(value, dict) and isinstance(content.get(key), dict)
        content[key] = content[key] | value if whole else value
    write(file, content)


def change(run: RunDir, section: str, **values) -> None:
    """Change settings in one section of the run's workflow."""
    workflow = json.loads(run.config.read_text())["workflow"]
    alter(run.config, workflow={section: (workflow.get(section) or {}) | values})


def measure_states(run: RunDir, suite: str, passed: tuple, n: int = N, **more) -> None:
    """Write the evaluations of base, tuned and recovered, as far as `passed` goes: see `measure_fully`."""
    for state, passes in zip(STATES, passed, strict=False):
        measure_fully(run, state, suite, passes, n, **more)


def measure_fully(run: RunDir, state: str, suite: str, passes: int | set[int], n: int = N, **more) -> None:
    """Write one evaluation with answers, metrics, floors and cost; `passes` numbers the passed prompts.

    A number stands for the first ones. `fields` returns further fields of the row of a prompt, such as
    `ended`, `group` and `floor`.
    """
    passes = passes if isinstance(passes, set) else set(range(passes))
    role = ROLES.get(suite, "retention")
    rows = [
        {
            "doc_id": i,
            "prompt": more.get("prompt", f"Prompt number {i} of {suite}"),
            "response": more.get("response", f"{state} answers {i}"),
            "target": None,
            "scores": {STRICT: i in passes, "inst_level_strict_acc": [True, i in passes]},
            "tokens": 50,
            **(more["fields"](i) if "fields" in more else {}),
        }
        for i in range(n)
    ]
    mean = len(passes) / n
    result = {
        "state": state,
        "suite": suite,
        "role": role,
        "metric": STRICT,
        "n": n,
        "metrics": {
            STRICT: mean,
            "inst_level_strict_acc": (1 + mean) / 2,
            "prompt_level_loose_acc": mean + 0.01,
            "inst_level_loose_acc": (1 + mean) / 2 + 0.01,
        },
        "floor": {"empty": {STRICT: 0.0}, "constant": {STRICT: 0.05}, "copy": {STRICT: 0.025}},
        "model": {"id": "smollm2-135m", "adapter_sha256": None if state == "base" else f"{state}-hash"},
        "cost": {"seconds": 10.0, "tokens": 1000, "peak_memory_bytes": 2 * 2**30},
    }
    write(run.eval_result(state, suite), result)
    write(run.eval_samples(state, suite), rows)


def measured(run: RunDir, retention, n=400, domain=(), domain_n=300, floors=(0, 0), **fields) -> dict:
    """Measure the headline suites anew: the passed prompts of base, tuned and recovered. Return the JSON.

    A content-free answer passes as many prompts as `floors` says, by suite. `fields` maps a state to a
    function from a prompt's number to further fields of its row.
    """
    suites = (("instructions", retention, n, floors[0]), ("handbook", domain, domain_n, floors[1]))
    for suite, passed, size, floor in suites:
        for state, passes in zip(STATES, passed, strict=False):
            more = fields.get(state, lambda i: {})

            def row(i, more=more, floor=floor):
                return {"floor": i < floor} | more(i)

            measure_fully(run, state, suite, passes, size, **({"fields": row} if floor or fields else {}))
    return render.summarise(run)


def with_faults(run: RunDir) -> None:
    """Change files, base weights and adapters, and measure a control suite on fewer prompts."""
    for index, stage in enumerate(("finetune", "recover"), 1):
        folder = run.stage(index, stage)
        folder.adapter.mkdir(parents=True)
        (folder.adapter / ADAPTER).write_bytes(b"changed <b> & since")
        alter(folder.record, adapter_sha256="0" * 64)
    alter(run.manifest, base={"fingerprint_after": "deadbeef"})
    alter(run.manifest, adapters={"recovered": {"sha256": "retrained"}})
    measure_states(run, "neighbours", (20, 20, 20))
    measure_fully(run, "base", "neighbours", 20, n=35)


def pages(run: RunDir) -> dict[str, str]:
    """Write the report; return file name -> text."""
    render.write(Results(run))
    return {path.name: path.read_text(encoding="utf-8") for path in run.reports}


def held(name: str, document: dict) -> None:
    """Hold the keys of a document, and the types of their values, against keys.json."""

    def keys(value):
        if isinstance(value, dict):
            return {key: keys(content) for key, content in value.items()}
        return [keys(content) for content in value[:1]] if isinstance(value, list) else type(value).__name__

    known = json.loads((ROOT / "tests" / "unit" / "results" / "keys.json").read_text())
    assert json.dumps(keys(document)) == json.dumps(known[name])


def compared(runs: list[RunDir]) -> dict:
    """Return the comparison of runs as its JSON has it."""
    return compare.plain(compare.compare_runs(runs))
