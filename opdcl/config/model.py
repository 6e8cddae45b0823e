"""Settings of a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opdcl.config.section import Section


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
