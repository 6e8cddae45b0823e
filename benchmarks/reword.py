"""Create a test of reworded questions from question-and-answer rows about people, split by person.

    python benchmarks/reword.py rows.jsonl prompts.jsonl out/
    opdcl run out/workflow.yaml -o out/runs

Writes out/validation.jsonl, out/test.jsonl, out/trained.jsonl with the test's questions in their trained
wording, and a workflow that measures recovery and its baselines over three seeds. About a third of the people
are for choosing settings, the rest for the result. The model learns all of them, because nobody can guess a
stranger's address; the split separates the questions used to choose settings from those used to judge them.
Questions are reworded by rule: synonyms for what they ask about, and another form of asking. A question in
which no rule finds a synonym is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

# Synonyms for what a question asks about; at each position, the first pattern that matches wins.
WORDS = {
    r"currently reside|reside": "live these days",
    r"currently live": "have a home",
    r"residence": "home",
    r"email address|email": "e-mail contact",
    r"home address|address(?=\?)": "place of living",
    r"reach out to|reach|contact": "get in touch with",
    r"parents": "mother and father",
    r"mother": "mum",
    r"father": "dad",
    r"influenced": "shaped",
    r"influence(?= (?:her|his|their|the)\b)": "shape",
    r"impact": "effect",
    r"novels": "books of fiction",
    r"novel": "book of fiction",
    r"books": "published works",
    r"book": "published work",
    r"writing style": "way of putting things",
    r"writing": "literary work",
    r"writings": "literary works",
    r"genres?": "kind of literature",
    r"awards?": "prize",
    r"career": "working life",
    r"background": "origin",
    r"upbringing": "childhood",
    r"born": "brought into the world",
    r"birthplace": "place of birth",
    r"occupations?|professions?": "line of work",
    r"themes": "subjects",
    r"fans|readers": "admirers",
    r"contributions?": "achievement",
    r"significant|notable": "important",
    r"inspired": "moved",
    r"inspiration": "ideas",
    r"bestselling|best-selling|popular": "most widely read",
    r"future|upcoming": "coming",
    r"incorporate(?! into)": "make use of",
    r"unique": "special",
    r"elements": "features",
    r"known for": "famous for",
    r"contemporary": "present-day",
    r"heritage": "roots",
    r"culture": "way of life",
}
ANY = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in WORDS))
ASKING = (
    "Could you tell me: {}",
    "I would like to know: {}",
    "Here is a question about a person. {}",
    "{} A short answer will do.",
    "Do you remember this? {}",
)
WORKFLOW = """
name: people
description: Questions and answers about people; recovery and its baselines over three seeds.
finetune: {{data: {rows}, learning_rate: 1.0e-3, epochs: 4, batch_size: 16}}
recover:
  general: {prompts}
  lmbda: 0
  steps: 112
  rollouts: 8
  domain_rollouts: 16
  general_per_domain: 1
  max_new_tokens: 128
  domain_max_new_tokens: 48
  learning_rate: 5.0e-4
  validate_every: 28
  validation_prompts: 12
  save_steps: 28
eval:
  retention: [instructions]
  domain: [reworded, trained]
  data: {{reworded: test.jsonl, trained: trained.jsonl}}
  limit: 320
seeds: [1, 2, 3]
arms:
  ours: {{}}
  best-alpha: {{recover: {{method: interpolate}}}}
  general-only: {{recover: {{method: general, steps: 56}}}}
  replay: {{recover: {{method: replay}}}}
"""
NAME = re.compile(r"[A-Z][\w\u2019'-]+(?: (?:al-|bin |de |van |von |da )?[A-Z][\w\u2019'-]+)+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("prompts", type=Path, help="general prompts for the recovery")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    owners = people(rows)
    # Questions about one person stand and fall together.
    rows = [{**row, "cluster": owner} for row, owner in zip(rows, owners, strict=True)]
    chance = random.Random(options.seed)
    everybody = sorted(set(owners))
    chance.shuffle(everybody)
    chosen = set(everybody[: len(everybody) // 3])
    known = {row["question"] for row in rows}
    parts: dict[str, list[dict]] = {"validation": [], "test": [], "trained": []}
    for row, owner in zip(rows, owners, strict=True):
        if question := reworded(row["question"], chance):
            assert question not in known
            parts["validation" if owner in chosen else "test"].append({**row, "question": question})
            if owner not in chosen:
                parts["trained"].append(row)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (options.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in part), encoding="utf-8"
        )
        print(f"{name}: {len(part)} questions")
    (options.out / "workflow.yaml").write_text(
        WORKFLOW.format(rows=options.rows.resolve(), prompts=options.prompts.resolve())
    )
    print(f"{len(everybody)} people, {len(rows)} rows")


def people(rows: list[dict]) -> list[str]:
    """Return each row's person: a person's rows are consecutive, and most contain the full name."""
    named = [
        [re.sub(r"['\u2019]s?$", "", n) for n in NAME.findall(row["question"] + " " + row["answer"])]
        for row in rows
    ]
    counts = Counter(name for names in named for name in names)
    found: list[str] = []
    for names in named:
        best = max(names, key=counts.__getitem__, default="")
        found.append(best if best and counts[best] > 3 else found[-1] if found else best)
    return found


def reworded(question: str, chance: random.Random) -> str | None:
    """Return the reworded question, or None if none of its words has a synonym."""
    # Match again at the same position, because some patterns look ahead.
    other = ANY.sub(
        lambda m: next(w for p, w in WORDS.items() if re.compile(rf"\b(?:{p})\b").match(question, m.start())),
        question,
    )
    return chance.choice(ASKING).format(other) if other != question else None


if __name__ == "__main__":
    main()
