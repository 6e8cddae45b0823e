"""Settings of a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opdcl.config.section import Section


class ModelConfig(Section):
    """The base model: it is fine-tuned, and it is the teacher that recovery returns to."""

    id: str = Field(default="smollm2-135m", min_length=1)
    """`smollm2-135m` (embedded), a Hub id, a local folder, or a GGUF file."""
    revision: str | None = None
    """Hub revision to pin."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and computation. `auto`: bfloat16 where the hardware computes in it, else
    float32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave this off unless you have read that code."""
    deterministic: bool = False
    """Use only kernels that repeat bit for bit. CPU kernels always do; on CUDA this costs speed."""
    shard: bool = False
    """Shard the frozen layers over all processes (FSDP2). Has no effect with one process."""
