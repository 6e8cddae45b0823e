"""Grade completions in micro-batches: teacher distributions, token losses, and sums over all workers."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.distill.losses import TokenLosses, missed_ends, token_losses, top_k_overlap
from opdcl.distill.schedule import Stream
from opdcl.distill.teachers import AnyTeacher, Teacher, sequence
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates, TeacherDistribution, join
from opdcl.model.forward import answer_ids, answer_states
from opdcl.model.llama_pass import packs
from opdcl.model.memory import is_out_of_memory, release
from opdcl.sampling.rollout import MISMATCH_RATIO, Rollout

logger = logging.getLogger(__name__)

# Sums by name over all completion tokens: `loss`, `kl`, `tokens`, ...; 0 where nothing was added.
Sums = dict[str, float]


@dataclass(frozen=True)
class MicroBatch:
    """Completions that go through the models together, and their one teacher: `route` is its name, or "".

    `positions` are their indices in the graded list. A `filler` keeps workers in step where the base is
    sharded, and counts for nothing.
    """

    route: str
    teacher: Teacher
    positions: list[int]
    rollouts: list[Rollout]
    filler: bool = False

    @property
    def lengths(self) -> list[int]:
        return [len(r.completion_ids) for r in self.rollouts]


class Grader:
    """Compare the student with each completion's teacher, token by token.

    Each worker grades its share. Sums are those of all workers; a gradient is the worker's own part.
    """

    def __init__(self, backbone: Backbone, config: RecoverConfig, teachers: dict[Stream, AnyTeacher]):
        self.backbone, self.config, self.teachers = backbone, config, teachers
        self.micro_batch_tokens = int(config.micro_batch_tokens)

    @property
    def single_teachers(self) -> list[Teacher]:
        return [single for teacher in self.teachers.values() for single in teacher.members]

    def learn(self, rollouts: list[Rollout], stream: Stream, fresh: bool, reverse: float = 0.0) -> Sums:
        """Accumulate the gradient of the weighted mean loss per token; return the sums.

        `reverse` is the share of reverse KL in a loss of forward KL. When memory runs out, the step starts
        over in micro-batches of half the size. If the rollouts are `fresh` (the current weights sampled every
        token), a token whose probability differs between sampler and trainer by more than `MISMATCH_RATIO` is
        left out and counted as `mismatched`.

        Raises:
            OpdclError: One sequence alone does not fit into memory.
        """
        while True:
            try:
                return self._accumulate(rollouts, stream, fresh, reverse)
            except (RuntimeError, MemoryError) as fault:
                # Workers with a sharded base run in step, so none may start over alone.
                if not is_out_of_memory(fault) or parallel.sharded():
                    raise
            self.backbone.peft.zero_grad()
            self._halve_micro_batches(rollouts)

    def _accumulate(self, rollouts: list[Rollout], stream: Stream, fresh: bool, reverse: float) -> Sums:
        total = _count_tokens(rollouts)
        sums: dict[str, Any] = defaultdict(float)
        for batch in self._micro_batches(rollouts, self.teachers[stream]):
            teacher = batch.teacher.distribution(batch.rollouts)
            _, losses, sampler_N = self._compare(batch, teacher, True, reverse)
            weight_N = self._weights(batch, total / len(rollouts))
            if fresh and len(sampler_N):
                mismatch_N = (losses.logprob - sampler_N).abs() > math.log(MISMATCH_RATIO)
                weight_N = weight_N * ~mismatch_N
                sums["mismatched"] += 0 if batch.filler else mismatch_N.sum()
            loss = (losses.loss * weight_N).sum()
            sums["loss"] += loss.detach().double()
            (loss / total).backward()
            _add(sums, batch, losses)
        return defaultdict(float, parallel.sum_over_workers(_read(sums)), tokens=total)

    @torch.no_grad()
    def measure(
        self,
        rollouts: list[Rollout],
        stream: Stream,
        distributions: Mapping[int, TeacherDistribution] | None = None,
        agreement: bool = False,
    ) -> Sums:
        """Return the sums without learning; with `agreement`, also of `top_k_overlap` and `missed_ends`.

        To grade the same completions repeatedly, pass what the method `distributions` returned for them.
        """
        sums: dict[str, Any] = defaultdict(float)
        for batch in self._micro_batches(rollouts, self.teachers[stream]):
            if distributions is None:
                teacher = batch.teacher.distribution(batch.rollouts)
            else:
                teacher = join([distributions[i] for i in batch.positions])
            student, losses, _ = self._compare(batch, teacher)
            if agreement and not batch.filler:
                sums["overlap"] += top_k_overlap(student, teacher).sum().double()
                ends_N, missed_N = missed_ends(student, teacher, self.backbone.eos_ids)
                sums["ends"] += ends_N.sum().double()
                sums["missed_ends"] += missed_N.sum().double()
            _add(sums, batch, losses)
        return defaultdict(float, parallel.sum_over_workers(_read(sums)), tokens=_count_tokens(rollouts))

    def distributions(self, rollouts: list[Rollout], teacher: AnyTeacher) -> dict[int, TeacherDistribution]:
        """Return the teacher's distributions over the completions of this worker's share, by position."""
        by_position: dict[int, TeacherDistribution] = {}
        for batch in self._micro_batches(rollouts, teacher):
            parts = batch.teacher.distribution(batch.rollouts).split(batch.lengths)
            by_position |= dict(zip(batch.positions, parts, strict=True))
        return by_position

    def _compare(
        self, batch: MicroBatch, teacher: TeacherDistribution, learn: bool = False, reverse: float = 0.0
    ) -> tuple[HiddenStates, TokenLosses, torch.Tensor]:
        """Return the student's states, the token losses, and the sampler's log-probabilities."""
        sequences = [sequence(r.prompt_ids, r.completion_ids) for r in batch.rollouts]
        student = HiddenStates(answer_states(self.backbone.causal_lm, sequences), self.backbone.head_VH)
        device = student.states_NH.device
        sampler_N = torch.tensor([x for r in batch.rollouts for x in r.logprobs], device=device)
        advantage_N = None
        if learn and batch.rollouts[0].reward is not None:
            advantages = [r.advantage for r in batch.rollouts for _ in r.completion_ids]
            advantage_N = sampler_N.new_tensor(advantages)
        losses = token_losses(
            student.states_NH,
            student.head_VH,
            teacher,
            answer_ids(sequences, device),
            sampler_N,
            self.config.on_policy.temperature,
            self.config.loss,
            reward=self.config.reward,
            advantage_N=advantage_N,
            reverse=reverse,
        )
        return student, losses, sampler_N

    def _weights(self, batch: MicroBatch, mean_length: float) -> torch.Tensor:
        """Return each token's weight, `(N,)`; over a step they have the mean 1."""
        weights = [
            token_weights(length, rollout.finished, self.config.weighting, mean_length)
            for rollout, length in zip(batch.rollouts, batch.lengths, strict=True)
        ]
        return torch.cat(weights).to(self.backbone.device) * (not batch.filler)

    def _micro_batches(self, rollouts: list[Rollout], teacher: AnyTeacher) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches; if the base is sharded, then fillers up to the busiest's."""
        # A CPU's batches are cut as if rows were padded: so they attend with rows of their own length.
        padded = self.backbone.device.type == "cpu" or not packs(self.backbone.causal_lm, 0)
        for route, single, positions in teacher.split([r.prompt for r in rollouts]):
            # Dealt out longest first, so that all shares cost about the same.
            ordered = sorted(positions, key=lambda i: rollouts[i].length, reverse=True)
            shares = []
            for worker in range(parallel.worker_count()):
                lengths = {i: rollouts[i].length for i in parallel.my_share(ordered, worker)}
                shares.append(micro_batches(lengths, self.micro_batch_tokens, padded))
            own = shares[parallel.rank()]
            for batch in own:
                yield MicroBatch(route, single, batch, [rollouts[i] for i in batch])
            for _ in range(max(map(len, shares)) - len(own) if parallel.sharded() else 0):
                yield MicroBatch(route, single, ordered[-1:], [rollouts[ordered[-1]]], filler=True)

    def _halve_micro_batches(self, rollouts: list[Rollout]) -> None:
        if self.micro_batch_tokens <= max(r.length for r in rollouts):
            hint = "lower recover.max_new_tokens, or choose a smaller model"
            raise OpdclError("one sequence alone does not fit into memory", hint)
        self.micro_batch_tokens //= 2
        release()
        logger.warning("out of memory: continuing with micro-batches of %d tokens", self.micro_batch_tokens)


