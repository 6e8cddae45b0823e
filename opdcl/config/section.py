"""What every section of a workflow shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Sampler = Literal["auto", "slab", "generate", "continuous"]

# Strict: `true` is not 1, and '3' is not 3.
Positive = Annotated[int, Field(gt=0, strict=True)]

Rate = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    # Defaults are validated so that they are what a saved configuration is read as: 5 epochs would hash unlike 5.0.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )
