"""Where answers end: base and adapters answer long requests, and base says where it would have ended.

    python benchmarks/endings.py ADAPTER... --out endings.json     # five minutes an adapter on one core

Every model answers the same prompts, at temperature 1 and greedily. Per range of positions (tokens from the
answer's start) the table has the KL to base in both directions, on base's text and on the model's own, and
how many answers end there: as base expects on that text, and as they do. Greedy texts say nothing of
distributions, so only their lengths, endings and repetition are told.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import load_rows
from opdcl.distill.losses import both_divergences, missed_ends
from opdcl.distill.teachers import Teacher
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates
from opdcl.repetition import repetition
from opdcl.results.intervals import mean
from opdcl.results.plain import as_json
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.sampling.sample import sample

RANGES = ((0, 4), (4, 32), (32, 128), (128, 256), (256, 384))
AT_ONCE = 8


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapters", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, default=64, help="half of them ask for long answers")
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("endings.json"))
    options = parser.parse_args()
    backbone = Backbone.load(ModelConfig())
    prompts = held_out(backbone, options.prompts)
    backbone.load_adapter(options.adapters[0], "student", trainable=True)
    base = Teacher(backbone, "base")
    texts = {"base": answers(backbone, base, prompts, options.max_new_tokens)}
    rows: dict[str, Any] = {"base": {how: written(rollouts) for how, rollouts in texts["base"].items()}}
    print(rows["base"])
    for adapter in options.adapters:
        backbone.drop_adapters()
        backbone.load_adapter(adapter, "student", trainable=True)
        student = Teacher(backbone, "student")
        own = answers(backbone, student, prompts, options.max_new_tokens)
        row: dict[str, Any] = {how: written(rollouts) for how, rollouts in own.items()}
        row["on base's text"] = by_position(backbone, student, base, texts["base"]["sampled"])
        row["on its own text"] = by_position(backbone, student, base, own["sampled"])
        rows[str(adapter)] = row
        print(adapter, json.dumps(row, indent=1), flush=True)
        about = {"date": date.today().isoformat(), "threads": torch.get_num_threads(), "n": len(prompts)}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def held_out(backbone: Backbone, count: int) -> list[Prompt]:
    """Return held-out everyday prompts, half of which ask for long answers; short facts are left out."""
    rows = load_rows("everyday", "validation")
    long = [row for row in rows if row.group == "long"][: count // 2]
    others = [row for row in rows if row.group not in ("long", "fact")]
    others = others[:: max(1, len(others) // (count - len(long)))][: count - len(long)]
    return [Prompt(encode_prompt(row, backbone.tokenizer, 1024)) for row in long + others]


def answers(
    backbone: Backbone, model: Teacher, prompts: list[Prompt], limit: int
) -> dict[str, list[Rollout]]:
    """Return the model's answers at temperature 1 and greedily."""
    how = {"max_new_tokens": limit, "eos_ids": backbone.eos_ids, "seed": 11}
    with model.as_sampler() as merged:
        return {
            "sampled": sample(merged, prompts, temperature=1.0, **how),
            "greedy": sample(merged, prompts, temperature=0, **how),
        }


def written(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return length, share that ends and repetition, each with a 95 % interval over prompts."""
    values = {
        "tokens": [float(len(r.completion_ids)) for r in rollouts],
        "ended": [float(r.finished) for r in rollouts],
        "repetition": [repetition([r.completion_ids]) for r in rollouts],
    }
    return {name: as_json(mean(np.array(found)).rounded()) for name, found in values.items()}


def by_position(
    backbone: Backbone, student: Teacher, base: Teacher, rollouts: list[Rollout]
) -> dict[str, dict[str, float]]:
    """Return, per range of positions, mean KL in both directions and the ends expected and given."""
    sums: dict[tuple[int, int], list[list[float]]] = {span: [[], [], [], []] for span in RANGES}
    for start in range(0, len(rollouts), AT_ONCE):
        part = rollouts[start : start + AT_ONCE]
        p, q = (HiddenStates(model.states(part), model.head_VH) for model in (student, base))
        forward_N, reverse_N = both_divergences(p, q)
        expected_N, _ = missed_ends(p, q, backbone.eos_ids)
        position = 0
        for rollout in part:
            length = len(rollout.completion_ids)
            for span in RANGES:
                at = slice(position + min(span[0], length), position + min(span[1], length))
                for values, found_N in zip(sums[span], (forward_N, reverse_N, expected_N), strict=False):
                    values += found_N[at].tolist()
                sums[span][3].append(float(rollout.finished and span[0] < length <= span[1]))
            position += length
    names = ("KL(base, model)", "KL(model, base)")
    return {
        f"{low}-{high}": {
            **{name: round(fmean(values), 4) for name, values in zip(names, found, strict=False) if values},
            "ends expected": round(sum(found[2]), 2),
            "ends given": sum(found[3]),
        }
        for (low, high), found in sums.items()
    }


if __name__ == "__main__":
    main()
