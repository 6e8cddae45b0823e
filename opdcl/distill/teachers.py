"""Who grades: one interface, and the teachers that differ in what they know and in whether they move.

| kind | the teacher is | source |
| --- | --- | --- |
| `base` | the original checkpoint: recovery | |
| `tuned` | the fine-tuned adapter: the domain's guard | |
| `live` | the student itself; it has something to teach only where its `context` shows it more | arXiv 2601.19897, 2601.20802 |
| `ema` | a running mean of the student's adapter | arXiv 2601.19897 |
| `trust_region` | between a frozen reference and the student | arXiv 2601.20802 |
| `model` | another model of the family: strong to weak | arXiv 2306.13649 |

All but the last are adapter states of the student's own backbone, so they cost no second model. A `context` shows any of
them what the student does not see: the answer, or a demonstration. Shown the answer, base does not fight what it does
not know (arXiv 2606.00147).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from opdcl.config import TeacherSection
from opdcl.distill.backbone import Backbone, State
from opdcl.distill.contract import HINT, check_same_tokenizer, refuse_unsupported
from opdcl.distill.forward import answer_states
from opdcl.distill.rollouts import Rollout
from opdcl.errors import UsageError
from opdcl.models import eos_ids, load_base, load_tokenizer

if TYPE_CHECKING:
    from peft import PeftModel

# The prompt that the student sees -> the prompt that the teacher sees instead.
Contexts = dict[tuple[int, ...], list[int]]


class Teacher:
    """An adapter state of the backbone: frozen as `base` and `tuned`, or as it is right now as `student`.

    Args:
        backbone: The model that student and teacher share.
        state: Whose weights.
        contexts: Prompts that the teacher sees in place of the student's. Others it sees as they are.
    """

    def __init__(self, backbone: Backbone, state: State, contexts: Contexts | None = None):
        self.backbone, self.state, self.contexts = backbone, state, contexts or {}

    @property
    def moves(self) -> bool:
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
            return answer_states(model, [sequence(self.shown(r.prompt_ids), r.completion_ids) for r in rollouts])

    def judge(self, frozen: State) -> Teacher:
        """Return the teacher by which progress is measured: this one, or one that stays where it is and sees what it sees."""
        return Teacher(self.backbone, frozen, self.contexts) if self.moves else self

    def shown(self, prompt_ids: list[int]) -> list[int]:
        """Return what the teacher sees where the student sees this prompt."""
        return self.contexts.get(tuple(prompt_ids), prompt_ids)

    def writer(self) -> contextlib.AbstractContextManager[PreTrainedModel]:
        """Return a context in which the teacher can write completions itself."""
        return self.backbone.merged(self.state)

    def follow(self, step: int) -> None:
        """Take notice of the student after optimizer step `step`."""

    def save(self, folder: Path) -> None:
        """Write what of the teacher is not elsewhere into a checkpoint's folder."""

    def restore(self, folder: Path) -> None:
        """Take it back."""


class Ema(Teacher):
    """A running mean of the student's adapter weights: every `every` steps it moves by `rate` towards the student.

    At rate 1 it is the student, at rate 0 the student as it began.
    """

    def __init__(self, backbone: Backbone, state: State, rate: float, every: int, contexts: Contexts | None = None):
        super().__init__(backbone, state, contexts)
        self.rate, self.every = rate, every

    @property
    def moves(self) -> bool:
        return self.rate > 0

    @torch.no_grad()
    def follow(self, step: int) -> None:
        if step % self.every == 0:
            for mine, students in self._pairs():
                mine.lerp_(students, self.rate)

    @torch.no_grad()
    def begin(self) -> None:
        """Start as the student is now."""
        for mine, students in self._pairs():
            mine.copy_(students)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer in self.backbone.adapted_layers():
            for part in (layer.lora_A, layer.lora_B):
                yield part[self.state].weight, part["student"].weight

    def save(self, folder: Path) -> None:
        self.backbone.peft.save_pretrained(folder, selected_adapters=[self.state])

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        from peft import load_peft_weights, set_peft_model_state_dict

        peft: PeftModel = self.backbone.peft
        set_peft_model_state_dict(
            peft, load_peft_weights(str(folder / self.state), device=str(self.backbone.device)), adapter_name=self.state
        )


class TrustRegion(Teacher):
    """Logits on the straight line from a frozen reference to the student: at `mix` 0 the reference, at 1 the student.

    Where it writes, the reference writes. Both share the output head, so a line between logits is a line between hidden states.
    """

    def __init__(self, backbone: Backbone, reference: State, mix: float, contexts: Contexts | None = None):
        super().__init__(backbone, reference, contexts)
        self.mix = mix
        self._student = Teacher(backbone, "student", contexts)

    @property
    def moves(self) -> bool:
        return self.mix > 0

    def judge(self, frozen: State) -> Teacher:
        return Teacher(self.backbone, self.state, self.contexts)

    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        return torch.lerp(super().states(rollouts), self._student.states(rollouts), self.mix)


class Separate(Teacher):
    """Another model, with the same tokenizer."""

    def __init__(self, backbone: Backbone, model: PreTrainedModel, contexts: Contexts | None = None):
        super().__init__(backbone, "base", contexts)
        self.model = model

    @property
    def head_VH(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def states(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        return answer_states(self.model, [sequence(self.shown(r.prompt_ids), r.completion_ids) for r in rollouts])

    @contextlib.contextmanager
    def writer(self) -> Iterator[PreTrainedModel]:
        yield self.model


def make_teacher(
    config: TeacherSection, backbone: Backbone, contexts: Contexts | None = None, ema: State = "ema_general"
) -> Teacher:
    """Return the teacher that a configuration describes; its adapters, `ema` among them, must be on the backbone already."""
    match config.kind:
        case "live":
            return Teacher(backbone, "student", contexts)
        case "ema":
            return Ema(backbone, ema, config.rate, config.every, contexts)
        case "trust_region":
            return TrustRegion(backbone, config.reference, config.mix, contexts)
        case "model":
            return Separate(backbone, load_model(config, backbone), contexts)
        case frozen:
            return Teacher(backbone, frozen, contexts)


def load_model(config: TeacherSection, backbone: Backbone) -> PreTrainedModel:
    """Load another model as a teacher, after its tokenizer has been found to be the student's."""
    # On the student's device, whatever the default: their states meet.
    where = config.model.model_copy(update={"device": str(backbone.device)})
    check_same_tokenizer(backbone.tokenizer, load_tokenizer(where), where.id)
    model, tokenizer = load_base(where)
    refuse_unsupported(model.config)
    if (theirs := eos_ids(model, tokenizer)) != backbone.eos_ids:
        raise UsageError(f"teacher {config.model.id} ends answers with ids {theirs}, the student with {backbone.eos_ids}", HINT)
    return model.requires_grad_(False)


def sequence(prompt_ids: list[int], completion_ids: list[int]) -> tuple[list[int], list[bool]]:
    """Return a row for `answer_states` whose answer is the completion."""
    return prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids)
