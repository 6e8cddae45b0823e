"""Measure a recovery on held-out prompts, keep the best adapter, and say when to stop.

Two texts tell how near the student is: the teachers' answers, which it has to be able to write, and its own,
on which a student that has gone astray would not be graded otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from opdcl.config.recover import NO_WORSE, RecoverConfig
from opdcl.distill.checkpoints import StudentOptimizer
from opdcl.distill.grading import Grader, kl_by_route
from opdcl.distill.health import (
    CHECK_BASE,
    KL,
    LOWER_RATE,
    TEACHER_ENTROPY,
    Health,
    Writing,
    drift,
    halt_error,
)
from opdcl.distill.rollout_queue import RolloutQueue
from opdcl.distill.schedule import Stream
from opdcl.distill.start import KL_NOISE, Point, choose_start
from opdcl.errors import OpdclError
from opdcl.model.backbone import State
from opdcl.model.distributions import TeacherDistribution
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import StageDir
from opdcl.rundir.records import read_metrics
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.training import StageLog, save_adapter

SAMPLES_PER_MEASUREMENT = 8

# A KL as a share: of tuned's general KL the part recovered, of the domain the part kept (base keeps none).
SHARES = {"general_kl": "general_recovered", "domain_kl": "domain_kept"}

# Share of the domain that has to be kept where `until.retention` stops the run: 1 is tuned, 0 is base.
DOMAIN_FLOOR = 0.95

# Measures a stream's progress where its own teacher changes from step to step.
FROZEN: dict[Stream, State] = {"general": "base", "domain": "tuned"}


@dataclass
class Measurements:
    """What later decisions depend on; `tuned`, `base`, `start`: held-out KL before the first step."""

    tuned: KL = field(default_factory=dict)
    base: KL = field(default_factory=dict)
    start: KL = field(default_factory=dict)
    lowest_score: float = math.inf
    since_lowest: int = 0

    @classmethod
    def restore(cls, rows: list[dict], score: Callable[[KL], float]) -> Measurements:
        """Read the rows of metrics.jsonl, so that a resumed run decides like an uninterrupted one."""
        restored = cls()
        for row in rows:
            if row["step"] == 0 and "base" in row:
                restored.tuned, restored.base = row["validation"], row["base"]
                restored.start = row["start"]["validation"]
                restored.lowest_score = score(restored.start)
            elif "validation" in row:
                restored.add(score(row["validation"]))
        return restored

    def add(self, score: float) -> None:
        self.since_lowest = 0 if score < self.lowest_score else self.since_lowest + 1
        self.lowest_score = min(self.lowest_score, score)


class Validation:
    """Measure held-out KL every `validate_every` steps, and keep the last adapter with a good score.

    Each stream's teacher completes its held-out `prompts` once, so all measurements are on the same tokens.
    The student answers the general ones anew each time, at temperature 1 and with the same seed. The KL is to
    that teacher: by default base for the general stream and tuned for the domain. If the teacher is dynamic,
    it is to base or tuned in the teacher's context.
    """

    def __init__(
        self,
        config: RecoverConfig,
        grader: Grader,
        queue: RolloutQueue,
        prompts: dict[Stream, list[Prompt]],
        out: StageDir,
        log: StageLog,
        health: Health,
    ):
        self.config, self.grader, self.queue, self.prompts = config, grader, queue, prompts
        self.out, self.log, self.health = out, log, health
        self.best_adapter = out.best
        self.measurements = Measurements()
        self._held_out: dict[Stream, tuple[list[Rollout], dict[int, TeacherDistribution]]] = {}

    def write_held_out(self) -> None:
        for stream, prompts in self.prompts.items():
            if prompts:
                teacher = self.grader.teachers[stream].frozen_copy(FROZEN[stream])
                rollouts = self.queue.sample(prompts, stream, self.config.seed + 7, author=teacher)
                self._held_out[stream] = rollouts, self.grader.distributions(rollouts, teacher)

    def begin(self, is_new: bool) -> None:
        """Let the teachers answer; in a stage that `is_new`, measure base and tuned, and choose the start."""
        self.log.report.note("the teachers answer the held-out prompts, then the first validation")
        self.write_held_out()
        if is_new:
            self._start()
        rows = read_metrics(self.out.metrics)
        self.measurements = Measurements.restore(rows, self._score)
        self.health.on_start(*(_writing(kl) for kl in (self.measurements.base, self.measurements.tuned)))

    def after_step(self, step: int, optimizer: StudentOptimizer) -> str:
        """Measure if it is time; return why the recovery may stop after this step, or ""."""
        last = step == self.config.steps
        shares = None
        if step % self.config.validate_every == 0 or last:
            shares = self._measure(step, optimizer)
            self._keep_samples(step)
        reason = "" if last else self._reason_to_stop(step, shares)
        if reason:
            self.log.write({"step": step, "stopped": reason})
            self.log.report.note(f"step {step}: stopping early: {reason}")
        return reason

    def keep_start(self) -> None:
        """Keep the start as the recovered adapter, without training: the rival that costs nothing."""
        self.write_held_out()
        with self.grader.backbone.scaled(0.0):
            base = self.held_out_kl()
        tuned = self.held_out_kl()
        alpha, curve = self._choose_start(tuned, base)
        self.grader.backbone.shrink(alpha)
        start = self.held_out_kl()
        save_adapter(self.grader.backbone, self.best_adapter)
        seal(self.best_adapter)
        chosen = {"alpha": alpha, "validation": start, "curve": curve}
        rows = [
            {"step": 0, "validation": stream_kl(tuned), "start": chosen},
            {"step": 1, "validation": {**stream_kl(start), "best": True}},
        ]
        write_atomic(self.out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
        self.log.report.note(f"the adapter times {alpha:g}: {describe_kl(start)}")

    def held_out_kl(self, agreement: bool = False) -> KL:
        """Return KL(student, teacher) per stream, in nats per token.

        With `agreement`, also the share of top tokens that both have, and of the general teacher's endings
        that the student would miss.

        Raises:
            OpdclError: A KL is not finite, or a teacher's distributions are close to uniform.
        """
        kl = {}
        for stream, (rollouts, distributions) in self._held_out.items():
            sums = self.grader.measure(rollouts, stream, distributions, agreement)
            if agreement:
                kl[f"{stream}_overlap"] = sums["overlap"] / sums["tokens"]
            if agreement and stream == "general" and sums["ends"]:
                kl["missed_ends"] = sums["missed_ends"] / sums["ends"]
            kl[f"{stream}_kl"] = sums["kl"] / sums["tokens"]
            kl |= {f"{stream}_{key}": value for key, value in kl_by_route(sums).items()}
            if not math.isfinite(kl[f"{stream}_kl"]):
                hint = "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model"
                raise OpdclError(f"the held-out {stream} KL is not finite", hint)
            entropy = sums["teacher_entropy"] / sums["tokens"]
            if self.config.health and entropy > TEACHER_ENTROPY:
                raise OpdclError(f"the {stream} teacher is close to uniform ({entropy:.1f} nats)", CHECK_BASE)
        return kl

    def own_answers(self) -> KL:
        """Let the student answer the held-out general prompts; return its KL to base and how it writes."""
        prompts = self.prompts["general"]
        if not prompts:
            return {}
        teacher = self.grader.teachers["general"].frozen_copy(FROZEN["general"])
        # As an author it writes at temperature 1 and up to the length of base's answers.
        rollouts = self.queue.sample(prompts, "general", self.config.seed + 8, author=self.queue.student)
        graded = self.grader.distributions(rollouts, teacher)
        sums = self.grader.measure(rollouts, "general", graded)
        return {"own_kl": sums["kl"] / sums["tokens"], **_own(rollouts)}

    def _score(self, kl: KL) -> float:
        # Method `general` leaves the domain by design.
        return general_score(kl) if self.config.method == "general" else kl_score(kl)

    def _teachers_score(self, kl: KL) -> float:
        return kl["general_kl"] if self.config.method == "general" else sum(stream_kl(kl).values())

    def _start(self) -> None:
        """Measure base and tuned for later comparisons, and put the student at its start."""
        with self.grader.backbone.scaled(0.0):
            base = self.held_out_kl()
        if general := self._held_out.get("general"):
            base |= _own(general[0])
        tuned = self.held_out_kl(agreement=True) | self.own_answers()
        self.log.report.note(f"tuned: held-out {describe_kl(tuned)}{describe_own(tuned, base)}")
        alpha, curve = self._choose_start(tuned, base)
        start = tuned
        if alpha != 1:
            self.grader.backbone.shrink(alpha)
            start = self.held_out_kl(agreement=True) | self.own_answers()
            described = f"{describe_kl(start)}{describe_own(start, base)}"
            self.log.report.note(f"starting from the tuned adapter times {alpha:g}: held-out {described}")
        score = self._score(start)
        self._keep_if_good(0, score)
        chosen = {"alpha": alpha, "validation": start, "score": score, "curve": curve}
        self.log.write({"step": 0, "validation": {**tuned, "best": True}, "base": base, "start": chosen})

    def _choose_start(self, tuned: KL, base: KL) -> tuple[float, list[Point]]:
        return choose_start(self.config, self.grader, self.prompts, self.held_out_kl, tuned, base)

    def _measure(self, step: int, optimizer: StudentOptimizer) -> KL:
        """Measure, log, keep the adapter if it is good, and return the shares.

        Raises:
            OpdclError: The KL has drifted, or the student writes badly for the second time.
        """
        kl, first = self.held_out_kl(agreement=True) | self.own_answers(), self.measurements
        score = self._score(kl)
        best = self._keep_if_good(step, score)
        whole = {"general_kl": first.tuned, "domain_kl": first.base}
        shares = {SHARES[k]: 1 - kl[k] / whole[k][k] for k in stream_kl(kl) if whole[k][k] > KL_NOISE}
        self.log.write({"step": step, "validation": {**kl, **shares, "score": score, "best": best}})
        suffix = " (kept)" if best else ""
        ends = f", {kl['missed_ends']:.0%} of endings missed" if "missed_ends" in kl else ""
        own = describe_own(kl, first.base)
        self.log.report.note(f"step {step}: held-out {describe_kl(kl | shares)}{ends}{own}{suffix}")
        # Its own answers differ each time, so they are judged by how they are written.
        if self.config.health and (reason := drift(first.start, kl, self._teachers_score)):
            raise halt_error(step, reason, LOWER_RATE, self.out)
        if written := _writing(kl):
            self.health.on_validation(step, written, optimizer)
        return shares

    def _reason_to_stop(self, step: int, shares: KL | None) -> str:
        """Return why recovery may end after this step, or ""; `shares` if it was measured."""
        until = self.config.until
        if shares is None:
            return ""
        general, domain = shares.get("general_recovered", 0.0), shares.get("domain_kept", 1.0)
        if until.retention and general >= until.retention and domain >= DOMAIN_FLOOR:
            return f"{general:.0%} of the general KL is recovered, and {domain:.0%} of the domain is kept"
        since = self.measurements.since_lowest
        if until.patience and since >= until.patience:
            return f"no better adapter in {since} validations"
        return ""

    def _keep_if_good(self, step: int, score: float) -> bool:
        """Save the adapter if no earlier one is better, or with `keep: last`; return whether it did."""
        best = self.config.keep == "last" or score <= NO_WORSE * self.measurements.lowest_score
        self.measurements.add(score)
        if best:
            save_adapter(self.grader.backbone, self.best_adapter)
            write_json(self.best_adapter / "validation.json", {"step": step, "score": score})
            seal(self.best_adapter)
        return best

    def _keep_samples(self, step: int) -> None:
        """Append a few of the latest training completions, to show how the student changes."""
        rollouts = self.queue.latest.get("general") or self.queue.latest["domain"]
        decode = self.grader.backbone.tokenizer.decode
        rows = read_jsonl(self.out.samples)
        for rollout in rollouts[:SAMPLES_PER_MEASUREMENT]:
            completion = decode(rollout.completion_ids, skip_special_tokens=True)
            rows.append({"step": step, "prompt": decode(rollout.prompt_ids), "completion": completion})
        write_atomic(self.out.samples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def stream_kl(row: KL) -> KL:
    """Return a measurement's KL per stream, without overlaps, shares and single teachers."""
    return {name: value for name, value in row.items() if name in SHARES}


