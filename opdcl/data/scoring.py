"""Score answers: short ones against gold answers by their words, in any script, others by a task's own rules.

A user's rows as a suite are asked with their whole conversation. Shipped suites import this file too.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from opdcl.data.formats import PACKED_ROW, Row
from opdcl.data.messages import split_thought
from opdcl.errors import UsageError
from opdcl.repetition import UNSPACED

# Marks by what they are compared as. Every dash but the short ones is compared as an en dash.
SPELT = dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02b9\u02bb\u02bc\u02bd\u00b4`", "'")
SPELT |= dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u05f4", '"')
SPELT |= dict(
    zip("\u2010\u2011\u2212\u2044\u2215\u00f7\u2248\u223c\u00d7\u066b\u066c", "---///~~x.,", strict=True)
)
# What a writer may leave out: vowel points of Hebrew and Arabic, the stretching of Arabic words, and what
# says whether a sign is drawn in colours.
OPTIONAL = re.compile("[\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u0652\u0670\u06d6-\u06ed\ufe00-\ufe0f]")

# For the brackets of expressions: what relates a number to another, signs of currency, and all marks that may
# belong to a word. Others end words. The rest are a letter or digit, and one that is no digit.
RELATING = "<>\u2264\u2265\u2260~\u00b1\u221a\u00ac"
MONEY = "$\u00a2-\u00a5\u058f\u060b\u09f2\u09f3\u0af1\u0bf9\u0e3f\u17db\u20a0-\u20cf"
MARKS = rf"'\"\-/\\^*#@!.,:+=&%|\u2013\u2030{RELATING}{MONEY}"
CHAR, LETTER = rf"[^\s{MARKS}]", rf"[^\s\d{MARKS}]"

ARTICLE = re.compile(
    rf"(?<![^\s\"'*_])(?:a|an|An(?= +[a-z])|[Tt]he|THE) +(?=[\"'*_.{MONEY}]*\w)"
    r"(?!(?:and|or|is|are|was|to|in|of|for|with|at|on|by|from|as)\b)"
)
PAIR = rf"(?<!{CHAR})(\*\*|[\"'*_])(?=\S)(.{{1,200}}?)(?<=\S)\1(?!{CHAR})"
NUMBER = re.compile(r"\d(?:[\d.,']*\d)?")
# What is rewritten before the words are found, in this order.
REWRITTEN = [
    *[(PAIR, r" \2 ")] * 2,  # quotes around emphasis
    ("!=", "\u2260"),
    ("<=", "\u2264"),
    (">=", "\u2265"),
    (r"[-=]+>", " \u2192 "),
    (r"\+/?-", "\u00b1"),
    (r"\u00b0 *(?=[cfk]\b)", ""),  # 9 °C is also written 9 C
    (rf"([-+])([{MONEY}])\s*(?=\d)", r"\2\1"),
    (rf"(?<!\d)(?<!\d\s)([{MONEY}])\s*([-+]?{NUMBER.pattern})", r" \2 \1 "),
    (rf"(?<![\d.,]|{CHAR})\.(?=\d)", "0."),
    (rf"(?<!{LETTER})\u2013(?=\d)", "-"),
    (rf"(?<=\d)\s+[-\u2013]\s+(?=\d+(?!{CHAR}))", "-"),
    (r"(?<=\d)\s+([/*x:^])\s+(?=\d)", r"\1"),
    (r"--+(?=\s|$)|(?<=\S)--+", " "),
    (rf"(?<={LETTER})-(?={CHAR})|(?<={CHAR})-(?={LETTER})", " "),
    (rf"\s*([{RELATING}])\s*", r" \1"),
    (rf"(?<={CHAR})\+(?={CHAR})", " + "),
]
WORD = re.compile(
    rf"[=&%\u2030{MONEY}]"
    rf"|(?:(?<![^\s\"'=&,:])(?:\.|[-+#@!*/\\{RELATING}]+))?"
    rf"{CHAR}+(?:(?:\^-?|[/\\*@#|]|(?<=\d)[-.:](?=\d)){CHAR}+)*"
    r"(?:[+#*]+|-|(?<=\d)['\"])?"
    rf"|[+{RELATING}]"
)
# A letter that is a word, with its vowels and tones.
LONE = re.compile(rf"[{UNSPACED}][^\w\s]*")


def normalise(text: str) -> str:
    """Return the words of a text as they are compared, with a blank between two.

    Case, articles, quotes, brackets, and the marks of sentences are dropped. A mark that touches a letter or
    digit, such as a sign, an operator, + or #, belongs to its word; %, =, & and signs of currency are words.
    Spellings of one text become one: composed and decomposed letters, full width, digits of any script,
    dashes, 1,000 and 1000, 1,05 and 1.05. In scripts without spaces each letter is a word. A text of nothing
    but marks keeps them.
    """
    text = re.sub("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))", ",", text)  # groups of a number
    text = re.sub("[\u00b2\u00b3\u00b9\u2070-\u207b]+", r"^\g<0>", text)
    spelt = _spelt(unicodedata.normalize("NFKC", _spelt(text)))
    words = " ".join(NUMBER.sub(_number, ARTICLE.sub("", spelt).casefold()).split())
    for pattern, instead in REWRITTEN:
        words = re.sub(pattern, instead, words)
    found = LONE.sub(r" \g<0> ", " ".join(one[0] for one in WORD.finditer(words)))
    return " ".join((found if found.strip() else spelt if spelt.strip() else text).split())


def _spelt(text: str) -> str:
    return "".join(map(_as_compared, text))


def _number(found: re.Match[str]) -> str:
    """Return a number without groups and with a decimal point; commas between several numbers part them."""
    number = found[0]
    if re.fullmatch(r"\d{1,3}([,'])\d{3}(\1\d{3})*(\.\d+)?", number):
        return re.sub("[,']", "", number)
    if re.fullmatch(r"\d+,\d+|\d{1,3}(\.\d{3})+,\d+", number):
        return number.replace(".", "").replace(",", ".")
    return number.replace(",", " ")


@lru_cache(maxsize=1 << 14)
def _as_compared(char: str) -> str:
    """Return what stands for a character when answers are compared: a blank for a mark that says nothing."""
    form, plain = unicodedata.decomposition(char), unicodedata.normalize("NFKC", char)
    char = SPELT.get(char, plain if len(plain) == 1 else char)
    char = SPELT.get(char, char)  # of full width
    kind = unicodedata.category(char)
    if char == "_" or re.match(f"[{MARKS}]", char):
        return char
    if kind == "Pd":
        return "\u2013"
    if kind[0] == "P" or kind == "Sk" or char == "\u200b":
        return " "
    if kind == "Cf" or OPTIONAL.match(char):
        return ""
    if kind == "Nd":
        return str(unicodedata.decimal(char))
    if kind in ("So", "Sm"):  # a trade mark says nothing; any other sign is a word
        return " " if form.startswith("<super>") else f" {char} "
    return f" {char}" if form.startswith("<fraction>") else char  # 2½ is not 21/2


def token_f1(answer: str, gold: str, question: str = "") -> float:
    """Return the harmonic mean of token precision and recall, of what the question has not said already.

    The question's words count in neither text. A gold answer without any other word, such as one of two
    things that the question names, is compared as a whole, and scored by how far the answer is above the
    question: a copy gets 0 and the gold answer 1.
    """
    a, g, q = (normalise(text).split() for text in (answer, gold, question))
    if new := [word for word in g if word not in q]:
        return _f1([word for word in a if word not in q], new)
    copied = _f1(q, g)
    return max(0.0, _f1(a, g) - copied) / (1 - copied) if copied < 1 else float(a == g)


def _f1(a: list[str], g: list[str]) -> float:
    shared = sum((Counter(a) & Counter(g)).values())
    return 2 * shared / (len(a) + len(g)) if shared else 0.0


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """Score one answer against the gold answer and its aliases, `doc["answers"]`; the best match counts.

    An answer that also contains one of `doc["others"]`, the answers to questions of the same kind, does not
    count as containing its own: a list of colours names every colour.
    """
    answer, golds, question = results[0], doc["answers"], doc.get("question", "")
    words = normalise(answer)
    listed = any(f" {normalise(other)} " in f" {words} " for other in doc.get("others") or [])
    return {
        "exact_match": max(float(words == normalise(g)) for g in golds),
        "token_f1": max(token_f1(answer, g, question) for g in golds),
        "contains": max(float(f" {normalise(g)} " in f" {words} " and not listed) for g in golds),
    }


def question_task(name: str, rows: Callable[[], list[Row]], max_tokens: int) -> dict[str, Any]:
    """Describe a closed-book task over rows of questions and answers; headline: token F1."""
    import datasets

    def load(**kwargs: Any) -> dict[str, Any]:
        return {"test": datasets.Dataset.from_list([document(row) for row in rows()])}

    metrics = ("token_f1", "exact_match", "contains")
    return {
        "task": name,
        "custom_dataset": load,
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "question",
        "doc_to_target": "{{answers[0]}}",
        "process_results": process_results,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max_tokens},
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics],
    }


def document(row: Row) -> dict[str, Any]:
    """Return a row as a document: its last question, its answer, and packed, all that the model is shown.

    Raises:
        UsageError: It has no question or no answer in words.
    """
    thought, _, answer = split_thought(row.answer or "")
    answer = answer if thought is None else answer.lstrip()
    if not answer or not row.prompt:
        reason = "its answer is a tool call" if row.reply.get("tool_calls") else "a domain suite needs both"
        raise UsageError(f"{row.where} has no question and answer", reason)
    questions = [message["content"] for message in row.prompt if message["role"] == "user"]
    return {"question": questions[-1], "answers": [answer], "cluster": row.cluster, PACKED_ROW: row.packed()}


# The scores of an answer, by metric.
Scores = dict[str, Any]


def score_answers(task: Any, docs: list[dict], answers: list[str]) -> list[Scores]:
    """Return the scores of an answer to each document."""
    return score_documents(task, docs, [[answer] for answer in answers])


def score_documents(task: Any, docs: Sequence[dict], answers: Sequence[Sequence[Any]]) -> list[Scores]:
    """Return the scores of documents by the answers to each: one text, or the likelihood of each choice.

    lm-eval's chains of filters leave the part of a text that counts, such as a number. Each chain has a score
    of its own, named as lm-eval does, `METRIC,CHAIN`; that of the first has the metric's name, too.
    """
    from lm_eval.api.instance import Instance

    requests = []
    for number, (doc, own) in enumerate(zip(docs, answers, strict=True)):
        place = None, number, 1
        requests.append([Instance(task.OUTPUT_TYPE, doc, ("", {}), 0, place, [answer]) for answer in own])
    # Likelihoods have no parts.
    chains = task._filters if task.OUTPUT_TYPE == "generate_until" else task._filters[:1]
    for chain in chains:
        chain.apply([request for own in requests for request in own])
    scores = []
    for doc, own in zip(docs, requests, strict=True):
        found: Scores = {}
        for chain in chains:
            by_chain = task.process_results(doc, [request.filtered_resps[chain.name] for request in own])
            found = by_chain | found | {f"{metric},{chain.name}": by_chain[metric] for metric in by_chain}
        scores.append(found)
    return scores
