"""Measure a recovery on held-out prompts: how far the student is from its teachers, and how it writes.

Two texts tell how near the student is: the teachers' answers, which it has to be able to write, and the
student's own, because drift shows there first.

Signs that a recovery goes wrong while its loss looks fine: a held-out KL that has risen far above the start's
halts the run. The student's own answers are compared with base's and tuned's: when they first go wrong, the
learning rate is halved, the next time the run halts. The best adapter is kept either way. A step that is not
finite is another sign, which `opdcl.train.loop` reacts to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from opdcl import parallel
from opdcl.config.recover import NO_WORSE, RecoverConfig
from opdcl.errors import OpdclError
from opdcl.model.backbone import State
from opdcl.repetition import distinct, repetition
from opdcl.rundir.stage import read_metrics
from opdcl.train.checkpoints import StudentOptimizer
from opdcl.train.learner import Learner, Scored, kl_by_teacher
from opdcl.train.loop import StageLog, StageReport, counted
from opdcl.train.rollouts import RolloutQueue, converse, teacher_name, turns_of
from opdcl.train.start import KL_NOISE
from opdcl.train.teachers import IN_WORDS, Teacher, Teachers
from opdcl.words import STREAMS, Prompts, Rollout, StreamName

# Measures a stream's progress where its own teacher changes from step to step.
FROZEN: dict[StreamName, State] = {"general": "base", "domain": "tuned"}

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

# What a validation says of the student, and its name in metrics.jsonl.
SAID = {
    "KL of own answers": "own_distance",
    "KL on your prompts": "domain_kl",
    "endings missed": "missed_ends",
}

# The longest answer that is shown on a terminal, in tokens: it has a line.
SHOWN_TOKENS = 40

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
class Measurement:
    """What the held-out prompts show of one model: KL to the teachers in nats per token, and its answers."""

    kl: dict[StreamName, float]
    """To each stream's teacher, on that teacher's answers."""
    kl_by_teacher: dict[StreamName, dict[str, float]] = field(default_factory=dict)
    """The same for each teacher that rows name."""
    missed_ends: float | None = None
    """The share of the general teacher's endings that the model would miss."""
    own_kl: float | None = None
    """To the general teacher, on what the model writes itself: the mean over tokens."""
    own_distance: float | None = None
    """The same as a mean over answers, as an evaluation's distance is. An answer in the domain's style is
    short, and hardly counts in `own_kl`."""
    own: ResponseStats | None = None
    """How it answers the general prompts at temperature 1."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Measurement:
        """Return what later decisions depend on, from what `row` has written."""
        kl = {stream: row[f"{stream}_kl"] for stream in STREAMS if f"{stream}_kl" in row}
        own = None
        if "own_length" in row:
            own = ResponseStats(row["own_length"], row["own_ended"], row["own_repetition"])
        further = {key: row.get(key) for key in ("missed_ends", "own_kl", "own_distance")}
        return cls(kl, own=own, **further)

    def row(self) -> dict[str, float]:
        """Return its values by the names that they have in metrics.jsonl."""
        values = {key: getattr(self, key) for key in ("missed_ends", "own_kl", "own_distance")}
        for stream, kl in self.kl.items():
            values[f"{stream}_kl"] = kl
            for teacher, kl_to_it in self.kl_by_teacher.get(stream, {}).items():
                values[f"{stream}_kl/{teacher}"] = kl_to_it
        if self.own:
            values |= {f"own_{key}": value for key, value in asdict(self.own).items()}
        return {name: value for name, value in values.items() if value is not None}

    def score(self, method: str) -> float:
        """Return how far the student is from its teachers, both streams with the same weight.

        On general prompts the teacher's text or its own counts, whichever is further. Method `general` leaves
        the domain by design.
        """
        general = max(self.kl.get("general", 0.0), self.own_kl or 0.0)
        return general if method == "general" else general + self.kl.get("domain", 0.0)

    def teachers_score(self, method: str) -> float:
        """Return the distance on the teachers' text alone, which is the same in all measurements."""
        return self.kl["general"] if method == "general" else sum(self.kl.values())


@dataclass
class Milestones:
    """What later measurements are compared with: `tuned`, `base` and the start, before the first step."""

    tuned: Measurement
    base: Measurement
    start: Measurement
    lowest_score: float = math.inf

    @classmethod
    def restore(cls, rows: list[dict[str, Any]], method: str) -> Milestones:
        """Read the rows of metrics.jsonl, so that a resumed run decides like an uninterrupted one."""
        first = next(row for row in rows if "start" in row)
        measured = [first["start"]["validation"]]
        measured += [row["validation"] for row in rows if "validation" in row and row is not first]
        scores = [Measurement.of_row(values).score(method) for values in measured]
        tuned, base = Measurement.of_row(first["validation"]), Measurement.of_row(first["base"])
        return cls(tuned, base, Measurement.of_row(first["start"]["validation"]), min(scores))

    def gaps_closed(self, now: Measurement) -> dict[str, float]:
        """Return what share of the KL from base to tuned on the domain is closed, where there is a gap."""
        if "domain" not in now.kl or self.base.kl["domain"] <= KL_NOISE:
            return {}
        return {"domain_gap_closed": 1 - now.kl["domain"] / self.base.kl["domain"]}


