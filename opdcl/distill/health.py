"""Signs that a recovery goes wrong while its loss looks fine, and the reaction to them.

A sign in the logged steps counts once it has lasted for `PATIENCE` steps of its stream. At a validation the
student answers held-out prompts; a sign in how it writes counts at once. The first sign that counts halves
the learning rate, the next one halts the run. The best adapter is kept either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from opdcl.data.chat import render
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.repetition import repetition
from opdcl.rundir.layout import StageDir
from opdcl.rundir.records import read_metrics
from opdcl.sampling.rollout import Rollout
from opdcl.training import StageLog

if TYPE_CHECKING:
    from opdcl.distill.checkpoints import StudentOptimizer

# Steps of a stream in a row that show a sign before it counts.
PATIENCE = 3

# Limits in nats: a healthy instruct model's entropy stays near 3 on its own text, and a student near 0 always
# says the same.
TEACHER_ENTROPY = 6.0
STUDENT_ENTROPY = 0.02
GRAD_NORM = 1000.0

# Multiples of the tuned adapter's norm, and of the mean length of base's answers.
ADAPTER_GROWTH = 3.0
LENGTH_GROWTH = 3.0

# Share of 4-grams that occurred earlier in the same answer, in steps that the student wrote.
REPETITION = 0.6

# Of held-out answers, shares above base's own, or tuned's if that is higher: repeated 4-grams, and answers
# that are cut at the maximum length.
REPETITION_EXCESS = 0.3
TRUNCATED_EXCESS = 0.5

# Held-out KL, both streams together: it may rise by this factor, and by so many nats, without an alarm.
KL_GROWTH = 1.5
KL_SLACK = 0.5

# Minimum share of base's 16 likeliest tokens that are among the student's on general texts (arXiv
# 2604.13016).
OVERLAP = 0.1

RATE_HALVED = "rate halved"
CHECK_BASE = "check that the base model loads correctly: opdcl chat RUN"
LOWER_RATE = "lower recover.learning_rate"
CHECK_ENDS = "check the end-of-sequence ids and the loss"


# A held-out measurement: KL by stream in nats per token, and other values by name.
KL = dict[str, float]


@dataclass(frozen=True)
class Sign:
    """A logged value past its bound. Where less is worse, both are negated."""

    name: str
    value: float
    bound: float
    hint: str

    def __str__(self) -> str:
        return f"{self.name} is {abs(self.value):.3g}, past its limit of {abs(self.bound):.3g}"


@dataclass(frozen=True)
class Writing:
    """How a model answers the held-out general prompts at temperature 1."""

    length: float
    """Mean, in tokens."""
    ended: float
    """Share of answers that end within the maximum length."""
    repetition: float
    """Share of 4-grams that occurred earlier in the same answer."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Writing:
        """Return how these answers are written."""
        texts, count = [r.completion_ids for r in rollouts], len(rollouts)
        return cls(sum(map(len, texts)) / count, sum(r.finished for r in rollouts) / count, repetition(texts))

    def signs(self, base: Writing, tuned: Writing) -> list[Sign]:
        """Return what is wrong with it, given how both teachers write."""
        looped = max(base.repetition, tuned.repetition) + REPETITION_EXCESS
        cut = 1 - min(base.ended, tuned.ended) + TRUNCATED_EXCESS
        checks = [
            Sign("repetition", self.repetition, looped, LOWER_RATE),
            Sign("answer length", self.length, LENGTH_GROWTH * max(base.length, tuned.length), CHECK_ENDS),
            Sign("share of truncated answers", 1 - self.ended, cut, CHECK_ENDS),
        ]
        return [sign for sign in checks if sign.value > sign.bound]


def signs(row: dict[str, Any], adapter_norm: float) -> list[Sign]:
    """Return what is wrong with one logged step; `adapter_norm` is the tuned adapter's."""
    checks = [
        Sign("teacher entropy", row["teacher_entropy"], TEACHER_ENTROPY, CHECK_BASE),
        Sign("gradient norm", row["grad_norm"], GRAD_NORM, LOWER_RATE),
        Sign("adapter norm", row["adapter_norm"], ADAPTER_GROWTH * adapter_norm, LOWER_RATE),
    ]
    if row["author"] == "student":
        checks.append(Sign("repetition", row["repetition"], REPETITION, LOWER_RATE))
    if row["stream"] == "general":  # domain answers may be short and certain
        collapse = f"the student always says the same: {LOWER_RATE}"
        checks.append(Sign("student entropy", -row["student_entropy"], -STUDENT_ENTROPY, collapse))
    return [sign for sign in checks if sign.value > sign.bound]


