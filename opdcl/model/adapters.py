"""Find adapters: in a run directory, in a folder, or on the Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opdcl.config.model import ModelConfig
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.hub import HUB_IDS, parse, snapshot
from opdcl.rundir.layout import RunDir, adapter_config


@dataclass(frozen=True)
class ModelRef:
    """A model as stages hand it on: a base, and an adapter on disk unless it is the base itself."""

    base: ModelConfig
    adapter: Path | None = None


def find_adapter(place: str) -> Path:
    """Return the folder of the adapter that a run directory ended with, of the one that lies right there, or of one on the hub.

    Raises:
        UsageError: There is none.
    """
    path = Path(place)
    hint = "name a run directory whose training has ended, an adapter's folder, or a hub id: owner/name, owner/name@revision"
    if not os.path.exists(place) and (wanted := parse("adapter", place)):
        path = snapshot(wanted)
    if (path / "adapter_model.safetensors").is_file():
        return path
    last = RunDir(path).last_stage()
    if last is None and (path / "config.json").is_file() and not RunDir(path).is_run():
        raise UsageError(
            f"{place} is a model folder: it holds no adapter",
            "--model names it as the base of a new run; transformers and vLLM load it as it is",
        )
    if last is None:
        raise UsageError(f"{place} holds no adapter", hint)
    return last.adapter


def find_states(place: str) -> tuple[ModelConfig, dict[str, Path]]:
    """Return the base and, by state, the adapters of a run directory; or those of a single adapter from a folder or the hub."""
    run = RunDir(Path(place))
    if run.is_run():
        return Workflow.model_validate(run.settings()).model, run.adapters()
    folder = find_adapter(place)
    config = adapter_config(folder)
    named = config.get("base_model_name_or_path")
    if not named:
        raise UsageError(
            f"adapter {place} does not say what its base is",
            "base_model_name_or_path in its adapter_config.json does",
        )
    embedded = {hub: name for name, hub in HUB_IDS.items()}
    return ModelConfig(id=embedded.get(named, named), revision=config.get("revision")), {"adapter": folder}
