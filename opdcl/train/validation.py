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
from opdcl.errors import OpdclError
from opdcl.model.backbone import State
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import StageDir
from opdcl.rundir.records import read_metrics
from opdcl.train.checkpoints import StudentOptimizer
from opdcl.train.health import CHECK_BASE, TEACHER_ENTROPY, Health, Writing
from opdcl.train.learner import Graded, Learner, kl_by_route
from opdcl.train.rollout_queue import RolloutQueue
from opdcl.train.start import KL_NOISE, Point, choose_start
from opdcl.train.teachers import EmaTeacher, Teacher, Teachers
from opdcl.training import StageLog, counted, save_adapter
from opdcl.types import Prompt, Rollout, StreamName

SAMPLES_PER_MEASUREMENT = 8

# How much of a gap in KL is closed: on general prompts from tuned to base, on the domain from base to tuned.
SHARES = {"general_kl": "general_gap_closed", "domain_kl": "domain_gap_closed"}

# Measures a stream's progress where its own teacher changes from step to step.
FROZEN: dict[StreamName, State] = {"general": "base", "domain": "tuned"}

# Share of the length of base's answers from which the student's are no stubs, and worth grading. In the
# quickstart it is .16 at the start and .62 at half of the steps, where a pilot let the student take over.
LONG_ENOUGH = 0.5

# A held-out measurement: KL by stream in nats per token, and other values by name.
KL = dict[str, float]


