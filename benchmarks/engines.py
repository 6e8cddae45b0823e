"""Compare the sampling engines: agreement under greedy decoding, speed, and whether the base stays unchanged.

Where two answers differ, both continuations were nearly equally likely: the gap is the difference between the
two tokens' log-probabilities at the first position where the answers differ, in one plain forward pass.

    python benchmarks/engines.py --prompts 100             # agreement and speed
    python benchmarks/engines.py --steps 200     # recover for 200 steps with each: base weights, mismatch
    python benchmarks/engines.py --steps 10 --dtype bfloat16 --out bf16.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from throughput import lora_section, machine_rates, start_adapter

ENGINES = ("slab", "graph", "generate", "continuous")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, help="train for this many small steps with each engine instead")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("engines.json"))
    options = parser.parse_args()
    options.shape = None
    rows = {e: train(e, options) for e in options.engines} if options.steps else agree(options)
    # Keep what another call measured: the file has one section per kind of measurement.
    kind = f"after {options.steps} steps, {options.dtype}" if options.steps else "greedy"
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    record[kind] = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/engines.py", *sys.argv[1:]]),
        "machine": machine_rates(options, options.dtype),
        "engines": rows,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")


def agree(options: argparse.Namespace) -> dict[str, dict]:
    """Let every engine answer the same prompts greedily and compare the answers with the first engine's."""
    from opdcl.config.model import ModelConfig
    from opdcl.data.chat import render
    from opdcl.data.suites import load_suite
    from opdcl.model.backbone import Backbone
    from opdcl.sampling.sample import sample

    backbone = Backbone.load(ModelConfig(dtype=options.dtype))
    task = load_suite("instructions").task
    messages = [
        [{"role": "user", "content": task.doc_to_text(d)}] for d in list(task.test_docs())[: options.prompts]
    ]
    texts = [render(backbone.tokenizer, m, True, tokenize=False) for m in messages]
    prompts = [backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found, rows = {}, {}
    for engine in options.engines:
        started = time.perf_counter()
        found[engine] = sample(
            backbone.causal_lm,
            prompts,
            max_new_tokens=options.new_tokens,
            eos_ids=backbone.eos_ids,
            temperature=0,
            batch_size=options.prompts,
            engine=engine,
        )
        seconds = time.perf_counter() - started
        tokens = sum(len(r.completion_ids) for r in found[engine])
        pairs = zip(found[options.engines[0]], found[engine], strict=True)
        differ = [(a, b) for a, b in pairs if a.completion_ids != b.completion_ids]
        gaps = [gap(backbone.causal_lm, a, b) for a, b in differ]
        rows[engine] = {
            "dtype": str(backbone.causal_lm.dtype),
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "of": len(prompts),
            "differing": len(differ),
            "gaps": sorted(gaps, reverse=True),
        }
        print(engine, json.dumps(rows[engine]), flush=True)
    return rows


class Silent:
    """A stage's reporter that discards everything."""

    def progress(self, done, total, **values):
        pass

    def note(self, text):
        pass


def train(engine: str, options: argparse.Namespace) -> dict:
    """Recover a random adapter step by step; return whether base is unchanged, and the mismatch share."""
    from opdcl.config.model import ModelConfig
    from opdcl.config.recover import RecoverConfig
    from opdcl.distill.prompts import read_recovery_source
    from opdcl.model.backbone import Backbone
    from opdcl.rundir.files import read_jsonl
    from opdcl.rundir.layout import StageDir
    from opdcl.stages.recover import recover
    from opdcl.training import save_adapter

    model = ModelConfig(dtype=options.dtype)
    backbone = Backbone.load(model)
    before = backbone.fingerprint()
    start_adapter(backbone.new_adapter(lora_section(), 0))
    last = options.steps
    config = RecoverConfig(
        steps=last,
        rollouts=2,
        learning_rate=3e-4,
        micro_batch_tokens=2048,
        sample_ahead=1,  # only freshly sampled tokens can be compared with the trainer's probabilities
        max_new_tokens=12,
        lmbda=1.0,
        validate_every=last,
        validation_prompts=2,
        save_steps=last,
        sampler=engine,
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = StageDir(Path(folder) / "recover")
        save_adapter(backbone, Path(folder) / "tuned")
        source, tuned = read_recovery_source(config), Path(folder) / "tuned"
        recover(config, source, backbone, tuned, out, Silent())
        steps = [r for r in read_jsonl(out.metrics) if "tokens" in r]
    tokens = sum(r["tokens"] for r in steps)
    row = {
        "dtype": str(backbone.causal_lm.dtype),
        "steps": len(steps),
        "tokens": tokens,
        "seconds": time.perf_counter() - started,
        "base_unchanged": backbone.fingerprint() == before,
        "mismatch": sum(r["mismatch"] * r["tokens"] for r in steps) / tokens,
    }
    print(engine, json.dumps(row), flush=True)
    return row


@torch.no_grad()
def gap(model, a, b) -> float:
    """Return the gap in nats between the log-probabilities of a's and b's tokens where they first differ."""
    pairs = zip(a.completion_ids, b.completion_ids, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if at is None:
        return float("inf")  # one answer is a prefix of the other
    ids = torch.tensor([a.prompt_ids + a.completion_ids[:at]], device=model.device)
    logprobs = model(ids).logits[0, -1].log_softmax(-1)
    return abs(float(logprobs[a.completion_ids[at]] - logprobs[b.completion_ids[at]]))


if __name__ == "__main__":
    main()
