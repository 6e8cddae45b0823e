"""Settings of the recovery. A field's docstring is its help text in `opdcl config schema`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from opdcl.config.model import SERVED_TOKENS, WHOLE_VOCABULARY, ServerSection
from opdcl.config.section import (
    Auto,
    BatchSize,
    Count,
    Positive,
    Rate,
    Section,
    Seed,
    Share,
    Steps,
    SystemPrompt,
    Weight,
)
from opdcl.config.teacher import BUILT_IN, LossSection, TeacherName, TeacherSection
from opdcl.errors import nearest
from opdcl.words import STREAMS, WHOLE, Loss, Stream, StreamName, Weighting


class OnPolicySection(Section):
    """The general steps in which the student writes: see `lmbda`."""

    domain: bool = False
    """The student also writes the domain steps from then on. When false, the domain's teacher writes them
    all: a student near base answers at length, and a teacher that ends early would teach it to end."""
    reverse: Share = 0.0
    """Share of reverse KL in a loss that is forward KL otherwise. It penalizes what the student writes and
    base would not. A quarter is not shown to help."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Temperature at which the student writes them; 0 is greedy. The loss, and what teachers write, stay at
    1. At another one than 1 no step compares the sampler's probabilities with the trainer's. Greedy text
    did not bring ends nearer to base's on both of two seeds."""


class RewardSection(Section):
    """A verifiable reward besides the teacher: a suite's scorer rates each completion relative to the others
    on its prompt (GRPO, arXiv 2402.03300). The suite's documents replace the general prompts."""

    suite: str = Field(min_length=1)
    """Any generative suite. The model learns from its documents, so measure on another suite."""
    metric: str | None = None
    """Which of the suite's scores to use. Default: its first."""
    group: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 8
    """Completions per prompt that are compared with each other."""
    teacher: Weight = 0.1
    """Weight of the teacher's loss on the same tokens, as a dense signal."""
    weight: Weight = 1.0
    """Weight of the reward's loss. With 0 the reward only chooses what a teacher with `context` is shown."""


# The largest ratio to the lowest score at which an adapter still counts as no worse. The student samples new
# answers to a dozen prompts each time, so scores are noisy; of two equals, the later one has trained longer.
NO_WORSE = 1.25

# Prompts of each stream, at most, that a start is computed from. Tuned answers those of the domain.
PROMPTS_OF_START: dict[StreamName, int] = {"general": 64, "domain": 256}

# Completions of a recovery: far more than any adapter needs, and seconds to plan.
MOST_COMPLETIONS = 2_000_000

# The largest domain step that was measured has this many times the rows of a general one.
MOST_DOMAIN_ROWS = 6

# The settings of what the student writes.
ON_POLICY = "on_policy.domain on_policy.reverse on_policy.temperature"

# Why some settings have no use.
TRAINS_NOTHING = "with steps 0: nothing is trained"


def split_share(item: str) -> tuple[str, float | None]:
    """Split `SOURCE=SHARE`; without a number at its end, all of it is the source."""
    source, separator, share = item.rpartition("=")
    if separator and source and re.fullmatch(r"\d*\.?\d+", share):
        return source, float(share)
    return item, None


def _needs_no_loss(recover: RecoverConfig) -> bool:
    # With a teacher on a server, the loss still says which log-probabilities to request.
    served = any(teacher.server for teacher in recover.teachers.values())
    return recover.steps == 0 and not served


def _has_no_author(recover: RecoverConfig) -> bool:
    """Return whether the student writes no answers, because it may write only general ones and has none."""
    return recover.general_per_domain == 0 and recover.method != "general" and not recover.on_policy.domain