class Health:
    """Watch every logged step of a recovery, and every validation."""

    def __init__(self, watch: bool, backbone: Backbone, out: StageDir, log: StageLog):
        self.watch, self.backbone, self.out, self.log = watch, backbone, out, log
        self.base: Writing | None = None
        self.tuned: Writing | None = None
        self._adapter_norm = 0.0
        self._streaks: Counter[str] = Counter()
        self._rate_halved = False

    def on_start(self, base: Writing | None, tuned: Writing | None) -> None:
        """Take how base and tuned write as the measure, and resume the counts of an interrupted run."""
        self.base, self.tuned = base, tuned
        self._adapter_norm = self.backbone.adapter_norm("tuned")
        for row in read_metrics(self.out.metrics):
            if "adapter_norm" in row:
                self._count(row)
            if row.get("health", {}).get("action") == RATE_HALVED:
                self._rate_halved = True
                self._streaks.clear()

    def _count(self, row: dict[str, Any]) -> list[Sign]:
        """Return the signs that have lasted for `PATIENCE` steps of their stream or more."""
        stream = row["stream"]
        current = {f"{stream} {sign.name}": sign for sign in signs(row, self._adapter_norm)}
        for key in [k for k in self._streaks if k.startswith(stream) and k not in current]:
            del self._streaks[key]
        self._streaks.update(current.keys())
        return [sign for key, sign in current.items() if self._streaks[key] >= PATIENCE]

    def after_step(self, step: int, row: dict[str, Any], optimizer: StudentOptimizer) -> None:
        """Judge what a step has logged.

        Raises:
            OpdclError: It is a bad sign, and the rate has been halved before.
        """
        if self.watch:
            self._react(step, self._count(row), optimizer)

    def on_validation(self, step: int, own: Writing, optimizer: StudentOptimizer) -> None:
        """Judge how the student writes.

        Raises:
            OpdclError: It writes badly, and the rate has been halved before.
        """
        if self.watch and self.base and self.tuned:
            self._react(step, own.signs(self.base, self.tuned), optimizer)

    def _react(self, step: int, found: list[Sign], optimizer: StudentOptimizer) -> None:
        """Halve the learning rate for the first sign of the run, halt for the next."""
        for sign in found:
            if not self._rate_halved:
                self._rate_halved = True
                self._streaks.clear()
                optimizer.halve_rate()
                self._record(step, sign, RATE_HALVED)
                return
            self._record(step, sign, "halted")
            raise halt_error(step, str(sign), sign.hint, self.out)

    def _record(self, step: int, sign: Sign, action: str) -> None:
        health = {"sign": sign.name, "value": abs(sign.value), "bound": abs(sign.bound), "action": action}
        self.log.write({"step": step, "health": health})
        self.log.report.note(f"step {step}: {sign}: {action}")


def drift(first: KL, now: KL, score: Callable[[KL], float]) -> str:
    """Return how held-out KL or overlap has gone wrong since the first measurement, or ""."""
    before, after = score(first), score(now)
    # Where little was forgotten, a small rise is no alarm.
    if after > max(KL_GROWTH * before, before + KL_SLACK):
        return f"held-out KL rose from {before:.2f} to {after:.2f} nats per token"
    before, after = (kl.get("general_overlap", 1.0) for kl in (first, now))
    # Where the overlap was small from the start, a little less is no alarm.
    if after < min(OVERLAP, before / 2):
        now_shared = f"on general texts the student shares {after:.0%} of the teacher's top tokens"
        return f"{now_shared}, {before:.0%} at the start"
    return ""


def halt_error(step: int, reason: str, hint: str, out: StageDir) -> OpdclError:
    """Return the error that ends a recovery and names the best adapter so far."""
    return OpdclError(
        f"recovery halted at step {step}: {reason}",
        f"{hint}; the best adapter so far is in {out.trainer / 'best'}",
    )


def check_turn_end(tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> None:
    """Refuse a chat template that does not end answers with an end-of-sequence id, so stopping is learned."""
    marker = "finis"
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": marker}]
    text = render(tokenizer, turns, False, tokenize=False)
    rest = tokenizer(text[text.rindex(marker) + len(marker) :], add_special_tokens=False)["input_ids"]
    if not set(rest) & set(eos_ids):
        ends = tokenizer.convert_ids_to_tokens(rest[:3])
        known = tokenizer.convert_ids_to_tokens(eos_ids)
        raise UsageError(
            f"the chat template ends an answer with {ends}, none of which is an end of sequence ({known})",
            "use the template and generation config that the checkpoint was trained with",
        )
