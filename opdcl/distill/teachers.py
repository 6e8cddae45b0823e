"""Who grades: one interface, and the teachers that differ in what they know and in whether they move.

| kind | the teacher is | source |
| --- | --- | --- |
| `base` | the original checkpoint: recovery | |
| `tuned` | the fine-tuned adapter: the domain's guard | |
| `adapter` | an adapter that another run made: a specialist, or what an earlier run left | |
| `live` | the student itself; it has something to teach only where its `context` shows it more | arXiv 2601.19897, 2601.20802 |
| `ema` | a running mean of the student's adapter | arXiv 2601.19897 |
| `trust_region` | between a frozen reference and the student | arXiv 2601.20802 |
| `model` | another model of the family: strong to weak | arXiv 2306.13649 |
| `remote` | a model on a server, which tells of each position's likeliest tokens | |

All but the last two are adapter states of the student's own backbone, so they cost no second model. A `context` shows any of
them what the student does not see: the answer, or a demonstration. Shown the answer, base does not fight what it does
not know (arXiv 2606.00147).

`RoutedTeacher` gives each prompt a teacher of its own, so that several specialists teach one student.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.config.server import ServerSection
from opdcl.config.teacher import TeacherSection
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone, State
from opdcl.model.compatibility import HINT, PROBES, check_same_tokenizer, refuse_unsupported
from opdcl.model.distributions import HiddenStates, TeacherDistribution, TopTokens, join, shared_rows
from opdcl.model.forward import answer_states
from opdcl.model.load import eos_ids, load_base, load_tokenizer
from opdcl.sampling.rollout import Rollout
from opdcl.sampling.sample import sample
from opdcl.sampling.server import Server
from opdcl.training import save_adapter

if TYPE_CHECKING:
    from peft import PeftModel


# Nats per token by which a model and its copy on a server may differ: far above rounding, far below another model.
SAME_MODEL = 0.3

# The prompt that the student sees -> the prompt that the teacher sees instead.
Contexts = dict[tuple[int, ...], list[int]]


class Teacher:
    """An adapter state of the backbone: frozen as `base` and `tuned`, or as it is right now as `student`.

    Args:
        backbone: The model that student and teacher share.
        state: Whose weights.
        contexts: Prompts that the teacher sees in place of the student's. Others it sees as they are.
    """

    # Tokens at the start of each completion that it does not grade.
    skip_tokens = 0

    def __init__(self, backbone: Backbone, state: State, contexts: Contexts | None = None):
        self.backbone, self.state, self.contexts = backbone, state, contexts or {}

    def split(self, prompts: Sequence[Sequence[int]]) -> list[tuple[str, Teacher, list[int]]]:
        """Return who is in charge of which of the prompts: name, teacher, indices. A single teacher has the name ""."""
        return [("", self, list(range(len(prompts))))]

    @property
    def is_dynamic(self) -> bool:
        """Whether its opinion of the same text changes as the student learns."""
        return self.state == "student"

    @property
    def head_VH(self) -> torch.Tensor:
        """The output embedding that turns its states into logits."""
        return self.backbone.causal_lm.get_output_embeddings().weight

    @torch.no_grad()
    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return the last hidden state of each position that predicts a completion token, `(N, H)`, rollout after rollout."""
        with self.backbone.state(self.state) as model:
            return answer_states(model, [self._sequence(r) for r in rollouts])

    def distribution(self, rollouts: Sequence[Rollout]) -> TeacherDistribution:
        """Return what it thinks of each completion token, rollout after rollout."""
        return HiddenStates(self.states(rollouts), self.head_VH)

    def prefetch(self, rollouts: Sequence[Rollout]) -> None:
        """Take notice of completions whose opinion will be asked for."""

    def frozen_copy(self, frozen: State) -> Teacher:
        """Return the teacher by which progress is measured: this one, or one that stays where it is and sees what it sees."""
        return Teacher(self.backbone, frozen, self.contexts) if self.is_dynamic else self

    def teacher_prompt(self, prompt_ids: list[int]) -> list[int]:
        """Return what the teacher sees where the student sees this prompt."""
        return self.contexts.get(tuple(prompt_ids), prompt_ids)

    def _sequence(self, rollout: Rollout) -> tuple[list[int], list[bool]]:
        return sequence(
            rollout.teacher_prompt_ids or self.teacher_prompt(rollout.prompt_ids), rollout.completion_ids
        )

    def complete(
        self,
        prompts: list[list[int]],
        config: RecoverConfig,
        max_new_tokens: int,
        seed: int,
        on_finished: Callable[[list[Rollout]], None] | None = None,
        **unfinished: Any,
    ) -> list[Rollout]:
        """Complete prompts, of which it sees what it is to see; `unfinished` is what `sample` knows of `begun` and `leave`."""
        with self.as_sampler() as model:
            return sample(
                model,
                [self.teacher_prompt(p) for p in prompts],
                max_new_tokens=max_new_tokens,
                eos_ids=self.backbone.eos_ids,
                temperature=config.temperature,
                seed=seed,
                engine=config.sampler,
                on_finished=on_finished,
                **unfinished,
            )

    def as_sampler(self) -> contextlib.AbstractContextManager[PreTrainedModel]:
        """Return a context in which the teacher can write completions itself."""
        return self.backbone.merged(self.state)

    def on_start(self) -> None:
        """Take notice of the student as it starts."""

    def after_step(self, step: int) -> None:
        """Take notice of the student after optimizer step `step`."""

    def save(self, folder: Path) -> None:
        """Write what of the teacher is not elsewhere into a checkpoint's folder."""

    def restore(self, folder: Path) -> None:
        """Take it back."""

    def close(self) -> None:
        """Let go of what is not this process's own."""