class RecoverConfig(Section):
    """Recovery by distillation: a teacher grades every token of its own answers, or of the student's."""

    unused = (
        (f"lmbda {ON_POLICY} weighting", lambda s: s.steps == 0, TRAINS_NOTHING),
        ("general_per_domain", lambda s: s.method == "general", "with method general: no domain steps"),
        ("loss", _needs_no_loss, TRAINS_NOTHING),
        ("general", lambda s: s.reward is not None, "with reward, whose suite has the general prompts"),
        ("given_answers", lambda s: bool(s.reward) or s.general is None, "without rows of general prompts"),
        (f"server {ON_POLICY}", lambda s: s.lmbda == 0, "with lmbda 0: the teachers write all answers"),
        (f"lmbda {ON_POLICY}", _has_no_author, "without general steps, unless on_policy.domain is set"),
        ("on_policy.reverse", lambda s: s.loss.kind != "forward_kl", "unless loss.kind is forward_kl"),
    )

    former = {"save_steps": (12, "a checkpoint is written at each validation: see validate_every")}

    method: Literal["alternating", "general"] = "alternating"
    """`alternating` is our method. A baseline: `general`, without domain steps."""
    start: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Where the student starts. `auto`: the tuned adapter without what it does to the inputs that base's
    answers excite, in closed form; what that spares of both streams is chosen by held-out KL. It is 1 where a
    teacher is not base or tuned itself. A number scales the adapter: near 0 it is base, 1 is tuned."""
    general: Annotated[str | list[str], Field(min_length=1)] | None = "everyday"
    """Prompts on which base is the teacher: `everyday` (shipped) or a file. Several sources: a list, in equal
    parts or as SOURCE=SHARE, such as `[everyday=0.3, prompts.jsonl=0.7]`. None: domain steps only."""
    given_answers: bool = False
    """Learn from the answers of the general rows instead of base's, where the student does not write: base
    grades every token of them, and writes nothing. Held-out prompts come with theirs too, so each row needs
    an answer."""
    domain: str | None = None
    """Prompts on which tuned is the teacher. Default: the questions of the fine-tune's data."""
    general_teacher: TeacherName = "base"
    """Teacher of general prompts: `base`, `tuned`, or a name in `teachers`. `tuned` is a placebo: the student
    at its start grades itself."""
    domain_teacher: TeacherName = "tuned"
    """Teacher of domain prompts, likewise."""
    system: SystemPrompt | None = None
    """System prompt that the model is used with, or `@FILE` in the current folder: prompts are answered with
    it, unless they bring their own. The fine-tune learns rows as they are."""
    teachers: dict[TeacherName, TeacherSection] = {}
    """Further teachers by name. A teacher grades the stream that names it, its own `prompts`, and the domain
    prompts whose `teacher` field names it."""
    reward: RewardSection | None = None
    """Verifiable reward for general completions, in addition to the teacher."""
    steps: Steps | Auto = 48
    """Steps, general and domain ones together; the weights change after each domain step. 0: the start alone
    is recovered, without training. `auto`: as many as learn from the tokens that the fine-tune's rows have
    over all epochs, if all answers reach their maximum length; at least 32, at most 512. Without a fine-tune,
    48."""
    rollouts: BatchSize | Auto = "auto"
    """Completions per step. `auto`: 8 below hidden size 1536, 16 below 3072, 32 from there. For the
    same number of completions in all, many small steps recover more than few large ones."""
    domain_rollouts: BatchSize | None = None
    """Completions per domain step. Default: as many as give it the tokens of a general step, if all answers
    reach their maximum length; at least `rollouts` and at most six times as many."""
    general_per_domain: Count = 1
    """General steps before each domain step; both then change the weights together. 0: domain steps only."""
    lmbda: Share = 0.5
    """Share of the general steps, the last ones, in which the student writes the answers; at least one step,
    if it is above 0 and there are two. In those before, their teacher writes, as it does in domain steps.
    1 is on-policy, 0 off-policy. TRL's GKD draws each step with this chance."""
    on_policy: OnPolicySection = OnPolicySection()
    """What is different where the student writes."""
    sample_ahead: Positive | Auto = "auto"
    """Steps of a stream sampled at once, where the student writes. 1 is strictly on-policy; more use the
    hardware better. `auto`: as many as have 64 rows. Frozen teachers write 96 rows at once."""
    max_new_tokens: Positive = 384
    """Maximum length of general completions, in tokens. Most end before; a truncated answer never
    shows an end."""
    domain_max_new_tokens: Positive | None = None
    """Maximum length of domain completions, in tokens. Default: `max_new_tokens`."""
    server: ServerSection | None = None
    """Server that samples the student's completions. It must load adapters and read the run directory, as
    `opdcl serve RUN` does."""
    loss: LossSection = LossSection()
    """Loss and its parameters."""
    weighting: Weighting = "edges"
    """How the tokens of a step share its loss. `tokens`: all count the same, so long answers count most.
    `answers`: every answer counts the same. `edges`: likewise, and an answer's first tokens and the token
    that ends it count up to five times as much as the others. They decide what kind of answer it is, and when
    it stops."""
    learning_rate: Rate | Auto = "auto"
    """Peak learning rate. It rises in the first tenth of the steps, and falls to zero on a line. `auto`: 0.5
    times the automatic rate of the fine-tune, that is 5e-4 for the embedded model and 1.1e-4 at hidden size
    4096."""
    micro_batch_tokens: Positive | Auto = "auto"
    """Maximum tokens per forward and backward pass, padding included. It bounds memory; results change by
    rounding, which training can amplify, so a run keeps its value. `auto`: 2048 on CPU, 8192 on CUDA."""
    health: bool = True
    """Watch the validations: halt if held-out KL rises far above the start's; if the student's own answers
    go wrong, halve the learning rate once, then halt. When false, only what is not finite halts the run."""
    validate_every: Positive = 12
    """Steps between measurements of held-out KL, each of which ends with a checkpoint."""
    validation_prompts: Positive = 16
    """Prompts per stream for held-out KL. General ones are set aside; domain ones are also trained on."""
    keep: Literal["best", "last"] = "best"
    """Adapter that the stage returns: the last one whose held-out KL is at most 1.25 times the lowest, or the
    last one measured."""
    seed: Seed = 0
    """Seed of the prompt order and of all sampling."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_methods(cls, settings: Any) -> Any:
        """Read a former method of a stored run, which names all settings, as the settings that it was.

        With the former `lmbda: auto`, base wrote first and the student then, from a measured step on.
        """
        method = settings.get("method") if isinstance(settings, dict) else None
        if method and settings.get("lmbda") == "auto" and "loss" in settings:
            settings = settings | {"lmbda": 0.5}
        if method == "replay":
            now, words = (
                {"loss": {"kind": "cross_entropy"}, "lmbda": 0},
                "loss.kind cross_entropy and lmbda 0",
            )
        elif method == "interpolate":
            now, words = {"steps": 0}, "steps 0"
        else:
            return settings
        if not {"loss", "lmbda"} <= settings.keys():
            raise ValueError(f"method {method} is gone: set {words}")
        return settings | {"method": "alternating"} | now

    @model_validator(mode="after")
    def _can_learn(self) -> RecoverConfig:
        self._check_size()
        self._check_names()
        general = self.teacher_of("general")
        if general.begins_as_tuned and general.kind != "tuned":
            raise ValueError("general_teacher equals the student at the start: use base, or set context")
        if "self" in self.general_sources():
            hint = "write prompts with any model, for example with vLLM, and name the file"
            context = {"key": "general", "reason": "cannot be self: base writes no prompts", "hint": hint}
            raise PydanticCustomError("source", "{reason}", context)
        if self.general is None and not self.reward and (self.general_per_domain or self.method == "general"):
            raise ValueError("without general prompts use method alternating and general_per_domain 0")
        for name, teacher in self.teachers.items():
            self._check_teacher(name, teacher)
        if self.given_answers and not self.reward and self.loss.kind == "policy_gradient":
            raise ValueError("given_answers needs another loss.kind: nobody sampled these answers")
        if self.on_policy.temperature != 1 and (self.reward or self.loss.kind == "policy_gradient"):
            raise ValueError("on_policy.temperature must be 1 with policy_gradient and with reward")
        if self.reward:
            self._check_reward(self.reward.group)
        return self

    def _check_size(self) -> None:
        """Refuse more completions than can be planned in reasonable time."""
        in_general = 1 if self.rollouts == "auto" else self.rollouts
        of_step = max(in_general, self.domain_rollouts or in_general)
        if self.steps != "auto" and self.steps * of_step > MOST_COMPLETIONS:
            raise ValueError(
                f"{self.steps} steps of {of_step:g} completions are more than {MOST_COMPLETIONS} in all: "
                "lower steps or rollouts"
            )

    def _check_names(self) -> None:
        """Refuse a teacher that is not defined, and one that has the name of a built-in teacher."""
        known = [*BUILT_IN, *self.teachers]
        for key in ("general_teacher", "domain_teacher"):
            if (name := getattr(self, key)) not in known:
                near = nearest(name, known)
                hint = f"did you mean {near}?" if near else f"define it: recover.teachers.{name}"
                context = {"key": key, "reason": f"names no teacher {name!r}", "hint": hint}
                raise PydanticCustomError("teacher", "{reason}", context)
        for name in BUILT_IN:
            if name in self.teachers:
                raise ValueError(f"teachers.{name}: {name} is built in; give the teacher another name")

    def _check_teacher(self, name: str, teacher: TeacherSection) -> None:
        only_general = name == self.general_teacher != self.domain_teacher and not teacher.prompts
        if "{feedback}" in (teacher.context or "") and not (self.reward and only_general):
            raise ValueError(
                f"teachers.{name}.context: {{feedback}} needs reward, and only general_teacher receives it"
            )

    def _check_reward(self, group: int) -> None:
        if not self.steps or self.loss.kind == "cross_entropy":
            raise ValueError("reward needs steps, and a loss.kind other than cross_entropy")
        if self.lmbda != 1:
            raise ValueError("reward needs the student's own completions: set lmbda 1")
        if self.rollouts != "auto" and self.rollouts % group:
            raise ValueError(f"rollouts must be a multiple of reward.group ({group})")
        if self.keep != "last":
            raise ValueError("reward needs keep last: held-out KL does not say which adapter is best")

    def general_sources(self) -> dict[str, float]:
        """Return the sources of the general prompts with their shares; none if a reward's suite has them.

        Raises:
            ValueError: The shares are not those of a whole.
        """
        if self.reward or self.general is None:
            return {}
        if isinstance(self.general, str):
            return {self.general: 1.0}
        named = dict(map(split_share, self.general))
        given = [share for share in named.values() if share is not None]
        rest, equal_parts = 1 - sum(given), len(named) - len(given)
        is_whole = rest > 0.01 if equal_parts else abs(rest) < 0.01
        if len(named) < len(self.general) or 0 in given or not is_whole:
            raise ValueError("general: the shares of different sources must be above 0 and add up to 1")
        return {source: rest / equal_parts if share is None else share for source, share in named.items()}

    def limit(self, stream: StreamName) -> int:
        """Return the maximum length of a stream's completions, in tokens."""
        own = self.domain_max_new_tokens if stream == "domain" else None
        return own or self.max_new_tokens

    def completions(self, stream: StreamName) -> int:
        """Return the number of completions that a step of a stream learns from; `rollouts` is a number."""
        rollouts = int(self.rollouts)
        if stream == "general":
            return rollouts
        if self.domain_rollouts:
            return self.domain_rollouts
        longer = self.limit("general") / self.limit("domain")
        return round(rollouts * min(max(longer, 1), MOST_DOMAIN_ROWS))

    def on_policy_share(self, stream: StreamName) -> float:
        """Return the share of a stream's steps that are the student's to write."""
        return self.lmbda if stream == "general" or self.on_policy.domain else 0.0

    @property
    def served_tokens(self) -> int:
        """How many of the likeliest tokens of each position a teacher on a server is asked for."""
        if self.loss.kind in WHOLE:
            return WHOLE_VOCABULARY
        # Fewer would save nothing, and the logged KL is over those that are named.
        return max(self.loss.k, SERVED_TOKENS) if self.loss.kind == "top_k" else SERVED_TOKENS

    def teacher_of(self, stream: StreamName, name: str = "") -> TeacherSection:
        """Return the definition of a named teacher, or of the stream's own."""
        own = self.general_teacher if stream == "general" else self.domain_teacher
        return (BUILT_IN | self.teachers)[name or own]

    def streams(self) -> dict[StreamName, Stream]:
        """Return what the recovery learns, by stream."""
        of_domain = 1 / (self.general_per_domain + 1) if self.domain and self.method != "general" else 0.0
        teachers = {"general": self.general_teacher, "domain": self.domain_teacher}
        prompts = {"general": ", ".join(self.general_sources()), "domain": self.domain or ""}
        if self.reward:
            prompts["general"] = self.reward.suite
        streams = {}
        for name in STREAMS:
            writes = self.on_policy_share(name) > 0
            author = "rows" if name == "general" and self.given_answers else teachers[name]
            if writes:
                author = "student" if self.lmbda == 1 else f"{author}, then student"
            reverse = self.on_policy.reverse if writes and self.loss.kind == "forward_kl" else 0.0
            loss = Loss(self.loss.kind, self.loss.k, self.loss.beta, reverse, self.weighting)
            if self.reward and name == "general":
                loss = replace(loss, reward_weight=self.reward.weight, teacher_weight=self.reward.teacher)
            share = of_domain if name == "domain" else 1 - of_domain
            streams[name] = Stream(name, prompts[name], author, teachers[name], loss, share)
        return streams
