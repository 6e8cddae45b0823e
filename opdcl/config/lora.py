"""Settings of a new adapter."""

from __future__ import annotations

from pydantic import field_validator

from opdcl.config.section import Positive, Section


class LoraSection(Section):
    """The adapter. Recovery trains the same one further."""

    r: Positive = 32
    """Rank."""
    alpha: Positive = 64
    """Scale numerator: the update is multiplied by alpha / r."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter; `lm_head` is not allowed. Experts count as linear layers, which
    transformers names `gate_up_proj` and `down_proj`. Each expert gets rank r / (experts per token); routers
    get no adapter."""

    @field_validator("target_modules")
    @classmethod
    def _head_stays_frozen(cls, value: str | list[str]) -> str | list[str]:
        if "lm_head" in ([value] if isinstance(value, str) else value):
            raise ValueError("lm_head cannot be a target: the distillation loss reads the base model's head")
        return value
