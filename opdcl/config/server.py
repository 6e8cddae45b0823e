"""Settings of a model server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opdcl.config.section import Positive, Section


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