def token_weights(length: int, finished: bool, weighting: str, mean_length: float) -> torch.Tensor:
    """Return how much each token of a completion counts in the loss of its step, `(length,)`.

    With `tokens` they add up to `length`, otherwise to the mean length of the step's completions. Those of
    `edges` fall like 1 + 4 exp(-i / 4), because the first tokens decide what kind of answer follows, and are
    few (arXiv 2605.27028). The token that ends a finished answer gains 4 as well.
    """
    if weighting == "tokens":
        return torch.ones(length)
    weight = torch.ones(length)
    if weighting == "edges":
        weight += 4 * torch.exp(-torch.arange(length) / 4)
        weight[-1] += 4 * finished
    return weight * (mean_length / weight.sum())


def kl_by_route(sums: Sums) -> dict[str, float]:
    """Return the KL per token to each named teacher."""
    return {key: sums[key] / sums[f"tokens/{key[3:]}"] for key in sums if key.startswith("kl/")}


def micro_batches(lengths: Mapping[int, int], tokens: int, padded: bool = True) -> list[list[int]]:
    """Split sequences, given as position -> length, into batches of at most `tokens` ids, padding included.

    If they are padded, those of similar length share a batch, of which none is more than half padding.
    """
    batches: list[list[int]] = []
    width = held = 0
    for i in sorted(lengths, key=lengths.__getitem__, reverse=True):
        full = held + (width if padded else lengths[i]) > tokens
        if not batches or full or (padded and 2 * lengths[i] < width):
            batches.append([])
            width, held = lengths[i], 0
        batches[-1].append(i)
        held += width if padded else lengths[i]
    return batches


def _add(sums: dict[str, Any], batch: MicroBatch, losses: TokenLosses) -> None:
    """Add a micro-batch's KL and entropies to the sums."""
    if batch.filler:
        return
    for name in ("kl", "student_entropy", "teacher_entropy"):
        sums[name] += getattr(losses, name).sum().double()
    if batch.route:
        sums[f"kl/{batch.route}"] += losses.kl.sum().double()
        sums[f"tokens/{batch.route}"] += len(losses.kl)


def _read(sums: dict[str, Any]) -> dict[str, float]:
    """Return the sums as numbers. Only here does the host wait for the device, once for all micro-batches."""
    return {name: float(value) for name, value in sums.items()}


def _count_tokens(rollouts: list[Rollout]) -> int:
    return sum(len(r.completion_ids) for r in rollouts)
