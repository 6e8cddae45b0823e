"""Measure held-out KL during recovery and keep the best adapter."""

from __future__ import annotations

import json
import math

from transformers import TrainerCallback

from opdcl.config.recover import RecoverConfig
from opdcl.distill.health import Health, drifted, halted
from opdcl.distill.schedule import Stream
from opdcl.distill.trainer import RecoveryTrainer, by_teacher
from opdcl.errors import OpdclError
from opdcl.model.backbone import State
from opdcl.model.distributions import TeacherDistribution
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Rollout
from opdcl.training import StageCallback, save_adapter

SAMPLES_KEPT = 8

# What a held-out KL is worth: of tuned's general KL what is gone, and what is kept of the domain, where base's KL is none of it.
SHARES = {"general_kl": "general_gone", "domain_kl": "domain_kept"}

# Nats per token below which there is nothing to have a share of.
KL_NOISE = 1e-3

# Who judges the held-out texts where the stream's own teacher is not the same from one step to the next.
FROZEN: dict[Stream, State] = {"general": "base", "domain": "tuned"}


class Validation(TrainerCallback):
    """Measure held-out KL per stream every so many steps, and keep the adapter that is best by their sum.

    The text is sampled once from each stream's teacher, so every measurement is on the same tokens: the general KL
    says how far the student still is from base, the domain KL how far it has left tuned. Where a stream has another
    teacher the KL is to that one, and if it moves, to base or tuned with what it is shown.
    """

    def __init__(
        self,
        config: RecoverConfig,
        prompts: dict[Stream, list[list[int]]],
        out: StageDir,
        callback: StageCallback,
        health: Health,
    ):
        self.config, self.prompts, self.out, self.callback, self.health = (
            config,
            prompts,
            out,
            callback,
            health,
        )
        self.trainer: RecoveryTrainer | None = None
        self.best_adapter = out.trainer / "best"
        self._texts: dict[Stream, tuple[list[Rollout], dict[int, TeacherDistribution]]] = {}

    def write_texts(self) -> None:
        """Let each stream's teacher answer the held-out prompts."""
        for stream, prompts in self.prompts.items():
            if prompts:
                judge = self.trainer.teachers[stream].frozen_copy(FROZEN[stream])
                texts = self.trainer.sample(prompts, stream, seed=self.config.seed + 7, teacher=judge)
                self._texts[stream] = texts, self.trainer.opinions(texts, judge)

    def on_train_begin(self, args, state, control, **kwargs):
        self.write_texts()
        general, _ = self._texts.get("general", ([], []))
        self.health.on_start(general)
        if state.global_step == 0:
            self._warm_start()

    def on_step_end(self, args, state, control, **kwargs):
        for teacher in self.trainer.teachers.values():
            teacher.after_step(state.global_step)
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
                raise OpdclError(
                    f"the held-out {stream} KL is not finite",
                    "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model",
                )
            if sums["teacher_entropy"] / sums["tokens"] > self.config.health.teacher_entropy:
                raise OpdclError(
                    f"the {stream} teacher is close to uniform ({sums['teacher_entropy'] / sums['tokens']:.1f} nats)",
                    "check that the base model loads correctly: opdcl chat RUN",
                )
        return kl

    def _score(self, kl: dict[str, float]) -> float:
        """Return what the kept adapter has least of.

        Recovery without domain steps leaves the domain by design, so there the general stream alone counts.
        """
        return kl["general_kl"] if self.config.method == "general" else kl_score(kl)

    def _warm_start(self) -> None:
        """Take tuned's KL as the mark to beat and base's as the other end, then shrink the student to where it is to start from."""
        backbone, alpha = self.trainer.backbone, self.config.warm_start
        with backbone.scaled(0.0):
            base = self.held_out_kl()
        tuned = start = self.held_out_kl(overlap=True)
        if alpha < 1:
            backbone.shrink(alpha)
            for teacher in self.trainer.teachers.values():
                teacher.on_start()
            start = self.held_out_kl()
        self._keep_if_best(0, self._score(start))
        self.callback.write(
            {
                "step": 0,
                "validation": {**tuned, "best": True},
                "base": base,
                "warm_start": {"alpha": alpha, **start},
            }
        )
        scaled = f"; starting from the adapter times {alpha:g}: {describe_kl(start)}" if alpha < 1 else ""
        self.callback.report.note(f"step 0: held-out {describe_kl(tuned)}{scaled}")

    def _measure(self, step: int) -> None:
        kl = self.held_out_kl(overlap=True)
        best = self._keep_if_best(step, self._score(kl))
        began = next(r for r in read_jsonl(self.out.metrics) if r["step"] == 0)
        whole = {"general_kl": began["validation"], "domain_kl": began["base"]}
        shares = {SHARES[k]: 1 - kl[k] / whole[k][k] for k in stream_kl(kl) if whole[k][k] > KL_NOISE}
        row = {"step": step, "validation": {**kl, **shares, "best": best}}
        if row not in read_jsonl(self.out.metrics):
            self.callback.write(row)
        self.callback.report.note(
            f"step {step}: held-out {describe_kl(kl | shares)}{' (best so far)' if best else ''}"
        )
        if self.config.health.watch and (
            why := drifted(began["validation"], kl, self._score, self.config.health)
        ):
            raise halted(step, why, "lower recover.learning_rate", self.out)

    def _enough(self, step: int, measured: bool) -> str:
        """Say why recovery may end after this step, which may have been `measured`, or return nothing."""
        until = self.config.until
        done = sum(s.keep for s in self.trainer.steps[:step])
        if until.rollouts and done >= until.rollouts:
            return f"{done} completions were graded"
        if not measured:
            return ""
        later = [
            row["validation"] for row in read_jsonl(self.out.metrics) if row["step"] and "validation" in row
        ]
        if not later:
            return ""
        gone, kept = later[-1].get("general_gone", 0.0), later[-1].get("domain_kept", 1.0)
        if until.retention and gone >= until.retention and kept >= until.domain_floor:
            return f"{gone:.0%} of the general KL is gone, and {kept:.0%} of the domain is kept"
        since = next((i for i, kl in enumerate(reversed(later)) if kl["best"]), len(later))
        return (
            f"no better adapter in {since} validations" if until.patience and since >= until.patience else ""
        )

    def _keep_if_best(self, step: int, score: float) -> bool:
        """Keep the adapter if no earlier step was better, or if the last one measured is wanted.

        Judged by the metrics, which a resumed run has cut back to its checkpoint, and not by the adapter that lies there,
        which may be of a later step: so a resumed run decides as the uninterrupted one does.
        """
        rows = [row for row in read_jsonl(self.out.metrics) if "validation" in row and row["step"] < step]
        best = self.config.keep == "last" or all(
            score < self._score(row.get("warm_start", row["validation"])) for row in rows
        )
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
            {
                "step": step,
                "prompt": decode(r.prompt_ids),
                "completion": decode(r.completion_ids, skip_special_tokens=True),
            }
            for r in rollouts[:SAMPLES_KEPT]
        ]
        write_atomic(self.out.samples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def stream_kl(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name in SHARES}


def kl_score(kl: dict[str, float]) -> float:
    """Return held-out KL, both streams counting alike."""
    return sum(stream_kl(kl).values())


def describe_kl(kl: dict[str, float]) -> str:
    shares = {
        key: f" ({kl[share]:.0%} {share.split('_')[1]})" for key, share in SHARES.items() if share in kl
    }
    return ", ".join(
        f"{key.removesuffix('_kl')} KL {value:.3f}{shares.get(key, '')}"
        for key, value in stream_kl(kl).items()
    )
