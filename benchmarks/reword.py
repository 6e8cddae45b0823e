"""Create a test of reworded questions from question-and-answer rows about people, split by person.

    python benchmarks/reword.py rows.jsonl out/
    opdcl run out/workflow.yaml -o out/runs

Writes out/learned.jsonl, out/validation.jsonl, out/test.jsonl, out/trained.jsonl with the test's questions in
their trained wording, and a workflow that measures the recovery. About a third of the people
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

from ruamel.yaml import YAML

from opdcl.rundir.files import read_jsonl

TEXTS = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
WORDS: dict[str, str] = TEXTS["words"]
ANY = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in WORDS))
NAME = re.compile(r"[A-Z][\w\u2019'-]+(?: (?:al-|bin |de |van |von |da )?[A-Z][\w\u2019'-]+)+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--people", type=int, help="how many of them, chosen by chance; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = list(read_jsonl(options.rows))
    owners = people(rows)
    # Questions about one person stand and fall together.
    rows = [{**row, "cluster": owner} for row, owner in zip(rows, owners, strict=True)]
    chance = random.Random(options.seed)
    everybody = sorted(set(owners))
    chance.shuffle(everybody)
    everybody = everybody[: options.people]
    chosen = set(everybody[: len(everybody) // 3])
    known = {row["question"] for row in rows}
    rows, owners = zip(*((r, o) for r, o in zip(rows, owners, strict=True) if o in everybody), strict=True)
    parts: dict[str, list[dict]] = {"learned": list(rows), "validation": [], "test": [], "trained": []}
    for row, owner in zip(rows, owners, strict=True):
        if question := reworded(row["question"], chance):
            assert question not in known
            parts["validation" if owner in chosen else "test"].append({**row, "question": question})
            if owner not in chosen:
                parts["trained"].append(row)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part]
        (options.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(part)} questions")
    (options.out / "workflow.yaml").write_text(TEXTS["workflow"])


def people(rows: list[dict]) -> list[str]:
    """Return each row's person: a person's rows are consecutive, and most contain the full name."""
    texts = [f"{row['question']} {row['answer']}" for row in rows]
    named = [[re.sub(r"['\u2019]s?$", "", name) for name in NAME.findall(text)] for text in texts]
    counts = Counter(name for names in named for name in names)
    found: list[str] = []
    for names in named:
        best = max(names, key=counts.__getitem__, default="")
        found.append(best if best and counts[best] > 3 else found[-1] if found else best)
    return found


def reworded(question: str, chance: random.Random) -> str | None:
    """Return the reworded question, or None if none of its words has a synonym."""

    def other(match: re.Match[str]) -> str:
        # Match again at the same position, because some patterns look ahead.
        patterns = {pattern: re.compile(rf"\b(?:{pattern})\b") for pattern in WORDS}
        return next(WORDS[p] for p, found in patterns.items() if found.match(question, match.start()))

    changed = ANY.sub(other, question)
    return chance.choice(TEXTS["asking"]).format(changed) if changed != question else None


if __name__ == "__main__":
    main()
