"""opdcl: fine-tune a model on a domain, recover what it forgot, and prove both."""

import os
from typing import TYPE_CHECKING, Any

from opdcl.version import __version__

if TYPE_CHECKING:
    from opdcl.api import compare, evaluate, finetune, recover, report, run

__all__ = ["__version__", "compare", "evaluate", "finetune", "recover", "report", "run"]

# A training run is nobody else's business: TRL would report itself to the hub. Read when huggingface_hub is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    """Import the verbs of `opdcl.api` at their first use: `import opdcl` alone costs nothing."""
    if name in __all__:
        from opdcl import api

        return getattr(api, name)
    raise AttributeError(f"module 'opdcl' has no attribute {name!r}")
