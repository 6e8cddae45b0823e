"""Compare a vLLM server with the process: a teacher there, and sampling and evaluation there.

    python benchmarks/remote.py teacher ADAPTER --serve \\
        "vllm serve MODEL --dtype float32 --host 127.0.0.1 --port 8123 --served-model-name base"
    python benchmarks/remote.py student RUN --serve "... --enable-lora --max-lora-rank 32"

MODEL is the base, as a folder that `vllm` can read. The command is started here, and killed at the end.

`teacher`: ADAPTER is a tuned adapter from a fine-tune on the handbook. The server is killed with SIGKILL in
the middle of a recovery, and started again. Both recoveries use the sampled token's advantage and the same
seed and prompts. They are compared by their full-vocabulary KL to base, computed locally, on answers that
base wrote to held-out prompts. Takes an hour on two cores; `--steps` and `--prompts` shorten it.

`student`: RUN is a finished run whose stored answers were decoded greedily on this machine; they are the
local results. VLLM_ALLOW_RUNTIME_LORA_UPDATING=True must be in the environment. Reports how many answers
differ, how that affects the scores, and how often trainer and server disagree about a sampled token by more
than a factor of two. Takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from common import head, store

from opdcl.config.model import ModelConfig, ServerSection
from opdcl.config.recover import RecoverConfig
from opdcl.config.workflow import Workflow
from opdcl.data.prompts import encode_prompts, encode_stream, read_recovery_source
from opdcl.data.suites import load_suite
from opdcl.measure.evaluate import Asking, evaluate
from opdcl.model.backbone import Backbone
from opdcl.model.load_backbone import load_backbone
from opdcl.results.intervals import mean
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.sampling.sample import sample
from opdcl.sampling.server import Server
from opdcl.train.external_teachers import ServedStudent, provided, reach_server
from opdcl.train.loop import StageReport
from opdcl.train.losses import ScoredTokens, token_losses
from opdcl.train.recover import recover
from opdcl.train.teachers import Teacher
from opdcl.words import Loss, Rollout

IN_FLIGHT = (1, 8, 32)


class Served:
    """A server in its own process group, so that killing it leaves nothing behind."""

    def __init__(self, command: str, url: str, log: Path):
        self.command, self.url, self.log = command, url, log
        self.process: subprocess.Popen | None = None

    def start(self) -> float:
        """Start the server and wait until it answers; return the seconds that took."""
        began, words = time.monotonic(), shlex.split(self.command)
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        while True:
            if self.process.poll() is not None:
                sys.exit(f"the server ended with code {self.process.returncode}; see {self.log}")
            try:
                if httpx2.get(f"{self.url}/models", timeout=2).status_code == 200:
                    return time.monotonic() - began
            except httpx2.TransportError:
                time.sleep(1)

    def version(self) -> str:
        return str(httpx2.get(f"{self.url.removesuffix('/v1')}/version", timeout=5).json()["version"])

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Told(StageReport):
    """Print what a stage reports, and run an action at a given step."""

    def __init__(self, name: str, at: int = 0, act: Callable[[], None] | None = None):
        self.name, self.at, self.act = name, at, act
        self.notes: list[str] = []

    def progress(self, done: int, total: int, **values: Any) -> None:
        print(f"{self.name} {done}/{total}", values, flush=True)
        if done == self.at and self.act:
            self.act()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"{self.name}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="kind", required=True)
    teacher, student = commands.add_parser("teacher"), commands.add_parser("student")
    teacher.add_argument("adapter", type=Path)
    teacher.add_argument("--steps", type=int, default=16)
    teacher.add_argument("--prompts", type=int, default=48, help="held-out prompts for the comparison")
    student.add_argument("run", type=Path)
    student.add_argument("--limit", type=int, help="evaluate only the first N documents of each suite")
    for command, record in ((teacher, "remote"), (student, "served")):
        command.add_argument("--serve", required=True, help="command that starts the server")
        command.add_argument("--url", default="http://127.0.0.1:8123/v1")
        command.add_argument("--out", type=Path, default=Path(__file__).with_name(f"{record}.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(options.serve, options.url, Path(folder) / "server.log")
        try:
            compare = compare_teachers if options.kind == "teacher" else compare_students
            record, fault = compare(served, options, Path(folder))
        finally:
            served.kill()
    store(options.out, record)
    print(json.dumps(record, indent=2))
    sys.exit(fault)


def encoded(config: RecoverConfig, backbone: Backbone) -> Any:
    source = read_recovery_source(config)
    return encode_stream(config, source, "general", backbone.tokenizer, backbone.context_length)


def told_by(teacher: Teacher, rollouts: list[Rollout]) -> torch.Tensor:
    """Return a local model's log-probability of each token of the completions."""
    opinion = teacher.distribution(rollouts)
    tokens = torch.tensor([t for r in rollouts for t in r.completion_ids])
    parts = [slice(i, i + 256) for i in range(0, len(tokens), 256)]
    size = len(opinion.head_VH)
    return torch.cat([opinion.log_probs(p, size).gather(1, tokens[p, None])[:, 0] for p in parts]).detach()


