"""Settings of the fine-tune."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opdcl.config.loss import LossKind, LossSection
from opdcl.config.section import Positive, Rate, Section


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
