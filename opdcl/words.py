"""The words of the method: a stream and its loss, a prompt, its completion, and what a step learns from.

Every room of the trainings speaks them, so this file imports nothing of opdcl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

StreamName = Literal["general", "domain"]

STREAMS: tuple[StreamName, ...] = ("general", "domain")

# Who wrote the answers of a step.
Author = Literal["rows", "base", "teacher", "student"]

LossKind = Literal["reverse_kl", "forward_kl", "jsd", "top_k", "policy_gradient", "cross_entropy"]
# Those that compare the whole vocabulary.
WHOLE = ("reverse_kl", "forward_kl", "jsd")
Weighting = Literal["edges", "answers", "tokens"]


@dataclass(frozen=True)
class Loss:
    """What the student pays for a token, and how the tokens of a step share its loss."""

    kind: LossKind = "forward_kl"
    k: int = 100
    """`top_k`: number of the teacher's likeliest tokens that are compared one by one."""
    beta: float = 0.5
    """`jsd`: the teacher's share of the mixture; 0 is forward KL, 1 reverse KL."""
    reverse: float = 0.0
    """Share of reverse KL in forward KL, where the student wrote the answers."""
    weighting: Weighting = "tokens"
    reward_weight: float | None = None
    """Weight of the scorer's clipped gradient, if there is a scorer."""
    teacher_weight: float = 1.0
    """Weight of the teacher's loss beside it."""


@dataclass(frozen=True)
class Stream:
    """One thing that a training learns. Its streams say what a training is."""

    name: StreamName
    prompts: str
    """Where the prompts come from."""
    author: str
    """Who writes the answers, at first and later."""
    teacher: str
    """Who scores them, token by token; "" if the answers themselves are imitated."""
    loss: Loss
    share: float
    """Share of the optimizer steps."""


@dataclass(frozen=True)
class Example:
    """What a step learns from: token ids, and for each id whether it is learned or scored.

    A row of a fine-tune has one or several. If a model wrote the answer, `rollout` says all else about it.
    One that comes again has a `place`, by which its teacher's states are kept.
    """

    ids: list[int]
    learned: list[bool]
    rollout: Rollout | None = None
    place: str = ""

    @classmethod
    def of(cls, prompt_ids: list[int], answer_ids: list[int]) -> Example:
        """Return the example that teaches an answer to a prompt."""
        return cls(prompt_ids + answer_ids, [False] * len(prompt_ids) + [True] * len(answer_ids))

    @property
    def teacher(self) -> str:
        """The name of the teacher that scores it, or "" for the stream's own."""
        return self.rollout.prompt.teacher if self.rollout else ""

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def answer_length(self) -> int:
        return len(self.predicting)

    @property
    def predicting(self) -> list[int]:
        """The positions that predict a learned token; the first token has nothing before it to predict it."""
        return [i for i, is_learned in enumerate(self.learned[1:]) if is_learned]


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, and in a recovery all that is known about it.

    `ids` are the token ids that the student sees. `teacher` is the name of the prompt's own teacher, or ""
    for the stream's. `context` is what that teacher sees in place of `ids`, if it differs. `number` is the
    position of its row in the stream, by which a reward finds the document. `answer` is given in place of
    one that the teacher writes. If it begins a conversation, `following` has for each later turn the ids
    around the answers before it, which the model itself gives.
    """

    ids: list[int]
    teacher: str = ""
    context: list[int] | None = None
    number: int = 0
    answer: list[int] | None = None
    following: list[list[list[int]]] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return 1 + len(self.following)

    def after(self, answers: Sequence[list[int]]) -> Prompt:
        """Return the turn that comes after these answers to the earlier ones."""
        if not answers:
            return self
        ids, *rest = self.following[len(answers) - 1]
        further = [[*answer, *part] for answer, part in zip(answers, rest, strict=True)]
        return replace(self, ids=sum(further, ids), following=[])

    @property
    def shown(self) -> list[int]:
        """The token ids that the teacher sees."""
        return self.context or self.ids


@dataclass(frozen=True)
class Prompts:
    """One stream's prompts, to train on and held out."""

    train: list[Prompt]
    held_out: list[Prompt]
    questions: tuple[str, ...] = ()
    """The texts of the held-out prompts, for people."""


@dataclass
class Rollout:
    """A prompt and its sampled completion.

    `completion_ids` ends with an end-of-sequence id if and only if `finished`; `logprobs` holds the sampler's
    log-probability (nats, at the sampling temperature) of each of its tokens and is empty under greedy
    decoding. `reward` is the suite scorer's, `advantage` its distance from the group's mean in standard
    deviations. If it `recurs`, other steps learn from it too.
    """

    prompt: Prompt
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    reward: float | None = None
    advantage: float = 0.0
    recurs: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt.ids

    @property
    def message(self) -> list[int]:
        """The completion without the id that ends it, as it stands before a later turn."""
        return self.completion_ids[: -1 if self.finished else None]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def to_example(self, place: str = "") -> Example:
        """Return the prompt and its completion as the student learns them, once the completion is whole."""
        return replace(Example.of(self.prompt_ids, self.completion_ids), rollout=self, place=place)


class Judge(Protocol):
    """Scores completions, and may show the teacher what was better."""

    def judge(self, rollouts: list[Rollout]) -> None:
        """Set the reward and the advantage of each completion."""
        ...


@dataclass(frozen=True)
class Step:
    """One step, which learns from completions of the prompts with these indices.

    The student completes them if `on_policy`, else the teacher. After a step that `ends_period` the weights
    change, by the gradients of all its period's steps.
    """

    stream: StreamName
    prompts: tuple[int, ...]
    on_policy: bool
    ends_period: bool


@dataclass
class Batch:
    """What one optimizer step learns from: rows without a teacher, or completions, all of one stream.

    It is `fresh` if the current weights sampled every token, at temperature 1.
    """

    stream: Stream
    examples: list[Example]
    author: Author
    fresh: bool = False

    @property
    def rollouts(self) -> list[Rollout]:
        """The completions among the examples: none or all."""
        return [example.rollout for example in self.examples if example.rollout]
