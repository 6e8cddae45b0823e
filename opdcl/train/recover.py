"""Win back what the fine-tune forgot: on-policy distillation from the original checkpoint.

opdcl recover runs/mine --prompts prompts.jsonl

For each step of the schedule: take completions, which a teacher or the student wrote; let the step's teacher
grade every token; learn from that; validate now and then, and keep the best adapter; save checkpoints.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opdcl.config.recover import RecoverConfig
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.repetition import repetition
from opdcl.rundir.files import folder_appears_whole
from opdcl.rundir.hashes import SEAL, damage
from opdcl.rundir.layout import StageDir
from opdcl.sampling.sample import pick_engine
from opdcl.train.checkpoints import Checkpoints, StudentOptimizer
from opdcl.train.learner import Learner, Sums, kl_by_route, mean_loss
from opdcl.train.rollout_queue import RolloutQueue
from opdcl.train.schedule import plan_steps
from opdcl.train.teachers import EmaTeacher, Teacher, Teachers, teacher_here
from opdcl.train.validation import Validation
from opdcl.training import Interruption, StageLog, StageReport, last_checkpoint, steps_done
from opdcl.types import Batch, Judge, Prompt, Prompts, Stream, StreamName


@dataclass(frozen=True)
class Provided:
    """What a recovery is given besides prompts and models, where its settings ask for it."""

    reward: Judge | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """The folders of teachers' adapters, by the place that the settings name."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    """Second models, and models on a server, by the teacher's name."""
    student: Teacher | None = None
    """The student as a server samples it."""


@dataclass
class Recovery:
    """What a recovery works with: its steps with their completions, student and teachers, and records."""

    queue: RolloutQueue
    learner: Learner
    validation: Validation
    log: StageLog


def recover(
    config: RecoverConfig,
    prompts: dict[StreamName, Prompts],
    backbone: Backbone,
    tuned: Path,
    out: StageDir,
    report: StageReport,
    provided: Provided = Provided(),
) -> None:
    """Train the tuned adapter towards base on general prompts, and hold it to tuned on domain prompts.

    This resumes from the stage's last checkpoint, if there is one.
    """
    backbone.drop_adapters()
    backbone.load_adapter(tuned, "student", trainable=True)
    backbone.load_adapter(tuned, "tuned")
    backbone.causal_lm.eval()
    train = {stream: of_stream.train for stream, of_stream in prompts.items()}
    held_out = {stream: of_stream.held_out for stream, of_stream in prompts.items()}
    if config.given_answers:
        report.note(_describe_given(train["general"] + held_out["general"], config.limit("general")))
    teachers: dict[StreamName, Teachers] = {}
    for name, stream in config.streams().items():
        own = [prompt.teacher for prompt in train[name] + held_out[name]]
        teachers[name] = _teachers(config, stream, own, backbone, tuned, provided)
    student = provided.student or _student(backbone, report)
    if config.method == "general":
        train["domain"] = []
    steps = plan_steps(config, len(train["general"]), len(train["domain"]))
    queue = RolloutQueue(config, steps, train, student, teachers, report, provided.reward)
    learner = Learner(backbone, teachers, "recover.max_new_tokens", int(config.micro_batch_tokens))
    log = StageLog(report, out, config.steps)
    validation = Validation(config, learner, queue, held_out, out, log)
    validation.question = prompts["general"].question
    if config.method == "interpolate":
        validation.keep_start()
    else:
        learn(Recovery(queue, learner, validation, log))
    queue.texts.tell(report.note)
    if problem := damage(out.best):
        hint = f"remove {out.trainer}: the same command then repeats the stage"
        raise OpdclError(f"{out.best}, the adapter to end with, is damaged: {problem}", hint)
    with folder_appears_whole(out.adapter) as folder:
        shutil.copytree(out.best, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SEAL))


def learn(recovery: Recovery) -> None:
    """Take all steps from the last checkpoint on. The best adapter stays in the stage's trainer folder.

    Raises:
        Interrupted: A signal came; a checkpoint is saved.
    """
    queue, learner, log = recovery.queue, recovery.learner, recovery.log
    config, clock = queue.config, learner.clock
    optimizer = StudentOptimizer(learner.backbone, config)
    moving = [t.state for t in learner.all_teachers if isinstance(t, EmaTeacher)]
    checkpoints = Checkpoints(learner.backbone, optimizer, queue, moving, log.out)
    checkpoint = last_checkpoint(log.out, log.report, config.steps)
    if checkpoint:
        checkpoints.restore(checkpoint)
        learner.kept_states = queue.kept_states
    # A signal that comes here ends the stage at once: it takes minutes, and there is nothing new to save.
    with clock.part("validation"):
        recovery.validation.begin(is_new=not checkpoint)
    interruption = Interruption(log.report)
    with interruption.awaited():
        for step in range(steps_done(checkpoint) + 1, config.steps + 1):
            started = time.perf_counter()
            values, tokens = take_step(recovery, optimizer, step)
            for teacher in learner.all_teachers:
                teacher.after_step()
            with clock.part("validation"):
                recovery.validation.after_step(step, optimizer)
            if values:  # those of a skipped step are counted with the next one's
                values["parts"] = clock.take()
                log.step(step, values, tokens, time.perf_counter() - started)
            if interruption.has_come() or step % config.validate_every == 0 or step == config.steps:
                checkpoints.save(step)
            interruption.end(step, config.steps)


def take_step(recovery: Recovery, optimizer: StudentOptimizer, step: int) -> tuple[dict[str, Any], int]:
    """Grade a step's completions and change the student; return what to log, and the number of tokens.

    There is nothing to log if the step was skipped.
    """
    learner = recovery.learner
    with learner.clock.part("sampling"):
        batch = recovery.queue.take(step - 1)
    sums = learner.learn(batch)
    if sums is None:
        optimizer.skip()
        recovery.log.skip(step)
        return {}, 0
    tokens = int(sums["tokens"])
    values: dict[str, Any] = {"loss": float(mean_loss(sums)), "learning_rate": optimizer.rate}
    values |= {"stream": batch.stream.name, "author": batch.author, **step_metrics(batch, sums)}
    values |= {"answers": len(batch.examples), "graded": tokens}
    values["adapter_norm"] = learner.backbone.adapter_norm("student")
    with learner.clock.part("student"):
        values["grad_norm"] = optimizer.update()
    return values, tokens


def step_metrics(batch: Batch, sums: Sums) -> dict[str, float]:
    """Return what a step logs about its completions: means per token (nats) or per completion."""
    rollouts, tokens = batch.examples, sums["tokens"]
    metrics: dict[str, float] = {}
    if batch.fresh:
        metrics["mismatch"] = sums["mismatched"] / tokens
    if rollouts[0].reward is not None:
        metrics["reward"] = sum(r.reward or 0.0 for r in rollouts) / len(rollouts)
        # The share whose group is tied, and carries no signal.
        metrics["reward_tied"] = sum(not r.advantage for r in rollouts) / len(rollouts)
    metrics |= kl_by_route(sums)
    metrics["kl"] = sums["kl"] / tokens
    metrics["student_entropy"] = sums["student_entropy"] / tokens
    metrics["teacher_entropy"] = sums["teacher_entropy"] / tokens
    metrics["mean_length"] = tokens / len(rollouts)
    metrics["truncated"] = sum(not r.finished for r in rollouts) / len(rollouts)
    metrics["repetition"] = repetition([r.completion_ids for r in rollouts])
    return metrics


def _describe_given(prompts: list[Prompt], limit: int) -> str:
    """Say how many answers are given, and how many of them are cut."""
    cut = sum(len(prompt.answer or []) > limit for prompt in prompts)
    ends = f"; {cut} of them are cut at recover.max_new_tokens, {limit}" if cut else ""
    return f"the answers of {len(prompts)} general rows are graded as they are{ends}"


def _student(backbone: Backbone, report: StageReport) -> Teacher:
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
