"""Play cheats against the suites of a finished run, and score base's own answers beside them.

    python benchmarks/floors.py runs/quickstart        writes benchmarks/instructions.json

What is played is in cheats.py. On `instructions`, the cheats also keep the constraints. Every answer is
scored as an evaluation scores it: by the rules of the suite, and then by base, which reads what passes them.
The run holds base's answers, which are not asked for again; on the domain, where base knows nothing, tuned's
take their place. A suite shows something of a model only as far as the model is above all cheats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cheats import cheats, fit
from common import head, parser_of, store

from opdcl.config.shipped import shipped_suites
from opdcl.data.suites import Suite, cut_at, load_suite
from opdcl.measure import relevance
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir

RECORD = Path(__file__).with_name("instructions.json")
KEPT = "prompt_level_strict_acc"


def owner(run: RunDir, suite: str) -> str:
    """Return whose answers are right on a suite of a run: base's, or on its domain tuned's."""
    return "tuned" if read_json(run.eval_result("base", suite))["role"] == "domain" else "base"


def all_answers(suite: Suite, docs: list[dict], own: list[str]) -> dict[str, list[str]]:
    """Return all answers to the documents by name: a model's `own`, and those of cheats."""
    prompts = [str(suite.task.doc_to_text(doc)) for doc in docs]
    requests = [doc.get("request", prompt) for doc, prompt in zip(docs, prompts, strict=True)]
    played = cheats(prompts, requests, own)
    for name, texts in played.items():
        if "own answer" in name:
            # An answer of one word is the same in any order: that is no cheat.
            played[name] = [
                "" if text.rstrip(".") == answer.rstrip(".") else text
                for text, answer in zip(texts, own, strict=True)
            ]
    if suite.content:
        constraints = [json.loads(doc["constraints"]) for doc in docs]
        for name, texts in played.items():
            played[name] = [fit(text, own) for text, own in zip(texts, constraints, strict=True)]
    stops = (suite.task.config.generation_kwargs or {}).get("until") or []
    for name, texts in played.items():
        played[name] = [cut_at(text, stops) for text in texts]
    return {"own": own, **played}


def measure(suite: Suite, backbone: Any, answers: list[str]) -> dict[str, Any]:
    """Return the record of a suite: a model's own answers to its first prompts, and each cheat on them."""
    docs, metric = suite.documents(len(answers)), suite.metrics[0]
    played = {}
    for name, texts in all_answers(suite, docs, answers).items():
        rules = suite.scores(docs, texts)
        read = relevance.grade(relevance.Reader(backbone), suite, docs, texts)
        played[name] = {"rules": mean(rules, metric), "score": mean(read, metric)}
        print(suite.name, name, played[name], flush=True)
    return {"n": len(docs), "own": played.pop("own"), "cheats": played}


def mean(scores: list[dict[str, Any]], metric: str) -> float:
    return round(sum(float(row[metric]) for row in scores) / len(scores), 4)


def main() -> None:
    from opdcl.config.model import ModelConfig
    from opdcl.model.load_backbone import load_backbone

    parser = parser_of(str(RECORD), __doc__)
    parser.add_argument("run", type=Path, help="whose answers are read")
    parser.add_argument("--suites", nargs="+", help="default: all shipped ones that the run has measured")
    parser.add_argument("--limit", type=int, help="play on the first N prompts only")
    options = parser.parse_args()
    run, backbone = RunDir(options.run), load_backbone(ModelConfig())
    measured = [file.stem for file in sorted(run.evals.glob("base/*.json")) if file.stem in shipped_suites()]
    record = read_json(options.out) if options.suites and options.out.exists() else {"suites": {}}
    record |= head()
    for name in options.suites or measured:
        whose = owner(run, name)
        rows = read_jsonl(run.eval_samples(whose, name))[: options.limit]
        answers = [row["response"] for row in rows]
        found = measure(load_suite(name), backbone, answers)
        record["suites"][name] = {"whose": whose, **found, "answers": answers}
        store(options.out, record)


if __name__ == "__main__":
    main()
