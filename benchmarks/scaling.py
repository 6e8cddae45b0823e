"""Measure how a recovery step's time and memory grow with batch, length and depth; the cost of a straggler.

Lengths are forced: the sampler's uniform numbers are chosen so that every completion ends at the intended
length.

    python benchmarks/scaling.py              # the embedded model; some minutes on two cores
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from unittest import mock

import throughput as shared
import torch

BATCHES, LENGTHS, LAYERS = (8, 16, 32, 64), (32, 64, 128, 256), (8, 15, 30)
MEAN_LENGTH, STRAGGLERS = 64, 32  # tokens per row; rows of the batch with a straggler
END = 0  # the id that ends a completion here; the uniform number 0 draws it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scaling.json"))
    options = parser.parse_args()
    options.shape = None
    rows: dict[str, list[dict]] = {"batch": [], "length": [], "depth": [], "straggler": []}

    def run(kind: str, step: Step, lengths: list[int], steps: int = 1, ahead: int = 1, **labels) -> None:
        rows[kind].append({**labels, **step.measure(lengths, steps, ahead, options.repeats)})
        print(kind, json.dumps(rows[kind][-1]), flush=True)

    step = Step(options)
    for prompts in BATCHES:
        run("batch", step, [MEAN_LENGTH] * prompts, prompts=prompts)
    for length in LENGTHS:
        run("length", step, [length] * 8, length=length)
    even, short = [MEAN_LENGTH] * STRAGGLERS, MEAN_LENGTH * 9 // 10 + 1
    straggler = [short] * (STRAGGLERS - 1)
    straggler.append(sum(even) - sum(straggler))
    # With 3, long completions continue alongside the next ones; six steps, until the last is learned from.
    for ahead in (1, 3):
        run("straggler", step, even, 6, ahead, spread="even", longest=max(even), sample_ahead=ahead)
        run(
            "straggler",
            step,
            straggler,
            6,
            ahead,
            spread="one straggler per step",
            longest=max(straggler),
            sample_ahead=ahead,
        )
    for layers in LAYERS:
        run("depth", Step(options, layers), [MEAN_LENGTH] * 16, layers=layers)
    pairs = zip(rows["straggler"][::2], rows["straggler"][1::2], strict=True)
    ratios = {
        f"sample_ahead {even['sample_ahead']}": straggler["seconds"] / even["seconds"]
        for even, straggler in pairs
    }
    fits = {kind: linear_fit(rows[kind]) for kind in ("batch", "length")}
    for ahead, ratio in ratios.items():
        print(
            f"one straggler of {max(straggler)} tokens among {len(straggler)}, {ahead}: "
            f"{ratio:.2f} times the even split"
        )
    for kind, fit in fits.items():
        print(
            f"time over tokens, by {kind}: linear with R2 = {fit['r2']:.3f}, "
            f"{1000 * fit['seconds_per_token']:.1f} ms per token + {fit['constant']:.1f} s"
        )
    machine = shared.machine_rates(options)
    options.out.write_text(
        json.dumps(
            {
                "date": date.today().isoformat(),
                "command": " ".join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
                "machine": machine,
                "rows": rows,
                "linear": fits,
                "straggler_ratio": ratios,
            },
            indent=2,
        )
        + "\n"
    )


class Step:
    """Steps that can be measured individually."""

    def __init__(self, options, layers: int | None = None):
        from opdcl.model.backbone import Backbone

        model, tokenizer = shared.load_model(options)
        if layers:
            model.model.layers = model.model.layers[:layers]
            model.config.num_hidden_layers = layers
        self.backbone = Backbone(model, tokenizer)
        self.backbone.eos_ids = [END]
        shared.start_adapter(self.backbone.new_adapter(shared.lora_section(), 0))
        options.prompts = 64
        self.prompts = shared.prompt_ids(options, tokenizer)

    def measure(self, lengths: list[int], steps: int, ahead: int, repeats: int) -> dict:
        """Sample, grade and differentiate steps with completions of these lengths; return the median cost."""
        from opdcl.config.recover import RecoverConfig
        from opdcl.distill.grading import Grader
        from opdcl.distill.rollout_queue import RolloutQueue, Selection
        from opdcl.distill.schedule import plan_steps
        from opdcl.distill.teachers import Teacher
        from opdcl.training import peak_memory, reset_peak_memory

        config = RecoverConfig(
            steps=steps,
            rollouts=len(lengths),
            sample_ahead=ahead,
            lmbda=1.0,
            max_new_tokens=max(lengths),
            micro_batch_tokens=2048,
        )
        # Identical prompts, so that only the completions differ.
        prompts = {"general": self.prompts[:1] * len(lengths), "domain": []}
        teachers = {"general": Teacher(self.backbone, "base")}
        grader = Grader(self.backbone, config, teachers)
        student, plan = Teacher(self.backbone, "student"), plan_steps(config, len(lengths), 0)
        queue = RolloutQueue(config, plan, prompts, student, teachers, Selection(config))
        self.backbone.peft.train()
        times, found = [], []
        for _ in range(repeats + 1):
            reset_peak_memory()
            started = time.perf_counter()
            with self.forced(queue, lengths):
                for index in range(steps):
                    batch = queue.take(index)
                    found.append(batch.rollouts)
                    grader.learn(batch.rollouts, "general", batch.fresh)
                    self.backbone.peft.zero_grad()
            times.append((time.perf_counter() - started) / steps)
        assert sorted(len(r.completion_ids) for rollouts in found for r in rollouts) == sorted(
            lengths * steps * (repeats + 1)
        )
        return {
            "tokens": sum(lengths),
            "seconds": round(statistics.median(times[1:]), 2),
            "peak_bytes": peak_memory(),
        }

    @contextlib.contextmanager
    def forced(self, queue, lengths: list[int]) -> Iterator[None]:
        """Make every step's completions end at these lengths, also when they are sampled in several parts."""
        plain, due = queue.sample, []

        def sample(prompts, *others, unfinished, **options):
            ahead = [
                next(end - len(r.completion_ids) for known, end in due if known is r) for r in unfinished
            ]
            ahead += lengths * (len(prompts) // len(lengths))
            uniform_NT = torch.full((len(ahead), max(lengths)), 0.5)
            for row, length in enumerate(ahead):
                uniform_NT[row, length - 1 :] = 0.0
            with mock.patch("opdcl.sampling.decode.torch.rand", return_value=uniform_NT):
                found = plain(prompts, *others, unfinished=unfinished, **options)
            due.extend(zip(found[len(unfinished) :], ahead[len(unfinished) :], strict=True))
            return found

        with mock.patch.object(queue, "sample", sample):
            yield


def linear_fit(rows: list[dict]) -> dict[str, float]:
    """Fit a least-squares line of seconds over completion tokens."""
    tokens, seconds = [r["tokens"] for r in rows], [r["seconds"] for r in rows]
    slope, constant = statistics.linear_regression(tokens, seconds)
    return {
        "seconds_per_token": slope,
        "constant": constant,
        "r2": statistics.correlation(tokens, seconds) ** 2,
    }


if __name__ == "__main__":
    main()
