"""Signs that a recovery goes wrong while its loss looks fine, and the reaction to them.

At every validation, a held-out KL that has risen far above the start's halts the run. The student's own
answers are compared with base's and tuned's: when they first go wrong, the learning rate is halved, the next
time the run halts. The best adapter is kept either way. A step that is not finite is another sign, which
`opdcl.training` reacts to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opdcl.errors import OpdclError
from opdcl.repetition import distinct, repetition
from opdcl.rundir.records import read_metrics
from opdcl.training import StageLog
from opdcl.types import Rollout

if TYPE_CHECKING:
    from opdcl.train.checkpoints import StudentOptimizer

# Nats per token above which a teacher's entropy is that of a guess; an instruct model's stays near 3.
TEACHER_ENTROPY = 6.0

# Alarm when held-out KL, summed over both streams, exceeds its start both by this factor and by these nats.
KL_GROWTH = 1.5
KL_SLACK = 0.5

# Multiple of the mean length of base's or tuned's answers, whichever is longer.
LENGTH_GROWTH = 3.0

# Of held-out answers, shares above base's own, or tuned's if that is higher: repeated 4-grams, and answers
# that are cut at the maximum length.
REPETITION_EXCESS = 0.3
TRUNCATED_EXCESS = 0.5

RATE_HALVED = "rate halved"
CHECK_BASE = "check that the base model loads correctly: opdcl chat RUN"
LOWER_RATE = "lower recover.learning_rate"
CHECK_ENDS = "check the end-of-sequence ids and the loss"


@dataclass(frozen=True)
class ResponseStats:
    """How a model answers the held-out general prompts at temperature 1."""

    length: float
    """Mean, in tokens."""
    ended: float
    """Share of answers that end within the maximum length."""
    repetition: float
    """Share of 4-grams that occurred earlier in the same answer."""
    distinct: float = 1.0
    """Mean share of an answer's 2-grams that the answers to other prompts lack."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> ResponseStats:
        """Return how these answers are written."""
        texts = [r.completion_ids for r in rollouts]
        return cls(
            length=sum(map(len, texts)) / len(texts),
            ended=sum(r.finished for r in rollouts) / len(texts),
            repetition=repetition(texts),
            distinct=sum(distinct(texts)) / len(texts),
        )


@dataclass(frozen=True)
class Sign:
    """A value of the student's answers that is past its limit."""

    name: str
    value: float
    bound: float
    hint: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.3g}, past its limit of {self.bound:.3g}"


def response_sign(own: ResponseStats, teachers: Sequence[ResponseStats]) -> Sign | None:
    """Return what is wrong with the student's answers, given how base and tuned write; None if nothing is."""
    looped = max(teacher.repetition for teacher in teachers) + REPETITION_EXCESS
    if own.repetition > looped:
        return Sign("repetition", own.repetition, looped, LOWER_RATE)
    longest = LENGTH_GROWTH * max(teacher.length for teacher in teachers)
    if own.length > longest:
        return Sign("answer length", own.length, longest, CHECK_ENDS)
    truncated, most = 1 - own.ended, 1 - min(teacher.ended for teacher in teachers) + TRUNCATED_EXCESS
    if truncated > most:
        return Sign("share of truncated answers", truncated, most, CHECK_ENDS)
    return None


def drift(before: float, after: float) -> str:
    """Return how held-out KL has gone wrong since the start, or ""."""
    # Where little was forgotten, a small rise is no alarm.
    if after <= max(KL_GROWTH * before, before + KL_SLACK):
        return ""
    return f"held-out KL rose from {before:.2f} to {after:.2f} nats per token"


def check_kl(log: StageLog, step: int, before: float, after: float) -> None:
    """Judge the held-out KL, given the start's.

    Raises:
        OpdclError: It has risen too far.
    """
    if reason := drift(before, after):
        raise _halt(log, step, reason, LOWER_RATE)


def check_responses(
    log: StageLog,
    step: int,
    own: ResponseStats,
    teachers: Sequence[ResponseStats],
    optimizer: StudentOptimizer,
) -> None:
    """Judge how the student writes, and halve the learning rate for the first bad sign of the run.

    An interrupted run remembers by its metrics what it had seen.

    Raises:
        OpdclError: There is a bad sign, and the rate has been halved before.
    """
    sign = response_sign(own, teachers)
    if sign is None:
        return
    was_halved = any(
        row.get("health", {}).get("action") == RATE_HALVED for row in read_metrics(log.out.metrics)
    )
    action = "halted" if was_halved else RATE_HALVED
    health = {"sign": sign.name, "value": sign.value, "bound": sign.bound, "action": action}
    log.write({"step": step, "health": health})
    log.report.note(f"step {step}: {sign}: {action}")
    if was_halved:
        raise _halt(log, step, str(sign), sign.hint)
    optimizer.halve_rate()


def _halt(log: StageLog, step: int, reason: str, hint: str) -> OpdclError:
    """Return the error that ends a recovery and names the best adapter so far."""
    message = f"recovery halted at step {step}: {reason}"
    return OpdclError(message, f"{hint}; the best adapter so far is in {log.out.best}")
