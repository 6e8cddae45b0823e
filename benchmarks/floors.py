"""Play answers without content against the shipped suites, and measure base on `instructions` beside them.

    python benchmarks/floors.py                      writes benchmarks/instructions.json
    python benchmarks/floors.py --limit 100          the first prompts only

On `instructions`, the cheats of cheats.py keep the constraints. What share of them also has words of its own
and is about its prompt is recorded beside base's answers, and what share of those the checks reject. On the
other suites, the content-free answers of every evaluation are scored, and for the handbook the answer to the
nearest trained wording. A suite shows something of a model only as far as the model is above all of them.
"""

import argparse
import hashlib
import json
import platform
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from cheats import cheats

RECORD = Path(__file__).with_name("instructions.json")
METRIC, KEPT = "passed", "prompt_level_strict_acc"
OTHERS = ["neighbours", "neighbours_quick", "neighbours_validation", "handbook"]


def constraints(docs: list[dict]) -> list[list[dict]]:
    return [json.loads(doc["constraints"]) for doc in docs]


def scored(task: Any, docs: list[dict], answers: list[str]) -> list[dict[str, Any]]:
    """Return what the task itself says of answers, before base reads them."""
    return [task.process_results(doc, [answer]) for doc, answer in zip(docs, answers, strict=True)]


