"""opdcl: fine-tune a model on a domain, recover what it forgot, and measure both."""

import os
from typing import Any

from opdcl.api import chat, chat_page, compare, evaluate, export, finetune, recover, report, run, verify
from opdcl.version import __version__

__all__ = [
    "__version__",
    "chat",
    "chat_page",
    "compare",
    "evaluate",
    "export",
    "finetune",
    "recover",
    "report",
    "run",
    "verify",
]

# TRL would report each training run to the Hub. huggingface_hub reads this on import.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# torch's threads would wait for each other in a loop of some milliseconds, which takes the cores away from a
# second process: both crawl. After 1,000 rounds they sleep. GNU's OpenMP reads this when torch loads it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """Name the verb that a shorter name means."""
    near = next((f"; did you mean opdcl.{verb}?" for verb in __all__ if verb.startswith(name)), "")
    raise AttributeError(f"module 'opdcl' has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return [name for name in __all__ if name != "__version__"]  # what completion offers
