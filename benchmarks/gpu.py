"""Measure opdcl on a CUDA device in eight minutes: decoding, recovery steps beside TRL's, the quickstart.

    python benchmarks/gpu.py                                # all arms, the most telling first
    python benchmarks/gpu.py --arms "decode qwen3-8b 64"    # some

Each arm runs in a process of its own, and its result is a line of gpu.jsonl as soon as it is there. An arm
that fails, for want of memory for example, is a result too, and so is one for which no time was left. Shapes
other than the embedded model have random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import head
from speed import floor, load_model, machine_rates, measure, prompt_ids, start_adapter

from opdcl.config.model import LoraSection
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_json
from opdcl.sampling.sample import sample
from opdcl.words import Prompt

EMBEDDED = "smollm2-135m"
# What is wanted of each arm, and what vLLM does where that is published: 8B on one H100, in the ML.ENERGY
# leaderboard of February 2026.
ARMS = {
    "decode qwen3-0.6b 64": "15,000 tokens/s",
    "decode qwen3-8b 64": "5,500 tokens/s; vLLM 4,315",
    "decode qwen3-8b 256": "12,000 tokens/s; vLLM 7,719",
    "step qwen3-0.6b opdcl 64": "at most 0.15 of TRL's",
    "step qwen3-0.6b stock 64": "",
    "step qwen3-8b opdcl 64": "at most 2.5 times the floor, 45 GB",
    "quickstart": "90 s",
    "decode smollm2-135m 64": "",
    "decode qwen3-1.7b 64": "",
    "step qwen3-1.7b opdcl 64": "",
}
# Tokens decoded. A step's time is the difference of two calls, so that prompts and captures do not count.
FEW, MANY = 8, 136
NEW_TOKENS, STEPS = 512, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--arm", help="run one in this process and print its figures")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no arm afterwards (8)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(figures(*options.arm.split())))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; benchmarks/speed.py measures on the CPU")
    print(table(run_arms(options.arms, time.monotonic() + 60 * options.minutes, options.out)))


def run_arms(arms: list[str], end: float, out: Path) -> list[dict[str, Any]]:
    """Run the arms one after the other until the time `end`; store each result at once."""
    rows = []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for arm in arms:
        row: dict[str, Any] = {"arm": arm, **head(), "device": device, "torch": torch.__version__}
        left = end - time.monotonic()
        if left <= 0:
            row["failed"] = "no time was left"
        else:
            command = [sys.executable, __file__, "--arm", arm]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=left + 60)
                found = done.stdout.splitlines()
                row |= {"failed": done.stderr[-1500:]} if done.returncode else json.loads(found[-1])
            except subprocess.TimeoutExpired:
                row["failed"] = "it took too long"
        rows.append(row)
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"{arm}: {row.get('failed') or row}", flush=True)
    return rows


def figures(kind: str, shape: str = "", *sizes: str) -> dict[str, Any]:
    """Return what one arm measures."""
    if kind == "quickstart":
        return quickstart()
    if kind == "decode":
        return decode(shape, int(sizes[0]))
    arm, prompts = sizes[0], int(sizes[1])
    options = argparse.Namespace(shape=shape, prompts=prompts, new_tokens=NEW_TOKENS, steps=STEPS)
    found = measure(arm, options)["median"]
    machine = machine_rates(shape)
    return found | {"over_floor": found["step"] / floor(machine, found), "rates": machine}


def decode(shape: str, rows: int) -> dict[str, Any]:
    """Time one decoding step of a batch of `rows` sequences."""
    backbone = Backbone(*load_model(None if shape == EMBEDDED else shape))
    backbone.merged_weights = [] if backbone.device.type == "cuda" else None
    start_adapter(backbone.new_adapter(LoraSection(), 0))
    prompts = [*map(Prompt, prompt_ids(rows, backbone.tokenizer))]
    seconds = {}
    with backbone.merged("student") as model:
        for count in (FEW, FEW, MANY):  # the first call captures and allocates
            started = time.perf_counter()
            sample(model, prompts, max_new_tokens=count, eos_ids=(), seed=1, batch_size=rows)
            seconds[count] = time.perf_counter() - started
    step = (seconds[MANY] - seconds[FEW]) / (MANY - FEW)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"step": step, "tokens_per_s": rows / step, "first_tokens": seconds[FEW], "peak_bytes": peak}


def quickstart() -> dict[str, Any]:
    """Time the whole command, the start included, and the stages alone."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        words = ["-m", "opdcl", "run", "quickstart", "-o", f"{folder}/run"]
        subprocess.run([sys.executable, *words], check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - started
        return {"step": seconds, "stages": read_json(Path(folder) / "run" / "manifest.json")["seconds"]}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per arm, with what was wanted."""
    lines = [
        "| arm | seconds | tokens/s | peak GB | over the floor | wanted |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        wanted = ARMS.get(row["arm"], "")
        if "failed" in row:
            lines.append(f"| {row['arm']} | {row['failed'].strip().splitlines()[-1]} | | | | {wanted} |")
            continue
        speed = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else ""
        memory = f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else ""
        above = f"{row['over_floor']:.1f}" if "over_floor" in row else ""
        lines.append(f"| {row['arm']} | {row['step']:.4g} | {speed} | {memory} | {above} | {wanted} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
