"""Write the prompts of the suite `instructions` from hand-written requests and phrasings of constraints.

    python evals/instructions/make.py

Writes {test,validation,train}.jsonl beside it. Each request gets one or two constraints. Those of
the `seen` group are of types that occur in workflows/data/everyday.jsonl, those of the `unseen` group are of
types that no prompt there demands, and the groups share none. The test has phrasings of its own:
what was chosen on the validation prompts has not been fitted to the test's. Rows alternate between the two
groups, and each round of a group uses each of its recipes once, so that the first rows of a file are as
balanced as the whole file.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent

SEED = 39
NUMBERS = {3: "three", 4: "four", 5: "five"}
FIRST_KEY = {"test": 0, "validation": 1000, "train": 2000}
PROMPTS_PER_REQUEST = {"test": 1, "validation": 1, "train": 2}

AVOIDED = ["people", "world", "life", "time", "many", "often", "important", "also"]

# Name -> choices of parameters. {word} is the request's word, marked with * in requests.txt.
PARAMETERS = {
    "word": [{"type": "words", "words": ["{word}"]}],
    "title": [{"type": "title"}],
    "postscript": [{"type": "postscript", "marker": "P.S."}],
    "one sentence": [{"type": "sentence_count", "least": 1, "most": 1}],
    "few sentences": [{"type": "sentence_count", "least": 1, "most": 2}],
    "some words": [{"type": "word_count", "least": 30, "most": 80}],
    "first": [{"type": "first", "phrase": "The {word}"}, {"type": "first", "phrase": "I think the {word}"}],
    "numbered": [{"type": "numbered", "count": n} for n in (3, 4, 5)],
    "forbidden": [{"type": "forbidden", "words": [word]} for word in AVOIDED],
}

# How validation and training prompts demand each: sentences behind the request.
SENTENCES = {
    "word": ['Use the word "{words}".', 'Your answer must contain the word "{words}".'],
    "title": ["Begin with a title in double angular brackets, like <<title>>, and one sentence below it."],
    "postscript": ["Write one or two sentences, and then a postscript that begins with P.S."],
    "one sentence": ["Answer in one sentence.", "Write exactly one sentence."],
    "few sentences": ["Use at most two sentences.", "Answer in at most two sentences."],
    "some words": ["Write between 30 and 80 words.", "Use at least 30 words and at most 80."],
    "first": ['Start your answer with "{phrase}".', 'Begin with the words "{phrase}".'],
    "numbered": ["Give a numbered list of {count} points.", "Give {count} short points as a numbered list."],
    "forbidden": ['Avoid the word "{words}".', 'Your answer must not contain the word "{words}".'],
}  # fmt: skip

# How the test demands each, in frames of its own.
TEST_SENTENCES = {
    "word": ['Your answer should use the word "{words}".', 'Be sure to use the word "{words}".'],
    "title": ["Give your answer a title in double angular brackets, like <<title>>, and then one sentence."],
    "postscript": ["Respond with one or two sentences and, below them, a postscript that starts with P.S."],
    "one sentence": ["Your answer should be one sentence.", "Respond with one sentence."],
    "few sentences": ["Your answer should have one or two sentences.", "Respond with one or two sentences."],
    "some words": ["Your answer should have 30 to 80 words.", "Respond with 30 to 80 words."],
    "first": ['Let your answer start with "{phrase}".', 'Let your answer begin with the words "{phrase}".'],
    "numbered": ["Write a numbered list of {count} points.", "Write {count} points as a numbered list."],
    "forbidden": ['Leave out the word "{words}".', 'Answer without the word "{words}".'],
}  # fmt: skip
FRAMES = ["{request} {demands}", "{request}\n{demands}", "{request}\n\n{demands}"]
RECIPES = {
    "seen": [
        ("word", "title"),
        ("word", "postscript"),
        ("word", "one sentence"),
        ("word", "few sentences"),
        ("word", "some words"),
    ],
    "unseen": [("first",), ("first", "forbidden"), ("numbered",), ("numbered", "forbidden"), ("forbidden",)],
}


def read_requests() -> dict[str, list[str]]:
    """Return the requests by split, each with its word still marked."""
    parts = re.split(r"^\[(\w+)\]$", (HERE / "requests.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        name: [line for line in text.splitlines() if line]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def constraint(name: str, word: str, split: str, rng: random.Random) -> dict:
    """Return one constraint on an answer about `word`: its parameters, and its `text` in the prompt."""
    parameters = json.loads(json.dumps(rng.choice(PARAMETERS[name])).replace("{word}", word))
    shown = parameters | {"number": parameters.get("count"), "count": NUMBERS.get(parameters.get("count"))}
    shown["words"] = "".join(parameters.get("words", ""))
    if name == "first" and word[0].isupper():
        parameters["phrase"] = parameters["phrase"].removesuffix(f"he {word}")[:-1] + word  # without article
        shown |= parameters
    phrasings = (TEST_SENTENCES if split == "test" else SENTENCES)[name]
    return parameters | {"text": rng.choice(phrasings).format(**shown)}


def prompt(request: str, texts: list[str], split: str, rng: random.Random) -> str:
    """Return a request with its demands."""
    frame = rng.choice(FRAMES if split == "test" else FRAMES[:1])
    return frame.format(request=request, demands=" ".join(texts))


def recipes(group: str, rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yield the group's recipes, in rounds of new orders."""
    while True:
        yield from rng.sample(RECIPES[group], len(RECIPES[group]))


def make(split: str, requests: list[str]) -> list[dict]:
    """Return the rows of a split."""
    rng = random.Random(f"{SEED} {split}")
    sources = {group: recipes(group, rng) for group in RECIPES}
    rows = []
    for marked in requests * PROMPTS_PER_REQUEST[split]:
        group = [*RECIPES][len(rows) % 2]
        word, request = re.search(r"\*([\w'-]+)", marked)[1], marked.replace("*", "")
        chosen = [constraint(name, word, split, rng) for name in next(sources[group])]
        rng.shuffle(chosen)
        rows.append(
            {
                "key": FIRST_KEY[split] + len(rows),
                "prompt": prompt(request, [c["text"] for c in chosen], split, rng),
                "request": request,
                "constraints": chosen,
                "group": group,
            }
        )
    return rows


def main() -> None:
    for split, requests in read_requests().items():
        rows = make(split, requests)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (HERE / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
