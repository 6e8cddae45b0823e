"""Grade completions in micro-batches: teacher distributions, token losses, and sums over all workers."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates, TeacherDistribution, join
from opdcl.model.forward import answer_ids, answer_states
from opdcl.model.llama_pass import packs
from opdcl.model.memory import is_out_of_memory, release
from opdcl.sampling.rollout import MISMATCH_RATIO
from opdcl.train.losses import TokenLosses, missed_ends, token_losses
from opdcl.train.teachers import Teacher, Teachers, by_teacher
from opdcl.training import Clock
from opdcl.types import Example, Rollout, Stream

logger = logging.getLogger(__name__)

# Bytes of teachers' states that are kept for completions that come again.
KEPT_STATES = 2**28

# Sums by name over all completion tokens: `loss`, `kl`, `tokens`, ...; 0 where nothing was added.
Sums = dict[str, float]

Count = Callable[[list[int]], None]


@dataclass(frozen=True)
class MicroBatch:
    """Completions that go through the models together, and the name of their one teacher, or "".

    `positions` are their indices in the graded list. A `filler` keeps workers in step where the base is
    sharded, and counts for nothing.
    """

    route: str
    positions: list[int]
    rollouts: list[Rollout]
    filler: bool = False

    @property
    def examples(self) -> list[Example]:
        return [r.example for r in self.rollouts]

    @property
    def lengths(self) -> list[int]:
        return [len(r.completion_ids) for r in self.rollouts]


@dataclass(frozen=True)
class Graded:
    """Completions, and by position their teachers' distributions over those of this worker's share."""

    rollouts: list[Rollout]
    distributions: dict[int, TeacherDistribution]


class Grader:
    """Compare the student with each completion's teacher, token by token.

    Each worker grades its share. Sums are those of all workers; a gradient is the worker's own part.
    """

    def __init__(
        self,
        backbone: Backbone,
        config: RecoverConfig,
        teachers: Mapping[Stream, Teachers],
        clock: Clock | None = None,
    ):
        self.backbone, self.config, self.teachers = backbone, config, dict(teachers)
        self.clock = clock or Clock()
        self.kept_states = 0
        """The bytes of teachers' states that completions hold."""
        self.micro_batch_tokens = int(config.micro_batch_tokens)

    @property
    def all_teachers(self) -> list[Teacher]:
        return [teacher for teachers in self.teachers.values() for teacher in teachers.values()]

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
        tokens = _count_tokens(rollouts)
        sums: dict[str, Any] = defaultdict(float)
        for batch in self._micro_batches(rollouts):
            with self.clock.part("teacher"):
                teacher = self._teach(batch, stream)
            with self.clock.part("student"):
                sampler_N = self._sampler(batch)
                losses = self._losses(batch, self._student(batch), teacher, sampler_N, reverse)
                weight_N = self._weights(batch, tokens / len(rollouts))
                if fresh and len(sampler_N):
                    mismatch_N = (losses.logprob - sampler_N).abs() > math.log(MISMATCH_RATIO)
                    weight_N = weight_N * ~mismatch_N
                    sums["mismatched"] += 0 if batch.filler else mismatch_N.sum()
                loss = (losses.loss * weight_N).sum()
                sums["loss"] += loss.detach().double()
                (loss / tokens).backward()
                _add(sums, batch, losses)
        return _over_workers(sums, tokens)

    def _teach(self, batch: MicroBatch, stream: Stream) -> TeacherDistribution:
        """Return the teacher's distributions; of texts that come again, its states are kept."""
        teacher = self.teachers[stream][batch.route]
        if not any(r.recurs for r in batch.rollouts) or parallel.worker_count() > 1:
            return teacher.distribution(batch.rollouts)
        unread = [r for r in batch.rollouts if r.states_NH is None]
        found: dict[int, TeacherDistribution] = {}
        if unread:
            whole = teacher.distribution(unread)
            lengths = [len(r.completion_ids) for r in unread]
            read: Sequence[TeacherDistribution] = whole.split(lengths)
            found = {id(r): distribution for r, distribution in zip(unread, read, strict=True)}
            is_all = len(unread) == len(batch.rollouts)
            self._keep(unread, found)
            if is_all:
                return whole
        parts = []
        for r in batch.rollouts:
            known = found.get(id(r))
            parts.append(known or HiddenStates(r.states_NH, teacher.head_VH))
        return join(parts)

    def _keep(self, rollouts: list[Rollout], found: dict[int, TeacherDistribution]) -> None:
        """Keep the states over completions as long as all kept ones fit into `KEPT_STATES`."""
        for r in rollouts:
            distribution = found[id(r)]
            if r.recurs and isinstance(distribution, HiddenStates) and r.states_NH is None:
                size = distribution.states_NH.nbytes
                if self.kept_states + size <= KEPT_STATES:
                    self.kept_states += size
                    r.states_NH = distribution.states_NH.clone()

    def grade(self, rollouts: list[Rollout], teachers: Teachers, count: Count | None = None) -> Graded:
        """Return completions with their teachers' distributions, to be measured any number of times.

        `count` receives the positions of the completions that were graded since its last call.
        """
        distributions: dict[int, TeacherDistribution] = {}
        for batch in self._micro_batches(rollouts):
            parts = teachers[batch.route].distribution(batch.rollouts).split(batch.lengths)
            distributions |= dict(zip(batch.positions, parts, strict=True))
            if count and not batch.filler:
                count(batch.positions)
        return Graded(rollouts, distributions)

    @torch.no_grad()
    def measure(self, graded: Graded, endings: bool = False, count: Count | None = None) -> Sums:
        """Return the sums without learning, with each answer's mean KL; with `endings`, also `missed_ends`.

        `count` is that of `grade`.
        """
        sums: dict[str, Any] = defaultdict(float)
        for batch in self._micro_batches(graded.rollouts):
            teacher = join([graded.distributions[i] for i in batch.positions])
            student = self._student(batch)
            losses = self._losses(batch, student, teacher, self._sampler(batch))
            _add(sums, batch, losses)
            if not batch.filler:
                answers = losses.kl.split(batch.lengths)
                sums["answer_kl"] += sum(answer.mean().double() for answer in answers)
            if endings and not batch.filler:
                ends_N, missed_N = missed_ends(student, teacher, self.backbone.eos_ids)
                sums["ends"] += ends_N.sum().double()
                sums["missed_ends"] += missed_N.sum().double()
            if count and not batch.filler:
                count(batch.positions)
        return _over_workers(sums, _count_tokens(graded.rollouts))

    def _student(self, batch: MicroBatch) -> HiddenStates:
        states_NH = answer_states(self.backbone.causal_lm, batch.examples)
        return HiddenStates(states_NH, self.backbone.head_VH)

    def _sampler(self, batch: MicroBatch) -> torch.Tensor:
        """Return the sampler's log-probabilities, `(N,)`."""
        logprobs = [logprob for r in batch.rollouts for logprob in r.logprobs]
        return torch.tensor(logprobs, device=self.backbone.device)

    def _losses(
        self,
        batch: MicroBatch,
        student: HiddenStates,
        teacher: TeacherDistribution,
        sampler_N: torch.Tensor,
        reverse: float = 0.0,
    ) -> TokenLosses:
        advantage_N = None
        if batch.rollouts[0].reward is not None:
            advantages = [r.advantage for r in batch.rollouts for _ in r.completion_ids]
            advantage_N = sampler_N.new_tensor(advantages)
        return token_losses(
            student.states_NH,
            student.head_VH,
            teacher,
            answer_ids(batch.examples, student.states_NH.device),
            sampler_N,
            self.config.loss,
            reward=self.config.reward,
            advantage_N=advantage_N,
            reverse=reverse,
        )

    def _weights(self, batch: MicroBatch, mean_length: float) -> torch.Tensor:
        """Return each token's weight, `(N,)`; over a step they have the mean 1."""
        weighting = self.config.weighting
        weights = [
            token_weights(len(r.completion_ids), r.finished, weighting, mean_length) for r in batch.rollouts
        ]
        return torch.cat(weights).to(self.backbone.device) * (not batch.filler)

    def _micro_batches(self, rollouts: list[Rollout]) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches; if the base is sharded, then fillers up to the busiest's."""
        # A CPU's batches are cut as if rows were padded: so they attend with rows of their own length.
        padded = self.backbone.device.type == "cpu" or not packs(self.backbone.causal_lm, 0)
        for route, positions in by_teacher([r.prompt for r in rollouts]).items():
            # Dealt out longest first, so that all shares cost about the same.
            ordered = sorted(positions, key=lambda i: rollouts[i].length, reverse=True)
            shares = []
            for worker in range(parallel.worker_count()):
                lengths = {i: rollouts[i].length for i in parallel.my_share(ordered, worker)}
                shares.append(micro_batches(lengths, self.micro_batch_tokens, padded))
            own = shares[parallel.rank()]
            for batch in own:
                yield MicroBatch(route, batch, [rollouts[i] for i in batch])
            if parallel.sharded():
                last = ordered[-1]
                for _ in range(max(map(len, shares)) - len(own)):
                    yield MicroBatch(route, [last], [rollouts[last]], filler=True)

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
    weight = torch.ones(length)
    if weighting == "tokens":
        return weight
    if weighting == "edges":
        weight += 4 * torch.exp(-torch.arange(length) / 4)
        weight[-1] += 4 * finished
    return weight * (mean_length / weight.sum())


def kl_by_route(sums: Sums) -> dict[str, float]:
    """Return the KL per token to each named teacher."""
    routes = [key.removeprefix("kl/") for key in sums if key.startswith("kl/")]
    return {f"kl/{route}": sums[f"kl/{route}"] / sums[f"tokens/{route}"] for route in routes}


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
    sums["kl"] += losses.kl.sum().double()
    sums["student_entropy"] += losses.student_entropy.sum().double()
    sums["teacher_entropy"] += losses.teacher_entropy.sum().double()
    if batch.route:
        sums[f"kl/{batch.route}"] += losses.kl.sum().double()
        sums[f"tokens/{batch.route}"] += len(losses.kl)


def _over_workers(sums: Sums, tokens: int) -> Sums:
    """Return the sums of all workers as numbers."""
    own = {name: float(value) for name, value in sums.items()}
    return defaultdict(float, parallel.sum_over_workers(own), tokens=tokens)


def _count_tokens(rollouts: list[Rollout]) -> int:
    return sum(len(r.completion_ids) for r in rollouts)
