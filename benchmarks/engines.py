"""Do the sampling engines say the same under greedy decoding, and how fast is each?

Where two answers differ, both continuations were nearly equally likely: the gap is the difference of the two tokens'
log-probabilities at the first place where they part, under one plain forward pass.

    python benchmarks/engines.py --prompts 100
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path

import torch
from throughput import machine_rates

ENGINES = ("slab", "generate", "continuous")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("engines.json"))
    options = parser.parse_args()
    options.shape = None
    from opdcl.config import EvalConfig, ModelConfig
    from opdcl.data import render
    from opdcl.distill.backbone import Backbone
    from opdcl.distill.rollouts import sample
    from opdcl.evaluate import load_task

    backbone = Backbone.load(ModelConfig())
    (task,) = load_task("instructions", EvalConfig())["tasks"].values()
    messages = [
        [{"role": "user", "content": task.doc_to_text(d)}] for d in list(task.test_docs())[: options.prompts]
    ]
    texts = [render(backbone.tokenizer, m, True, tokenize=False) for m in messages]
    prompts = [backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found, rows = {}, {}
    for engine in options.engines:
        started = time.perf_counter()
        found[engine] = sample(backbone.causal_lm, prompts, max_new_tokens=options.new_tokens, eos_ids=backbone.eos_ids,
                               temperature=0, batch_size=options.prompts, engine=engine)  # fmt: skip
        seconds = time.perf_counter() - started
        tokens = sum(len(r.completion_ids) for r in found[engine])
        pairs = zip(found[options.engines[0]], found[engine], strict=True)
        differ = [(a, b) for a, b in pairs if a.completion_ids != b.completion_ids]
        gaps = [gap(backbone.causal_lm, a, b) for a, b in differ]
        rows[engine] = {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "of": len(prompts),
                        "differing": len(differ), "largest_gap": max(gaps, default=0.0)}  # fmt: skip
        print(engine, json.dumps(rows[engine]), flush=True)
    options.out.write_text(json.dumps({
        "date": date.today().isoformat(), "command": " ".join(["python", "benchmarks/engines.py", *sys.argv[1:]]),
        "machine": machine_rates(options), "engines": rows,
    }, indent=2) + "\n")  # fmt: skip


@torch.no_grad()
def gap(model, a, b) -> float:
    """Return how much likelier a's token is than b's where the two part, in nats."""
    pairs = zip(a.completion_ids, b.completion_ids, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if at is None:
        return float("inf")  # one answer is the beginning of the other
    ids = torch.tensor([a.prompt_ids + a.completion_ids[:at]], device=model.device)
    logprobs = model(ids).logits[0, -1].log_softmax(-1)
    return abs(float(logprobs[a.completion_ids[at]] - logprobs[b.completion_ids[at]]))


if __name__ == "__main__":
    main()
