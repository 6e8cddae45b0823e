"""Teachers: one interface; they differ in what they see and in whether they change during training.

| kind | the teacher is | source |
| --- | --- | --- |
| `base` | the original checkpoint: recovery | |
| `tuned` | the fine-tuned adapter: keeps the domain | |
| `adapter` | an adapter from another run: a specialist, or the result of an earlier run | |
| `live` | the student itself; useful only with a `context` | arXiv 2601.19897, 2601.20802 |
| `ema` | an exponential moving average of the student's adapter | arXiv 2601.19897 |
| `model` | another model of the same family: strong to weak | arXiv 2306.13649 |
| `remote` | a model on a server, which returns whole distributions or the top tokens | |

All but the last two, which are in `external_teachers`, are adapter states of the student's own backbone, so
they need no second model. A `context` shows the teacher what the student does not see: the answer, or a
demonstration. With the answer in its prompt, base does not penalize facts that it does not know (arXiv
2606.00147).

A prompt may name a teacher of its own, so that several specialists can teach one student.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from opdcl.config.teacher import EMA_RATE, TeacherSection
from opdcl.model.backbone import Backbone, State
from opdcl.model.distributions import HiddenStates, TeacherDistribution
from opdcl.model.forward import answer_states
from opdcl.model.lora import adapter_weights
from opdcl.sampling.sample import sample
from opdcl.words import Example, Judge, Prompt, Rollout

# How the states are called on the screen.
IN_WORDS = {"base": "the original model", "tuned": "the fine-tuned model", "student": "the model in training"}

# Receives the completions that have ended since its last call.
OnFinished = Callable[[list[Rollout]], None]


class Teacher:
    """An adapter state of the backbone: frozen for `base` and `tuned`, the current weights for `student`.

    It scores a completion after the prompt's `context`, where there is one.
    """

    def __init__(self, backbone: Backbone, state: State):
        self.backbone, self.state = backbone, state

    @property
    def is_dynamic(self) -> bool:
        """Whether its distribution for a fixed text changes as the student learns."""
        return self.state == "student"

    @property
    def frozen_state(self) -> State | None:
        """The state of the backbone that writes its completions, if training never changes it."""
        return None if self.is_dynamic else self.state

    @property
    def head_VH(self) -> torch.Tensor:
        """The output embedding that turns its hidden states into logits."""
        return self.backbone.head_of(self.state)

    @torch.no_grad()
    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return the last hidden state before each completion token, `(N, H)`, rollout by rollout."""
        with self.backbone.state(self.state) as model:
            return answer_states(model, self._examples(rollouts))

    def distribution(self, rollouts: Sequence[Rollout]) -> TeacherDistribution:
        """Return the teacher's distribution for each completion token, rollout by rollout."""
        return HiddenStates(self.states(rollouts), self.head_VH)

    def prefetch(self, rollouts: Sequence[Rollout]) -> None:
        """Start to compute distributions that will be needed soon, where that happens elsewhere."""

    def frozen_copy(self, frozen: State) -> Teacher:
        """Return the teacher that measures progress: this one, or if it is dynamic, state `frozen`."""
        return Teacher(self.backbone, frozen) if self.is_dynamic else self

    def _examples(self, rollouts: Sequence[Rollout]) -> list[Example]:
        return [Example.of(r.prompt.shown, r.completion_ids) for r in rollouts]

    def complete(self, prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        """Complete the `ids` of each prompt, by default at temperature 1; `options` are those of `sample`."""
        with self.as_sampler() as model:
            return sample(model, prompts, eos_ids=self.backbone.eos_ids, **options)

    def as_sampler(self) -> contextlib.AbstractContextManager[PreTrainedModel]:
        """Return a context that yields the model to sample this teacher's completions from."""
        return self.backbone.merged(self.state)

    def after_step(self) -> None:
        """Follow the student after an optimizer step."""

    def close(self) -> None:
        """Release connections to other processes."""


class EmaTeacher(Teacher):
    """An exponential moving average of the student's adapter, moved by `rate` at every step.

    At rate 1 it is the student; at rate 0 it is the student at its start. The trainer's checkpoints hold it:
    it is one of the model's adapters.
    """

    def __init__(self, backbone: Backbone, state: State, rate: float):
        super().__init__(backbone, state)
        self.rate = rate

    @property
    def is_dynamic(self) -> bool:
        return self.rate > 0

    @torch.no_grad()
    def after_step(self) -> None:
        for layer in self.backbone.adapted_layers(self.state):
            averages, students = adapter_weights(layer, self.state), adapter_weights(layer, "student")
            for average, student in zip(averages, students, strict=True):
                average.lerp_(student, self.rate)


def teacher_here(config: TeacherSection, backbone: Backbone, state: State = "general") -> Teacher:
    """Return the teacher that a configuration describes, if it is a state of the backbone.

    An `ema` or `adapter` teacher needs its adapter on the backbone already, as `state`.
    """
    match config.kind:
        case "live":
            return Teacher(backbone, "student")
        case "adapter":
            return Teacher(backbone, state)
        case "ema":
            return EmaTeacher(backbone, state, EMA_RATE)
        case "base" | "tuned" as frozen:
            return Teacher(backbone, frozen)
    raise ValueError(f"a teacher of kind {config.kind} is no state of the backbone")


class Completions:
    """Where the completions of teachers come from: all are sampled, unless there is a cache."""

    def complete(self, teacher: Teacher, prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        """Let a teacher complete prompts, as `Teacher.complete`."""
        return teacher.complete(prompts, **options)


SAMPLED = Completions()


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
    completions: Completions = SAMPLED
    """What frozen teachers wrote in earlier runs, if that is kept."""


# The teachers of a stream by the names that its prompts give; "" is the stream's own.
Teachers = Mapping[str, Teacher]


def by_teacher(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the places at which each teacher is named, by its name in alphabetical order."""
    indices: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        indices.setdefault(name, []).append(i)
    return dict(sorted(indices.items()))
