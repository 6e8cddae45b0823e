"""Group a suite's prompts by outcome, with the answers of all states, for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opdcl.repetition import REPEATED_WORD
from opdcl.results import format, measurements
from opdcl.results.measurements import MeasuredSuite

LONGEST_PROMPT, LONGEST_ANSWER = 900, 700
# Of each group in the report; a page of several thousand prompts would be slow.
PROMPTS_SHOWN = 500
# At the top of the report, which has all of the answer further down.
EXAMPLE_ANSWER = 280
# A suggested prompt is no longer, in characters.
SUGGESTED_PROMPT = 240
# A base answer of fewer words says little.
WORDS_OF_AN_EXAMPLE = 10
WHAT_PASSES = "“Pass”: the answer keeps the constraints, or is the expected one. Its truth is not judged."
RULE = (
    "Examples are the first of their groups, by a rule: first those where every answer ends and repeats "
    f"nothing, and base's has {WORDS_OF_AN_EXAMPLE} words or more; then by how near the last model's is in "
    "length to its teacher's, which is base, or tuned on the domain."
)

REGAINED = "Lost by the fine-tune, regained by recovery"
# The title of each group -> the outcomes of its prompts: whether base, tuned and, if measured, recovered
# pass. The groups of a page are in this order; those that the fine-tune changed come first.
SKILL = {
    REGAINED: ["+-+"],
    "Lost by the fine-tune, not regained": ["+--"],
    "Lost by the fine-tune": ["+-"],
    "Newly lost in the recovery": ["++-"],
    "Never lost": ["+++", "++"],
    "Passed by recovered, not by base": ["--+", "-++"],
    "Passed by tuned, not by base": ["-+"],
    "Passed by neither base nor recovered": ["---", "-+-"],
    "Passed by neither base nor tuned": ["--"],
}
DOMAIN = {
    "Learned by the fine-tune, kept by recovery": ["-++"],
    "Learned by the fine-tune, lost again": ["-+-"],
    "Learned by the fine-tune": ["-+"],
    "Newly learned in the recovery": ["--+"],
    "Not learned": ["---", "--"],
    "Passed by base already": ["+++", "+-+", "++"],
    "Passed by base, not by recovered": ["++-", "+--"],
    "Passed by base, not by tuned": ["+-"],
}
# The beginning of the titles of the prompts that the fine-tune changed.
CHANGED = ("Lost by the fine-tune", "Learned by the fine-tune")


@dataclass(frozen=True)
class Answer:
    """One state's answer to a prompt."""

    state: str
    text: str
    passed: bool
    mark: str
    """`pass`, `fail`, or how much of its score it reaches."""
    failed: list[str]
    """What it violates of the prompt's constraints; empty unless the suite has any."""


@dataclass(frozen=True)
class Sample:
    """One prompt with the answers of all measured states."""

    number: int
    prompt: str
    target: str | None
    answers: list[Answer]


@dataclass
class Group:
    """The prompts of a suite with the same outcome, the most readable ones first."""

    title: str
    count: int = 0
    samples: list[Sample] = field(default_factory=list)
    """The first `PROMPTS_SHOWN` of them."""


@dataclass(frozen=True)
class PickedExample:
    """A prompt for the top of the report: one of a group, among `of` that the fine-tune changed."""

    group: Group
    """Its first sample is shown."""
    suite: str
    of: int


def sort_samples(suite: MeasuredSuite) -> list[Group]:
    """Return the prompts of a suite, grouped by outcome.

    It is empty without written answers of base and tuned.
    """
    if not {"base", "tuned"} <= set(suite.rows):
        return []
    titles = DOMAIN if suite.role == "domain" else SKILL

    def title_of(passed: dict[str, bool]) -> str:
        outcome = "".join("-+"[passed[state]] for state in suite.rows)
        return next(title for title, outcomes in titles.items() if outcome in outcomes)

    return _grouped(suite, [*titles], title_of)


def answers_by_run(suite: MeasuredSuite) -> list[Group]:
    """Return the prompts of a suite, grouped by which of several runs pass them.

    The rows of the suite are those of base and, by name, of each run's last model.
    """
    first, *others = [name for name in suite.rows if name != "base"]
    rest, another = (others[0], others[0]) if len(others) == 1 else ("every other run", "another run")
    better, worse = f"Passed by {first}, not by {rest}", f"Passed by {another}, not by {first}"
    every, none = "Passed by every run", "Passed by none"

    def title_of(passed: dict[str, bool]) -> str:
        runs = [passed[name] for name in (first, *others)]
        if len({*runs}) == 1:
            return every if passed[first] else none
        return better if passed[first] else worse

    return _grouped(suite, [better, worse, every, none], title_of)


