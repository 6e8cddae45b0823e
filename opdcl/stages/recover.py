"""Win back what the fine-tune forgot: on-policy distillation from the original checkpoint.

    opdcl recover runs/mine --prompts prompts.jsonl
"""

from __future__ import annotations

import json
import math
import shutil

from transformers import TrainerCallback
from trl import DistillationConfig

from opdcl.config import RecoverConfig
from opdcl.distill.backbone import Backbone, State
from opdcl.distill.opinion import Opinion
from opdcl.distill.rollouts import Rollout, pick_engine
from opdcl.distill.schedule import Stream, plan_steps
from opdcl.distill.teachers import Routed, Served, Teacher, make_teacher, reach_own_model
from opdcl.distill.trainer import RecoveryTrainer, by_teacher
from opdcl.errors import OpdclError, UsageError
from opdcl.health import Health, check_turn_end, drifted, halted
from opdcl.models import ModelRef, find_adapter
from opdcl.reward import Reward
from opdcl.rundir import StageDir, folder_appears_whole, read_jsonl, write_atomic, write_json
from opdcl.streams import STREAMS, Prompts, encode_stream, teacher_section
from opdcl.training import StageCallback, StageReport, save_adapter, trainer_arguments

SAMPLES_KEPT = 8
# What a held-out KL is worth: of tuned's general KL what is gone, and what is kept of the domain, where base's KL is none of it.
SHARES = {"general_kl": "general_gone", "domain_kl": "domain_kept"}
# Nats per token below which there is nothing to have a share of.
KL_NOISE = 1e-3
# Who judges the held-out texts where the stream's own teacher is not the same from one step to the next.
FROZEN: dict[Stream, State] = {"general": "base", "domain": "tuned"}
# The scales that `interpolate` tries: the same for every layer, then rising or falling with depth.
SCALES = [(i / 20, 0.0) for i in range(20, 0, -1)] + [(i / 10, tilt) for tilt in (-1.0, -0.5, 0.5, 1.0) for i in range(8, 1, -1)]


def recover(config: RecoverConfig, backbone: Backbone, parent: ModelRef, out: StageDir, report: StageReport) -> ModelRef:
    """Continue the tuned adapter towards base on general prompts, held to tuned on domain prompts.

    Resumes from the stage's last checkpoint if there is one.
    """
    if config.method == "replay":
        config = config.model_copy(
            update={"lmbda": 0.0, "loss": config.loss.model_copy(update={"kind": "cross_entropy"})}
        )
    check_turn_end(backbone)
    streams = {stream: encode_stream(config, stream, backbone) for stream in STREAMS}
    train = {stream: [] if (config.method, stream) == ("general", "domain") else prompts.train for stream, prompts in streams.items()}
    if not any(train.values()):
        raise UsageError("recovery has no prompts", "set recover.general")
    backbone.drop_adapters()
    backbone.load_adapter(parent.adapter, "student", trainable=True)
    backbone.load_adapter(parent.adapter, "tuned")
    teachers = {stream: _teachers(config, stream, prompts, backbone, parent, report) for stream, prompts in streams.items()}
    beta, rescaled = config.loss.beta, config.loss.kind != "jsd" or config.loss.rescaled or config.loss.beta in (0.0, 1.0)
    if config.method != "interpolate" and not rescaled:
        report.note(f"recover.loss.rescaled is off: at beta {beta:g} loss and gradient are about {1 / (beta * (1 - beta)):.0f} times smaller "
                    "than reverse KL's, so that gradient clipping and loss.cap hardly ever act")  # fmt: skip
    student = Teacher(backbone, "student")
    if config.server:
        student = Served(backbone, reach_own_model(config.server, backbone, report.note), out.trainer / "served")
    elif config.sampler == "auto":
        report.note("sampler {}: {}".format(*pick_engine(backbone.causal_lm)))
    steps = plan_steps(config, len(train["general"]), len(train["domain"]))
    callback = StageCallback(report, config.steps, backbone)
    health = Health(config.health, backbone, out, callback)
    validation = Validation(config, {stream: prompts.held_out for stream, prompts in streams.items()}, out, callback, health)
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
    trainer = RecoveryTrainer(backbone, config, steps, train, teachers, DistillationConfig(**arguments), [validation, callback, health],
                              Reward(config.reward, backbone, config.general_teacher.context) if config.reward else None, student)  # fmt: skip
    validation.trainer = trainer
    try:
        if config.method == "interpolate":
            _interpolate(validation, backbone, out)
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


def _teachers(config: RecoverConfig, stream: Stream, prompts: Prompts, backbone: Backbone, parent: ModelRef,
              report: StageReport) -> Teacher | Routed:  # fmt: skip
    """Return a stream's teacher, with the adapters that it needs put onto the backbone."""

    def one(name: str) -> Teacher:
        section, state = teacher_section(config, stream, name), f"{stream}_{name}" if name else stream
        if section.kind in ("ema", "adapter"):
            backbone.load_adapter(find_adapter(section.adapter) if section.adapter else parent.adapter, state)
        return make_teacher(section, backbone, prompts.contexts.get(name), state, report.note)

    own, named = one(""), {name: one(name) for name in dict.fromkeys(prompts.routes.values())}
    return Routed(own, named, prompts.routes) if named else own


