"""Signs that a recovery goes wrong while its loss looks fine, and the reaction to them.

A sign that lasts for `patience` steps halves the learning rate, once. If it lasts as long again, the run
halts. The best adapter by held-out KL is kept either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback

from opdcl.config.recover import HealthSection
from opdcl.data.chat import render
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Rollout
from opdcl.training import StageCallback

# Nats per token, both streams together, by which held-out KL may rise without an alarm.
KL_SLACK = 0.5

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
class Baseline:
    """Base's mean length (tokens) and truncated share on held-out prompts, and tuned's adapter norm."""

    mean_length: float
    truncated: float
    adapter_norm: float


def signs(row: dict[str, Any], limits: HealthSection, baseline: Baseline) -> list[Sign]:
    """Return what is wrong with one logged step."""
    checks = [
        Sign("teacher entropy", row["teacher_entropy"], limits.teacher_entropy, CHECK_BASE),
        Sign("gradient norm", row["grad_norm"], limits.grad_norm, LOWER_RATE),
        Sign("adapter norm", row["adapter_norm"], limits.adapter_growth * baseline.adapter_norm, LOWER_RATE),
        Sign("repetition", row["repetition"], limits.repetition, LOWER_RATE),
    ]
    if row["stream"] == "general":
        # Domain answers may be short and certain; general ones are compared with base's own.
        collapse = f"the student always says the same: {LOWER_RATE}"
        longest = limits.length_growth * baseline.mean_length
        most_truncated = baseline.truncated + limits.truncated_excess
        checks += [
            Sign("student entropy", -row["student_entropy"], -limits.student_entropy, collapse),
            Sign("answer length", row["mean_length"], longest, CHECK_ENDS),
            Sign("share of truncated answers", row["truncated"], most_truncated, CHECK_ENDS),
        ]
    return [sign for sign in checks if sign.value > sign.bound]


class Health(TrainerCallback):
    """Watch every logged step of a recovery."""

    def __init__(self, limits: HealthSection, backbone: Backbone, out: StageDir, callback: StageCallback):
        self.limits, self.backbone, self.out, self.callback = limits, backbone, out, callback
        self.baseline: Baseline | None = None
        self._streaks: Counter[str] = Counter()
        self._rate_halved = False

    def on_start(self, general: list[Rollout]) -> None:
        """Take base's held-out answers as the baseline, and resume the counts of an interrupted run."""
        lengths = [len(r.completion_ids) for r in general] or [10**9]
        truncated = sum(not r.finished for r in general) / len(lengths)
        self.baseline = Baseline(sum(lengths) / len(lengths), truncated, self.backbone.adapter_norm("tuned"))
        for row in read_jsonl(self.out.metrics):
            if "adapter_norm" in row:
                self._count(row)
            if row.get("health", {}).get("action") == RATE_HALVED:
                self._rate_halved = True
                self._streaks.clear()

    def _count(self, row: dict[str, Any]) -> list[Sign]:
        """Return the signs that have lasted for `patience` steps of their stream or more."""
        stream = row["stream"]
        current = {f"{stream} {sign.name}": sign for sign in signs(row, self.limits, self.baseline)}
        for key in [k for k in self._streaks if k.startswith(stream) and k not in current]:
            del self._streaks[key]
        self._streaks.update(current.keys())
        return [sign for key, sign in current.items() if self._streaks[key] >= self.limits.patience]

    def on_log(self, args, state, control, logs=None, lr_scheduler=None, **kwargs):
        if not self.limits.watch or not logs or "adapter_norm" not in logs:
            return
        for sign in self._count(logs):
            if not self._rate_halved:
                self._rate_halved = True
                self._streaks.clear()
                lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]
                self._record(state.global_step, sign, RATE_HALVED)
                return
            self._record(state.global_step, sign, "halted")
            raise halt_error(state.global_step, str(sign), sign.hint, self.out)

    def _record(self, step: int, sign: Sign, action: str) -> None:
        health = {"sign": sign.name, "value": abs(sign.value), "bound": abs(sign.bound), "action": action}
        self.callback.write({"step": step, "health": health})
        self.callback.report.note(f"step {step}: {sign}: {action}")


def drift(first: KL, now: KL, score: Callable[[KL], float], limits: HealthSection) -> str:
    """Return which held-out metrics have drifted past their limits since the first measurement, or ""."""
    before, after = score(first), score(now)
    # Where little was forgotten, a small rise is no alarm.
    if after > max(limits.kl_growth * before, before + KL_SLACK):
        return f"held-out KL rose from {before:.2f} to {after:.2f} nats per token"
    before, after = (kl.get("general_overlap", 1.0) for kl in (first, now))
    # Where the overlap was small from the start, a little less is no alarm.
    if after < min(limits.overlap, before / 2):
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
