"""The schema of a workflow. A field's docstring is its help text, in `opdcl config schema` and in error messages.

Own fields are few. Everything else that a trainer can do goes through its `trainer:` mapping, which is checked
against the real fields of `trl.SFTConfig` and `trl.DistillationConfig` before anything is loaded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

TEACHER_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,31}$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Sampler = Literal["auto", "slab", "generate", "continuous"]
LossKind = Literal["reverse_kl", "forward_kl", "jsd", "entropy_switched", "top_k", "policy_gradient", "cross_entropy"]
# Strict: `true` is not 1, and '3' is not 3.
Positive = Annotated[int, Field(gt=0, strict=True)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    # Defaults are validated so that they are what a saved configuration is read as: 5 epochs would hash unlike 5.0.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True)


class ModelConfig(Section):
    """The base model: what is fine-tuned, and the teacher that recovery returns to."""

    id: str = Field(default="smollm2-135m", min_length=1)
    """`smollm2-135m` (embedded), a hub id, or a folder or GGUF file on this machine."""
    revision: str | None = None
    """Hub revision to pin."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and computation. `auto`: bfloat16 where the hardware computes in it, else float32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave off unless you have read that code."""
    deterministic: bool = False
    """Only kernels that repeat bit for bit. The CPU's do so anyway; on CUDA it costs speed."""
    shard: bool = False
    """Spread the frozen layers over all processes (FSDP2); with one process it does nothing."""


class LoraSection(Section):
    """The adapter. Recovery continues the same one."""

    r: Positive = 32
    """Rank."""
    alpha: Positive = 64
    """Scale numerator: the update is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """Which linear layers get an adapter; `lm_head` cannot."""

    @field_validator("target_modules")
    @classmethod
    def _head_stays_frozen(cls, value: str | list[str]) -> str | list[str]:
        if "lm_head" in ([value] if isinstance(value, str) else value):
            raise ValueError("lm_head cannot be a target: the distillation loss reads the base head")
        return value


class LossSection(Section):
    """What a graded token costs. Only `kind`'s own parameters play a part."""

    kind: LossKind = "reverse_kl"
    """The divergence between student and teacher; `policy_gradient` and `cross_entropy` grade the sampled token alone."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """`jsd`: 0 is forward KL, 1 reverse KL. Scaled so that one learning rate suits every value."""
    rescaled: bool = True
    """`jsd`: divide by beta (1 - beta). Without it, as in GKD, loss and gradient are a quarter at 0.5 and vanish near the ends."""
    unsure_above: Annotated[float, Field(ge=0)] = 2.0
    """`entropy_switched`: teacher entropy in nats above which forward KL is used."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """`policy_gradient`: how much of the next token's advantage each token answers for; 0 leaves each to itself."""
    k: Positive = 100
    """`top_k`: how many of the teacher's likeliest tokens count one by one."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest loss of a token in nats; what lies above has no gradient."""
    unfinished: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of completions that were cut off at their longest length; 0 drops them."""


class SelfDistillLoss(LossSection):
    kind: LossKind = Field(default="forward_kl", description="As in `recover.loss`.")


class SelfDistillSection(Section):
    """Learning from oneself: the student answers, and a running mean of it that is shown the row's answer grades."""

    context: str = "{prompt}\n\nA good answer would be: {answer}\n\nAnswer in your own words."
    """What the teacher sees in place of the last user message."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """How far towards the student the teacher moves at each step; 0 leaves it at the model as it began."""
    loss: SelfDistillLoss = SelfDistillLoss()
    """The divergence, and its parameters."""
    max_new_tokens: Positive = 64
    """Longest completion, in tokens."""
    skip_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """Leave out so many tokens at the start of each completion, where a teacher that knows the answer gives itself away."""

    @model_validator(mode="after")
    def _can_teach(self) -> SelfDistillSection:
        if "{answer}" not in self.context or "{prompt}" not in self.context:
            raise ValueError("context needs {prompt} and {answer}")
        if self.skip_tokens >= self.max_new_tokens:
            raise ValueError(f"skip_tokens leaves nothing of {self.max_new_tokens} tokens")
        return self


class FinetuneConfig(Section):
    """Fine-tune of a LoRA adapter on the domain."""

    method: Literal["sft", "self-distill"] = "sft"
    """`sft`: imitate the rows' answers, the loss on these only. `self-distill`: sample, and be graded by oneself with the
    answer at hand, which forgets less and needs a model that can learn from an example (arXiv 2601.19897)."""
    data: str = Field(min_length=1)
    """`handbook` (shipped), a JSONL, CSV or Parquet file, a folder of documents, or a hub dataset: `owner/name@revision`."""
    lora: LoraSection = LoraSection()
    """The adapter's shape."""
    learning_rate: Rate = 1e-3
    """Peak rate. 1e-3 suits 135M parameters; about 2e-4 suits 1B to 8B."""
    epochs: Annotated[float, Field(gt=0)] = 5
    """Passes over the data."""
    batch_size: Positive = 16
    """Rows per optimizer step."""
    max_length: Positive = 1024
    """Longest row in tokens; a longer one is refused, plain text is cut into pieces of this size."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Several rows per sequence. `auto`: where a flash-attention kernel keeps the rows apart."""
    save_steps: Positive = 50
    """Optimizer steps between checkpoints."""
    seed: int = 0
    """Order of rows and start of the adapter."""
    self_distill: SelfDistillSection = SelfDistillSection()
    """Settings of `self-distill`."""
    trainer: dict[str, Any] = {}
    """Further fields of `trl.SFTConfig`, of `trl.DistillationConfig` for `self-distill`."""


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


