"""The step of both trainings: micro-batches, the loss at each token of their texts, sums over all workers.

A fine-tune's rows have no teacher and are imitated; all other texts are scored by theirs, token by token.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from opdcl import parallel
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates, TeacherDistribution, join
from opdcl.model.forward import Pass, answer_ids, answer_states, pick_pass
from opdcl.model.hardware import is_out_of_memory, release
from opdcl.sampling.sample import MISMATCH_RATIO
from opdcl.train.loop import Clock, is_finite
from opdcl.train.losses import ScoredTokens, TokenLosses, imitation_losses, missed_ends, token_losses
from opdcl.train.teachers import Teacher, Teachers, by_teacher
from opdcl.words import Batch, Example, Loss, Rollout, StreamName, Weighting

logger = logging.getLogger(__name__)

# The file of a checkpoint with the teachers' states over examples that come again.
STATES = "states.safetensors"

# Bytes of teachers' states that are kept: those of some ten thousand rows of a small model; fewer where each
# checkpoint holds them.
ROOM_IN_MEMORY, ROOM_IN_CHECKPOINTS = 2**30, 2**28

# Sums by name over all learned tokens: `loss`, `kl`, `tokens`, ...; 0 where nothing was added.
Sums = dict[str, float]

Count = Callable[[list[int]], None]


@dataclass(frozen=True)
class MicroBatch:
    """Examples that go through the models together, and the name of their one teacher, or "".

    `positions` are their indices in the step's list. A `filler` keeps workers in step where the base is
    sharded, and counts for nothing.
    """

    teacher: str
    positions: list[int]
    examples: list[Example]
    filler: bool = False

    @property
    def rollouts(self) -> list[Rollout]:
        return [example.rollout for example in self.examples if example.rollout]

    @property
    def lengths(self) -> list[int]:
        return [example.answer_length for example in self.examples]


@dataclass(frozen=True)
class Scored:
    """Completions, and by position their teachers' distributions over those of this worker's share."""

    examples: list[Example]
    loss: Loss
    distributions: dict[int, TeacherDistribution]


class Learner:
    """Compare the student with each text's teacher, token by token, and let it learn.

    Each worker takes its share. Sums are those of all workers.
    """

    def __init__(
        self,
        backbone: Backbone,
        teachers: Mapping[StreamName, Teachers],
        too_long: str,
        micro_batch_tokens: int | None = None,
        room: int = 0,
    ):
        """Take the teachers of the streams that have some.

        `too_long` is the setting to lower if one text does not fit into memory. Without a number of
        `micro_batch_tokens` a worker's share of a step is one micro-batch, as long as memory suffices.
        `room` bounds the bytes of teachers' states that are kept for examples that come again.
        """
        self.backbone, self.teachers, self.too_long = backbone, dict(teachers), too_long
        self.micro_batch_tokens, self.clock = micro_batch_tokens, Clock()
        self.room, self.kept = room, dict[str, torch.Tensor]()
        """By place, a frozen teacher's last hidden states before each learned token, `(N, H)`."""

    @property
    def all_teachers(self) -> list[Teacher]:
        return [teacher for teachers in self.teachers.values() for teacher in teachers.values()]

    def learn(self, batch: Batch) -> Sums | None:
        """Accumulate the gradient of the weighted mean loss per token; return the sums.

        When memory runs out, the step starts over in micro-batches of half the size. Of a `fresh` batch, a
        token whose probability differs between sampler and trainer by more than `MISMATCH_RATIO` is left out
        and counted as `mismatched`. There are neither sums nor a gradient if one of them is not finite.

        Raises:
            OpdclError: One text alone does not fit into memory.
        """
        model = self.backbone.peft
        # Without dropout: with it, an adapter without effect would differ from base, and the model that is
        # scored would not be the one that wrote the completions.
        model.train(not batch.stream.teacher)
        while True:
            try:
                sums = self._accumulate(batch)
                break
            except (RuntimeError, MemoryError) as fault:
                # Workers with a sharded base run in step, so none may start over alone.
                if not is_out_of_memory(fault) or parallel.sharded():
                    raise
            model.zero_grad()
            self._halve_micro_batches(batch.examples)
        parallel.add_gradients(model)
        if is_finite(model, mean_loss(sums).to(self.backbone.device)):
            return sums
        model.zero_grad()
        return None

    def _accumulate(self, batch: Batch) -> Sums:
        stream, tokens = batch.stream, _count_tokens(batch.examples)
        mean_length = tokens / len(batch.examples)
        loss = stream.loss if batch.author == "student" else replace(stream.loss, reverse=0.0)
        sums: dict[str, Any] = defaultdict(float)
        for part in self._micro_batches(batch.examples):
            if stream.teacher:
                with self.clock.part("teacher"):
                    teacher = self._teach(part, self.teachers[stream.name][part.teacher])
            with self.clock.part("student"):
                student = self._student(part)
                if stream.teacher:
                    losses = self._losses(part, student, teacher, loss)
                else:
                    losses = imitation_losses(student, answer_ids(part.examples, self.backbone.device))
                weight_N = self._weights(part, loss.weighting, mean_length)
                if batch.fresh and part.rollouts[0].logprobs:
                    mismatch_N = (losses.logprob - self._sampler(part)).abs() > math.log(MISMATCH_RATIO)
                    weight_N = weight_N * ~mismatch_N
                    sums["mismatched"] += 0 if part.filler else mismatch_N.sum()
                total = (losses.loss * weight_N).sum()
                (total / tokens).backward()
                sums["loss"] += total.detach().double()
                if not part.filler:
                    _add(sums, part, losses)
        return _over_workers(sums, tokens)

    def _teach(self, batch: MicroBatch, teacher: Teacher) -> TeacherDistribution:
        """Return the teacher's distributions; of examples that come again, its states are kept."""
        if not any(example.place for example in batch.examples) or parallel.worker_count() > 1:
            return teacher.distribution(batch.rollouts)
        unread = [i for i, example in enumerate(batch.examples) if example.place not in self.kept]
        found: dict[int, TeacherDistribution] = {}
        if unread:
            whole = teacher.distribution([batch.rollouts[i] for i in unread])
            found = dict(zip(unread, whole.split([batch.lengths[i] for i in unread]), strict=True))
            for i, part in found.items():
                if batch.examples[i].place and isinstance(part, HiddenStates):
                    self.keep(batch.examples[i].place, part.states_NH)
            if len(unread) == len(batch.examples):
                return whole
        for i, example in enumerate(batch.examples):
            if i not in found:
                found[i] = HiddenStates(self.kept[example.place], teacher.head_VH)
        return join([found[i] for i in range(len(batch.examples))])

    def keep(self, place: str, states_NH: torch.Tensor) -> None:
        """Keep a teacher's states over an example, if there is room."""
        if place not in self.kept and states_NH.nbytes <= self.room:
            self.room -= states_NH.nbytes
            self.kept[place] = states_NH.clone()

    def save(self, folder: Path) -> None:
        """Write the kept states into a checkpoint."""
        save_file(self.kept, folder / STATES)

    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote."""
        self.kept = load_file(folder / STATES, device=str(self.backbone.device))
        self.room -= sum(states_NH.nbytes for states_NH in self.kept.values())

    def score(
        self, rollouts: list[Rollout], loss: Loss, teachers: Teachers, count: Count | None = None
    ) -> Scored:
        """Return completions with their teachers' distributions, to be measured any number of times.

        `loss` is that of their stream. `count` receives the positions of the completions that were scored
        since its last call.
        """
        examples = [rollout.to_example() for rollout in rollouts]
        distributions: dict[int, TeacherDistribution] = {}
        for batch in self._micro_batches(examples):
            parts = teachers[batch.teacher].distribution(batch.rollouts).split(batch.lengths)
            distributions |= dict(zip(batch.positions, parts, strict=True))
            if count and not batch.filler:
                count(batch.positions)
        return Scored(examples, replace(loss, reverse=0.0, reward_weight=None), distributions)

    @torch.no_grad()
    def measure(self, scored: Scored, endings: bool = False, count: Count | None = None) -> Sums:
        """Return the sums without learning; with `endings`, also `missed_ends`.

        `count` is that of `score`.
        """
        sums: dict[str, Any] = defaultdict(float)
        for batch in self._micro_batches(scored.examples):
            teacher = join([scored.distributions[i] for i in batch.positions])
            student = self._student(batch)
            losses = self._losses(batch, student, teacher, scored.loss)
            if batch.filler:
                continue
            _add(sums, batch, losses)
            sums["answer_kl"] += sum(answer.mean().double() for answer in losses.kl.split(batch.lengths))
            if endings:
                ends_N, missed_N = missed_ends(student, teacher, self.backbone.eos_ids)
                sums["ends"] += ends_N.sum().double()
                sums["missed_ends"] += missed_N.sum().double()
            if count:
                count(batch.positions)
        return _over_workers(sums, _count_tokens(scored.examples))

    def _student(self, batch: MicroBatch) -> HiddenStates:
        states_NH = answer_states(self.backbone.causal_lm, batch.examples)
        return HiddenStates(states_NH, self.backbone.head_VH)

    def _sampler(self, batch: MicroBatch) -> torch.Tensor:
        """Return the sampler's log-probabilities, `(N,)`."""
        logprobs = [logprob for rollout in batch.rollouts for logprob in rollout.logprobs]
        return torch.tensor(logprobs, device=self.backbone.device)

    def _losses(
        self, batch: MicroBatch, student: HiddenStates, teacher: TeacherDistribution, loss: Loss
    ) -> TokenLosses:
        sampler_N = self._sampler(batch)
        advantages = [rollout.advantage for rollout in batch.rollouts for _ in rollout.completion_ids]
        token_N = answer_ids(batch.examples, self.backbone.device)
        tokens = ScoredTokens(token_N, sampler_N, sampler_N.new_tensor(advantages))
        return token_losses(student, teacher, tokens, loss)

    def _weights(self, batch: MicroBatch, weighting: Weighting, mean_length: float) -> torch.Tensor:
        """Return each token's weight, `(N,)`; over a step they have the mean 1."""
        weights = []
        for example in batch.examples:
            finished = example.rollout is None or example.rollout.finished
            weights.append(token_weights(example.answer_length, finished, weighting, mean_length))
        return torch.cat(weights).to(self.backbone.device) * (not batch.filler)

    def _micro_batches(self, examples: list[Example]) -> Iterator[MicroBatch]:
        """Yield this worker's micro-batches; if the base is sharded, then fillers up to the busiest's."""
        # A CPU's batches are cut as if rows were padded: so they attend with rows of their own length.
        padded = pick_pass(self.backbone.causal_lm) != Pass.IN_ONE_KERNEL
        for teacher, ordered in by_teacher(example.teacher for example in examples).items():
            if self.micro_batch_tokens:
                # Dealt out longest first, so that all shares cost about the same.
                ordered.sort(key=lambda i: examples[i].length, reverse=True)
            shares = []
            for worker in range(parallel.worker_count()):
                lengths = {i: examples[i].length for i in parallel.my_share(ordered, worker)}
                shares.append(micro_batches(lengths, self.micro_batch_tokens, padded))
            own = shares[parallel.rank()]
            for batch in own:
                yield MicroBatch(teacher, batch, [examples[i] for i in batch])
            if parallel.sharded():
                last = ordered[-1]
                for _ in range(max(map(len, shares)) - len(own)):
                    yield MicroBatch(teacher, [last], [examples[last]], filler=True)

    def _halve_micro_batches(self, examples: list[Example]) -> None:
        lengths = [example.length for example in examples]
        self.micro_batch_tokens = (self.micro_batch_tokens or sum(lengths)) // 2
        if 2 * self.micro_batch_tokens <= max(lengths):
            hint = f"lower {self.too_long}, or choose a smaller model"
            raise OpdclError("one sequence alone does not fit into memory", hint)
        release()
        logger.warning("out of memory: continuing with micro-batches of %d tokens", self.micro_batch_tokens)


