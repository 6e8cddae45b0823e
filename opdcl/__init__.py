"""opdcl: fine-tune a model on a domain, recover what it forgot, and prove both."""

import os

__version__ = "0.1.0"

# A training run is nobody else's business: TRL would report itself to the hub. Read when huggingface_hub is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
