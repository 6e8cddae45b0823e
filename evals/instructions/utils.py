"""Prompts with constraints, verified here, that have to be met in words of one's own.

opdcl also asks base whether an answer is about its prompt (`content` in the task's metadata); plain lm-eval
does not.
"""

import json
import re
import sys
from pathlib import Path

import datasets

HERE = Path(__file__).parent

try:
    from opdcl.data.own_words import copied_run, own_words
except ImportError:  # plain lm-eval in a checkout, without opdcl installed
    sys.path.append(str(HERE.parents[1]))
    from opdcl.data.own_words import copied_run, own_words

OWN_WORDS = 2  # content words that an answer must add to its prompt
COPIED = 8  # words of a prompt in a row that an answer may repeat
QUICK = 300  # prompts of `instructions_quick`: the first of the test, where the groups alternate


def load_test(**kwargs):
    """Return the test split, under the name that the task scores."""
    return {"test": _split("test")}


def load_quick(**kwargs):
    """Return the first prompts of the test, for a run that must be short."""
    return {"test": _split("test").select(range(QUICK))}


def load_validation(**kwargs):
    """Return the validation split, under the name that the task scores."""
    return {"test": _split("validation")}


def load_train(**kwargs):
    """Return the prompts for reward training, under the name that the task scores."""
    return {"test": _split("train")}


def _split(name):
    rows = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    # Arrow would give every constraint the union of all parameters; as text they stay as they are.
    return datasets.Dataset.from_list(
        [{**row, "constraints": json.dumps(row["constraints"])} for row in rows]
    )


def _words(text):
    return re.findall(r"[^\W_]+(?:['\u2019-][^\W_]+)*", text)


def _sentences(text):
    """Split at stops before a blank or the end; an abbreviation and the number of a list item end none."""
    text = re.sub(r"\b(Mr|Mrs|Ms|Dr|St|P\.S|e\.g|i\.e|a\.m|p\.m)\.", r"\1", text)
    text = re.sub(r"(?m)^\s*\d+[.)]", "", text)
    return [part for part in re.split(r"[.!?]+[\"')\]\u201d\u2019]*(?=\s|$)", text) if _words(part)]


def _paragraphs(text):
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def _occurrences(text, word):
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _in_range(count, c):
    return c.get("least", 0) <= count <= c.get("most", float("inf"))


def _is_title(text, c):
    first, *rest = _lines(text)
    return bool(re.fullmatch(r"<<[^<>]*\w[^<>]*>>", first) and first.lower() != "<<title>>" and rest)


def _is_postscript(text, c):
    *before, last = _paragraphs(text)
    return bool(before) and last.startswith(c["marker"]) and bool(_words(last.removeprefix(c["marker"])))


def _is_numbered(text, c):
    numbers = [int(found[1]) for line in _lines(text) if (found := re.match(r"(\d+)[.)]\s+\S", line))]
    return numbers == [*range(1, c["count"] + 1)]


# Type -> whether a non-empty answer, stripped of surrounding blanks, keeps the constraint.
VERIFIERS = {
    "words": lambda text, c: all(_occurrences(text, word) for word in c["words"]),
    "word_count": lambda text, c: _in_range(len(_words(text)), c),
    "sentence_count": lambda text, c: _in_range(len(_sentences(text)), c),
    "title": _is_title,
    "postscript": _is_postscript,
    "numbered": _is_numbered,
    "first": lambda text, c: bool(re.match(rf"{re.escape(c['phrase'])}(?!\w)", text)),
    "forbidden": lambda text, c: not any(_occurrences(text, word) for word in c["words"]),
}


def keeps(constraint, answer):
    """Return whether an answer keeps one constraint; an empty answer keeps none."""
    return bool(answer.strip()) and bool(VERIFIERS[constraint["type"]](answer.strip(), constraint))


def has_own_words(doc, answer):
    """Return whether an answer adds words to its prompt, and copies no long part of it."""
    prompt = doc["prompt"]
    return len(own_words(prompt, answer)) >= OWN_WORDS and copied_run(prompt, answer) <= COPIED


def process_results(doc, results):
    """Score one answer: whether all constraints are kept, which of them, and whether it has own words."""
    kept = [keeps(constraint, results[0]) for constraint in json.loads(doc["constraints"])]
    own = has_own_words(doc, results[0])
    return {
        "passed": all(kept) and own,
        "prompt_level_strict_acc": all(kept),
        "own_words": own,
        "inst_level_strict_acc": kept,
    }


def feedback(doc, answer):
    """Name the constraints that an answer violates, in the words of the prompt."""
    violated = [c["text"] for c in json.loads(doc["constraints"]) if not keeps(c, answer)]
    return f"Not kept: {' '.join(violated)}" if violated else "Every constraint is kept."


def agg_inst_level_acc(items):
    """Average over constraints, not over prompts."""
    kept = [one for prompt in items for one in prompt]
    return sum(kept) / len(kept)