def _grouped(
    suite: MeasuredSuite, titles: Sequence[str], title_of: Callable[[dict[str, bool]], str]
) -> list[Group]:
    """Group a suite's prompts by the title for which of its states pass; empty without written answers."""
    if all(row.get("response") is None for row in suite.rows["base"]):
        return []
    # Of several parts all must pass, one part may be a fraction.
    needed = 1.0 if any(len(parts) != 1 for parts in suite.parts("base")) else 0.5
    # State -> of its score, the share that each prompt reaches.
    reached = {}
    for state in suite.rows:
        reached[state] = [sum(parts) / max(len(parts), 1) for parts in suite.parts(state)]
    groups = {title: Group(title) for title in titles}
    for i in _by_readability(suite):
        shares = {state: found[i] for state, found in reached.items()}
        passed = {state: share >= needed for state, share in shares.items()}
        group = groups[title_of(passed)]
        group.count += 1
        if group.count <= PROMPTS_SHOWN:
            group.samples.append(_sample(suite, i, shares, passed))
    return [group for group in groups.values() if group.samples]


def pick_examples(samples: Mapping[str, Sequence[Group]]) -> list[PickedExample]:
    """Return the most readable prompt of each suite's first group that the fine-tune changed."""
    examples = []
    for name, groups in samples.items():
        changed = [group for group in groups if group.title.startswith(CHANGED)]
        if changed:
            examples.append(PickedExample(changed[0], name, sum(group.count for group in changed)))
    return examples


def regained_prompts(suites: Sequence[MeasuredSuite], most: int = 3) -> list[str]:
    """Return prompts that the fine-tune lost and the recovery regained, the most readable ones first.

    Conversations are left out, because their last question alone would be another prompt. So is multiple
    choice, which was never asked as a prompt: likelihoods of given answers were compared.
    """
    prompts = []
    for suite in suites:
        if any("likelihoods" in row for row in suite.measured):
            continue
        conversations = {row["doc_id"] for row in suite.measured if "question" in row}
        for group in sort_samples(suite):
            for sample in group.samples if group.title == REGAINED else ():
                if len(sample.prompt) <= SUGGESTED_PROMPT and sample.number not in conversations:
                    prompts.append(sample.prompt)
    return prompts[:most]


def _by_readability(suite: MeasuredSuite) -> list[int]:
    """Return the numbers of the prompts, sorted by `RULE`."""
    # Whether an answer of any state was truncated or repeats itself, where that is recorded.
    unclean = np.zeros(len(suite.measured), bool)
    for state in suite.rows:
        written = measurements.response_values(suite, state)
        unclean |= written.get("ended", 1) < 1
        unclean |= written.get("repetition", 0) > 0
    teacher, keys = "tuned" if suite.role == "domain" and "tuned" in suite.rows else "base", []
    *_, last = suite.rows
    for i, row in enumerate(suite.rows["base"]):
        model, own = (len(str(suite.rows[state][i].get("response") or "")) for state in (teacher, last))
        is_short = len(REPEATED_WORD.findall(str(row.get("response") or ""))) < WORDS_OF_AN_EXAMPLE
        keys.append((bool(unclean[i]), is_short, abs(own - model) / max(own, model, 1), model, i))
    return [i for *_, i in sorted(keys)]


def _sample(suite: MeasuredSuite, i: int, shares: dict[str, float], passed: dict[str, bool]) -> Sample:
    row, answers = suite.rows["base"][i], []
    for state, rows in suite.rows.items():
        share, failed = shares[state], [] if passed[state] else _violated(rows[i])
        mark = ("pass" if passed[state] else "fail") if share in (0, 1) else f"{100 * share:.0f} %"
        text = format.shorten(str(rows[i].get("response") or ""), LONGEST_ANSWER)
        answers.append(Answer(state, text, passed[state], mark, failed))
    prompt, question = str(row["prompt"]), str(row.get("question", row["prompt"]))
    if question != prompt and len(prompt) > LONGEST_PROMPT:  # a conversation: its beginning and last question
        question = format.shorten(question, LONGEST_PROMPT // 2)
        prompt = f"{format.shorten(prompt, LONGEST_PROMPT // 3)}\n\n{question}"
    else:
        prompt = format.shorten(prompt, LONGEST_PROMPT)
    target = format.shorten(str(row["target"]), LONGEST_ANSWER) if row.get("target") else None
    return Sample(row["doc_id"], prompt, target, answers)


def _violated(row: dict[str, Any]) -> list[str]:
    """Say what an answer violates, in the words of its prompt; without these, how many constraints."""
    scores, constraints = row["scores"], row.get("constraints") or []
    kept = scores.get("inst_level_strict_acc")
    if not isinstance(kept, list):
        return []
    found = [text for text, is_kept in zip(constraints, kept, strict=False) if not is_kept]
    if len(constraints) != len(kept):
        found = [] if all(kept) else [f"{len(kept) - sum(kept)} of {len(kept)} constraints"]
    if found or "own_words" not in scores:
        return found
    return ["being about the prompt"] if scores["own_words"] else ["words of its own"]
