"""opdcl: fine-tune a model on a domain, recover what it forgot, and prove both."""

__version__ = "0.1.0"