def shares(scores: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of answers that keep the constraints, that also have own words, and that pass."""
    own = [row[KEPT] and row["own_words"] for row in scores]
    named = {
        "kept": [row[KEPT] for row in scores],
        "own_words": own,
        "passed": [row[METRIC] for row in scores],
    }
    return {name: round(float(np.mean(values)), 4) for name, values in named.items()}


def fingerprint(docs: list[dict]) -> str:
    """Return a hash of the prompts and constraints that a record is about."""
    text = json.dumps([(doc["prompt"], doc["constraints"]) for doc in docs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def share(values: list[float]) -> dict:
    """Return a mean with its 95 % interval (Wilson's); of nothing, only that there was nothing."""
    if not values:
        return {"n": 0}
    n, p, z = len(values), float(np.mean(values)), 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return {"n": n, "score": round(p, 4), "low": round(centre - half, 4), "high": round(centre + half, 4)}


def answered(suite: str, backbone: Any, limit: int | None, batch_size: int = 32) -> list[dict]:
    """Return the documents of a suite with base's greedy `answer`, its `tokens`, and whether it `ended`."""
    from opdcl.data.chat import render
    from opdcl.data.suites import load_suite
    from opdcl.sampling.rollout import Prompt
    from opdcl.sampling.sample import sample

    task = load_suite(suite).task
    docs, tokenizer = list(task.test_docs())[:limit], backbone.tokenizer
    texts = [
        render(tokenizer, [{"role": "user", "content": d["prompt"]}], True, tokenize=False) for d in docs
    ]
    prompts = [Prompt(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    options = {"max_new_tokens": task.config.generation_kwargs["max_gen_toks"], "eos_ids": backbone.eos_ids}
    with backbone.merged("base") as model:
        rollouts = sample(model, prompts, temperature=0, batch_size=batch_size, **options)
    ids = [rollout.completion_ids for rollout in rollouts]
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [
        doc | {"answer": answer, "tokens": len(i), "ended": i[-1] in backbone.eos_ids}
        for doc, i, answer in zip(docs, ids, answers, strict=True)
    ]


def measure(suite: str, backbone: Any, docs: list[dict], others: list[dict], played_on: int = 100) -> dict:
    """Return the record of a suite: base, the gains of its answers, and each cheat on the first prompts."""
    from opdcl.data.suites import load_suite
    from opdcl.stages import content

    loaded, started = load_suite(suite), time.perf_counter()
    task, judge = loaded.task, content.judge(backbone, loaded)
    answers = [doc["answer"] for doc in docs]
    base = judge(docs, answers, scored(task, docs, answers))
    seconds = time.perf_counter() - started
    first = docs[:played_on]
    known = [(doc["request"], doc["answer"]) for doc in others]
    played = cheats(first, constraints(first), answers[:played_on], known)
    read = {}
    for name, texts in played.items():
        read[name] = judge(first, texts, scored(task, first, texts))
        print(suite, name, shares(read[name]), flush=True)
    return describe(docs, base) | {
        "seconds": round(seconds, 1),
        "gains": [row.get("gain") for row in base],
        "answers": answers,
        "played_on": len(first),
        "cheats": {name: shares(rows) for name, rows in read.items()},
    }


def describe(docs: list[dict], base: list[dict[str, Any]]) -> dict:
    """Return base's scores: all, by group and type of constraint; what the checks reject; how answers end."""
    by_group, by_type = defaultdict(list), defaultdict(list)
    for doc, row, own in zip(docs, base, constraints(docs), strict=True):
        by_group[doc["group"]].append(float(row[METRIC]))
        for constraint, one in zip(own, row["inst_level_strict_acc"], strict=True):
            by_type[constraint["type"]].append(float(one))
    kept = [row for row in base if row[KEPT]]
    return {
        "prompts": fingerprint(docs),
        "base": share([float(row[METRIC]) for row in base]),
        "base_parts": shares(base),
        "base_by_group": {name: share(values) for name, values in by_group.items()},
        "base_by_type": {name: share(values) for name, values in sorted(by_type.items())},
        "rejected": {
            "copied": share([float(not row["own_words"]) for row in kept]),
            "off topic": share([float(not row[METRIC]) for row in kept if row["own_words"]]),
        },
        "finished": share([float(doc["ended"]) for doc in docs]),
        "mean_tokens": round(float(np.mean([doc["tokens"] for doc in docs])), 1),
    }


def other_floors() -> dict[str, dict[str, float]]:
    """Return the headline score of each content-free answer on the other shipped suites."""
    from opdcl.data.suites import load_suite

    found = {}
    for name in OTHERS:
        suite = load_suite(name)
        targets = [suite.task.doc_to_target(doc) for doc in suite.documents(None)]
        scores = suite.floors(None, targets)
        if name == "handbook":
            scores = scores | {"answer to the nearest trained wording": looked_up(suite)}
        found[name] = {free: suite.means(rows)[suite.metrics[0]] for free, rows in scores.items()}
    return found


def looked_up(suite: Any) -> list[dict[str, Any]]:
    """Score the answer to the trained wording that is nearest to each question; it knows all facts."""
    from opdcl.config.shipped import package_folder
    from opdcl.data.similarity import similarity

    text = (package_folder("evals") / "handbook" / "facts.jsonl").read_text(encoding="utf-8")
    known = [
        (wording, fact["answer"]) for fact in map(json.loads, text.splitlines()) for wording in fact["train"]
    ]
    docs = suite.documents(None)
    nearest = similarity([doc["question"] for doc in docs], [wording for wording, _ in known]).argmax(axis=1)
    return scored(suite.task, docs, [known[i][1] for i in nearest])


def main() -> None:
    import torch

    from opdcl.config.model import ModelConfig
    from opdcl.model.backbone import Backbone

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="measure on the first N prompts only")
    parser.add_argument("--suites", nargs="+", default=["instructions_validation", "instructions"])
    parser.add_argument("--cheats", type=int, default=100, help="play cheats on the first N prompts only")
    parser.add_argument(
        "--answers", type=Path, help="folder for base's answers, which are read if they are there"
    )
    options = parser.parse_args()
    limits = [f"--{name} {number}" for name, number in vars(options).items() if isinstance(number, int)]
    backbone = Backbone.load(ModelConfig())
    docs = {}
    for suite in ("instructions_validation", "instructions"):
        file = options.answers and options.answers / f"{suite}.json"
        if not (file and file.exists()):
            docs[suite] = answered(suite, backbone, options.limit)
        if file and not file.exists():
            file.write_text(json.dumps(docs[suite]), encoding="utf-8")
        docs[suite] = docs.get(suite) or json.loads(file.read_text(encoding="utf-8"))
    cpu = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpu.read_text().splitlines() if "model name" in line]
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(["python benchmarks/floors.py", *limits]),
        "machine": f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "dtype": str(backbone.causal_lm.dtype),
        "floors": other_floors(),
        "validation_answers": [doc["answer"] for doc in docs["instructions_validation"]],
        "suites": {},
    }
    for suite in options.suites:
        own = docs[suite]
        others = docs["instructions_validation"] if suite == "instructions" else []
        record["suites"][suite] = measure(suite, backbone, own, others, options.cheats)
        print(suite, json.dumps(record["suites"][suite]), flush=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