def general_score(kl: KL) -> float:
    """Return how far the student is from base, by base's text or its own: the larger counts."""
    return max(kl["general_kl"], kl.get("own_kl", 0.0))


def kl_score(kl: KL) -> float:
    """Return how far the student is from its teachers, both streams with the same weight."""
    return sum(general_score(kl) if name == "general_kl" else value for name, value in stream_kl(kl).items())


def describe_own(kl: KL, base: KL) -> str:
    """Return how the student answers beside base, or ""."""
    if "own_kl" not in kl:
        return ""
    length = f"{kl['own_length']:.0f} tokens (base {base['own_length']:.0f})"
    ended = f"{kl['own_ended']:.0%} end (base {base['own_ended']:.0%})"
    return f"; its own answers: KL {kl['own_kl']:.3f}, {length}, {ended}"


def _own(rollouts: list[Rollout]) -> KL:
    """Return how answers are written, as values of a measurement."""
    return {f"own_{name}": value for name, value in asdict(Writing.of(rollouts)).items()}


def _writing(kl: KL) -> Writing | None:
    """Return how the student, or base, wrote in a measurement; None without general prompts."""
    values = {name: kl.get(f"own_{name}") for name in ("length", "ended", "repetition")}
    return Writing(**values) if values["length"] is not None else None


def describe_kl(kl: KL) -> str:
    parts = []
    for key, value in stream_kl(kl).items():
        share = SHARES[key]
        suffix = f" ({kl[share]:.0%} {share.split('_')[1]})" if share in kl else ""
        parts.append(f"{key.removesuffix('_kl')} KL {value:.3f}{suffix}")
    return ", ".join(parts)
