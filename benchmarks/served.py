"""Compare sampling and evaluation on a vLLM server that loads adapters at run time with local results.

    python benchmarks/served.py RUN --serve \\
        "vllm serve MODEL --dtype float32 --port 8123 --served-model-name base
         --enable-lora --max-lora-rank 32"

RUN is a finished run whose stored answers were decoded greedily on this machine; they are the local results.
VLLM_ALLOW_RUNTIME_LORA_UPDATING=True must be in the environment. Reports how many answers differ, how that
affects the scores, and how often trainer and server disagree about a sampled token by more than a factor of
two. Takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from remote import Served as Process
from remote import Told

from opdcl.config.model import ModelConfig, ServerSection
from opdcl.config.recover import RecoverConfig
from opdcl.config.workflow import Workflow
from opdcl.data.suites import load_suite
from opdcl.distill.make_teacher import reach_server
from opdcl.distill.prompts import encode_stream, read_recovery_source
from opdcl.distill.teachers import ServedStudent, Teacher
from opdcl.model.backbone import Backbone
from opdcl.rundir.environment import machine
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.stages.evaluate import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--serve", required=True, help="command that starts the server")
    parser.add_argument("--url", default="http://127.0.0.1:8123/v1")
    parser.add_argument("--suites", nargs="+", default=["instructions", "handbook"])
    parser.add_argument("--states", nargs="+", default=["base", "recovered"])
    parser.add_argument("--sampled", type=int, default=48, help="completions to compare log-probabilities on")
    parser.add_argument("--limit", type=int, help="evaluate only the first N documents of each suite")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("served.json"))
    options = parser.parse_args()
    run = RunDir(options.run)
    workflow = Workflow.model_validate(read_json(run.config)["workflow"])
    backbone = Backbone.load(ModelConfig(id=workflow.model.id, revision=workflow.model.revision))
    with tempfile.TemporaryDirectory() as folder:
        process = Process(options.serve, options.url, Path(folder) / "server.log")
        try:
            process.start()
            version = process.version()
            place = ServerSection(url=options.url, model="base")
            found = [
                compare(run, workflow, backbone, place, suite, state, options, Path(folder))
                for suite in options.suites
                for state in options.states
            ]
            sampled = sampling(run, backbone, place, options.sampled, Path(folder))
        finally:
            process.kill()
    record = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "server": version,
        "evaluation": found,
        "sampling": sampled,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    if bad := [r for r in found if abs(r["served"] - r["local"]) > 0.01]:
        sys.exit(f"{len(bad)} scores differ by more than a point")


def compare(
    run: RunDir,
    workflow: Workflow,
    backbone: Backbone,
    place: ServerSection,
    suite: str,
    state: str,
    options: argparse.Namespace,
    folder: Path,
) -> dict:
    """Measure a state on a suite through the server; compare each answer with the one stored in the run."""
    adapter = run.adapters().get(state)
    config = workflow.eval.model_copy(update={"server": place, "limit": options.limit})
    began = time.monotonic()
    record = {"role": "control", "model": {"id": workflow.model.id}}
    report = Told(f"{suite} {state}")
    out = RunDir(folder / "run")
    evaluate(config, load_suite(suite, config), backbone, state, out, record, report, adapter)
    seconds = time.monotonic() - began
    rows = {r["doc_id"]: r for r in read_jsonl(RunDir(folder / "run").eval_samples(state, suite))}
    stored = {r["doc_id"]: r for r in read_jsonl(run.eval_samples(state, suite)) if r["doc_id"] in rows}
    metric = read_json(run.eval_result(state, suite))["metric"]
    scores = {
        name: sum(float(r["scores"][metric]) for r in found.values()) / len(found)
        for name, found in (("served", rows), ("local", stored))
    }
    differing = sum(rows[i]["response"] != stored[i]["response"] for i in rows)
    return {
        "suite": suite,
        "state": state,
        "n": len(rows),
        "metric": metric,
        **scores,
        "differing": differing / len(rows),
        "seconds": round(seconds, 1),
    }


def sampling(run: RunDir, backbone: Backbone, place: ServerSection, count: int, folder: Path) -> dict:
    """Let the server sample from the run's last adapter, and grade the completions with the local weights."""
    adapter = list(run.adapters().values())[-1]
    backbone.drop_adapters()
    backbone.load_adapter(adapter, "student", trainable=True)
    config = RecoverConfig(validation_prompts=count)
    prompts = encode_stream(
        config, read_recovery_source(config), "general", backbone.tokenizer, backbone.context_length
    ).held_out
    student = ServedStudent(backbone, reach_server(place, backbone, print), folder / "served")
    began = time.monotonic()
    rollouts = student.complete(prompts, RecoverConfig(), 64, seed=1)
    seconds = time.monotonic() - began
    student.close()
    tokens = torch.tensor([t for r in rollouts for t in r.completion_ids])
    opinion = Teacher(backbone, "student").distribution(rollouts)
    parts = [slice(i, i + 256) for i in range(0, len(tokens), 256)]
    mine = torch.cat(
        [opinion.log_probs(p, len(opinion.head_VH)).gather(1, tokens[p, None])[:, 0] for p in parts]
    ).detach()
    gap = (mine - torch.tensor([x for r in rollouts for x in r.logprobs])).abs()
    return {
        "completions": len(rollouts),
        "tokens": len(tokens),
        "seconds": round(seconds, 1),
        "largest_gap": float(gap.max()),
        "mismatched": float((gap > math.log(2)).float().mean()),
    }


if __name__ == "__main__":
    main()
