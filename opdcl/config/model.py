"""Settings of a model, loaded here or on a server, and of an adapter on it."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from opdcl.config.section import Positive, Section

# How many of the likeliest tokens a server is asked for at each position: vLLM's limit, unless it is raised.
SERVED_TOKENS = 20

# In place of a number of tokens: the whole vocabulary, as vLLM calls it.
WHOLE_VOCABULARY = -1


def is_this_machine(host: str) -> bool:
    """Return whether the name or address of a host is reached from this machine only."""
    try:
        # Also the short and numeric forms that the system takes: 127.1, 2130706433.
        is_short = re.fullmatch(r"[0-9a-fA-FxX.]+", host)
        address = ipaddress.ip_address(socket.inet_aton(host) if is_short else host.strip("[]"))
    except (ValueError, OSError):
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback


class TeacherModel(Section):
    """Another model that teaches. It is loaded onto the student's device, is sharded if base is, and takes
    over a chat template that is set for base. Code that comes with it is not run."""

    former = {
        "revision": (None, "download the revision, and name its folder as id"),
        "quantization": (None, "a teacher has its weights as they are stored; a remote one may be quantized"),
    }

    id: str = Field(default="smollm2-135m", min_length=1)
    """`smollm2-135m` (embedded), a Hub id, a local folder, or a GGUF file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and computation. `auto`: bfloat16 where the hardware has it, else float32."""

    def resident(self, **shared: Any) -> ModelConfig:
        """Return all settings of the model; `shared` holds those that it takes over from base."""
        return ModelConfig(**self.model_dump(), **shared)


class ModelConfig(TeacherModel):
    """The base model: it is fine-tuned, and it is the teacher that recovery returns to."""

    former = {
        "device": ("auto", "CUDA_VISIBLE_DEVICES=1 chooses the second GPU, CUDA_VISIBLE_DEVICES= the CPU")
    }

    revision: str | None = None
    """Hub revision to pin."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Quantize the frozen linear layers with bitsandbytes: `4bit` (NF4, as in QLoRA) or `8bit`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, or with a task of lm-eval of your own. Leave this off unless
    you have read that code. What a run directory has stored does not count: a command that reads it must
    allow the code again."""
    chat_template: str | None = None
    """Chat template that replaces the model's own: a Jinja file, or the text itself."""
    chat_template_kwargs: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], bool | int | float | str
    ] = {}
    """Variables of the chat template, such as `{enable_thinking: true}`, which is off by default."""
    deterministic: bool = False
    """Use only kernels that repeat bit for bit. CPU kernels always do; on CUDA this costs speed."""
    shard: bool = False
    """Shard the frozen layers over all processes (FSDP2). Has no effect with one process."""

    @model_validator(mode="after")
    def _can_be_quantized(self) -> ModelConfig:
        if self.quantization and self.id.endswith(".gguf"):
            raise ValueError("quantization needs a model in safetensors, not a GGUF file")
        if self.quantization and self.shard:
            raise ValueError("quantization excludes shard: FSDP2 cannot split quantized weights")
        return self

    @field_validator("chat_template")
    @classmethod
    def _is_template(cls, value: str | None) -> str | None:
        # `config.load` has read the file if a command or a workflow names one. A run stores the text, so it
        # can be continued without the file, and names none.
        if value is not None and "{" not in value:
            raise ValueError("is neither a Jinja template nor a file that can be read")
        return value


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


class ServerSection(Section):
    """A model server that returns log-probabilities of prompt tokens, such as vLLM. Its API key is read from
    the environment variable `OPDCL_SERVER_KEY`, and sent to the server at `OPDCL_SERVER_URL` only, or without
    that variable to servers on this machine. What a run directory has stored does not count: a command that
    reads it must name the server again."""

    former = {
        "model": (None, "serve one model, as opdcl serve does: only a teacher's server may hold others")
    }

    url: Annotated[str, Field(pattern=r"^https?://[^/@\s]+(/\S*)?$")]
    """OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""


class NamedServer(ServerSection):
    """A server that may serve several models."""

    former = {}

    model: str | None = None
    """Name of the model on the server. Default: the only one it serves."""
