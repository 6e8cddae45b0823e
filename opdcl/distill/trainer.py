"""RecoveryTrainer: TRL's DistillationTrainer with one resident model, alternating teachers and its own sampler."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import pvariance
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.distill.losses import group_advantages, token_logprobs, token_losses, top_k_overlap
from opdcl.distill.schedule import Step, Stream
from opdcl.distill.teachers import Routed, Teacher, sequence
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.compatibility import refuse_unsupported
from opdcl.model.distributions import Hidden, Opinion, join, shared_rows
from opdcl.model.forward import answer_ids, answer_states
from opdcl.rundir.files import write_atomic
from opdcl.sampling.rollout import Rollout, repetition
from opdcl.training import finite_or_skipped, is_out_of_memory

if TYPE_CHECKING:
    from opdcl.distill.reward import Reward


logger = logging.getLogger(__name__)

# Sequences sampled together that leave little of the hardware idle.
FULL_BATCH = 96


class RecoveryTrainer(DistillationTrainer):
    """Distil the teacher of each stream into the student, on completions that the student samples.

    What it changes in its parent: a step is one row of a schedule laid out beforehand, so that resuming needs no
    more than a step number; completions come from `opdcl.distill.rollouts`; the teacher is an adapter state of the
    student's own backbone; a step is split into micro-batches of bounded tokens, longest sequences together, and
    the loss is averaged over all tokens of the step, however it was split.
    """

    def __init__(
        self,
        backbone: Backbone,
        config: RecoverConfig,
        steps: list[Step],
        prompts: dict[Stream, list[list[int]]],
        teachers: dict[Stream, Teacher | Routed],
        args: DistillationConfig,
        callbacks: list,
        reward: Reward | None = None,
        student: Teacher | None = None,
    ):
        refuse_unsupported(backbone.causal_lm.config)
        self.teachers, self.reward, self.student = teachers, reward, student or Teacher(backbone, "student")
        self.backbone, self.recover_config, self.steps, self.prompts = backbone, config, steps, prompts
        self.micro_batch_tokens = config.micro_batch_tokens
        self._ahead: dict[int, list[Rollout]] = {}
        self._unfinished: dict[Stream, list[Rollout]] = {}
        self._fresh = False
        self.latest: dict[Stream, list[Rollout]] = {}
        super().__init__(
            model=backbone.peft,
            teacher_model=None,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["" for _ in steps], "step": list(range(len(steps)))}),
            processing_class=backbone.tokenizer,
            callbacks=callbacks,
        )

    # -- sampling ---------------------------------------------------------------------------------------------------

    def rollouts_of(self, index: int) -> list[Rollout]:
        """Return the completions of step `index`, sampling those of later steps of its kind along with them.

        What the student writes goes stale as it learns, so `sample_ahead` steps at most; a frozen teacher's answers never do.
        Where steps are sampled together anyway, the last, long completions go on with the next such steps, and are learned from then.
        """
        self._fresh = self.steps[index].on_policy and index not in self._ahead
        if index not in self._ahead:
            self._sample_from(index)
        return self._ahead.pop(index)

    def _sample_from(self, index: int) -> None:
        step, ahead = self.steps[index], self.recover_config.sample_ahead
        teacher, stream = self.teachers[step.stream], step.stream
        alike = [
            i
            for i in range(index, len(self.steps))
            if (self.steps[i].stream, self.steps[i].on_policy) == (stream, step.on_policy)
        ]
        stale = step.on_policy or teacher.is_dynamic
        same = alike[: ahead if stale else max(ahead, FULL_BATCH // len(step.prompts))]
        prompts = [self.prompts[stream][p] for i in same for p in self.steps[i].prompts]
        seed = self.recover_config.seed * 1_000_003 + index
        rewarded = self.reward and stream == "general"
        begun = self._unfinished.pop(stream, []) if step.on_policy else []
        leave = self._may_leave(same) if step.on_policy and len(same) < len(alike) and not rewarded else 0
        # A teacher far away reads each completion while the others are still being written.
        found = self.sample(
            prompts,
            stream,
            seed,
            None if step.on_policy else teacher,
            None if rewarded else teacher.prefetch,
            begun,
            leave,
        )
        if left := [r for r in found if not self._is_done(r, stream)]:
            self._unfinished[stream] = left
        begun, new = found[: len(begun)], iter(found[len(begun) :])
        for i in same:
            answers = [next(new) for _ in self.steps[i].prompts] + (begun if i == same[-1] else [])
            answers = [r for r in answers if self._is_done(r, stream)]
            if rewarded:
                answers = self._most_divided(answers, self.steps[i].keep)
            elif self.recover_config.oversample > 1:
                answers = self._largest_gap(answers, stream, self.steps[i].keep)
            self._ahead[i] = answers
        # Some tokens of these are older than the weights, so they say nothing about the sampler.
        self._fresh &= not (begun and same == [index])

    def _most_divided(self, rollouts: list[Rollout], keep: int) -> list[Rollout]:
        """Reward completions, note how each stands among those on its prompt, and return the groups that differ most.

        Where all of a group got the same there is nothing to learn from it (DAPO, arXiv 2503.14476, section 3.2).
        """
        size = self.recover_config.reward.group
        rewards = self.reward(rollouts)
        for rollout, reward, advantage in zip(
            rollouts, rewards, group_advantages(rewards, size), strict=True
        ):
            rollout.reward, rollout.advantage, rollout.step_reward = (
                reward,
                advantage,
                sum(rewards) / len(rewards),
            )
        starts = range(0, len(rollouts), size)
        chosen = sorted(starts, key=lambda start: pvariance(rewards[start : start + size]), reverse=True)[
            : keep // size
        ]
        kept = [rollout for start in sorted(chosen) for rollout in rollouts[start : start + size]]
        self.reward.demonstrate(kept)
        return kept

    def _largest_gap(self, rollouts: list[Rollout], stream: Stream, keep: int) -> list[Rollout]:
        """Return the rollouts with the largest mean |log q - log p| of their tokens, q the teacher and p the sampler."""
        if len(rollouts) <= keep:
            return rollouts
        gaps: dict[str, float] = {}
        places = {id(r): str(i) for i, r in enumerate(rollouts)}
        for _, teacher, batch, _ in self._batches(rollouts, self.teachers[stream]):
            tokens_N = torch.tensor([t for r in batch for t in r.completion_ids], device=self.backbone.device)
            opinion = self._opinion(batch, teacher)
            rows = shared_rows(self.backbone.causal_lm.get_output_embeddings().weight, opinion)
            theirs = token_logprobs(opinion, tokens_N, rows, self.recover_config.temperature)
            for rollout, q_N in zip(batch, theirs.split([len(r.completion_ids) for r in batch]), strict=True):
                gaps[places[id(rollout)]] = float((q_N - q_N.new_tensor(rollout.logprobs)).abs().mean())
        gaps = parallel.sum_over_workers(gaps)
        kept = set(sorted(places.values(), key=gaps.__getitem__, reverse=True)[:keep])
        return [r for r in rollouts if places[id(r)] in kept]

    def _may_leave(self, steps: list[int]) -> int:
        """Return how many completions of these steps may be left unfinished: a sixteenth, and never all of a step.

        0 where each step is to be strictly on-policy, where completions are chosen from, where somebody else samples, and in
        several processes, each of which would leave others behind.
        """
        config = self.recover_config
        if len(steps) == 1 or config.oversample > 1 or config.server or parallel.worker_count() > 1:
            return 0
        sizes = [len(self.steps[i].prompts) for i in steps]
        return min(sum(sizes) // 16, min(sizes) - 1)

    def _is_done(self, rollout: Rollout, stream: Stream) -> bool:
        return rollout.finished or len(rollout.completion_ids) >= self._longest(stream)

    def _longest(self, stream: Stream) -> int:
        config = self.recover_config
        return (config.domain_max_new_tokens if stream == "domain" else None) or config.max_new_tokens

    def sample(
        self,
        prompts: list[list[int]],
        stream: Stream,
        seed: int,
        teacher: Teacher | Routed | None = None,
        on_finished: Callable[[list[Rollout]], None] | None = None,
        unfinished: list[Rollout] | None = None,
        max_unfinished: int = 0,
    ) -> list[Rollout]:
        """Sample one completion per prompt from the student, or from a teacher with what it sees, with merged weights.

        What is `unfinished`, by the student alone, is gone on with, and comes first in the result.
        """
        config, longest = self.recover_config, self._longest(stream)
        if unfinished or max_unfinished:
            return self.student.write(
                prompts,
                config,
                longest,
                seed,
                on_finished,
                unfinished=unfinished or [],
                max_unfinished=max_unfinished,
            )
        found: dict[int, Rollout] = {}
        for _, author, mine in (teacher or self.student).split(prompts):
            written = author.write([prompts[i] for i in mine], config, longest, seed, on_finished)
            for i, rollout in zip(mine, written, strict=True):
                rollout.prompt_ids = prompts[i]  # what the teacher saw stays with the teacher
                found[i] = rollout
        return [found[i] for i in range(len(prompts))]

    # -- one optimizer step -----------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch):
        return generation_batch

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Sample, grade and accumulate the gradient of one scheduled step; return its mean loss per token."""
        model.train()
        index = inputs[0]["step"]
        self._stream = self.steps[index].stream
        rollouts = self.latest[self._stream] = self.rollouts_of(index)
        while True:
            try:
                sums = self.grade(rollouts, self._stream, learn=True)
                break
            except (RuntimeError, MemoryError) as fault:
                if (
                    not is_out_of_memory(fault) or parallel.sharded()
                ):  # where all run the base together, none may start anew
                    raise
                # Nothing is lost but time: the step is graded anew, from no gradient, in smaller pieces.
                model.zero_grad()
                self._halve_micro_batches(rollouts)
        parallel.add_gradients(model)
        for name, value in self._summary(rollouts, sums).items():
            self._metrics["train"][name].append(value)
        return finite_or_skipped(
            self, model, torch.tensor(sums["loss"] / sums["tokens"], device=self.args.device)
        )

    def _halve_micro_batches(self, rollouts: list[Rollout]) -> None:
        if self.micro_batch_tokens <= max(map(_length, rollouts)):
            raise OpdclError(
                "one sequence alone does not fit into memory",
                "lower recover.max_new_tokens, or choose a smaller model",
            )
        self.micro_batch_tokens //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("out of memory: going on with micro-batches of %d tokens", self.micro_batch_tokens)

    def grade(
        self,
        rollouts: list[Rollout],
        stream: Stream,
        learn: bool,
        opinions: dict[int, Opinion] | None = None,
        overlap: bool = False,
    ) -> dict[str, float]:
        """Sum KL and entropies over all completion tokens; with `learn`, accumulate the gradient of their mean.

        Each process grades its share; the sums are those of all, the gradient is its own part.

        While learning from what the student has only just sampled, a token is left out, and counted as `mismatched`,
        where sampler and trainer disagree about its probability by more than a factor of two.

        Args:
            rollouts: The completions to grade.
            stream: Whose teacher grades.
            learn: Whether to accumulate the gradient.
            opinions: What `opinions` gave for the same rollouts, where they are graded more than once.
            overlap: Whether to sum `top_k_overlap` as well.
        """
        config = self.recover_config
        total = sum(len(r.completion_ids) for r in rollouts)
        sums: dict[str, float] = defaultdict(float)
        weight_VH = self.backbone.causal_lm.get_output_embeddings().weight
        for name, judge, batch, idle in self._batches(rollouts, self.teachers[stream]):
            opinion = join([opinions[id(r)] for r in batch]) if opinions else self._opinion(batch, judge)
            with self.compute_loss_context_manager(), torch.set_grad_enabled(learn):
                student_NH = answer_states(
                    self.backbone.causal_lm,
                    sequences := [sequence(r.prompt_ids, r.completion_ids) for r in batch],
                )
                token_N = answer_ids(sequences, student_NH.device)
                sampler_N = torch.tensor([x for r in batch for x in r.logprobs], device=student_NH.device)
                rewarded = learn and batch[0].reward is not None
                advantage_N = (
                    sampler_N.new_tensor([r.advantage for r in batch for _ in r.completion_ids])
                    if rewarded
                    else None
                )
                losses = token_losses(
                    student_NH,
                    weight_VH,
                    opinion,
                    token_N,
                    sampler_N,
                    config.temperature,
                    config.loss,
                    [len(r.completion_ids) for r in batch],
                    config.reward,
                    advantage_N,
                )
            if learn:
                weight_N = _weights(batch, config.loss.unfinished, judge.skip_tokens, student_NH.device) * (
                    not idle
                )
                if self._fresh and len(sampler_N):
                    mismatch_N = (losses.logprob - sampler_N).abs() > math.log(2)
                    weight_N = weight_N * ~mismatch_N
                    sums["mismatched"] += 0 if idle else int(mismatch_N.sum())
                loss = (losses.loss * weight_N).sum()
                sums["loss"] += float(loss.detach())
                self.accelerator.backward(loss / total)
            if idle:
                continue
            for figure in ("kl", "student_entropy", "teacher_entropy"):
                sums[figure] += float(getattr(losses, figure).sum())
            if overlap:
                sums["overlap"] += float(top_k_overlap(Hidden(student_NH, weight_VH), opinion).sum())
            if name:
                sums[f"kl/{name}"] += float(losses.kl.sum())
                sums[f"tokens/{name}"] += len(token_N)
        return defaultdict(float, parallel.sum_over_workers(sums), tokens=total)

    def opinions(self, rollouts: list[Rollout], teacher: Teacher | Routed) -> dict[int, Opinion]:
        """Return what a teacher thinks of the completion tokens of each rollout in this process's share, by the rollout's `id`."""
        found = {}
        for _, judge, batch, _ in self._batches(rollouts, teacher):
            parts = self._opinion(batch, judge).split([len(r.completion_ids) for r in batch])
            found |= {id(r): part for r, part in zip(batch, parts, strict=True)}
        return found

    def _batches(
        self, rollouts: list[Rollout], teacher: Teacher | Routed
    ) -> Iterator[tuple[str, Teacher, list[Rollout], bool]]:
        """Yield this process's micro-batches, each with the one teacher that grades it, that teacher's name, and whether it is idle.

        Where the base is spread over the processes, all must run it equally often; who is done early repeats something idly.
        """
        for name, judge, theirs in teacher.split([r.prompt_ids for r in rollouts]):
            ordered = sorted(
                (rollouts[i] for i in theirs), key=_length, reverse=True
            )  # so that the shares cost alike
            cut = [
                micro_batches(parallel.my_share(ordered, i), self.micro_batch_tokens)
                for i in range(parallel.worker_count())
            ]
            mine = cut[parallel.rank()]
            for batch in mine:
                yield name, judge, batch, False
            for _ in range(max(map(len, cut)) - len(mine) if parallel.sharded() else 0):
                yield name, judge, ordered[-1:], True

    def _opinion(self, batch: list[Rollout], teacher: Teacher) -> Opinion:
        with self.compute_loss_context_manager():
            return teacher.opinion(batch)

    def _summary(self, rollouts: list[Rollout], sums: dict[str, float]) -> dict[str, float]:
        count = len(rollouts)
        mismatch = {"mismatch": sums["mismatched"] / sums["tokens"]} if self._fresh else {}
        return (
            mismatch
            | _rewards(rollouts)
            | by_teacher(sums)
            | {
                "kl": sums["kl"] / sums["tokens"],
                "student_entropy": sums["student_entropy"] / sums["tokens"],
                "teacher_entropy": sums["teacher_entropy"] / sums["tokens"],
                "mean_length": sums["tokens"] / count,
                "truncated": sum(not r.finished for r in rollouts) / count,
                "repetition": repetition([r.completion_ids for r in rollouts]),
                "adapter_norm": self.backbone.adapter_norm("student"),
                "tokens": sums["tokens"],
            }
        )

    def log(self, logs: dict, start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["stream"] = self._stream
        super().log(logs, start_time)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        # First, because the trainer writes its state file last: whoever finds that, finds a whole checkpoint.
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        kept = {"ahead": self._ahead, "unfinished": self._unfinished}
        written = {
            part: {str(key): [asdict(r) for r in rollouts] for key, rollouts in found.items()}
            for part, found in kept.items()
        }
        write_atomic(folder / "rollouts.json", json.dumps(written))
        for teacher in self.teachers.values():
            teacher.save(folder)
        super()._save_checkpoint(model, trial)

    def restore(self, checkpoint: Path) -> None:
        """Take back the teachers, and the completions that were sampled ahead, as they were when the checkpoint was written.

        Raises:
            UsageError: Another version of opdcl wrote it, which kept its completions in another way.
        """
        kept = json.loads((checkpoint / "rollouts.json").read_text())
        if set(kept) != {"ahead", "unfinished"}:
            raise UsageError(
                f"another version of opdcl wrote {checkpoint}",
                "remove that folder: the run goes on from the one before, or anew",
            )
        for teacher in self.teachers.values():
            teacher.restore(checkpoint)
        ahead, unfinished = (
            {key: [Rollout(**r) for r in rollouts] for key, rollouts in kept[part].items()}
            for part in ("ahead", "unfinished")
        )
        self._ahead, self._unfinished = (
            {int(index): rollouts for index, rollouts in ahead.items()},
            unfinished,
        )

    def create_model_card(self, *args, **kwargs) -> None:
        """Write none: the report writes the model card."""


def _rewards(rollouts: list[Rollout]) -> dict[str, float]:
    """Return the mean reward, and which share of the completions was told nothing by it because its group got all the same."""
    if rollouts[0].reward is None:
        return {}
    return {
        "reward": rollouts[0].step_reward,
        "reward_tied": sum(not r.advantage for r in rollouts) / len(rollouts),
    }


def by_teacher(sums: dict[str, float]) -> dict[str, float]:
    """Return the KL per token to each teacher that has a name."""
    return {key: sums[key] / sums[f"tokens/{key[3:]}"] for key in sums if key.startswith("kl/")}


def _weights(batch: list[Rollout], unfinished: float, skipped: int, device: torch.device) -> torch.Tensor:
    """Return the weight of each completion token, `(N,)`: none for the first `skipped`, less where the end was cut off."""
    weights = [
        (i >= skipped) * (1.0 if r.finished else unfinished)
        for r in batch
        for i in range(len(r.completion_ids))
    ]
    return torch.tensor(weights, device=device)


def micro_batches(rollouts: list[Rollout], tokens: int) -> list[list[Rollout]]:
    """Split into batches of at most `tokens` ids, padding included, sequences of like length together.

    None is more than half padding in any of them: a single long sequence has a batch of its own.
    """
    batches: list[list[Rollout]] = []
    width = 0
    for rollout in sorted(rollouts, key=_length, reverse=True):
        if not batches or (len(batches[-1]) + 1) * width > tokens or 2 * _length(rollout) < width:
            batches.append([])
            width = _length(rollout)
        batches[-1].append(rollout)
    return batches


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.completion_ids)
