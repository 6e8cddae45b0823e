"""Recover what the fine-tune forgot: on-policy distillation from the original checkpoint.

opdcl recover runs/mine --prompts prompts.jsonl

For each step of the schedule: take completions, which a teacher or the student wrote; let the step's teacher
score every token; learn from that; validate now and then, and keep the best adapter; save checkpoints.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from opdcl.config.recover import PROMPTS_OF_START, RecoverConfig
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.model.lora import describe_adapter
from opdcl.repetition import repetition
from opdcl.rundir.files import folder_appears_whole, write_atomic, write_json
from opdcl.rundir.hashes import SEAL, damage, seal
from opdcl.rundir.stage import StageDir, read_metrics
from opdcl.sampling.sample import pick_engine
from opdcl.train.checkpoints import Checkpoints, StudentOptimizer, last_checkpoint, save_adapter, step_of
from opdcl.train.learner import ROOM_IN_CHECKPOINTS, Learner, Sums, kl_by_teacher, mean_loss
from opdcl.train.loop import Interruption, StageLog, StageReport
from opdcl.train.rollouts import RolloutQueue
from opdcl.train.start import Ends, Start, put_at_start
from opdcl.train.teachers import EmaTeacher, Provided, Teacher, Teachers, teacher_here
from opdcl.train.validation import (
    HeldOut,
    Milestones,
    check_kl,
    check_responses,
    describe_kl,
    describe_step,
    is_kept,
    response_sign,
)
from opdcl.words import Batch, Prompts, Stream, StreamName


def recover(
    config: RecoverConfig,
    prompts: dict[StreamName, Prompts],
    backbone: Backbone,
    tuned: Path,
    out: StageDir,
    report: StageReport,
    provided: Provided,
) -> None:
    """Train the tuned adapter towards base on general prompts, and hold it to tuned on domain prompts.

    This resumes from the stage's last checkpoint, if there is one.
    """
    backbone.drop_adapters()
    backbone.load_adapter(tuned, "student", trainable=True)
    backbone.load_adapter(tuned, "tuned")
    backbone.causal_lm.eval()
    report.note(describe_adapter(backbone.peft))
    train = {stream: of_stream.train for stream, of_stream in prompts.items()}
    if config.given_answers:
        given, limit = train["general"] + prompts["general"].held_out, config.limit("general")
        cut = sum(len(prompt.answer or []) > limit for prompt in given)
        ends = f"; {cut} of them are cut at recover.max_new_tokens, {limit}" if cut else ""
        report.note(f"the answers of {len(given)} general rows are graded as they are{ends}")
    teachers: dict[StreamName, Teachers] = {}
    for name, stream in config.streams().items():
        own = [prompt.teacher for prompt in train[name] + prompts[name].held_out]
        teachers[name] = _teachers(config, stream, own, backbone, tuned, provided)
    provided = replace(provided, student=provided.student or student_here(backbone, report))
    if config.method == "general":
        train["domain"] = []
    queue = RolloutQueue(config, train, teachers, provided, report)
    tokens = int(config.micro_batch_tokens)
    learner = Learner(backbone, teachers, "recover.max_new_tokens", tokens, ROOM_IN_CHECKPOINTS)
    held_out = HeldOut(config, learner, queue, prompts, report)
    log = StageLog(report, out, config.steps, partial(describe_step, config))
    recovery = Recovery(config, queue, learner, held_out, log)
    if config.steps:
        recovery.learn()
    else:
        recovery.keep_start()
    if queue.unasked:
        hint = "the answer before each ran into its maximum length, recover.max_new_tokens"
        report.note(f"{queue.unasked} turns of conversations were not asked: {hint}")
    if problem := damage(out.best):
        hint = f"remove {out.trainer}: the same command then repeats the stage"
        raise OpdclError(f"{out.best}, the adapter to end with, is damaged: {problem}", hint)
    with folder_appears_whole(out.adapter) as folder:
        shutil.copytree(out.best, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SEAL))


@dataclass
class Recovery:
    """A recovery and its parts: settings, steps with their completions, student and teachers, records."""

    config: RecoverConfig
    queue: RolloutQueue
    learner: Learner
    held_out: HeldOut
    log: StageLog

    def learn(self) -> None:
        """Take all steps from the last checkpoint on. The best adapter stays in the stage's trainer folder.

        Raises:
            Interrupted: A signal came; a checkpoint is saved.
        """
        config, learner, log = self.config, self.learner, self.log
        optimizer = StudentOptimizer(learner.backbone, config.steps, float(config.learning_rate))
        moving = [t.state for t in learner.all_teachers if isinstance(t, EmaTeacher)]
        parts = (optimizer, self.queue, learner)
        checkpoints = Checkpoints(learner.backbone, ["student", *moving], parts, log.out)
        checkpoint = last_checkpoint(log.out, log.report, config.steps)
        if checkpoint:
            checkpoints.restore(checkpoint)
        # A signal that comes here ends the stage at once: it takes minutes, and there is nothing new to save.
        with learner.clock.part("validation"):
            milestones = self.begin(is_new=not checkpoint)
        interruption = Interruption(log.report)
        with interruption.awaited():
            for step in range(step_of(checkpoint) + 1, config.steps + 1):
                started = time.perf_counter()
                values, tokens = self.take_step(step, optimizer)
                for teacher in learner.all_teachers:
                    teacher.after_step()
                is_measured = step % config.validate_every == 0 or step == config.steps
                if is_measured:
                    with learner.clock.part("validation"):
                        self.validate(step, milestones, optimizer)
                if values:  # those of a skipped step are counted with the next one's
                    values["parts"] = learner.clock.take()
                    log.step(step, values, tokens, time.perf_counter() - started)
                if interruption.has_come() or is_measured:
                    checkpoints.save(step)
                interruption.end(step, config.steps)

    def begin(self, is_new: bool) -> Milestones:
        """Let the teachers answer; in a stage that `is_new`, find the start; return what to compare with."""
        config, held_out, log = self.config, self.held_out, self.log
        held_out.let_teachers_answer()
        if is_new:
            start, found = self.find_start()
            before = None if start.is_tuned else found.tuned
            log.report.note(f"start: {start}; in nats a token, {describe_kl(found.start, before)}")
            held_out.show_answers()
            score = found.start.score(config.method)
            self.keep_adapter(0, score)
            tuned, base = {**found.tuned.row(), "best": True}, found.base.row()
            chosen = start.row() | {"validation": found.start.row(), "score": score}
            log.write({"step": 0, "validation": tuned, "base": base, "start": chosen})
        return Milestones.restore(read_metrics(log.out.metrics), config.method)

    def find_start(self) -> tuple[Start, Milestones]:
        """Measure base and tuned, and put the student where it starts; return the place and the findings."""
        held_out, learner, queue = self.held_out, self.learner, self.queue
        base, tuned = held_out.measure_base(), held_out.measure_student("tuned")

        def measure_kl(doing: str) -> dict[StreamName, float]:
            return held_out.on_teachers_answers(doing).kl

        def texts() -> tuple[list[list[int]], list[list[int]]]:
            general = queue.prompts["general"][: PROMPTS_OF_START["general"]]
            domain = [(r.prompt_ids + r.completion_ids)[:-1] for r in queue.first_domain_texts()]
            return [prompt.ids for prompt in general], domain

        ends = Ends(tuned.kl, base.kl)
        start = put_at_start(self.config, learner, ends, measure_kl, texts, self.log.report)
        if start.is_tuned:
            return start, Milestones(tuned, base, tuned)
        for teacher in learner.all_teachers:  # an average begins where the student does
            if isinstance(teacher, EmaTeacher):
                learner.backbone.shrink(start.alpha, teacher.state)
        return start, Milestones(tuned, base, held_out.measure_student())

    def take_step(self, step: int, optimizer: StudentOptimizer) -> tuple[dict[str, Any], int]:
        """Score a step's completions and change the student; return what to log, and the number of tokens.

        There is nothing to log if the step was skipped.
        """
        learner = self.learner
        with learner.clock.part("sampling"):
            batch = self.queue.take(step - 1)
        sums = learner.learn(batch)
        ends_period = self.queue.steps[step - 1].ends_period
        if sums is None:
            optimizer.end_step(ends_period)
            self.log.skip(step)
            return {}, 0
        tokens = int(sums["tokens"])
        values: dict[str, Any] = {"loss": float(mean_loss(sums)), "learning_rate": optimizer.rate}
        values |= {"stream": batch.stream.name, "author": batch.author, **step_metrics(batch, sums)}
        values |= {"answers": len(batch.examples), "graded": tokens}
        values["adapter_norm"] = learner.backbone.adapter_norm("student")
        with learner.clock.part("student"):
            values["grad_norm"] = optimizer.add()
            optimizer.end_step(ends_period)
        return values, tokens

    def validate(self, step: int, milestones: Milestones, optimizer: StudentOptimizer) -> None:
        """Measure the student, keep its adapter if it is good, log and show both, and check its health.

        Raises:
            OpdclError: The KL has drifted, or the student writes badly for the second time.
        """
        config, held_out, log = self.config, self.held_out, self.log
        now = held_out.measure_student()
        score = now.score(config.method)
        is_best = is_kept(config, score, milestones.lowest_score)
        milestones.lowest_score = min(milestones.lowest_score, score)
        if is_best:
            self.keep_adapter(step, score)
        values = now.row() | milestones.gaps_closed(now)
        log.write({"step": step, "validation": {**values, "score": score, "best": is_best}})
        described = describe_kl(now, milestones.start, "at the start")
        log.report.note(f"step {step}: {described}{'; adapter kept' if is_best else ''}")
        held_out.show_answers()
        if config.health:
            before, after = (model.teachers_score(config.method) for model in (milestones.start, now))
            check_kl(log, step, before, after)
            if now.own:
                sign = response_sign(now.own, [milestones.base.own, milestones.tuned.own])
                check_responses(log, step, sign, optimizer)

    def keep_adapter(self, step: int, score: float) -> None:
        """Save the student's adapter as the one to end with, unless a later one is kept."""
        best = self.log.out.best
        save_adapter(self.learner.backbone, best)
        write_json(best / "validation.json", {"step": step, "score": score})
        seal(best)

    def keep_start(self) -> None:
        """Keep the start as the recovered adapter, without training: the rival that costs next to nothing."""
        log = self.log
        self.held_out.let_teachers_answer()
        start, found = self.find_start()
        save_adapter(self.learner.backbone, log.out.best)
        seal(log.out.best)
        kept = found.start.row()
        rows = [
            {"step": 0, "validation": found.tuned.row(), "start": start.row() | {"validation": kept}},
            {"step": 1, "validation": {**kept, "best": True}},
        ]
        write_atomic(log.out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
        log.report.note(f"{start}; in nats a token, {describe_kl(found.start, found.tuned)}")


def step_metrics(batch: Batch, sums: Sums) -> dict[str, float]:
    """Return what a step logs about its completions: means per token (nats) or per completion."""
    rollouts, tokens = batch.rollouts, sums["tokens"]
    metrics: dict[str, float] = {}
    if batch.fresh:
        metrics["mismatch"] = sums["mismatched"] / tokens
    if rollouts[0].reward is not None:
        metrics["reward"] = sum(r.reward or 0.0 for r in rollouts) / len(rollouts)
        # The share whose group is tied, and carries no signal.
        metrics["reward_tied"] = sum(not r.advantage for r in rollouts) / len(rollouts)
    metrics |= {f"kl/{teacher}": kl for teacher, kl in kl_by_teacher(sums).items()}
    metrics["kl"] = sums["kl"] / tokens
    metrics["student_entropy"] = sums["student_entropy"] / tokens
    metrics["teacher_entropy"] = sums["teacher_entropy"] / tokens
    metrics["mean_length"] = tokens / len(rollouts)
    metrics["truncated"] = sum(not r.finished for r in rollouts) / len(rollouts)
    metrics["repetition"] = repetition([r.completion_ids for r in rollouts])
    return metrics


def student_here(backbone: Backbone, report: StageReport) -> Teacher:
    """Return the sampler of on-policy steps in this process."""
    engine = pick_engine(backbone.causal_lm)
    if engine == "generate":
        report.note(f"the slower sampler `{engine}` is used: some layers are not attention")
    if engine == "graph":
        backbone.merged_weights = []
    return Teacher(backbone, "student")


def _teachers(
    config: RecoverConfig,
    stream: Stream,
    names: Iterable[str],
    backbone: Backbone,
    tuned: Path,
    provided: Provided,
) -> Teachers:
    """Return a stream's own teacher and the named ones, and put their adapters onto the backbone."""
    teachers: dict[str, Teacher] = {}
    for name in dict.fromkeys(["", *names]):
        if elsewhere := provided.teachers.get(name or stream.teacher):
            teachers[name] = elsewhere
            continue
        section = config.teacher_of(stream.name, name)
        state = f"{stream.name}_{name}" if name else stream.name
        if section.kind in ("ema", "adapter"):
            backbone.load_adapter(provided.adapters[section.adapter] if section.adapter else tuned, state)
        teachers[name] = teacher_here(section, backbone, state)
    return teachers