class ServerSection(Section):
    """A model on a server that tells log-probabilities of prompts, such as vLLM. `OPDCL_SERVER_KEY` in the environment is its key."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@\s]+(/\S*)?$")]
    """Its OpenAI-compatible endpoint: http://127.0.0.1:8000/v1"""
    model: str | None = None
    """Name under which it serves the model. Default: the only one there is."""
    top_k: Positive = 20
    """How many likely tokens of each position it is asked for; vLLM allows 20 unless it is told otherwise."""
    concurrency: Positive = 16
    """Requests in flight."""
    timeout: Annotated[float, Field(gt=0)] = 300
    """Seconds until a request counts as lost."""
    patience: Annotated[float, Field(gt=0)] = 600
    """Seconds that a server which is gone is waited for."""


class TeacherSection(Section):
    """Who grades a stream. Only `kind`'s own parameters play a part."""

    kind: Literal["base", "tuned", "adapter", "live", "ema", "trust_region", "model", "remote"]
    """`base`, `tuned` and `adapter`, which another run made, are frozen; `live` is the student itself, `ema` a running mean of
    it, `trust_region` lies between `reference` and the student; `model` is another one with the same tokenizer, `remote` one
    on a server."""
    adapter: Annotated[str, Field(min_length=1)] | None = None
    """`adapter`: a run directory, whose last adapter it is, an adapter's folder, or its hub id."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """`ema`: how far towards the student it moves at a time."""
    every: Positive = 1
    """`ema`: steps from one move to the next."""
    reference: Literal["base", "tuned"] = "base"
    """`trust_region`: the frozen end."""
    mix: Annotated[float, Field(ge=0, le=1)] = 0.05
    """`trust_region`: the student's share."""
    model: ModelConfig | None = None
    """`model`: which."""
    server: ServerSection | None = None
    """`remote`: where."""
    context: str | None = None
    """What the teacher sees in place of the last user message, with `{prompt}` and `{answer}`: it knows, the student has to
    find out. Rows need answers then. Under a reward the answer is the best one of the group, for those that did worse, and
    `{feedback}` what the suite's scorer says of their own (arXiv 2601.20802)."""
    skip_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    """Leave out so many tokens at the start of each completion, where a teacher with context gives itself away."""

    @property
    def reads_feedback(self) -> bool:
        """Whether it is shown what a scorer says."""
        return "{feedback}" in (self.context or "")

    @property
    def begins_as_tuned(self) -> bool:
        """Whether it is, at first, what the student is."""
        tuned = self.kind in ("tuned", "ema") or (self.kind == "trust_region" and self.reference == "tuned")
        return tuned and self.context is None

    @model_validator(mode="after")
    def _has_something_to_teach(self) -> TeacherSection:
        if self.context is not None and ("{answer}" not in self.context or "{prompt}" not in self.context):
            raise ValueError("context needs {prompt} and {answer}")
        for kind, part in (("model", "model"), ("adapter", "adapter"), ("remote", "server")):
            if (self.kind == kind) != (getattr(self, part) is not None):
                raise ValueError(f"kind {kind} and {'an' if part == 'adapter' else 'a'} {part} go together")
        if self.kind == "live" and self.context is None:
            raise ValueError("a live teacher without context is the student: there is nothing to learn")
        return self


class NamedTeacher(TeacherSection):
    """One teacher among several, who grades the prompts that name it."""

    prompts: Annotated[str, Field(min_length=1)] | None = None
    """Further domain prompts, all of which are its own."""


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
            raise ValueError("general_teacher is the student as it begins, so it leads nowhere: take base, or give it a context")
        if self.alpha and self.method != "interpolate":
            raise ValueError("alpha is the scale of method interpolate; where a recovery starts is warm_start")
        if self.general is None and not self.reward and (self.general_per_domain or self.method == "general"):
            raise ValueError("without general prompts there are domain steps only: method alternating, general_per_domain 0")
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
            raise ValueError("a server tells log-probabilities at temperature 1, so that is what it must sample at: leave temperature or server out")
        return self

    def _can_be_told(self, name: str, teacher: TeacherSection) -> None:
        """Refuse a loss that would need more of a distribution than a server tells."""
        if teacher.server is None:
            return
        told = self.loss.kind == "policy_gradient" or (self.loss.kind == "top_k" and self.loss.k <= teacher.server.top_k)
        if not told or self.temperature != 1:
            raise ValueError(f"a server tells the token's own log-probability and {teacher.server.top_k} likely ones, at temperature 1: with {name} take "
                             f"loss.kind policy_gradient, or top_k with k at most {teacher.server.top_k}")  # fmt: skip

    @model_validator(mode="after")
    def _rewards_what_the_student_writes(self) -> RecoverConfig:
        if unfed := [name for name, t in self.all_teachers().items() if t.reads_feedback and not (self.reward and name == "general_teacher")]:
            raise ValueError(f"{unfed[0]}.context: {{feedback}} is known of rewarded completions only, whose teacher is general_teacher")
        if self.reward is None:
            return self
        if self.method not in ("alternating", "general") or self.loss.kind == "cross_entropy":
            raise ValueError("a reward needs method alternating or general, and a loss that compares with the teacher")
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


