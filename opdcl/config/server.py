"""Settings of a model server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opdcl.config.section import Positive, Section


class ServerSection(Section):
    """A model server that returns log-probabilities of prompt tokens, such as vLLM. Its API key is read from
    the environment variable `OPDCL_SERVER_KEY`."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@\s]+(/\S*)?$")]
    """OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    model: str | None = None
    """Name of the model on the server. Default: the only one it serves."""
    top_k: Positive = 20
    """Number of likeliest tokens to request per position. vLLM's default limit is 20."""
    concurrency: Positive = 16
    """Maximum number of requests in flight."""
    timeout: Annotated[float, Field(gt=0)] = 300
    """Request timeout, in seconds."""
    patience: Annotated[float, Field(gt=0)] = 600
    """How long to wait for an unreachable server, in seconds."""
