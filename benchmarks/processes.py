"""Run the same short job in one process, in two, and in two with the base sharded, and compare their curves.

    python benchmarks/processes.py [FOLDER]

The job is a short fine-tune of the embedded model, a recovery and an evaluation of both. Prints and stores,
for each arm against one process, the relative differences in loss and gradient norm at each step, the first
step with completions of another length, the number of questions answered differently, and the peak memory of
process 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from opdcl.rundir.environment import machine
from opdcl.rundir.files import now, read_json, read_jsonl, write_json
from opdcl.rundir.layout import RunDir

ARMS = {
    "one process": [],
    "two": ["--num-processes", "2"],
    "two, base sharded": ["--num-processes", "2", "--set", "model.shard=true"],
}
JOB = [
    "quickstart",
    "--set",
    "finetune.epochs=0.1",
    "--set",
    "recover.steps=12",
    "--set",
    "recover.rollouts=8",
    "--set",
    "recover.domain_rollouts=8",
    "--set",
    "recover.lmbda=1",
    "--set",
    "recover.max_new_tokens=32",
    "--set",
    "recover.validation_prompts=4",
    "--set",
    "recover.validate_every=6",
    "--set",
    "eval.limit=20",
    "--set",
    "model.dtype=float32",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="folder for the runs, which are kept")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="opdcl-processes-"))
    runs = {arm: RunDir(folder / arm.replace(", ", "-").replace(" ", "-")) for arm in ARMS}
    for arm, options in ARMS.items():
        subprocess.run(
            [sys.executable, "-m", "opdcl", "run", *JOB, "-o", str(runs[arm].path), "--quiet", *options],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    alone, *others = ARMS
    found = {arm: against(runs[arm], runs[alone]) for arm in others}
    record = {
        "date": now(),
        "machine": machine(),
        "command": "python benchmarks/processes.py",
        "job": " ".join(JOB),
        "peak_memory_gb": {arm: peaks(run) for arm, run in runs.items()},
        "against_one_process": found,
    }
    write_json(Path(__file__).with_suffix(".json"), record)
    print(json.dumps(record, indent=2))


def against(run: RunDir, alone: RunDir) -> dict:
    """Compare a run with that of a single process."""
    found: dict = {}
    for name in ("finetune", "recover"):
        pairs = list(zip(steps(run, name), steps(alone, name), strict=True))
        other = next(
            (
                a["step"]
                for a, b in pairs
                if (a["tokens"], a.get("mean_length")) != (b["tokens"], b.get("mean_length"))
            ),
            None,
        )
        found[name] = {
            "steps": len(pairs),
            "first_other_length": other,
            **{
                f"{key}_relative_difference": [
                    float(f"{abs(a[key] - b[key]) / abs(b[key]):.1e}") if b[key] else 0.0 for a, b in pairs
                ]
                for key in ("loss", "grad_norm")
            },
        }
    answers = {}
    for file in sorted(alone.evals.glob("*/*.samples.jsonl")):
        ours, theirs = read_jsonl(run.evals / file.relative_to(alone.evals)), read_jsonl(file)
        assert [row["doc_id"] for row in ours] == [row["doc_id"] for row in theirs] == list(range(len(ours)))
        answers[f"{file.parent.name} {file.name.split('.')[0]}"] = (
            f"{sum(a['response'] != b['response'] for a, b in zip(ours, theirs, strict=True))} of {len(ours)}"
        )
    return found | {"answers_that_differ": answers}


def steps(run: RunDir, name: str) -> list[dict]:
    return [row for row in read_jsonl(run.find_stage(name).metrics) if "loss" in row]


def peaks(run: RunDir) -> dict[str, float]:
    return {
        name: round(read_json(run.find_stage(name).record)["cost"]["peak_memory_bytes"] / 1e9, 2)
        for name in ("finetune", "recover")
    }


if __name__ == "__main__":
    main()