class HeldOut:
    """Held-out prompts with their teachers' answers, on which the models of a recovery are measured.

    Each stream's teacher completes its `prompts` once, so all measurements are on the same tokens. The
    student answers the general ones anew each time, at temperature 1 and with the same seed. The KL is to
    that teacher: by default base for the general stream and tuned for the domain. If the teacher is dynamic,
    it is to base or tuned in the teacher's context.
    """

    def __init__(
        self,
        config: RecoverConfig,
        learner: Learner,
        queue: RolloutQueue,
        prompts: dict[StreamName, Prompts],
        report: StageReport,
    ):
        self.config, self.learner, self.queue, self.report = config, learner, queue, report
        self.prompts = {stream: of_stream.held_out for stream, of_stream in prompts.items()}
        self.questions = itertools.cycle(enumerate(prompts["general"].questions))
        self.asked = self.prompts["general"]
        """The prompts that each model answers itself."""
        self.answers: dict[StreamName, Scored] = {}
        self._of_teacher: list[Rollout] = []
        """The general teacher's answers."""

    def let_teachers_answer(self) -> None:
        """Let the teachers answer the prompts, and score the answers."""
        for stream, prompts in self.prompts.items():
            if not prompts:
                continue
            teachers, name = self._frozen_teachers(stream), teacher_name(self.config, stream)
            count = counted(self.report, f"{name} answers", turns_of(prompts))
            talks = self.queue.teachers_answers(prompts, stream, self.config.seed + 7, teachers, count)
            rollouts = [*itertools.chain(*talks)]
            count_scored = counted(self.report, f"{name} reads answers", len(rollouts))
            loss = self.queue.streams[stream].loss
            self.answers[stream] = self.learner.score(rollouts, loss, teachers, count_scored)
            if stream == "general":
                self._of_teacher = rollouts

    def _frozen_teachers(self, stream: StreamName) -> Teachers:
        teachers = self.learner.teachers[stream]
        return {name: teacher.frozen_copy(FROZEN[stream]) for name, teacher in teachers.items()}

    def measure_base(self) -> Measurement:
        """Measure base, whose answers are those of the general teacher."""
        with self.learner.backbone.scaled(0.0):
            base = self.on_teachers_answers(f"measuring {IN_WORDS['base']}", model="base")
        return replace(base, own=ResponseStats.of(self._of_teacher)) if self._of_teacher else base

    def on_teachers_answers(self, doing: str, endings: bool = False, model: State = "student") -> Measurement:
        """Measure the student on what the teachers wrote; the progress line says `doing`.

        With `endings`, also how many of the general teacher's endings it would miss. While the student is as
        `model`, that state's KL to itself is 0, and is not computed.

        Raises:
            OpdclError: A KL is not finite, or a teacher's distributions are close to uniform.
        """
        kl = dict.fromkeys(self.answers, 0.0)
        by_teacher: dict[StreamName, dict[str, float]] = {}
        missed_ends = None
        unknown = {s: scored for s, scored in self.answers.items() if not self._is_its_teacher(model, s)}
        count = counted(self.report, doing, sum(len(scored.examples) for scored in unknown.values()))
        for stream, scored in unknown.items():
            sums = self.learner.measure(scored, endings and stream == "general", count)
            if sums["ends"]:
                missed_ends = sums["missed_ends"] / sums["ends"]
            kl[stream], by_teacher[stream] = sums["kl"] / sums["tokens"], kl_by_teacher(sums)
            if not math.isfinite(kl[stream]):
                hint = "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model"
                raise OpdclError(f"the held-out {stream} KL is not finite", hint)
            entropy = sums["teacher_entropy"] / sums["tokens"]
            if self.config.health and entropy > TEACHER_ENTROPY:
                raise OpdclError(f"the {stream} teacher is close to uniform ({entropy:.1f} nats)", CHECK_BASE)
        return Measurement(kl, by_teacher, missed_ends)

    def _is_its_teacher(self, model: State, stream: StreamName) -> bool:
        """Return whether a state scores a stream alone, and sees the prompts as they are asked."""
        shown = all(prompt.context is None for prompt in self.prompts[stream])
        return shown and {t.frozen_state for t in self._frozen_teachers(stream).values()} == {model}

    def measure_student(self, model: State = "student") -> Measurement:
        """Measure the student, which is as `model`, on the teachers' answers and on its own."""
        name, prompts = IN_WORDS[model], self.asked
        found = self.on_teachers_answers(f"measuring {name}", bool(prompts), model)
        if not prompts:
            return found
        # As a teacher does: at temperature 1, and up to the length of base's answers.
        limit, seed = self.config.limit("general"), self.config.seed + 8
        count = counted(self.report, f"{name} answers", turns_of(prompts))
        complete = partial(self.queue.student.complete, max_new_tokens=limit, on_finished=count)
        rollouts = [*itertools.chain(*converse(prompts, complete, seed))]
        reader = teacher_name(self.config, "general")
        count_scored = counted(self.report, f"{reader} reads answers", len(rollouts))
        loss, teachers = self.queue.streams["general"].loss, self._frozen_teachers("general")
        sums = self.learner.measure(self.learner.score(rollouts, loss, teachers, count_scored))
        by_token, by_answer = sums["kl"] / sums["tokens"], sums["answer_kl"] / len(rollouts)
        return replace(found, own_kl=by_token, own_distance=by_answer, own=ResponseStats.of(rollouts))

    def show_answers(self) -> None:
        """Show on a terminal each model's likeliest answer to a general prompt, the next one each time."""
        if not (self.asked and parallel.any_worker(self.report.is_live)):
            return
        number, question = next(self.questions)
        backbone, texts = self.learner.backbone, {"prompt": question}
        for state, words in IN_WORDS.items():
            model = self.queue.student if state == "student" else Teacher(backbone, state)
            greedy = {"max_new_tokens": SHOWN_TOKENS, "seed": 0, "temperature": 0.0}
            (rollout,) = model.complete([self.asked[number]], **greedy)
            name = words.removeprefix("the ")
            texts[name] = backbone.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
        self.report.texts(texts)