class EmaTeacher(Teacher):
    """A running mean of the student's adapter weights: every `every` steps it moves by `rate` towards the student.

    At rate 1 it is the student, at rate 0 the student as it began.
    """

    def __init__(
        self, backbone: Backbone, state: State, rate: float, every: int, contexts: Contexts | None = None
    ):
        super().__init__(backbone, state, contexts)
        self.rate, self.every = rate, every

    @property
    def is_dynamic(self) -> bool:
        return self.rate > 0

    def frozen_copy(self, frozen: State) -> Teacher:
        # Also at rate 0: a warm start moves it once, before the first step.
        return Teacher(self.backbone, frozen, self.contexts)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if step % self.every == 0:
            for mine, students in self._pairs():
                mine.lerp_(students, self.rate)

    @torch.no_grad()
    def on_start(self) -> None:
        for mine, students in self._pairs():
            mine.copy_(students)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer in self.backbone.adapted_layers(self.state):
            for part in (layer.lora_A, layer.lora_B):
                yield part[self.state].weight, part["student"].weight

    def save(self, folder: Path) -> None:
        self.backbone.peft.save_pretrained(folder, selected_adapters=[self.state])

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        from peft import load_peft_weights, set_peft_model_state_dict

        peft: PeftModel = self.backbone.peft
        set_peft_model_state_dict(
            peft,
            load_peft_weights(str(folder / self.state), device=str(self.backbone.device)),
            adapter_name=self.state,
        )


class TrustRegionTeacher(Teacher):
    """Logits on the straight line from a frozen reference to the student: at `mix` 0 the reference, at 1 the student.

    Where it writes, the reference writes. Both share the output head, so a line between logits is a line between hidden states.
    """

    def __init__(self, backbone: Backbone, reference: State, mix: float, contexts: Contexts | None = None):
        super().__init__(backbone, reference, contexts)
        self.mix = mix
        self._student = Teacher(backbone, "student", contexts)

    @property
    def is_dynamic(self) -> bool:
        return self.mix > 0

    def frozen_copy(self, frozen: State) -> Teacher:
        return Teacher(self.backbone, self.state, self.contexts)

    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        return torch.lerp(super().states(rollouts), self._student.states(rollouts), self.mix)


class SecondModel(Teacher):
    """Another model, with the same tokenizer."""

    def __init__(self, backbone: Backbone, model: PreTrainedModel, contexts: Contexts | None = None):
        super().__init__(backbone, "base", contexts)
        self.model = model

    @property
    def head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        return answer_states(self.model, [self._sequence(r) for r in rollouts])

    @contextlib.contextmanager
    def as_sampler(self) -> Iterator[PreTrainedModel]:
        with parallel.unsharded(self.model):
            yield self.model


