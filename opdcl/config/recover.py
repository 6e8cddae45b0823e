"""The schema of a workflow. A field's docstring is its help text, in `opdcl config schema` and in error messages.

Own fields are few. Everything else that a trainer can do goes through its `trainer:` mapping, which is checked
against the real fields of `trl.SFTConfig` and `trl.DistillationConfig` before anything is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from opdcl.config.loss import LossSection
from opdcl.config.section import Positive, Rate, Sampler, Section
from opdcl.config.server import ServerSection
from opdcl.config.teacher import TEACHER_NAME, NamedTeacher, TeacherSection


class HealthSection(Section):
    """Bounds whose crossing shows a recovery going wrong, whatever its loss says."""

    watch: bool = True
    """Whether steps are watched at all."""
    patience: Positive = 3
    """Steps of a stream in a row before the rate is halved, and as many again before the run halts."""
    teacher_entropy: Annotated[float, Field(gt=0)] = 6.0
    """Nats. A healthy instruct model stays near 3 on its own ground; a broken one guesses."""
    student_entropy: Annotated[float, Field(ge=0)] = 0.02
    """Nats, general prompts. Below it the student says one thing only."""
    truncated_excess: Annotated[float, Field(gt=0)] = 0.5
    """Share of cut general answers above that of base's own."""
    length_growth: Annotated[float, Field(gt=1)] = 3.0
    """Mean length of general answers over that of base's own."""
    repetition: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of 4-grams that occurred before in the same answer."""
    adapter_growth: Annotated[float, Field(gt=1)] = 3.0
    """Norm of the adapter's weights over tuned's."""
    grad_norm: Annotated[float, Field(gt=0)] = 1000.0
    """Gradient norm before clipping."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of base's 16 likeliest tokens that are among the student's, on held-out general texts: below it, and below half of
    where it began, the run halts at once, as the two no longer speak of the same words (arXiv 2604.13016)."""
    kl_growth: Annotated[float, Field(gt=1)] = 1.5
    """Held-out KL, both streams together, over what it was at the start: beyond it, and half a nat more, the run halts at once."""


class UntilSection(Section):
    """When recovery has done enough, by held-out KL. Without any of these it runs all its steps."""

    retention: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Stop once so much of the general KL that tuned began with is gone ..."""
    domain_floor: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """... while this share of the domain is kept, as each validation prints it: 1 is tuned, 0 is base."""
    rollouts: Positive | None = None
    """Stop after so many completions, both streams together."""
    patience: Positive | None = None
    """Stop after so many validations in a row without a better adapter."""


class RewardSection(Section):
    """A verifiable reward beside the teacher: how a suite's own scorer likes a completion, compared with the others on its prompt
    (GRPO, arXiv 2402.03300). General prompts are then the suite's documents, and `general` plays no part."""

    suite: str = Field(min_length=1)
    """Any generative suite. What it holds is learned from, so it says nothing about the model any more: measure on another."""
    metric: str | None = None
    """Which of the suite's scores. Default: its first."""
    group: Annotated[int, Field(ge=2, strict=True)] = 8
    """Completions per prompt, which are compared with each other."""
    teacher: Annotated[float, Field(ge=0)] = 0.1
    """Weight of what the teacher says of the same tokens, as a dense signal."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the comparison itself; 0 leaves the reward to choose what a teacher with `context` is shown."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far a token's probability may move, as a ratio, before the reward stops pushing it (arXiv 1707.06347)."""