def _interpolate(validation: Validation, backbone: Backbone, out: StageDir) -> None:
    """Keep the point of the alpha-curve with the least held-out KL: what recovery must beat, as it costs no training.

    Scaling the lower and the upper layers differently is the curve's stronger form (arXiv 2203.05482, 2212.04089 scale all
    alike), so it is tried as well. Where `recover.alpha` says which point, it is that one.
    """
    validation.write_texts()
    curve, given = [], validation.config.alpha
    scales = [(1.0, 0.0), (given, 0.0)] if given else SCALES
    for done, (alpha, tilt) in enumerate(scales, 1):
        with backbone.scaled(alpha, tilt):
            curve.append({"alpha": alpha, "tilt": tilt, **validation.held_out_kl()})
        validation.callback.report.progress(done, len(scales))
    best = curve[-1] if given else min(curve, key=_score)
    backbone.shrink(best["alpha"], best["tilt"])
    save_adapter(backbone, validation.best_adapter)
    chosen = {"alpha": best["alpha"], "tilt": best["tilt"], "curve": curve}
    rows = [
        {"step": 0, "validation": _kl(curve[0]), "interpolation": chosen},
        {"step": 1, "validation": {**_kl(best), "best": True}},
    ]
    write_atomic(out.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    slope = f", tilted by {best['tilt']:+g} with depth" if best["tilt"] else ""
    validation.callback.report.note(f"the adapter times {best['alpha']:g}{slope}{'' if given else ', where held-out KL is least'}: {_shown(best)}")


class Validation(TrainerCallback):
    """Measure held-out KL per stream every so many steps, and keep the adapter that is best by their sum.

    The text is sampled once from each stream's teacher, so every measurement is on the same tokens: the general KL
    says how far the student still is from base, the domain KL how far it has left tuned. Where a stream has another
    teacher the KL is to that one, and if it moves, to base or tuned with what it is shown.
    """

    def __init__(self, config: RecoverConfig, prompts: dict[Stream, list[list[int]]], out: StageDir,
                 callback: StageCallback, health: Health):  # fmt: skip
        self.config, self.prompts, self.out, self.callback, self.health = config, prompts, out, callback, health
        self.trainer: RecoveryTrainer | None = None
        self.best_adapter = out.trainer / "best"
        self._texts: dict[Stream, tuple[list[Rollout], dict[int, Opinion]]] = {}

    def write_texts(self) -> None:
        """Let each stream's teacher answer the held-out prompts."""
        for stream, prompts in self.prompts.items():
            if prompts:
                judge = self.trainer.teachers[stream].judge(FROZEN[stream])
                texts = self.trainer.sample(prompts, stream, seed=self.config.seed + 7, teacher=judge)
                self._texts[stream] = texts, self.trainer.opinions(texts, judge)

    def on_train_begin(self, args, state, control, **kwargs):
        self.write_texts()
        general, _ = self._texts.get("general", ([], []))
        self.health.begin(general)
        if state.global_step == 0:
            self._warm_start()

    def on_step_end(self, args, state, control, **kwargs):
        for teacher in self.trainer.teachers.values():
            teacher.follow(state.global_step)
        last = state.global_step == self.config.steps
        if measured := state.global_step % self.config.validate_every == 0 or last:
            self._measure(state.global_step)
            self._keep_samples(state.global_step)
        if not last and (why := self._enough(state.global_step, measured)):
            self.callback.write({"step": state.global_step, "stopped": why})
            self.callback.report.note(f"step {state.global_step}: stopping here: {why}")
            control.should_training_stop = True

    def held_out_kl(self, overlap: bool = False) -> dict[str, float]:
        """Return KL(student, teacher) per stream on the held-out texts, in nats per token; on request the top-k overlap too."""
        kl = {}
        for stream, (texts, opinions) in self._texts.items():
            sums = self.trainer.grade(texts, stream, learn=False, opinions=opinions, overlap=overlap)
            if overlap:
                kl[f"{stream}_overlap"] = sums["overlap"] / sums["tokens"]
            kl[f"{stream}_kl"] = sums["kl"] / sums["tokens"]
            kl |= {f"{stream}_{key}": value for key, value in by_teacher(sums).items()}
            if not math.isfinite(kl[f"{stream}_kl"]):
                raise OpdclError(f"the held-out {stream} KL is not finite",
                                 "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model")  # fmt: skip
            if sums["teacher_entropy"] / sums["tokens"] > self.config.health.teacher_entropy:
                raise OpdclError(f"the {stream} teacher is close to uniform ({sums['teacher_entropy'] / sums['tokens']:.1f} nats)",
                                 "check that the base model loads correctly: opdcl chat RUN")  # fmt: skip
        return kl

    def _score(self, kl: dict[str, float]) -> float:
        """Return what the kept adapter has least of.

        Recovery without domain steps leaves the domain by design, so there the general stream alone counts.
        """
        return kl["general_kl"] if self.config.method == "general" else _score(kl)

    def _warm_start(self) -> None:
        """Take tuned's KL as the mark to beat and base's as the other end, then shrink the student to where it is to start from."""
        backbone, alpha = self.trainer.backbone, self.config.warm_start
        with backbone.scaled(0.0):
            base = self.held_out_kl()
        tuned = start = self.held_out_kl(overlap=True)
        if alpha < 1:
            backbone.shrink(alpha)
            for teacher in self.trainer.teachers.values():
                teacher.begin()
            start = self.held_out_kl()
        self._keep_if_best(0, self._score(start))
        self.callback.write({"step": 0, "validation": {**tuned, "best": True}, "base": base, "warm_start": {"alpha": alpha, **start}})
        scaled = f"; starting from the adapter times {alpha:g}: {_shown(start)}" if alpha < 1 else ""
        self.callback.report.note(f"step 0: held-out {_shown(tuned)}{scaled}")

    def _measure(self, step: int) -> None:
        kl = self.held_out_kl(overlap=True)
        best = self._keep_if_best(step, self._score(kl))
        began = next(r for r in read_jsonl(self.out.metrics) if r["step"] == 0)
        whole = {"general_kl": began["validation"], "domain_kl": began["base"]}
        shares = {SHARES[k]: 1 - kl[k] / whole[k][k] for k in _kl(kl) if whole[k][k] > KL_NOISE}
        row = {"step": step, "validation": {**kl, **shares, "best": best}}
        if row not in read_jsonl(self.out.metrics):
            self.callback.write(row)
        self.callback.report.note(f"step {step}: held-out {_shown(kl | shares)}{' (best so far)' if best else ''}")
        if self.config.health.watch and (why := drifted(began["validation"], kl, self._score, self.config.health)):
            raise halted(step, why, "lower recover.learning_rate", self.out)

    def _enough(self, step: int, measured: bool) -> str:
        """Say why recovery may end after this step, which may have been `measured`, or return nothing."""
        until = self.config.until
        done = sum(s.keep for s in self.trainer.steps[:step])
        if until.rollouts and done >= until.rollouts:
            return f"{done} completions were graded"
        if not measured:
            return ""
        later = [row["validation"] for row in read_jsonl(self.out.metrics) if row["step"] and "validation" in row]
        if not later:
            return ""
        gone, kept = later[-1].get("general_gone", 0.0), later[-1].get("domain_kept", 1.0)
        if until.retention and gone >= until.retention and kept >= until.domain_floor:
            return f"{gone:.0%} of the general KL is gone, and {kept:.0%} of the domain is kept"
        since = next((i for i, kl in enumerate(reversed(later)) if kl["best"]), len(later))
        return f"no better adapter in {since} validations" if until.patience and since >= until.patience else ""

    def _keep_if_best(self, step: int, score: float) -> bool:
        """Keep the adapter if no earlier step was better, or if the last one measured is wanted.

        Judged by the metrics, which a resumed run has cut back to its checkpoint, and not by the adapter that lies there,
        which may be of a later step: so a resumed run decides as the uninterrupted one does.
        """
        rows = [row for row in read_jsonl(self.out.metrics) if "validation" in row and row["step"] < step]
        best = self.config.keep == "last" or all(score < self._score(row.get("warm_start", row["validation"])) for row in rows)
        if best:
            save_adapter(self.trainer.backbone, self.best_adapter)
            write_json(self.best_adapter / "validation.json", {"step": step, "score": score})
        return best

    def _keep_samples(self, step: int) -> None:
        """Append a few completions that the student has just been trained on, so that a person can read how it changes."""
        rollouts = self.trainer.latest.get("general") or self.trainer.latest["domain"]
        decode = self.trainer.backbone.tokenizer.decode
        rows = [row for row in read_jsonl(self.out.samples) if row["step"] < step]
        rows += [
            {"step": step, "prompt": decode(r.prompt_ids), "completion": decode(r.completion_ids, skip_special_tokens=True)}
            for r in rollouts[:SAMPLES_KEPT]
        ]
        write_atomic(self.out.samples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _kl(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name in SHARES}


def _score(kl: dict[str, float]) -> float:
    """Return held-out KL, both streams counting alike."""
    return sum(_kl(kl).values())


def _shown(kl: dict[str, float]) -> str:
    shares = {key: f" ({kl[share]:.0%} {share.split('_')[1]})" for key, share in SHARES.items() if share in kl}
    return ", ".join(f"{key.removesuffix('_kl')} KL {value:.3f}{shares.get(key, '')}" for key, value in _kl(kl).items())
