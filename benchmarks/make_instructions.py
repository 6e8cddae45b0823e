"""Write the prompts of the suite `instructions` from hand-written requests and phrasings of constraints.

    python benchmarks/make_instructions.py

Writes evals/instructions/{test,validation,train}.jsonl. Each request gets two constraints. One is bound to
the request's own word (marked with * in instructions_requests.txt), so that an answer to another prompt
misses it. The other one, of form, is missed by the prompt itself and by the prompt with a text of 100 words
behind it. Constraints are `seen`, of types that may occur in workflows/data/everyday.jsonl, or `unseen`;
required words go with both. Rows alternate between the two groups, and each round of a group uses each of
its recipes once, so that the first rows of a file are as balanced as the whole file.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUESTS = Path(__file__).with_name("instructions_requests.txt")
SUITE = ROOT / "evals" / "instructions"
SEED = 20
NUMBERS = {3: "three", 4: "four"}
FIRST_KEY = {"test": 0, "validation": 1000, "train": 2000}
PROMPTS_PER_REQUEST = {"test": 1, "validation": 1, "train": 2}

# Name -> choices of parameters, and phrasings. {word} is the request's word; others are parameters.
CONSTRAINTS = {
    "word": (
        [{"type": "words", "words": ["{word}"]}],
        [
            'Use the word "{word}".',
            'Your answer must contain the word "{word}".',
            'Include the word "{word}".',
        ],
    ),
    "title": (
        [{"type": "title"}],
        [
            "Begin with a title in double angular brackets, like <<title>>, and write one sentence below it.",
            "First write a title in double angular brackets, like <<title>>, and below it one sentence.",
        ],
    ),
    "postscript": (
        [{"type": "postscript", "marker": "P.S."}],
        [
            "Write one or two sentences, and then a postscript that begins with P.S.",
            "Answer in one or two sentences, then add a postscript that begins with P.S.",
        ],
    ),
    "one sentence": (
        [{"type": "sentence_count", "least": 1, "most": 1}],
        ["Answer in one sentence.", "Write exactly one sentence."],
    ),
    "few sentences": (
        [{"type": "sentence_count", "least": 1, "most": 2}],
        ["Use at most two sentences.", "Answer in at most two sentences."],
    ),
    "some words": (
        [{"type": "word_count", "least": 30, "most": 80}],
        ["Write between 30 and 80 words.", "Use at least 30 words and at most 80."],
    ),
    "first": (
        [{"type": "first", "phrase": "The {word}"}, {"type": "first", "phrase": "I think the {word}"}],
        ['Start your answer with "{phrase}".', 'Begin with the words "{phrase}".'],
    ),
    "numbered": (
        [{"type": "numbered", "count": n} for n in (3, 4)],
        ["Give a numbered list of {count} short points.", "Give {count} short points as a numbered list."],
    ),
    "forbidden": (
        [{"type": "forbidden", "words": [w]} for w in ("people", "world", "life", "time", "many", "often")],
        ['Avoid the word "{words}".', 'Your answer must not contain the word "{words}".'],
    ),
}
RECIPES = {
    "seen": [
        ("word", "title"),
        ("word", "postscript"),
        ("word", "one sentence"),
        ("word", "few sentences"),
        ("word", "some words"),
    ],
    "unseen": [
        ("first", "one sentence"),
        ("first", "few sentences"),
        ("word", "numbered"),
        ("word", "forbidden", "one sentence"),
        ("word", "forbidden", "few sentences"),
    ],
}


def read_requests() -> dict[str, list[str]]:
    """Return the requests by split, each with its word still marked."""
    parts = re.split(r"^\[(\w+)\]$", REQUESTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        name: [line for line in text.splitlines() if line]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def constraint(name: str, word: str, rng: random.Random) -> dict:
    """Return one constraint on an answer about `word`: its parameters, and its `text` in the prompt."""
    choices, texts = CONSTRAINTS[name]
    parameters = json.loads(json.dumps(rng.choice(choices)).replace("{word}", word))
    if name == "first" and word[0].isupper():
        parameters["phrase"] = parameters["phrase"].removesuffix(f"he {word}")[:-1] + word  # without article
    shown = parameters | {
        "word": word,
        "count": NUMBERS.get(parameters.get("count")),
        "words": "".join(parameters.get("words", "")),
    }
    return parameters | {"text": rng.choice(texts).format(**shown)}


def recipes(group: str, rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yield the group's recipes, in rounds of new orders."""
    while True:
        yield from rng.sample(RECIPES[group], len(RECIPES[group]))


def make(split: str, requests: list[str]) -> list[dict]:
    """Return the rows of a split."""
    rng = random.Random(f"{SEED} {split}")
    sources = {group: recipes(group, rng) for group in RECIPES}
    rows = []
    for request in requests * PROMPTS_PER_REQUEST[split]:
        group = [*RECIPES][len(rows) % 2]
        word = re.search(r"\*([\w'-]+)", request)[1]
        chosen = [constraint(name, word, rng) for name in next(sources[group])]
        rng.shuffle(chosen)
        rows.append(
            {
                "key": FIRST_KEY[split] + len(rows),
                "prompt": " ".join([request.replace("*", ""), *(c["text"] for c in chosen)]),
                "constraints": chosen,
                "group": group,
            }
        )
    return rows


def main() -> None:
    for split, requests in read_requests().items():
        rows = make(split, requests)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (SUITE / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
