"""Write the five domains of benchmarks/rounds.yaml: 28 facts of the shipped handbook each, beside that file.

python benchmarks/rounds.py
opdcl run benchmarks/rounds.yaml -o runs/rounds
"""

from __future__ import annotations

import json
from pathlib import Path

from opdcl.rundir.files import read_jsonl

HERE = Path(__file__).parent
DOMAINS = [
    ("people", "leave"),
    ("travel", "canteen"),
    ("events", "money"),
    ("rooms", "tools"),
    ("security", "products"),
]


def main(folder: Path = HERE / "rounds") -> None:
    facts = list(read_jsonl(HERE.parent / "evals" / "handbook" / "facts.jsonl"))
    folder.mkdir(exist_ok=True)
    for number, documents in enumerate(DOMAINS, 1):
        chosen = [fact for fact in facts if fact["document"] in documents]
        write(folder / f"d{number}.jsonl", chosen, "train")
        write(folder / f"d{number}-test.jsonl", chosen, "test")


def write(path: Path, facts: list[dict], split: str) -> None:
    """Write one row for each wording of each fact."""
    lines = [
        json.dumps({"question": question, "answer": fact["answer"], "cluster": fact["id"]}) + "\n"
        for fact in facts
        for question in fact[split]
    ]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
