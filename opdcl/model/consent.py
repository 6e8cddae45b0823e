"""What only a command or a workflow file of the user's may allow, never what a run directory has stored.

A run directory may come from somebody else. Its settings could name a model with Python code and allow that
code, a server that is to receive prompts and the key of another one, or files of the user's. So what a run
has stored names these, at most, and a command that would use one asks for it anew.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opdcl.config.load import flatten
from opdcl.config.model import ModelConfig
from opdcl.config.reference import explain, origin_of
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.rundir.files import RESTORE
from opdcl.rundir.layout import RunDir

KEY = "model.trust_remote_code"
HINT = (
    f"read that code; if you trust it, add --set {KEY}=true (chat and export: --trust-remote-code; "
    "serve: -- --trust-remote-code)"
)

# Settings by which a stage reaches beyond the run: servers, and teachers that are a folder or a file.
SERVERS = ("recover.server.url", "recover.teachers.*.server.url", "eval.server.url")
TEACHERS = ("recover.teachers.*.adapter", "recover.teachers.*.model.id", "recover.teachers.*.prompts")

# Trackers, which send what a run measures to an account.
TRACK = "track"

# The origin of such a setting if a run has stored it.
STORED = "stored in the run"


def base_of_run(run: RunDir, trust_remote_code: bool) -> ModelConfig:
    """Return the base model of a run, whose own code may run only if the command says so.

    Raises:
        UsageError: The run was made with such code, and the command does not allow it.
    """
    model = stored_model(run.settings().get("model"), run.config)
    if model.trust_remote_code and not trust_remote_code:
        raise _not_given(model.id, run.path)
    return model.model_copy(update={"trust_remote_code": trust_remote_code})


def stored_model(record: Any, file: Path) -> ModelConfig:
    """Return the model that a record in a file of a run describes.

    Raises:
        UsageError: The record describes none.
    """
    try:
        return ModelConfig(**record | {"device": "auto"})  # runs of earlier versions name one
    except (TypeError, ValueError) as fault:
        problem = explain(fault, {}).message if isinstance(fault, ValidationError) else "it names no model"
        raise UsageError(f"{file} is damaged: {problem}", RESTORE) from fault


def without_consent(saved: Mapping[str, Any], place: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the stored settings of a run without the consent in them, and their origins.

    What reaches beyond the run is marked as stored there, even if the run names another origin.

    Raises:
        UsageError: The settings are those of several runs, which no run directory stores.
    """
    settings, origins = dict(saved["workflow"]), dict(saved.get("origins", {}))
    if settings.get("arms") or settings.get("seeds"):
        raise _several(place)
    model = settings.get("model")
    if isinstance(model, Mapping):
        settings["model"] = {key: value for key, value in model.items() if key != "trust_remote_code"}
    for key in flatten(settings):
        if _reaches_beyond(key):
            origins[key] = STORED
    return settings, origins


def refuse_stored_consent(stored: Mapping[str, Any], workflow: Workflow, place: Path) -> None:
    """Refuse to go on with a run that was made with its model's code, unless the command allows that code."""
    model = stored.get("model")
    needs_code = isinstance(model, Mapping) and bool(model.get("trust_remote_code"))
    if needs_code and not workflow.model.trust_remote_code:
        raise _not_given(workflow.model.id, place)


def refuse_consent_of_files(workflow: Workflow, origins: Mapping[str, str]) -> None:
    """Refuse a workflow file that lies in a run directory and allows the model's code, or describes several
    runs.

    Any other workflow that a command names is the user's own word, like a script that they start.
    """
    for key, origin in origins.items():
        is_consent = key == KEY and workflow.model.trust_remote_code
        is_several = key.startswith("arms.") or (key == "seeds" and workflow.seeds)
        if (is_consent or is_several) and _is_stored(origin):
            file = Path(origin.rpartition(":")[0])
            raise _not_given(workflow.model.id, file) if is_consent else _several(file)


def refuse_stored_places(
    workflow: Workflow, origins: Mapping[str, str], run: RunDir, todo: Collection[str]
) -> None:
    """Refuse servers and teachers outside the run that only a run has named, if a stage to do needs them.

    Raises:
        UsageError: The command has to name them.
    """
    stages = {name: getattr(workflow, name) for name in ("recover", "eval") if name in todo}
    settings = {name: stage.model_dump() for name, stage in stages.items() if stage}
    asked = []
    for key, value in flatten(settings).items():
        is_server = key.endswith(".url")
        if value is None or not _reaches_beyond(key) or not _is_stored(origin_of(key, origins)):
            continue
        if is_server or _lies_outside(str(value), run):
            asked.append((key, str(value), "server" if is_server else "file"))
    if not asked:
        return
    named = ", ".join(f"the {kind} {value} ({key})" for key, value, kind in asked)
    # Quoted: it is there to be copied into a shell.
    again = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value, _ in asked)
    message = f"a run directory cannot make this command use {named}"
    raise UsageError(message, f"if you trust it, name it yourself: {again}")


def trackers_of(workflow: Workflow, origins: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the trackers that the user has named, and a note on those that only a run has named."""
    if not (workflow.track and _is_stored(origin_of(TRACK, origins))):
        return list(workflow.track), ""
    again = f"--set {TRACK}=[{','.join(workflow.track)}]"
    return [], f"not tracked: a run directory cannot make this command use a tracker; {again} does"


def is_stored_file(file: Path) -> bool:
    """Return whether a workflow file lies in a run directory, also in one that has lost its settings."""
    folders = [*Path(os.path.abspath(file)).parents, *file.resolve().parents]
    return any(_was_run(RunDir(folder)) for folder in folders)


def missing(model: ModelConfig, fault: BaseException) -> UsageError | None:
    """Return the error to show if transformers refused to load a model because its code is not allowed."""
    if model.trust_remote_code or "trust_remote_code" not in str(fault):
        return None
    return UsageError(f"model {model.id!r} comes with Python code, which only you can allow to run", HINT)


def _reaches_beyond(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in (*SERVERS, *TEACHERS, TRACK))


def _is_stored(origin: str) -> bool:
    file = origin.rpartition(":")[0]
    return origin == STORED or (bool(file) and is_stored_file(Path(file)))


def _was_run(run: RunDir) -> bool:
    return run.is_run() or run.seal.is_file() or any(stage.record.is_file() for stage in run.stages())


def _lies_outside(place: str, run: RunDir) -> bool:
    """Return whether a text names a file or folder outside the run; a Hub id does not."""
    path = Path(os.path.expanduser(place))
    is_path = place.startswith((".", "~", "/")) or os.path.lexists(path)
    return is_path and not path.resolve().is_relative_to(run.path.resolve())


def _several(place: Path) -> UsageError:
    return UsageError(f"{place} is damaged: it is of one run, and its settings describe several", RESTORE)


def _not_given(model: str, place: Path) -> UsageError:
    message = f"{place} was made with Python code that comes with its model {model}, or with a task"
    return UsageError(f"{message}; a run directory cannot allow this command to run it", HINT)
