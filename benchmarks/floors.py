"""Measure base on the suite `instructions`, beside answers without any skill.

    python benchmarks/floors.py                      writes benchmarks/instructions.json

The floors are answers that do not depend on the prompt's demands: nothing, a constant text (short; about 100
words), the prompt itself, the prompt and the long text, and base's own answers, each to another prompt.
A suite shows something of a model only as far as the model is above all of them.
"""

import argparse
import hashlib
import json
import platform
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

import numpy as np

RECORD = Path(__file__).with_name("instructions.json")
METRIC = "prompt_level_strict_acc"
SHIFTS = (1, 7, 31, 101)  # by how many prompts the answers are moved; means over all of them are recorded


def passed(task, docs: list[dict], answers: list[str]) -> np.ndarray:
    """Return for every document whether its answer keeps all constraints."""
    pairs = zip(docs, answers, strict=True)
    return np.array([float(task.process_results(doc, [answer])[METRIC]) for doc, answer in pairs])


def floors(task, answers: list[str] | None = None) -> dict[str, float]:
    """Score the answers without skill, and a model's answers each given to another prompt."""
    from opdcl.data.suites import content_free

    docs = list(task.test_docs())
    free = content_free([doc["prompt"] for doc in docs])
    scores = {name: float(passed(task, docs, texts).mean()) for name, texts in free.items()}
    if answers:
        moved = [passed(task, docs, [*answers[k:], *answers[:k]]).mean() for k in SHIFTS if k < len(docs)]
        scores["shuffled"] = float(np.mean(moved))
    return {name: round(score, 4) for name, score in scores.items()}


def fingerprint(docs: list[dict]) -> str:
    """Return a hash of the prompts and constraints that a record is about."""
    text = json.dumps([(doc["prompt"], doc["constraints"]) for doc in docs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def share(values: list[float]) -> dict:
    """Return a mean with its 95 % interval (Wilson's)."""
    n, p, z = len(values), float(np.mean(values)), 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return {"n": n, "score": round(p, 4), "low": round(centre - half, 4), "high": round(centre + half, 4)}


def measure(suite: str, backbone, batch_size: int = 32, limit: int | None = None) -> tuple[dict, list[dict]]:
    """Let base answer a suite greedily; return the record and the rows with answers."""
    from opdcl.data.chat import render
    from opdcl.data.suites import load_suite
    from opdcl.sampling.sample import sample

    task = load_suite(suite).task
    docs, tokenizer = list(task.test_docs())[:limit], backbone.tokenizer
    texts = [
        render(tokenizer, [{"role": "user", "content": d["prompt"]}], True, tokenize=False) for d in docs
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    started = time.perf_counter()
    with backbone.merged("base") as model:
        rollouts = sample(
            model,
            prompts,
            max_new_tokens=task.config.generation_kwargs["max_gen_toks"],
            eos_ids=backbone.eos_ids,
            temperature=0,
            batch_size=batch_size,
        )
    seconds = time.perf_counter() - started
    ids = [rollout.completion_ids for rollout in rollouts]
    rows = [
        {"key": doc["key"], "answer": answer, "tokens": len(i), "ended": i[-1] in backbone.eos_ids}
        for doc, i, answer in zip(
            docs, ids, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
        )
    ]
    return describe(task, docs, rows) | {"seconds": round(seconds, 1)}, rows


def describe(task, docs: list[dict], rows: list[dict]) -> dict:
    """Return a model's scores on a suite: all, by group, by type of constraint; and how its answers end."""
    answers = [row["answer"] for row in rows]
    by_group, by_type = defaultdict(list), defaultdict(list)
    prompts = passed(task, docs, answers)
    for doc, prompt, answer in zip(docs, prompts, answers, strict=True):
        by_group[doc["group"]].append(prompt)
        kept = task.process_results(doc, [answer])["inst_level_strict_acc"]
        for constraint, one in zip(json.loads(doc["constraints"]), kept, strict=True):
            by_type[constraint["type"]].append(float(one))
    return {
        "prompts": fingerprint(docs),
        "base": share([*prompts]),
        "base_by_group": {name: share(values) for name, values in by_group.items()},
        "base_by_type": {name: share(values) for name, values in sorted(by_type.items())},
        "finished": share([float(row["ended"]) for row in rows]),
        "mean_tokens": round(float(np.mean([row["tokens"] for row in rows])), 1),
        "floors": floors(task, answers) if len(docs) == len(task.test_docs()) else {},
    }


def main() -> None:
    import torch

    from opdcl.config.model import ModelConfig
    from opdcl.model.backbone import Backbone

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", default=["instructions", "instructions_validation"])
    parser.add_argument("--answers", type=Path, help="folder for base's answers, one file per suite")
    options = parser.parse_args()
    backbone = Backbone.load(ModelConfig())
    cpu = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if "model name" in line]
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(["python benchmarks/floors.py --suites", *options.suites]),
        "machine": f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "dtype": str(backbone.causal_lm.dtype),
        "suites": {},
    }
    for suite in options.suites:
        record["suites"][suite], rows = measure(suite, backbone)
        print(suite, json.dumps(record["suites"][suite], indent=1), flush=True)
        if options.answers:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (options.answers / f"{suite}.jsonl").write_text(text, encoding="utf-8")
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
