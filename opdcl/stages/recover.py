"""Win back what the fine-tune forgot: on-policy distillation from the original checkpoint.

opdcl recover runs/mine --prompts prompts.jsonl
"""

from __future__ import annotations

import math
import shutil

from trl import DistillationConfig

from opdcl.config.recover import RecoverConfig
from opdcl.distill.health import Health, check_turn_end
from opdcl.distill.interpolate import interpolate
from opdcl.distill.prompts import STREAMS, Prompts, encode_stream, teacher_section
from opdcl.distill.reward import Reward
from opdcl.distill.schedule import Stream, plan_steps
from opdcl.distill.teachers import Routed, Served, Teacher, make_teacher, reach_own_model
from opdcl.distill.trainer import RecoveryTrainer
from opdcl.distill.validation import Validation
from opdcl.errors import UsageError
from opdcl.model.adapters import ModelRef, find_adapter
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import folder_appears_whole
from opdcl.rundir.layout import StageDir
from opdcl.sampling.sample import pick_engine
from opdcl.training import StageCallback, StageReport, trainer_arguments


def recover(
    config: RecoverConfig, backbone: Backbone, parent: ModelRef, out: StageDir, report: StageReport
) -> ModelRef:
    """Continue the tuned adapter towards base on general prompts, held to tuned on domain prompts.

    Resumes from the stage's last checkpoint if there is one.
    """
    if config.method == "replay":
        config = config.model_copy(
            update={"lmbda": 0.0, "loss": config.loss.model_copy(update={"kind": "cross_entropy"})}
        )
    check_turn_end(backbone)
    streams = {stream: encode_stream(config, stream, backbone) for stream in STREAMS}
    train = {
        stream: [] if (config.method, stream) == ("general", "domain") else prompts.train
        for stream, prompts in streams.items()
    }
    if not any(train.values()):
        raise UsageError("recovery has no prompts", "set recover.general")
    backbone.drop_adapters()
    backbone.load_adapter(parent.adapter, "student", trainable=True)
    backbone.load_adapter(parent.adapter, "tuned")
    teachers = {
        stream: _teachers(config, stream, prompts, backbone, parent, report)
        for stream, prompts in streams.items()
    }
    student = Teacher(backbone, "student")
    if config.server:
        student = Served(
            backbone, reach_own_model(config.server, backbone, report.note), out.trainer / "served"
        )
    elif config.sampler == "auto":
        report.note("sampler {}: {}".format(*pick_engine(backbone.causal_lm)))
    steps = plan_steps(config, len(train["general"]), len(train["domain"]))
    callback = StageCallback(report, config.steps, backbone)
    health = Health(config.health, backbone, out, callback)
    validation = Validation(
        config, {stream: prompts.held_out for stream, prompts in streams.items()}, out, callback, health
    )
    arguments = trainer_arguments(DistillationConfig, "recover", config.trainer, backbone, out) | {
        "per_device_train_batch_size": 1,  # one row of the schedule is one optimizer step
        "shuffle_dataset": False,
        "max_steps": config.steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": math.ceil(config.steps * 0.1),
        "save_steps": config.save_steps,
        "seed": config.seed,
        "temperature": config.temperature,
        "max_completion_length": config.max_new_tokens,
        "remove_unused_columns": False,
        **config.trainer,
    }
    trainer = RecoveryTrainer(
        backbone,
        config,
        steps,
        train,
        teachers,
        DistillationConfig(**arguments),
        [validation, callback, health],
        Reward(config.reward, backbone, config.general_teacher.context) if config.reward else None,
        student,
    )
    validation.trainer = trainer
    try:
        if config.method == "interpolate":
            interpolate(validation, backbone, out)
        else:
            if checkpoint := out.last_checkpoint():
                trainer.restore(checkpoint)
            callback.run(trainer, out)
    finally:
        for party in (student, *teachers.values()):
            party.close()
    with folder_appears_whole(out.adapter) as folder:
        shutil.copytree(validation.best_adapter, folder, dirs_exist_ok=True)
    return ModelRef(parent.base, out.adapter)


def _teachers(
    config: RecoverConfig,
    stream: Stream,
    prompts: Prompts,
    backbone: Backbone,
    parent: ModelRef,
    report: StageReport,
) -> Teacher | Routed:
    """Return a stream's teacher, with the adapters that it needs put onto the backbone."""

    def one(name: str) -> Teacher:
        section, state = teacher_section(config, stream, name), f"{stream}_{name}" if name else stream
        if section.kind in ("ema", "adapter"):
            backbone.load_adapter(find_adapter(section.adapter) if section.adapter else parent.adapter, state)
        return make_teacher(section, backbone, prompts.contexts.get(name), state, report.note)

    own, named = one(""), {name: one(name) for name in dict.fromkeys(prompts.routes.values())}
    return Routed(own, named, prompts.routes) if named else own