# -- a teacher on the server


def compare_teachers(served: Served, options: argparse.Namespace, folder: Path) -> tuple[dict, str | None]:
    """Return the record, and what is wrong with it."""
    backbone = load_backbone(ModelConfig())
    prompts = encoded(RecoverConfig(validation_prompts=options.prompts, rollouts=8), backbone)
    with backbone.merged("base") as model:
        how = {"max_new_tokens": 64, "eos_ids": backbone.eos_ids, "temperature": 1.0}
        texts = sample(model, prompts.held_out, seed=5, **how)
        graded = sample(model, prompts.train[:64], seed=6, **how)
    started = served.start()
    speed = [throughput(backbone, served.url, graded, n) for n in IN_FLIGHT]
    gap = agreement(backbone, served.url, texts)
    kl, seconds = {"tuned": whole_kl(backbone, options.adapter, texts)}, {}
    outage: dict[str, Any] = {"killed_at_step": options.steps // 2}

    def fail() -> None:
        served.kill()
        began = time.monotonic()

        def back() -> None:
            time.sleep(15)
            served.start()
            outage["seconds_away"] = round(time.monotonic() - began, 1)

        threading.Thread(target=back, daemon=True).start()

    teachers = {"remote": {"kind": "remote", "server": {"url": served.url}}}
    interrupted = Told("on a server", options.steps // 2, fail)
    for teacher, told in (("base", Told("local")), ("remote", interrupted)):
        config = RecoverConfig(
            **{"domain": "handbook", "general_teacher": teacher, "teachers": teachers},
            **{"loss": {"kind": "policy_gradient"}},
            **{"steps": options.steps, "rollouts": 16, "lmbda": 1.0, "learning_rate": 3e-4, "seed": 1},
            **{"max_new_tokens": 48, "domain_max_new_tokens": 12, "micro_batch_tokens": 2048},
            **{"validate_every": options.steps, "validation_prompts": 4, "keep": "last", "health": False},
        )
        began, out = time.monotonic(), RunDir(folder / told.name.replace(" ", "-")).stage(1, "recover")
        source = read_recovery_source(config)
        prompts = encode_prompts(config, source, backbone.tokenizer, backbone.context_length)
        with provided(config, source, prompts, backbone, out, told.note) as more:
            recover(config, prompts, backbone, options.adapter, out, told, more)
        seconds[told.name] = round(time.monotonic() - began, 1)
        kl[told.name] = whole_kl(backbone, out.adapter, texts)
    outage["notes"] = [note for note in interrupted.notes if "waiting" in note]
    difference = vars(mean(kl["on a server"] - kl["local"], 0).rounded())
    record = head() | {
        "server": served.version(),
        "server_start_seconds": round(started, 1),
        "largest_log_probability_gap": gap,
        "throughput": speed,
        "recovery": {
            **{"steps": options.steps, "prompts": len(texts), "loss": "policy_gradient", "seconds": seconds},
            "kl_to_base": {name: vars(mean(values, 0).rounded()) for name, values in kl.items()},
            "difference": difference,
        },
        "outage": outage,
    }
    alike = difference["low"] <= 0 <= difference["high"]
    return record, None if alike else "the two recoveries differ by more than their interval"


def throughput(backbone: Backbone, url: str, rollouts: list[Rollout], in_flight: int) -> dict[str, Any]:
    """Time how long the server takes to grade completions with `in_flight` concurrent requests."""
    vocabulary = backbone.causal_lm.config.vocab_size
    server = Server(url, vocabulary, in_flight=in_flight)
    try:
        server.score(rollouts[0].prompt_ids, rollouts[0].completion_ids[:1]).get()  # opens the connection
        began = time.monotonic()
        for request in [server.score(r.prompt_ids, r.completion_ids) for r in rollouts]:
            request.get()
        seconds = time.monotonic() - began
    finally:
        server.close()
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    found = {"in_flight": in_flight, "sequences": len(rollouts), "tokens": tokens}
    return found | {"seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds, 1)}


def agreement(backbone: Backbone, url: str, rollouts: list[Rollout]) -> float:
    """Return the largest gap in nats between the server's and the local model's token log-probabilities."""
    server = Server(url, backbone.causal_lm.config.vocab_size)
    try:
        theirs = [server.score(r.prompt_ids, r.completion_ids).get().logprob_N for r in rollouts]
    finally:
        server.close()
    return float((told_by(Teacher(backbone, "base"), rollouts) - torch.cat(theirs)).abs().max())


def whole_kl(backbone: Backbone, adapter: Path, texts: list[Rollout]) -> np.ndarray:
    """Return KL(adapter, base) in nats per token of each text."""
    backbone.drop_adapters()
    backbone.load_adapter(adapter, "student")
    student, base = Teacher(backbone, "student"), Teacher(backbone, "base")
    found = []
    for text in texts:
        tokens = torch.tensor(text.completion_ids)
        sides = student.distribution([text]), base.distribution([text])
        losses = token_losses(*sides, ScoredTokens(tokens, *torch.zeros(2, len(tokens))), Loss())
        found.append(float(losses.kl.mean()))
    backbone.drop_adapters()
    return np.array(found)


# -- sampling and evaluation on the server


def compare_students(served: Served, options: argparse.Namespace, folder: Path) -> tuple[dict, str | None]:
    """Return the record, and what is wrong with it."""
    run = RunDir(options.run)
    workflow = Workflow.model_validate(read_json(run.config)["workflow"])
    backbone = load_backbone(ModelConfig(id=workflow.model.id, revision=workflow.model.revision))
    served.start()
    place = options.url
    found = [
        answers(run, workflow, backbone, place, suite, state, options.limit, folder)
        for suite in ("instructions", "handbook")
        for state in ("base", "recovered")
    ]
    record = head() | {"server": served.version(), "evaluation": found}
    bad = [row for row in found if abs(row["served"] - row["local"]) > 0.01]
    fault = f"{len(bad)} scores differ by more than a point" if bad else None
    return record | {"sampling": sampling(run, backbone, place, 48, folder)}, fault


def answers(
    run: RunDir,
    workflow: Workflow,
    backbone: Backbone,
    place: str,
    suite: str,
    state: str,
    limit: int | None,
    folder: Path,
) -> dict[str, Any]:
    """Measure a state on a suite through the server; compare each answer with the one stored in the run."""
    config = workflow.eval.model_copy(update={"server": ServerSection(url=place), "limit": limit})
    record = {"role": "control", "model": {"id": workflow.model.id}}
    began, out, adapter = time.monotonic(), RunDir(folder / "run"), run.adapters().get(state)
    asking = Asking(config, backbone, out, state, suite, Told(f"{suite} {state}"), adapter, record)
    evaluate(asking, load_suite(suite, config))
    seconds = round(time.monotonic() - began, 1)
    rows = {r["doc_id"]: r for r in read_jsonl(out.eval_samples(state, suite))}
    stored = {r["doc_id"]: r for r in read_jsonl(run.eval_samples(state, suite)) if r["doc_id"] in rows}
    metric = read_json(run.eval_result(state, suite))["metric"]
    scores = {
        name: sum(float(r["scores"][metric]) for r in found.values()) / len(found)
        for name, found in (("served", rows), ("local", stored))
    }
    differing = sum(rows[i]["response"] != stored[i]["response"] for i in rows) / len(rows)
    about = {"suite": suite, "state": state, "n": len(rows), "metric": metric}
    return about | scores | {"differing": differing, "seconds": seconds}


def sampling(run: RunDir, backbone: Backbone, place: str, count: int, folder: Path) -> dict:
    """Let the server sample from the run's last adapter, and grade the completions with the local weights."""
    backbone.drop_adapters()
    backbone.load_adapter([*run.adapters().values()][-1], "student", trainable=True)
    prompts = encoded(RecoverConfig(validation_prompts=count, rollouts=8), backbone).held_out
    student = ServedStudent(backbone, reach_server(place, backbone, print), folder / "served")
    began = time.monotonic()
    rollouts = student.complete(prompts, max_new_tokens=64, temperature=1.0, seed=1)
    seconds = time.monotonic() - began
    student.close()
    theirs = torch.tensor([x for r in rollouts for x in r.logprobs])
    gap = (told_by(Teacher(backbone, "student"), rollouts) - theirs).abs()
    found = {"completions": len(rollouts), "tokens": len(theirs), "seconds": round(seconds, 1)}
    mismatched = float((gap > math.log(2)).float().mean())
    return found | {"largest_gap": float(gap.max()), "mismatched": mismatched}


if __name__ == "__main__":
    main()