def mean_loss(sums: Sums) -> torch.Tensor:
    """Return a step's loss per token."""
    return torch.tensor(sums["loss"] / sums["tokens"])


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


def kl_by_teacher(sums: Sums) -> dict[str, float]:
    """Return the KL per token to each named teacher."""
    teachers = [key.removeprefix("kl/") for key in sums if key.startswith("kl/")]
    return {teacher: sums[f"kl/{teacher}"] / sums[f"tokens/{teacher}"] for teacher in teachers}


def micro_batches(lengths: Mapping[int, int], tokens: int | None, padded: bool = True) -> list[list[int]]:
    """Split sequences, given as position -> length, into batches of at most `tokens` ids, padding included.

    If they are padded, those of similar length share a batch: no batch is more than half padding.
    Without a number of tokens all are one batch, in their order.
    """
    if tokens is None:
        return [[*lengths]] if lengths else []
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
    sums["kl"] += losses.kl.sum().double()
    sums["student_entropy"] += losses.student_entropy.sum().double()
    sums["teacher_entropy"] += losses.teacher_entropy.sum().double()
    if batch.teacher:
        sums[f"kl/{batch.teacher}"] += losses.kl.sum().double()
        sums[f"tokens/{batch.teacher}"] += len(losses.kl)


def _over_workers(sums: Sums, tokens: int) -> Sums:
    """Return the sums of all workers as numbers."""
    own = {name: float(value) for name, value in sums.items()}
    return defaultdict(float, parallel.sum_over_workers(own), tokens=tokens)


def _count_tokens(examples: list[Example]) -> int:
    return sum(example.answer_length for example in examples)
