"""Signs that a recovery goes wrong while its loss looks fine, and what follows from them.

A sign that lasts for `patience` steps halves the learning rate, once; if it lasts as long again, the run halts. The best
adapter by held-out KL is kept either way. Every action is a row of the stage's metrics and a note in the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from opdcl.config.recover import HealthSection
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Rollout
from opdcl.training import StageCallback

# Nats per token, both streams together, by which held-out KL may always rise.
KL_SLACK = 0.5


@dataclass(frozen=True)
class Sign:
    """A value beyond its bound."""

    name: str
    value: float
    bound: float
    hint: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.3g}, beyond {self.bound:.3g}"


@dataclass(frozen=True)
class Normal:
    """What is usual for base on its own answers to held-out general prompts, and for the adapter at the start."""

    mean_length: float
    truncated: float
    adapter_norm: float


def signs(row: dict[str, Any], limits: HealthSection, normal: Normal) -> list[Sign]:
    """Return what is wrong with one logged step."""
    found = []
    if row["teacher_entropy"] > limits.teacher_entropy:
        found.append(
            Sign(
                "teacher entropy",
                row["teacher_entropy"],
                limits.teacher_entropy,
                "check that the base model loads correctly: opdcl chat RUN",
            )
        )
    if row["grad_norm"] > limits.grad_norm:
        found.append(Sign("gradient norm", row["grad_norm"], limits.grad_norm, "lower recover.learning_rate"))
    bound = limits.adapter_growth * normal.adapter_norm
    if row["adapter_norm"] > bound:
        found.append(Sign("adapter norm", row["adapter_norm"], bound, "lower recover.learning_rate"))
    if row["repetition"] > limits.repetition:
        found.append(Sign("repetition", row["repetition"], limits.repetition, "lower recover.learning_rate"))
    if row["stream"] == "general":
        # Domain answers may be short, certain and alike; base's own answers are the measure of general ones.
        if row["student_entropy"] < limits.student_entropy:
            found.append(
                Sign(
                    "student entropy",
                    -row["student_entropy"],
                    -limits.student_entropy,
                    "the student says one thing only: lower recover.learning_rate",
                )
            )
        bound = limits.length_growth * normal.mean_length
        if row["mean_length"] > bound:
            found.append(
                Sign("answer length", row["mean_length"], bound, "check the end-of-sequence ids and the loss")
            )
        bound = normal.truncated + limits.truncated_excess
        if row["truncated"] > bound:
            found.append(
                Sign(
                    "share of cut answers",
                    row["truncated"],
                    bound,
                    "check the end-of-sequence ids and the loss",
                )
            )
    return found


class Health(TrainerCallback):
    """Watch every logged step of a recovery."""

    def __init__(self, limits: HealthSection, backbone: Backbone, out: StageDir, callback: StageCallback):
        self.limits, self.backbone, self.out, self.callback = limits, backbone, out, callback
        self.normal: Normal | None = None
        self._streaks: Counter[str] = Counter()
        self._lowered = False

    def on_start(self, general: list[Rollout]) -> None:
        """Note what is normal, and take up where an interrupted run left off."""
        lengths = [len(r.completion_ids) for r in general] or [1e9]
        truncated = sum(not r.finished for r in general) / len(lengths)
        self.normal = Normal(sum(lengths) / len(lengths), truncated, self.backbone.adapter_norm("tuned"))
        for row in read_jsonl(self.out.metrics):
            if "adapter_norm" in row:
                self._count(row)
            self._lowered |= row.get("health", {}).get("action") == "rate halved"

    def _count(self, row: dict[str, Any]) -> list[Sign]:
        """Return the signs that have lasted for `patience` steps of their stream or more."""
        found = {f"{row['stream']} {sign.name}": sign for sign in signs(row, self.limits, self.normal)}
        for key in [k for k in self._streaks if k.startswith(row["stream"]) and k not in found]:
            del self._streaks[key]
        self._streaks.update(found.keys())
        return [sign for key, sign in found.items() if self._streaks[key] >= self.limits.patience]

    def on_log(self, args, state, control, logs=None, lr_scheduler=None, **kwargs):
        if not self.limits.watch or not logs or "adapter_norm" not in logs:
            return
        for sign in self._count(logs):
            if not self._lowered:
                self._lowered = True
                self._streaks.clear()
                lr_scheduler.base_lrs = [rate / 2 for rate in lr_scheduler.base_lrs]
                self._tell(state.global_step, sign, "rate halved")
                return
            self._tell(state.global_step, sign, "halted")
            raise halted(state.global_step, str(sign), sign.hint, self.out)

    def _tell(self, step: int, sign: Sign, action: str) -> None:
        self.callback.write(
            {
                "step": step,
                "health": {
                    "sign": sign.name,
                    "value": abs(sign.value),
                    "bound": abs(sign.bound),
                    "action": action,
                },
            }
        )
        self.callback.report.note(f"step {step}: {sign}: {action}")


def drifted(
    first: dict[str, float],
    now: dict[str, float],
    score: Callable[[dict[str, float]], float],
    limits: HealthSection,
) -> str:
    """Say in what a measurement on held-out texts is beyond what may be, given the first one; empty where in nothing."""
    started, reached = score(first), score(now)
    # Where little was forgotten a small rise is no alarm.
    if reached > max(limits.kl_growth * started, started + KL_SLACK):
        return f"held-out KL rose from {started:.2f} to {reached:.2f} nats per token"
    before, shared = (found.get("general_overlap", 1.0) for found in (first, now))
    if shared < min(limits.overlap, before / 2):  # where little is shared at first, a little less is no alarm
        return f"of the teacher's likeliest tokens the student shares {shared:.0%} on general texts, {before:.0%} at the start"
    return ""


def halted(step: int, why: str, hint: str, out: StageDir) -> OpdclError:
    """Return the error that ends a recovery, saying where the best adapter is."""
    return OpdclError(
        f"recovery halted at step {step}: {why}",
        f"{hint}; the best adapter so far is in {out.trainer / 'best'}",
    )


def check_turn_end(backbone: Backbone) -> None:
    """Refuse a chat template whose assistant turns end with no end-of-sequence id: such a model never learns to stop."""
    from opdcl.data.chat import render

    tokenizer = backbone.tokenizer
    marker = "finis"
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": marker}]
    text = render(tokenizer, turns, False, tokenize=False)
    rest = tokenizer(text[text.rindex(marker) + len(marker) :], add_special_tokens=False)["input_ids"]
    if not set(rest) & set(backbone.eos_ids):
        ends = tokenizer.convert_ids_to_tokens(rest[:3])
        known = tokenizer.convert_ids_to_tokens(backbone.eos_ids)
        raise UsageError(
            f"the chat template ends an answer with {ends}, none of which is an end of sequence ({known})",
            "use the template and generation config that the checkpoint was trained with",
        )
