"""Consent to run the Python code that comes with a model: a command gives it, a run directory never does.

A run directory may come from somebody else, and could bring a model with code along and a configuration that
allows it. So what a run has stored says only that its model needs consent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opdcl.config.load import flatten
from opdcl.config.model import ModelConfig
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.rundir.layout import RunDir

KEY = "model.trust_remote_code"
HINT = (
    f"read that code; if you trust it, add --set {KEY}=true (chat and export: --trust-remote-code; "
    "serve: -- --trust-remote-code)"
)


def base_of_run(run: RunDir, trust_remote_code: bool) -> ModelConfig:
    """Return the base model of a run, whose own code may run only if the command says so.

    Raises:
        UsageError: The run was made with such code, and the command does not allow it.
    """
    model = ModelConfig(**run.settings()["model"] | {"device": "auto"})  # runs of earlier versions name one
    if model.trust_remote_code and not trust_remote_code:
        raise _not_given(model.id, run.path)
    return model.model_copy(update={"trust_remote_code": trust_remote_code})


def without_consent(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored settings of a run without the consent in them."""
    model = settings.get("model")
    if not isinstance(model, Mapping):
        return dict(settings)
    return {**settings, "model": {key: value for key, value in model.items() if key != "trust_remote_code"}}


def refuse_stored_consent(stored: Mapping[str, Any], workflow: Workflow, place: Path) -> None:
    """Refuse to go on with a run that was made with its model's code, unless the command allows that code."""
    model = stored.get("model")
    needs_code = isinstance(model, Mapping) and bool(model.get("trust_remote_code"))
    if needs_code and not workflow.model.trust_remote_code:
        raise _not_given(workflow.model.id, place)


def refuse_consent_of_files(workflow: Workflow, origins: Mapping[str, str]) -> None:
    """Refuse a workflow file that lies in a run directory and allows the model's code.

    Any other workflow that a command names is the user's own word, like a script that they start.
    """
    arms = {f"arms.{name}": settings for name, settings in workflow.arms.items()}
    values = flatten({"model": workflow.model.model_dump(), **arms})
    for key, value in values.items():
        if value is True and (key == KEY or key.endswith(f".{KEY}")):
            file = Path(origins.get(key, "").rpartition(":")[0])
            if file.name and RunDir(file.resolve().parent).is_run():
                raise _not_given(workflow.model.id, file)


def missing(model: ModelConfig, fault: BaseException) -> UsageError | None:
    """Return the error to show if transformers refused to load a model because its code is not allowed."""
    if model.trust_remote_code or "trust_remote_code" not in str(fault):
        return None
    return UsageError(f"model {model.id!r} comes with Python code, which only you can allow to run", HINT)


def _not_given(model: str, place: Path) -> UsageError:
    message = f"{place} was made with Python code that comes with its model {model}, or with a task"
    return UsageError(f"{message}; a run directory cannot allow this command to run it", HINT)