class RecoverConfig(Section):
    """Recovery by on-policy distillation: the student samples, a teacher grades every token by reverse KL."""

    method: Literal["alternating", "general", "replay", "interpolate"] = "alternating"
    """`alternating` is ours. Its rivals: `general`, without domain steps; `replay`, imitation of the teachers' answers;
    `interpolate`, the tuned adapter scaled by what held-out KL likes best, without training."""
    alpha: Annotated[float, Field(gt=0, le=1)] | None = None
    """The scale of `interpolate`, where it is not to be chosen: a further point of the alpha-curve."""
    general: Annotated[str, Field(min_length=1)] | None = "everyday"
    """Prompts on which base is the teacher: `everyday` (shipped) or your own file. None: domain steps only."""
    domain: str | None = None
    """Prompts on which tuned is the teacher. Default: the questions of the fine-tune's data."""
    general_teacher: TeacherSection = TeacherSection(kind="base")
    """Who grades general prompts."""
    domain_teacher: TeacherSection = TeacherSection(kind="tuned")
    """Who grades domain prompts."""
    teachers: dict[Annotated[str, Field(pattern=TEACHER_NAME)], NamedTeacher] = {}
    """Further teachers by name, such as specialists: each grades the prompts whose `teacher` field names it, and its own `prompts`."""
    reward: RewardSection | None = None
    """What general completions are rewarded for, beyond what their teacher can teach."""
    steps: Positive = 72
    """Optimizer steps, both streams together."""
    rollouts: Positive = 16
    """Completions per optimizer step."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Sample so many times `rollouts`, and learn from those where student and teacher, or a group's rewards, differ most (2605.27115, 2503.14476)."""
    domain_rollouts: Positive | None = None
    """Completions per domain step, where it should differ: domain answers are often short."""
    general_per_domain: Annotated[int, Field(ge=0, strict=True)] = 1
    """General steps before each domain step; the two are never mixed in one step. 0: domain steps only."""
    lmbda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of steps on the student's own completions; the others are on the teacher's."""
    teacher_first: Annotated[int, Field(ge=0, strict=True)] = 9
    """General steps at the start that are on base's answers: a student that says little learns little from itself."""
    sample_ahead: Positive = 3
    """Steps of a stream sampled at once. 1 is strictly on-policy; more fills the hardware, and lets long completions go on beside the next."""
    max_new_tokens: Positive = 128
    """Longest general completion, in tokens."""
    domain_max_new_tokens: Positive | None = None
    """Longest domain completion, where it should differ."""
    warm_start: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Scale of the tuned adapter from which recovery starts. Below 1 it starts nearer to base, at the domain's expense."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of the student."""
    sampler: Sampler = "auto"
    """Engine that samples: our own `slab`, or transformers' `generate` or `continuous` batching."""
    server: ServerSection | None = None
    """Where completions are sampled, if not in this process: a server that takes adapters and sees the run, as `opdcl serve RUN` is."""
    loss: LossSection = LossSection()
    """The divergence, and its parameters."""
    learning_rate: Rate = 3e-4
    """Peak rate: reached over the first tenth of the steps, falling to zero at the last."""
    micro_batch_tokens: Positive = 2048
    """Tokens, padding included, per forward and backward pass. It bounds memory and changes nothing else."""
    health: HealthSection = HealthSection()
    """When to slow down, and when to stop."""
    until: UntilSection = UntilSection()
    """When to stop before the last step."""
    validate_every: Positive = 12
    """Steps between measurements on held-out prompts; the best adapter by these is the one kept."""
    validation_prompts: Positive = 16
    """Prompts per stream for that: general ones kept aside, and some of the domain's, all of which are practised."""
    keep: Literal["best", "last"] = "best"
    """Which adapter the stage ends with: the best by held-out KL, or the last that was measured."""
    save_steps: Positive = 12
    """Steps between checkpoints."""
    seed: int = 0
    """Order of prompts and all sampling."""
    trainer: dict[str, Any] = {}
    """Further fields of `trl.DistillationConfig`."""

    @model_validator(mode="after")
    def _leads_somewhere(self) -> RecoverConfig:
        if self.general_teacher.begins_as_tuned:
            raise ValueError(
                "general_teacher is the student as it begins, so it leads nowhere: take base, or give it a context"
            )
        if self.alpha and self.method != "interpolate":
            raise ValueError(
                "alpha is the scale of method interpolate; where a recovery starts is warm_start"
            )
        if self.general is None and not self.reward and (self.general_per_domain or self.method == "general"):
            raise ValueError(
                "without general prompts there are domain steps only: method alternating, general_per_domain 0"
            )
        domain = self.domain_max_new_tokens or self.max_new_tokens
        for name, teacher in self.all_teachers().items():
            length = self.max_new_tokens if name == "general_teacher" else domain
            if teacher.skip_tokens >= length:
                raise ValueError(f"{name}.skip_tokens leaves nothing of {length} tokens")
            self._can_be_told(name, teacher)
        return self

    @model_validator(mode="after")
    def _samples_at_temperature_one_elsewhere(self) -> RecoverConfig:
        if self.server and self.temperature != 1:
            raise ValueError(
                "a server tells log-probabilities at temperature 1, so that is what it must sample at: leave temperature or server out"
            )
        return self

    def _can_be_told(self, name: str, teacher: TeacherSection) -> None:
        """Refuse a loss that would need more of a distribution than a server tells."""
        if teacher.server is None:
            return
        told = self.loss.kind == "policy_gradient" or (
            self.loss.kind == "top_k" and self.loss.k <= teacher.server.top_k
        )
        if not told or self.temperature != 1:
            raise ValueError(
                f"a server tells the token's own log-probability and {teacher.server.top_k} likely ones, at temperature 1: with {name} take "
                f"loss.kind policy_gradient, or top_k with k at most {teacher.server.top_k}"
            )

    @model_validator(mode="after")
    def _rewards_what_the_student_writes(self) -> RecoverConfig:
        if unfed := [
            name
            for name, t in self.all_teachers().items()
            if t.reads_feedback and not (self.reward and name == "general_teacher")
        ]:
            raise ValueError(
                f"{unfed[0]}.context: {{feedback}} is known of rewarded completions only, whose teacher is general_teacher"
            )
        if self.reward is None:
            return self
        if self.method not in ("alternating", "general") or self.loss.kind == "cross_entropy":
            raise ValueError(
                "a reward needs method alternating or general, and a loss that compares with the teacher"
            )
        if self.lmbda < 1 or self.teacher_first:
            raise ValueError("a reward is for what the student itself writes: lmbda 1, teacher_first 0")
        if self.rollouts % self.reward.group:
            raise ValueError(f"rollouts must be a multiple of reward.group, {self.reward.group}")
        if self.keep != "last":
            raise ValueError("with a reward, held-out KL does not say which adapter is best: keep last")
        return self

    def source(self, stream: Literal["general", "domain"]) -> str | None:
        """Return where a stream's prompts come from, if from a data source."""
        if stream == "domain":
            return self.domain
        return None if self.reward else self.general

    def all_teachers(self) -> dict[str, TeacherSection]:
        """Return every teacher by its key."""
        named = {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return {"general_teacher": self.general_teacher, "domain_teacher": self.domain_teacher, **named}