class RemoteTeacher(Teacher):
    """A model on a server: what it thinks comes over the wire, asked for as soon as a completion is whole."""

    def __init__(self, backbone: Backbone, server: Server, contexts: Contexts | None = None):
        super().__init__(backbone, "base", contexts)
        self.server = server

    def distribution(self, rollouts: Sequence[Rollout]) -> TeacherDistribution:
        found = join([asked.result() for asked in self._asked(rollouts)])
        return found.to(self.backbone.device)

    def prefetch(self, rollouts: Sequence[Rollout]) -> None:
        self._asked(rollouts)

    def _asked(self, rollouts: Sequence[Rollout]) -> list[Future[TopTokens]]:
        return [
            self.server.ask(
                rollout.teacher_prompt_ids or self.teacher_prompt(rollout.prompt_ids), rollout.completion_ids
            )
            for rollout in rollouts
        ]

    def complete(
        self,
        prompts: list[list[int]],
        config: RecoverConfig,
        max_new_tokens: int,
        seed: int,
        on_finished: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        shown = [self.teacher_prompt(p) for p in prompts]
        return parallel.on_first_worker(
            lambda: self.server.complete(
                shown,
                max_new_tokens,
                self.backbone.eos_ids,
                config.temperature,
                seed,
                on_finished=on_finished,
            )
        )

    def close(self) -> None:
        self.server.close()


class ServedStudent(Teacher):
    """The student, where a server samples for it: each time with the adapter as it is now.

    Args:
        backbone: The model that is trained.
        server: Who samples.
        folder: Where the adapter is handed over; the server must see it.
    """

    def __init__(self, backbone: Backbone, server: Server, folder: Path):
        super().__init__(backbone, "student")
        self.server, self.folder = server, folder

    def complete(
        self,
        prompts: list[list[int]],
        config: RecoverConfig,
        max_new_tokens: int,
        seed: int,
        on_finished: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        def ask() -> list[Rollout]:
            save_adapter(self.backbone, self.folder)
            with self.server.adapter(self.folder) as name:
                return self.server.complete(
                    prompts,
                    max_new_tokens,
                    self.backbone.eos_ids,
                    config.temperature,
                    seed,
                    name,
                    on_finished,
                )

        return parallel.on_first_worker(ask)

    def close(self) -> None:
        self.server.close()


class RoutedTeacher:
    """Several teachers: each grades, and writes where teachers write, on the prompts that are its own.

    It is asked through `split` alone, never for states: its teachers may be models of different widths.

    Args:
        others: In charge of prompts that have no route.
        named: The teachers that routes lead to.
        routes: Prompt -> name.
    """

    def __init__(self, others: Teacher, named: dict[str, Teacher], routes: dict[tuple[int, ...], str]):
        self.others, self.named, self.routes = others, named, routes

    def split(self, prompts: Sequence[Sequence[int]]) -> list[tuple[str, Teacher, list[int]]]:
        mine: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            mine.setdefault(self.routes.get(tuple(prompt), ""), []).append(i)
        return [(name, self.named[name] if name else self.others, mine[name]) for name in sorted(mine)]

    @property
    def is_dynamic(self) -> bool:
        return any(teacher.is_dynamic for teacher in self._all())

    def frozen_copy(self, frozen: State) -> RoutedTeacher:
        named = {name: teacher.frozen_copy(frozen) for name, teacher in self.named.items()}
        return RoutedTeacher(self.others.frozen_copy(frozen), named, self.routes)

    def prefetch(self, rollouts: Sequence[Rollout]) -> None:
        for _, teacher, mine in self.split([r.prompt_ids for r in rollouts]):
            teacher.prefetch([rollouts[i] for i in mine])

    def on_start(self) -> None:
        for teacher in self._all():
            teacher.on_start()

    def after_step(self, step: int) -> None:
        for teacher in self._all():
            teacher.after_step(step)

    def save(self, folder: Path) -> None:
        for teacher in self._all():
            teacher.save(folder)

    def restore(self, folder: Path) -> None:
        for teacher in self._all():
            teacher.restore(folder)

    def close(self) -> None:
        for teacher in self._all():
            teacher.close()

    def _all(self) -> list[Teacher]:
        return [self.others, *self.named.values()]


def make_teacher(
    config: TeacherSection,
    backbone: Backbone,
    contexts: Contexts | None = None,
    state: State = "general",
    notify: Callable[[str], None] = lambda text: None,
) -> Teacher:
    """Return the teacher that a configuration describes; an adapter of its own must be on the backbone already, as `state`.

    `notify` is for sentences about a server that is waited for.
    """
    teacher = _make(config, backbone, contexts, state, notify)
    teacher.skip_tokens = config.skip_tokens
    return teacher


def _make(
    config: TeacherSection,
    backbone: Backbone,
    contexts: Contexts | None,
    state: State,
    notify: Callable[[str], None],
) -> Teacher:
    match config.kind:
        case "live":
            return Teacher(backbone, "student", contexts)
        case "adapter":
            return Teacher(backbone, state, contexts)
        case "ema":
            return EmaTeacher(backbone, state, config.rate, config.every, contexts)
        case "trust_region":
            return TrustRegionTeacher(backbone, config.reference, config.mix, contexts)
        case "model":
            return SecondModel(backbone, load_model(config, backbone), contexts)
        case "remote":
            return RemoteTeacher(backbone, reach_server(config.server, backbone, notify), contexts)
        case frozen:
            return Teacher(backbone, frozen, contexts)


def reach_server(config: ServerSection, backbone: Backbone, notify: Callable[[str], None]) -> Server:
    """Find a server, after its tokenizer has been found to be the student's."""
    server = Server(config, backbone.causal_lm.config.get_text_config().vocab_size, notify)
    for probe in PROBES:
        ours, theirs = backbone.tokenizer(probe, add_special_tokens=False)["input_ids"], server.encode(probe)
        if ours != theirs:
            server.close()
            raise UsageError(
                f"the server at {config.url} has another tokenizer: {probe!r} becomes {ours[:8]} and {theirs[:8]}",
                HINT,
            )
    return server


def reach_own_model(config: ServerSection, backbone: Backbone, notify: Callable[[str], None]) -> Server:
    """Find a server that holds the student's own base: its tokenizer is the same, and so is what it thinks of a text."""
    server = reach_server(config, backbone, notify)
    ids = backbone.tokenizer(" ".join(PROBES[:6]), add_special_tokens=False)["input_ids"]
    theirs = server.ask(ids[:1], ids[1:]).result()
    ours = Teacher(backbone, "base").distribution([Rollout(ids[:1], ids[1:])])
    rows = shared_rows(backbone.causal_lm.get_output_embeddings().weight, ours)
    mine = ours.log_probs(slice(0, len(ids)), rows, 1.0).gather(
        1, torch.tensor(ids[1:], device=backbone.device)[:, None]
    )[:, 0]
    gap = float((mine.detach().cpu() - theirs.logprob_N).abs().mean())
    if gap > SAME_MODEL:
        server.close()
        raise UsageError(
            f"the server at {config.url} serves another model as {server.model}: on a probe the two differ by {gap:.2f} nats per token",
            "start it with `opdcl serve RUN`, and name the base: server.model",
        )
    return server


def load_model(config: TeacherSection, backbone: Backbone) -> PreTrainedModel:
    """Load another model as a teacher, after its tokenizer has been found to be the student's."""
    # On the student's device, whatever the default: their states meet.
    where = config.model.model_copy(update={"device": str(backbone.device)})
    check_same_tokenizer(backbone.tokenizer, load_tokenizer(where), where.id)
    model, tokenizer = load_base(where)
    refuse_unsupported(model.config)
    if (theirs := eos_ids(model, tokenizer)) != backbone.eos_ids:
        raise UsageError(
            f"teacher {config.model.id} ends answers with ids {theirs}, the student with {backbone.eos_ids}",
            HINT,
        )
    return model.requires_grad_(False)


def sequence(prompt_ids: list[int], completion_ids: list[int]) -> tuple[list[int], list[bool]]:
    """Return a row for `answer_states` whose answer is the completion."""
    return prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids)
