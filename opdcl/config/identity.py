"""Which settings determine a result, and which only where or how fast it is made."""

from __future__ import annotations

from typing import Any

# Where the model runs, and how.
MACHINE = {"device", "deterministic", "shard"}

# Settings that change where or how fast a result is made, not what it is.
WITHOUT_MEANING = {"save_steps", "micro_batch_tokens"}

# Where a server is, and how patiently it is asked.
PLACE = {"url", "concurrency", "timeout", "patience"}


def meaningful_settings(config: dict[str, Any], ignored: set[str] = WITHOUT_MEANING) -> dict[str, Any]:
    """Return the settings of a stage that determine its result, at every depth."""
    return {
        key: meaningful_settings(value, PLACE if key == "server" else set())
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key not in ignored
    }
