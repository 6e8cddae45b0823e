"""Find adapters: in a run directory, in a folder, or on the Hub."""

from __future__ import annotations

import os
from pathlib import Path

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.hub import HUB_IDS, parse, snapshot
from opdcl.rundir.layout import RunDir, adapter_config


def find_adapter(place: str) -> Path:
    """Return the adapter folder of `place`: a run's last adapter, the folder itself, or a Hub download.

    Raises:
        UsageError: There is no adapter.
    """
    path = Path(place)
    if not os.path.exists(place) and (hub_ref := parse("adapter", place)):
        path = snapshot(hub_ref)
    if (path / "adapter_model.safetensors").is_file():
        return path
    last_stage = RunDir(path).last_stage()
    if last_stage is None and (path / "config.json").is_file() and not RunDir(path).is_run():
        hint = "--model names it as the base of a new run; transformers and vLLM load it as it is"
        raise UsageError(f"{place} is a model folder: it holds no adapter", hint)
    if last_stage is None:
        hint = "name a finished run directory, an adapter folder, or a Hub id: owner/name[@revision]"
        raise UsageError(f"{place} holds no adapter", hint)
    RunDir(path).intact_adapters()
    return last_stage.adapter


def find_states(place: str) -> tuple[ModelConfig, dict[str, Path]]:
    """Return the base and the adapters by state, of a run directory, an adapter folder or a Hub id."""
    run = RunDir(Path(place))
    if run.is_run():
        return ModelConfig.model_validate(run.settings()["model"]), run.intact_adapters()
    folder = find_adapter(place)
    config = adapter_config(folder)
    base = config.get("base_model_name_or_path")
    if not base:
        hint = "set base_model_name_or_path in its adapter_config.json"
        raise UsageError(f"adapter {place} does not name its base model", hint)
    embedded = {hub_id: name for name, hub_id in HUB_IDS.items()}
    return ModelConfig(id=embedded.get(base, base), revision=config.get("revision")), {"adapter": folder}