class EvalConfig(Section):
    """What is measured, on base, tuned and recovered alike."""

    retention: list[str] = ["instructions"]
    """Suites of what must not be lost: `instructions` (shipped), `ifeval`, or any generative lm-eval task."""
    domain: list[str] = []
    """Suites of what was to be learned: `handbook` (shipped), or any generative lm-eval task."""
    control: list[str] = []
    """Suites shown beside them without a part in the verdict, such as `neighbours`."""
    data: dict[str, str] = {}
    """A local file in place of a suite's hub dataset, such as `{ifeval: input_data.jsonl}`; or, under a new name, a
    question-and-answer file that becomes a closed-book suite."""
    limit: Positive | None = None
    """First so many documents of each suite."""
    max_new_tokens: Positive | None = None
    """Longest answer in tokens, where a suite's own limit is not lower. Question files have 96 unless this says otherwise."""
    batch_size: Positive = 320
    """Answers decoded together."""
    sampler: Sampler = "auto"
    """Engine that decodes: our own `slab`, or transformers' `generate` or `continuous` batching."""
    server: ServerSection | None = None
    """Where completions are decoded, if not in this process: a server that takes adapters and sees the run, as `opdcl serve RUN` is."""
    seed: int = 0
    """Resamples of the intervals."""

    @field_validator("retention", "domain", "control", "data")
    @classmethod
    def _names_stay_inside_the_run(cls, value: list[str] | dict[str, str]) -> list[str] | dict[str, str]:
        # A suite's name is the name of its result files.
        if bad := [name for name in value if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name)]:
            raise ValueError(f"{bad[0]!r} is no suite name: letters, digits, dots, hyphens and underscores only")
        return value

    def suites(self) -> dict[str, str]:
        """Return suite -> role, in the order in which they are measured."""
        return {suite: role for role in ("retention", "domain", "control") for suite in getattr(self, role)}


class Gates(Section):
    """Scores that the run must reach; a miss ends `opdcl run` with exit code 3."""

    recovery: float | None = None
    """Smallest R."""
    domain_retention: float | None = None
    """Smallest D."""


class Workflow(Section):
    """One run: a model, and the stages that are given."""

    name: str = Field(default="run", pattern=NAME)
    """Name of the run directory under `runs/`."""
    description: str = ""
    """One line for `opdcl workflows ls`."""
    model: ModelConfig = ModelConfig()
    """The base model."""
    start: Annotated[str, Field(min_length=1)] | None = None
    """Adapter to go on with, instead of a new one: a run directory, whose last adapter it is, an adapter's folder, or its hub id."""
    finetune: FinetuneConfig | None = None
    """Learn the domain. Left out: recovery begins with the adapter of an earlier `opdcl finetune`, or with `start`."""
    recover: RecoverConfig | None = None
    """Win back what was forgotten."""
    eval: EvalConfig | None = None
    """Measure base, tuned and recovered."""
    gates: Gates = Gates()
    """Scores to reach."""
    track: list[Literal["trackio", "tensorboard", "wandb", "mlflow"]] = []
    """Trackers that show metrics as they come, and then scores, samples and verdict. The run's files hold all that anyway."""
    arms: dict[Annotated[str, Field(pattern=NAME)], dict[str, Any]] = {}
    """Several runs of one workflow: name -> the settings in which that run differs. What they have in common is made once."""
    seeds: list[Annotated[int, Field(ge=0, strict=True)]] = []
    """Repeat every run with each of these as the seed of fine-tune and recovery."""

    @model_validator(mode="after")
    def _measures_on_what_was_not_learned(self) -> Workflow:
        reward = self.recover.reward if self.recover else None
        if reward and self.eval and reward.suite in self.eval.suites():
            raise ValueError(f"recover.reward learns from {reward.suite}, so eval cannot measure on it: name another suite")
        return self

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is named twice, which would count one result as two")
        return value

    def adapters(self) -> dict[str, str]:
        """Return the places of the adapters that it starts from or is taught by, by their keys."""
        teachers = self.recover.all_teachers() if self.recover else {}
        places = {"start": self.start} | {f"recover.{name}.adapter": teacher.adapter for name, teacher in teachers.items()}
        return {key: place for key, place in places.items() if place}
