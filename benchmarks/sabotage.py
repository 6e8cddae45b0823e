"""Sabotage a recovery of the embedded model in six ways; check that it halts before it does harm.

    python benchmarks/sabotage.py runs/quickstart/stages/01-finetune/adapter     # half an hour on one core

Harm is measured as the held-out KL, general and domain together, of the adapter that is left, compared with
tuned's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

import opdcl.distill.grading as grading
from opdcl.config.load import load
from opdcl.config.model import ModelConfig
from opdcl.console import Output
from opdcl.distill.losses import token_losses
from opdcl.distill.prompts import read_recovery_source
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.stages.recover import recover

ANOTHER_TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def nothing(backbone: Backbone) -> None:
    pass


def uniform_teacher(backbone: Backbone) -> None:
    backbone.causal_lm.model.norm.weight.data.zero_()  # makes all logits of every state equal


def another_template(backbone: Backbone) -> None:
    backbone.tokenizer.chat_template = ANOTHER_TEMPLATE


def broken_eos(backbone: Backbone) -> None:
    backbone.eos_ids = [0]  # <|endoftext|>, which ends documents but never an answer


@contextlib.contextmanager
def reward_of_length(backbone: Backbone) -> Iterator[None]:
    """Add a cost for the probability of ending at every token."""

    def longer(student_NH, weight_VH, *others, **options):
        found = token_losses(student_NH, weight_VH, *others, **options)
        ending_N = (student_NH @ weight_VH.T).log_softmax(-1)[:, backbone.eos_ids].logsumexp(-1)
        return found._replace(loss=found.loss + 0.5 * ending_N)

    grading.token_losses = longer
    try:
        yield
    finally:
        grading.token_losses = token_losses


@contextlib.contextmanager
def reward_of_repetition(backbone: Backbone) -> Iterator[None]:
    """Add a cost for every token that is not the one before it."""

    def looping(student_NH, weight_VH, teacher, token_N, *others, **options):
        found = token_losses(student_NH, weight_VH, teacher, token_N, *others, **options)
        log_p = (student_NH @ weight_VH.T).log_softmax(-1)
        again_N = log_p.gather(-1, token_N.roll(1)[:, None])[:, 0]
        return found._replace(loss=found.loss - 0.5 * again_N)

    grading.token_losses = looping
    try:
        yield
    finally:
        grading.token_losses = token_losses


CASES = {
    "none, the control": (nothing, {}),
    "a uniform teacher": (uniform_teacher, {}),
    "the chat template of another model": (another_template, {}),
    "an EOS list without the end-of-turn token": (broken_eos, {}),
    "a learning rate 30 times too high": (nothing, {"learning_rate": 9e-3}),
    "a reward for length": (reward_of_length, {}),
    "a reward for repetition": (reward_of_repetition, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path, help="adapter from a fine-tune on the handbook")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("sabotage.json"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, help="fewer steps than the quickstart's")
    options = parser.parse_args()
    shorter = {"steps": options.steps} if options.steps else {}
    rows = []
    for name in options.cases:
        sabotage, settings = CASES[name]
        rows.append(row := case(options.adapter, sabotage, settings | shorter))
        print(f"{name}: {row}", flush=True)
        row["sabotage"] = name
    options.out.write_text(
        json.dumps(
            {"date": date.today().isoformat(), "threads": torch.get_num_threads(), "rows": rows}, indent=2
        )
        + "\n"
    )


def case(adapter: Path, sabotage, settings: dict) -> dict:
    base = ModelConfig()
    quickstart = load(["quickstart"])[0].recover
    assert quickstart
    backbone = Backbone.load(base)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = StageDir(Path(folder))
        ends = "it ran to its end"
        try:
            with sabotage(backbone) or contextlib.nullcontext():
                given = {"domain": "handbook", "micro_batch_tokens": 2048} | settings
                config = quickstart.model_copy(update=given)
                recover(
                    config,
                    read_recovery_source(config),
                    backbone,
                    adapter,
                    out,
                    Output("quiet").stage("recover"),
                )
        except OpdclError as fault:
            ends = fault.message
        steps = [r for r in read_jsonl(out.metrics) if "loss" in r]
        kept = out.trainer / "best" / "validation.json"
        before = next(
            (
                sum(r["validation"][k] for k in ("general_kl", "domain_kl"))
                for r in read_jsonl(out.metrics)
                if "validation" in r
            ),
            None,
        )
        return {
            "ends": ends.replace(folder, ""),
            "steps": len(steps),
            "seconds": round(time.perf_counter() - started),
            "tuned_kl": before,
            "kept": read_json(kept) if kept.exists() else None,
            "health": [r["health"] for r in read_jsonl(out.metrics) if "health" in r],
        }


if __name__ == "__main__":
    main()