def is_kept(config: RecoverConfig, score: float, lowest: float) -> bool:
    """Return whether an adapter is kept: always with `keep: last`, else if no earlier one is better."""
    return config.keep == "last" or score <= NO_WORSE * lowest


def describe_kl(now: Measurement, before: Measurement | None = None, when: str = "as tuned") -> str:
    """Say how far the student is from its teachers, in nats a token, and was `before`, that is `when`."""
    values, earlier, parts = now.row(), before.row() if before else {}, []
    for words, key in SAID.items():
        if key in values:
            then = f" {earlier[key]:.2f} {when}, now" if key in earlier else ""
            parts.append(f"{words}{then} {values[key]:.2f}")
    return "; ".join(parts)


def describe_step(config: RecoverConfig, values: Mapping[str, Any]) -> str:
    """Say whose prompts a step learned from, and who answered them."""
    stream, whose = values["stream"], "your" if values["stream"] == "domain" else "general"
    others = {"student": IN_WORDS["student"], "rows": "your file"}
    writer = others.get(values["author"]) or teacher_name(config, stream)
    return f"{whose} prompts, {writer} answers: loss {values['loss']:.3f}"


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
    longest = LENGTH_GROWTH * max(teacher.length for teacher in teachers)
    cut_off = 1 - min(teacher.ended for teacher in teachers) + TRUNCATED_EXCESS
    signs = (
        Sign("repetition", own.repetition, looped, LOWER_RATE),
        Sign("answer length", own.length, longest, CHECK_ENDS),
        Sign("share of truncated answers", 1 - own.ended, cut_off, CHECK_ENDS),
    )
    return next((sign for sign in signs if sign.value > sign.bound), None)


def check_kl(log: StageLog, step: int, before: float, after: float) -> None:
    """Judge the held-out KL, given the start's.

    Raises:
        OpdclError: It has risen too far.
    """
    # Where little was forgotten, a small rise is no alarm.
    if after > max(KL_GROWTH * before, before + KL_SLACK):
        reason = f"held-out KL rose from {before:.2f} to {after:.2f} nats per token"
        raise _halt(log, step, reason, LOWER_RATE)


def check_responses(log: StageLog, step: int, sign: Sign | None, optimizer: StudentOptimizer) -> None:
    """Halve the learning rate for the first bad sign of the run in how the student writes.

    An interrupted run remembers by its metrics what it had seen.

    Raises:
        OpdclError: There is a bad sign, and the rate has been halved before.
    """
    if sign is None:
        return
    seen = [row["health"]["action"] for row in read_metrics(log.out.metrics) if "health" in row]
    action = "halted" if RATE_HALVED in seen else RATE_HALVED
    health = {"sign": sign.name, "value": sign.value, "bound": sign.bound, "action": action}
    log.write({"step": step, "health": health})
    log.report.note(f"step {step}: {sign}: {action}")
    if action == "halted":
        raise _halt(log, step, str(sign), sign.hint)
    optimizer.halve_rate()


def _halt(log: StageLog, step: int, reason: str, hint: str) -> OpdclError:
    """Return the error that ends a recovery and names the best adapter so far."""
    message = f"recovery halted at step {step}: {reason}"
    return OpdclError(message, f"{hint}; the best adapter so far is in {log.out.best}")
