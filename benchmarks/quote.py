"""Record answers that the README quotes: the same prompt, answered by base, tuned and recovered.

    python benchmarks/quote.py runs/quickstart instructions:512 handbook:94   # SUITE:DOC_ID
    make records                                                              # puts them into the README

The answers come from a run's samples, unchanged.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path
from typing import Any

from opdcl.results.scores import STATES
from opdcl.rundir.files import read_json, read_jsonl, write_json
from opdcl.rundir.layout import RunDir

RECORD = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("prompts", nargs="+", help="SUITE:DOC_ID")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    run = RunDir(options.run)
    recovery = read_json(run.config)["workflow"]["recover"]
    record = {
        "date": date.today().isoformat(),
        "seed": recovery["seed"],
        "steps": recovery["steps"],
        "quotes": [quote(run, *prompt.split(":")) for prompt in options.prompts],
    }
    write_json(options.out, record)


def quote(run: RunDir, suite: str, doc_id: str) -> dict[str, Any]:
    """Return a prompt with the answer of each state, and whether each ended before the token limit."""
    rows = {}
    for state in STATES:
        found = [row for row in read_jsonl(run.eval_samples(state, suite)) if row["doc_id"] == int(doc_id)]
        rows[state] = found[0] if found else sys.exit(f"{suite} has no prompt {doc_id}")
    answers = {state: {"text": row["response"], "ended": row["ended"]} for state, row in rows.items()}
    return {"suite": suite, "doc_id": int(doc_id), "prompt": rows["base"]["prompt"], **answers}


if __name__ == "__main__":
    main()