@dataclass
class Measurements:
    """What later decisions depend on; `tuned`, `base`, `start`: held-out KL before the first step."""

    tuned: KL = field(default_factory=dict)
    base: KL = field(default_factory=dict)
    start: KL = field(default_factory=dict)
    lowest_score: float = math.inf

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
        self.lowest_score = min(self.lowest_score, score)

    def shares(self, kl: KL) -> KL:
        """Return what share of each stream's gap is closed, where there is one."""
        whole = {"general_kl": self.tuned, "domain_kl": self.base}
        shares = {}
        for name, value in stream_kl(kl).items():
            most = whole[name][name]
            if most > KL_NOISE:
                shares[SHARES[name]] = 1 - value / most
        return shares


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
        learner: Learner,
        queue: RolloutQueue,
        prompts: dict[StreamName, list[Prompt]],
        out: StageDir,
        log: StageLog,
    ):
        self.config, self.learner, self.queue, self.prompts = config, learner, queue, prompts
        self.out, self.log, self.health = out, log, Health(out, log)
        self.measurements = Measurements()
        self.question = ""
        """The text of the first general prompt, under which its answers are shown."""
        self._held_out: dict[StreamName, Graded] = {}
        self._shown: dict[str, Rollout] = {}
        """Its answers, by who wrote them."""

    def write_held_out(self) -> None:
        """Let the teachers answer the held-out prompts, and grade the answers."""
        for stream, prompts in self.prompts.items():
            if not prompts:
                continue
            teachers = self._frozen_teachers(stream)
            count = counted(self.log.report, f"{self._name_of(stream)} answers", len(prompts))
            rollouts = self.queue.write(prompts, stream, self.config.seed + 7, teachers, count)
            grades = counted(self.log.report, f"{self._name_of(stream)} grades", len(rollouts))
            self._held_out[stream] = self.learner.grade(
                rollouts, self.queue.streams[stream].loss, teachers, grades
            )

    def _frozen_teachers(self, stream: StreamName) -> Teachers:
        teachers = self.learner.teachers[stream]
        return {name: teacher.frozen_copy(FROZEN[stream]) for name, teacher in teachers.items()}

    def begin(self, is_new: bool) -> None:
        """Let the teachers answer; in a stage that `is_new`, measure base and tuned, and choose the start."""
        self.write_held_out()
        if (
            self.config.hands_over("general")
            and self.queue.prompts["general"]
            and not self.prompts["general"]
        ):
            self.log.report.note(
                "no general prompt is held out, so nothing tells when the student can write: base writes all "
                "answers; --set recover.lmbda=0.5 lets the student write the last half"
            )
        if "general" in self._held_out:
            self._shown[self._name_of("general")] = self._held_out["general"].rollouts[0]
        if is_new:
            self._start()
        rows = read_metrics(self.out.metrics)
        self.measurements = Measurements.restore(rows, self._score)
        for row in rows:
            if "start" in row:
                self._hand_over(0, row["start"]["validation"])
            elif "validation" in row:
                self._hand_over(row["step"], row["validation"])

    def _name_of(self, stream: StreamName) -> str:
        """Return how a stream's teacher is called on the screen."""
        kind = self.config.teacher_of(stream).kind
        return kind if kind in FROZEN.values() else f"{stream} teacher"

    def after_step(self, step: int, optimizer: StudentOptimizer) -> None:
        """Measure if it is time, and keep the adapter if it is no worse.

        Raises:
            OpdclError: The KL has drifted, or the student writes badly for the second time.
        """
        if step % self.config.validate_every and step < self.config.steps:
            return
        kl = self._measure(step)
        if self.config.health:
            self._judge(step, kl, optimizer)
        self._keep_samples(step)

    def keep_start(self) -> None:
        """Keep the start as the recovered adapter, without training: the rival that costs nothing."""
        backbone = self.learner.backbone
        self.write_held_out()
        with backbone.scaled(0.0):
            base = self.held_out_kl("measure base")
        tuned = self.held_out_kl("measure tuned")
        self.measurements = Measurements(tuned, base)
        alpha, curve = self._choose_start(tuned, base)
        backbone.shrink(alpha)
        start = self.held_out_kl()
        save_adapter(backbone, self.out.best)
        seal(self.out.best)
        chosen = {"alpha": alpha, "validation": start, "curve": curve}
        rows = [
            {"step": 0, "validation": stream_kl(tuned), "start": chosen},
            {"step": 1, "validation": {**stream_kl(start), "best": True}},
        ]
        write_atomic(self.out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
        self.log.report.note(f"the adapter times {alpha:g}: {self._described(start)}")

    def held_out_kl(self, doing: str = "validate", endings: bool = False) -> KL:
        """Return KL(student, teacher) per stream, in nats per token; the progress line says `doing`.

        With `endings`, also the share of the general teacher's endings that the student would miss.

        Raises:
            OpdclError: A KL is not finite, or a teacher's distributions are close to uniform.
        """
        kl = {}
        total = sum(len(graded.rollouts) for graded in self._held_out.values())
        count = counted(self.log.report, doing, total)
        for stream, graded in self._held_out.items():
            sums = self.learner.measure(graded, endings and stream == "general", count)
            if sums["ends"]:
                kl["missed_ends"] = sums["missed_ends"] / sums["ends"]
            kl[f"{stream}_kl"] = sums["kl"] / sums["tokens"]
            for route, value in kl_by_route(sums).items():
                kl[f"{stream}_{route}"] = value
            if not math.isfinite(kl[f"{stream}_kl"]):
                hint = "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model"
                raise OpdclError(f"the held-out {stream} KL is not finite", hint)
            entropy = sums["teacher_entropy"] / sums["tokens"]
            if self.config.health and entropy > TEACHER_ENTROPY:
                raise OpdclError(f"the {stream} teacher is close to uniform ({entropy:.1f} nats)", CHECK_BASE)
        return kl

    def own_answers(self, name: str = "student") -> KL:
        """Let the student answer the held-out general prompts; return its KL to base and how it writes.

        `own_kl` is the mean over tokens; `own_distance` that over answers, as an evaluation's distance is. An
        answer in the domain's style is short, and hardly counts in the first. `name` is what the answers are
        called on the screen.
        """
        prompts = self.prompts["general"]
        if not prompts:
            return {}
        # As a teacher does: at temperature 1, and up to the length of base's answers.
        limit, seed = self.config.limit("general"), self.config.seed + 8
        count = counted(self.log.report, f"{name} answers", len(prompts))
        rollouts = self.queue.student.complete(prompts, max_new_tokens=limit, seed=seed, on_finished=count)
        self._shown[name] = rollouts[0]
        grades = counted(self.log.report, f"{self._name_of('general')} grades", len(prompts))
        loss, teachers = self.queue.streams["general"].loss, self._frozen_teachers("general")
        graded = self.learner.grade(rollouts, loss, teachers, grades)
        sums = self.learner.measure(graded)
        distance = sums["answer_kl"] / len(rollouts)
        return {"own_kl": sums["kl"] / sums["tokens"], "own_distance": distance, **_own(rollouts)}

    def _greedy(self, writer: Teacher) -> KL:
        """Return how the held-out general prompts are answered greedily, where answers that loop show."""
        count = counted(self.log.report, "greedy answers", len(self.prompts["general"]))
        limit = self.config.limit("general")
        options = {"max_new_tokens": limit, "seed": self.config.seed, "temperature": 0.0}
        rollouts = self.queue.texts.complete(writer, self.prompts["general"], on_finished=count, **options)
        return {f"greedy_{name}": value for name, value in asdict(Writing.of(rollouts)).items()}

    def _student(self) -> KL:
        """Return all that is measured of the student."""
        kl = self.held_out_kl("validate", endings=True) | self.own_answers()
        return kl | self._greedy(self.queue.student) if self.prompts["general"] else kl

    def _score(self, kl: KL) -> float:
        # Method `general` leaves the domain by design.
        return general_score(kl) if self.config.method == "general" else kl_score(kl)

    def _teachers_score(self, kl: KL) -> float:
        """Return the distance on the teachers' text alone, which is the same in all measurements."""
        return kl["general_kl"] if self.config.method == "general" else sum(stream_kl(kl).values())

    def _start(self) -> None:
        """Measure base and tuned for later comparisons, and put the student at its start."""
        with self.learner.backbone.scaled(0.0):
            base = self.held_out_kl("measure base")
        if "general" in self._held_out:
            base |= _own(self._held_out["general"].rollouts)
            base |= self._greedy(Teacher(self.learner.backbone, "base"))
        tuned = self.held_out_kl("measure tuned", endings=True) | self.own_answers("tuned")
        self.measurements = Measurements(tuned, base)
        alpha, curve = self._choose_start(tuned, base)
        start = tuned
        if alpha == 1:
            self.log.report.note(f"start: tuned, {self._described(tuned)}")
        else:
            averages = [t.state for t in self.learner.all_teachers if isinstance(t, EmaTeacher)]
            for state in ["student", *averages]:  # an average begins where the student does
                self.learner.backbone.shrink(alpha, state)
            start = self._student()
            self.log.report.note(f"start: the tuned adapter times {alpha:g}, {self._described(start)}")
        self._show_answers()
        score = self._score(start)
        self._keep_if_good(0, score)
        self._hand_over(0, start)
        chosen = {"alpha": alpha, "validation": start, "score": score, "curve": curve}
        self.log.write({"step": 0, "validation": {**tuned, "best": True}, "base": base, "start": chosen})

    def _choose_start(self, tuned: KL, base: KL) -> tuple[float, list[Point]]:
        return choose_start(self.config, self.learner, self.prompts, self.held_out_kl, tuned, base)

    def _measure(self, step: int) -> KL:
        """Measure the student, keep its adapter if it is good, and log both; return also the shares."""
        kl = self._student()
        score = self._score(kl)
        best = self._keep_if_good(step, score)
        self._hand_over(step, kl)
        kl |= self.measurements.shares(kl)
        self.log.write({"step": step, "validation": {**kl, "score": score, "best": best}})
        kept = ", adapter kept" if best else ""
        self.log.report.note(f"step {step}: {self._described(kl)}{kept}")
        self._show_answers()
        return kl

    def _hand_over(self, step: int, kl: KL) -> None:
        """Let the student write from here on if its answers are at least half as long as base's."""
        if not self.config.hands_over("general") or self.queue.handed_over or step >= self.config.steps:
            return
        own, base = kl.get("own_length"), self.measurements.base.get("own_length")
        if own is None or base is None or own < LONG_ENOUGH * base:
            return
        self.queue.hand_over(step)
        writer = "those given" if self.config.given_answers else f"{self._name_of('general')}'s"
        self.log.report.note(
            f"step {step}: the student's answers have {own:.0f} tokens ({writer}: {base:.0f}); "
            "from here on the student writes the general answers"
        )

    def _described(self, kl: KL) -> str:
        """Say how far the student is from base, beside tuned, and on the domain from tuned, beside base."""
        parts = []
        if "general_kl" in kl:
            before, now = (of.get("own_distance", of["general_kl"]) for of in (self.measurements.tuned, kl))
            change = f"{before:.2f}" if kl is self.measurements.tuned else f"{before:.2f} -> {now:.2f}"
            parts.append(f"distance to {self._name_of('general')} {change} nats")
        if "domain_kl" in kl:
            now, farthest = kl["domain_kl"], self.measurements.base["domain_kl"]
            parts.append(f"domain {now:.2f} nats from {self._name_of('domain')} (base {farthest:.2f})")
        return ", ".join(parts)

    def _show_answers(self) -> None:
        """Show what each model answers to the first held-out prompt."""
        if not self._shown:
            return
        decode = self.learner.backbone.tokenizer.decode
        texts = {"prompt": self.question}
        for name, rollout in self._shown.items():
            texts[name] = decode(rollout.completion_ids, skip_special_tokens=True)
        self.log.report.texts(texts)

    def _judge(self, step: int, kl: KL, optimizer: StudentOptimizer) -> None:
        first = self.measurements
        self.health.on_kl(step, self._teachers_score(first.start), self._teachers_score(kl))
        if "own_kl" in kl:
            own, base, tuned = (_writing(x) for x in (kl, first.base, first.tuned))
            self.health.on_writing(step, own, base, tuned, optimizer)

    def _keep_if_good(self, step: int, score: float) -> bool:
        """Save the adapter if no earlier one is better, or with `keep: last`; return whether it did."""
        best = self.config.keep == "last" or score <= NO_WORSE * self.measurements.lowest_score
        self.measurements.add(score)
        if best:
            save_adapter(self.learner.backbone, self.out.best)
            write_json(self.out.best / "validation.json", {"step": step, "score": score})
            seal(self.out.best)
        return best

    def _keep_samples(self, step: int) -> None:
        """Append a few of the latest training completions, to show how the student changes."""
        rollouts = self.queue.latest.get("general") or self.queue.latest["domain"]
        decode = self.learner.backbone.tokenizer.decode
        rows = read_jsonl(self.out.samples)
        for rollout in rollouts[:SAMPLES_PER_MEASUREMENT]:
            completion = decode(rollout.completion_ids, skip_special_tokens=True)
            rows.append({"step": step, "prompt": decode(rollout.prompt_ids), "completion": completion})
        write_atomic(self.out.samples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def stream_kl(row: KL) -> KL:
    """Return a measurement's KL per stream, without shares and single teachers."""
    return {name: value for name, value in row.items() if name in SHARES}


def general_score(kl: KL) -> float:
    """Return how far the student is from base, by base's text or its own: the larger counts."""
    return max(kl["general_kl"], kl.get("own_kl", 0.0))


def kl_score(kl: KL) -> float:
    """Return how far the student is from its teachers, both streams with the same weight."""
    general = general_score(kl) if "general_kl" in kl else 0.0
    return general + kl.get("domain_kl", 0.0)


def _own(rollouts: list[Rollout]) -> KL:
    """Return how answers are written, as values of a measurement."""
    return {f"own_{name}": value for name, value in asdict(Writing.of(rollouts)).items()}


def _writing(kl: KL) -> Writing:
    """Return how the student, or base, wrote in a measurement."""
    return Writing(kl["own_length"], kl["own_ended"], kl["own_repetition"])
