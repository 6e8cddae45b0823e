"""Compare a teacher on a vLLM server with the same local teacher: speed, a recovery's result, an outage.

    python benchmarks/remote.py ADAPTER --serve \\
        "vllm serve MODEL --dtype float32 --host 127.0.0.1 --port 8123 --served-model-name base"

ADAPTER is a tuned adapter from a fine-tune on the handbook; MODEL is its base, as a folder that `vllm` can
read. The command is started, killed with SIGKILL in the middle of a recovery, and started again. Both
recoveries use the sampled token's advantage and the same seed and prompts. They are compared by their
full-vocabulary KL to base, computed locally, on answers that base wrote to held-out prompts. Takes an hour on
two cores; `--steps` and `--prompts` shorten it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import httpx2
import numpy as np
import torch

from opdcl.config.model import ModelConfig, ServerSection
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import LossSection
from opdcl.distill.losses import token_losses
from opdcl.distill.prompts import encode_stream, read_recovery_source
from opdcl.distill.teachers import Teacher
from opdcl.model.backbone import Backbone
from opdcl.results.stats import mean
from opdcl.rundir.environment import machine
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Rollout
from opdcl.sampling.sample import sample
from opdcl.sampling.server import Server
from opdcl.stages.recover import recover

IN_FLIGHT = (1, 8, 32)


class Served:
    """A server in its own process group, so that killing it leaves nothing behind."""

    def __init__(self, command: str, url: str, log: Path):
        self.command, self.url, self.log = command, url, log
        self.process: subprocess.Popen | None = None

    def start(self) -> float:
        """Start the server and wait until it answers; return the seconds that took."""
        began = time.monotonic()
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                shlex.split(self.command), stdout=log, stderr=log, start_new_session=True
            )
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


class Told:
    """Print what a stage reports, and run an action at a given step."""

    def __init__(self, name: str, at: int = 0, act=None):
        self.name, self.at, self.act = name, at, act
        self.notes: list[str] = []

    def progress(self, done: int, total: int, **values) -> None:
        print(
            f"{self.name} {done}/{total}",
            {k: round(v, 3) for k, v in values.items() if isinstance(v, float)},
            flush=True,
        )
        if done == self.at and self.act:
            self.act()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"{self.name}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--serve", required=True, help="command that starts the server")
    parser.add_argument("--url", default="http://127.0.0.1:8123/v1")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--prompts", type=int, default=48, help="number of held-out prompts for the comparison"
    )
    parser.add_argument("--graded", type=int, default=64, help="completions per speed measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("remote.json"))
    options = parser.parse_args()
    backbone = Backbone.load(ModelConfig())
    with tempfile.TemporaryDirectory() as folder:
        served = Served(options.serve, options.url, Path(folder) / "server.log")
        try:
            record = measure(backbone, served, options, Path(folder))
        finally:
            served.kill()
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    if not (record["recovery"]["difference"]["low"] <= 0 <= record["recovery"]["difference"]["high"]):
        sys.exit("the two recoveries differ by more than their interval")


def measure(backbone: Backbone, served: Served, options: argparse.Namespace, folder: Path) -> dict:
    held_out = RecoverConfig(validation_prompts=options.prompts)
    prompts = encode_stream(
        held_out, read_recovery_source(held_out), "general", backbone.tokenizer, backbone.context_length
    )
    with backbone.merged("base") as model:
        how = {"max_new_tokens": 64, "eos_ids": backbone.eos_ids, "temperature": 1.0}
        texts = sample(model, prompts.held_out, seed=5, **how)
        graded = sample(model, prompts.train[: options.graded], seed=6, **how)
    started = served.start()
    speed = [throughput(backbone, served.url, graded, n) for n in IN_FLIGHT]
    gap = agreement(backbone, served.url, texts)
    adapters, seconds = {}, {}
    outage: dict = {}

    def fail() -> None:
        served.kill()
        outage["killed_at_step"] = options.steps // 2
        began = time.monotonic()

        def back() -> None:
            time.sleep(15)
            served.start()
            outage["seconds_away"] = round(time.monotonic() - began, 1)

        threading.Thread(target=back, daemon=True).start()

    for name, teacher, told in (
        ("local", "base", Told("local")),
        ("on a server", "remote", Told("on a server", options.steps // 2, fail)),
    ):
        config = RecoverConfig(
            domain="handbook",
            general_teacher=teacher,
            teachers={"remote": {"kind": "remote", "server": {"url": served.url}}},
            loss={"kind": "policy_gradient"},
            steps=options.steps,
            rollouts=16,
            lmbda=1.0,
            max_new_tokens=48,
            domain_max_new_tokens=12,
            learning_rate=3e-4,
            micro_batch_tokens=2048,
            validate_every=options.steps,
            validation_prompts=4,
            keep="last",
            health=False,
            seed=1,
        )
        began = time.monotonic()
        out = StageDir(folder / name.replace(" ", "-"))
        recover(config, read_recovery_source(config), backbone, options.adapter, out, told)
        adapters[name] = out.adapter
        seconds[name] = round(time.monotonic() - began, 1)
        outage["notes"] = [note for note in told.notes if "waiting" in note]
    kl = {"tuned": whole_kl(backbone, options.adapter, texts)}
    kl |= {name: whole_kl(backbone, adapter, texts) for name, adapter in adapters.items()}
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "server": served.version(),
        "server_start_seconds": round(started, 1),
        "largest_log_probability_gap": gap,
        "throughput": speed,
        "recovery": {
            "steps": options.steps,
            "prompts": len(texts),
            "loss": "policy_gradient",
            "seconds": seconds,
            "kl_to_base": {name: mean(values, 0).as_dict() for name, values in kl.items()},
            "difference": mean(kl["on a server"] - kl["local"], 0).as_dict(),
        },
        "outage": outage,
    }


def throughput(backbone: Backbone, url: str, rollouts: list[Rollout], in_flight: int) -> dict:
    """Time how long the server takes to grade completions with `in_flight` concurrent requests."""
    vocabulary = backbone.causal_lm.config.vocab_size
    server = Server(ServerSection(url=url), vocabulary, in_flight=in_flight)
    try:
        server.grade(rollouts[0].prompt_ids, rollouts[0].completion_ids[:1]).result()  # opens the connection
        began = time.monotonic()
        for future in [server.grade(r.prompt_ids, r.completion_ids) for r in rollouts]:
            future.result()
        seconds = time.monotonic() - began
    finally:
        server.close()
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
    return {
        "in_flight": in_flight,
        "sequences": len(rollouts),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def agreement(backbone: Backbone, url: str, rollouts: list[Rollout]) -> float:
    """Return the largest gap in nats between the server's and the local model's token log-probabilities."""
    server = Server(ServerSection(url=url), backbone.causal_lm.config.vocab_size)
    try:
        theirs = torch.cat(
            [server.grade(r.prompt_ids, r.completion_ids).result().logprob_N for r in rollouts]
        )
    finally:
        server.close()
    ours = Teacher(backbone, "base").distribution(rollouts)
    tokens = torch.tensor([t for r in rollouts for t in r.completion_ids])
    parts = [slice(i, i + 256) for i in range(0, len(tokens), 256)]
    mine = torch.cat([ours.log_probs(p, len(ours.head_VH)).gather(1, tokens[p, None])[:, 0] for p in parts])
    return float((mine - theirs).detach().abs().max())


def whole_kl(backbone: Backbone, adapter: Path, texts: list[Rollout]) -> np.ndarray:
    """Return KL(adapter, base) in nats per token of each text."""
    backbone.drop_adapters()
    backbone.load_adapter(adapter, "student")
    student, base = Teacher(backbone, "student"), Teacher(backbone, "base")
    found = []
    for text in texts:
        tokens = torch.tensor(text.completion_ids)
        found.append(
            float(
                token_losses(
                    student.states([text]),
                    student.head_VH,
                    base.distribution([text]),
                    tokens,
                    torch.zeros(len(tokens)),
                    1.0,
                    LossSection(),
                ).kl.mean()
            )
        )
    backbone.drop_adapters()
    return np.array(found)


if __name__ == "__main__":
    main()
