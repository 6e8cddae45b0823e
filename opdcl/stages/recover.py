"""Win back what the fine-tune forgot: distillation from the original checkpoint.

opdcl recover runs/mine --prompts prompts.jsonl
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from transformers import TrainingArguments

from opdcl.config.recover import RecoverConfig
from opdcl.distill.grading import Grader
from opdcl.distill.health import Health, check_turn_end
from opdcl.distill.make_teacher import make_teacher, reach_own_model
from opdcl.distill.prompts import Prompts, RecoverySource, encode_stream
from opdcl.distill.reward import Reward
from opdcl.distill.rollout_queue import RolloutQueue, Selection
from opdcl.distill.schedule import STREAMS, Stream, plan_steps
from opdcl.distill.teachers import AnyTeacher, RoutedTeacher, ServedStudent, Teacher
from opdcl.distill.trainer import RecoveryTrainer
from opdcl.distill.validation import Validation
from opdcl.distill.work import RecoveryWork
from opdcl.errors import OpdclError
from opdcl.model.adapters import find_adapter
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import folder_appears_whole
from opdcl.rundir.hashes import SEAL, damage
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Prompt
from opdcl.sampling.sample import pick_engine
from opdcl.training import RECOVER_SCHEDULE, StageCallback, StageReport, trainer_arguments


def recover(
    config: RecoverConfig,
    source: RecoverySource,
    backbone: Backbone,
    tuned: Path,
    out: StageDir,
    report: StageReport,
) -> None:
    """Train the tuned adapter towards base on general prompts, and hold it to tuned on domain prompts.

    This resumes from the stage's last checkpoint, if there is one.
    """
    if config.method == "replay":
        imitation = config.loss.model_copy(update={"kind": "cross_entropy"})
        config = config.model_copy(update={"loss": imitation})
    check_turn_end(backbone.tokenizer, backbone.eos_ids)
    streams = {
        stream: encode_stream(config, source, stream, backbone.tokenizer, backbone.context_length)
        for stream in STREAMS
    }
    train = {stream: prompts.train for stream, prompts in streams.items()}
    if config.method == "general":
        train["domain"] = []
    backbone.drop_adapters()
    backbone.load_adapter(tuned, "student", trainable=True)
    backbone.load_adapter(tuned, "tuned")
    backbone.causal_lm.eval()  # recovery has no dropout, see `RecoveryTrainer.training_step`
    with contextlib.ExitStack() as stack:
        teachers: dict[Stream, AnyTeacher] = {}
        for stream, prompts in streams.items():
            teachers[stream] = _teacher(config, stream, prompts, backbone, tuned, report)
            for single in teachers[stream].members:
                stack.callback(single.close)
        student = _student(config, backbone, out, report)
        stack.callback(student.close)
        grader = Grader(backbone, config, teachers)
        reward = None
        if config.reward:
            context, rows = config.teacher_of("general").context, source.rows["general"]
            reward = Reward(config.reward, source.reward_task, rows, backbone, context, report.note)
        steps = plan_steps(config, len(train["general"]), len(train["domain"]))
        selection = Selection(config, reward)
        queue = RolloutQueue(config, steps, train, student, teachers, selection)
        dynamic = [stream for stream, teacher in teachers.items() if teacher.is_dynamic]
        work = RecoveryWork.of(config, backbone.costs, streams, dynamic)
        _train(config, grader, queue, {s: p.held_out for s, p in streams.items()}, work, out, report)
    if problem := damage(out.best):
        hint = f"remove {out.trainer}: the same command then repeats the stage"
        raise OpdclError(f"{out.best}, the adapter to end with, is damaged: {problem}", hint)
    with folder_appears_whole(out.adapter) as folder:
        shutil.copytree(out.best, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SEAL))


def _train(
    config: RecoverConfig,
    grader: Grader,
    queue: RolloutQueue,
    held_out: dict[Stream, list[Prompt]],
    work: RecoveryWork,
    out: StageDir,
    report: StageReport,
) -> None:
    """Leave the best adapter in the stage's trainer folder."""
    backbone = grader.backbone
    callback = StageCallback(report, config.steps, backbone)
    health = Health(config.health, backbone, out, callback)
    validation = Validation(config, grader, queue, held_out, out, callback, health)
    if config.method == "interpolate":
        validation.keep_start()
        return
    stage = {
        "per_device_train_batch_size": 1,  # one row of the schedule is one optimizer step
        "remove_unused_columns": False,
    }
    arguments = trainer_arguments(config, RECOVER_SCHEDULE, backbone, out, config.steps, **stage)
    trainer = RecoveryTrainer(queue, grader, TrainingArguments(**arguments), [validation, callback, health])
    if checkpoint := out.last_checkpoint():
        queue.restore(checkpoint)
    callback.work, work.ahead = work, queue.ahead
    callback.run(trainer, out)


def _student(config: RecoverConfig, backbone: Backbone, out: StageDir, report: StageReport) -> Teacher:
    """Return the sampler of on-policy steps: this process, or a server with the student's adapter."""
    if config.server:
        server = reach_own_model(config.server, backbone, report.note)
        return ServedStudent(backbone, server, out.trainer / "served")
    engine = pick_engine(backbone.causal_lm)
    if engine == "generate":
        report.note(f"the slower sampler `{engine}` is used: some layers are not attention")
    if engine == "graph":
        backbone.sums = []
    return Teacher(backbone, "student")


def _teacher(
    config: RecoverConfig,
    stream: Stream,
    prompts: Prompts,
    backbone: Backbone,
    tuned: Path,
    report: StageReport,
) -> AnyTeacher:
    """Return a stream's teacher, and put the adapters that it needs onto the backbone."""

    def single(name: str) -> Teacher:
        section, state = config.teacher_of(stream, name), f"{stream}_{name}" if name else stream
        if section.kind in ("ema", "adapter"):
            backbone.load_adapter(find_adapter(section.adapter) if section.adapter else tuned, state)
        return make_teacher(section, backbone, state, report.note)

    names = dict.fromkeys(["", *(prompt.teacher for prompt in prompts.train + prompts.held_out)])
    teachers = {name: single(name) for name in names}
    return RoutedTeacher(teachers) if len(teachers) > 1 else teachers[""]
