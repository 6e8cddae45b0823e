"""Open the run that a command continues, or begin one from an adapter or a model tuned elsewhere.

opdcl recover my-adapter --domain prompts.jsonl -o runs/mine
opdcl recover my-model --base its-base --domain prompts.jsonl -o runs/mine
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.adapters import base_of, find_adapter, template_beside, tuned_model
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_config


def open_or_begin(source: str, out: Path | None, base: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the run directory of `source`, a run, an adapter or a model, and its settings so far.

    `out` is the run directory for an adapter or a model; if a run is there, it goes on. `base` replaces the
    base that the adapter names; a model names none. Nothing is written.

    Raises:
        UsageError: `source` is none of these, or its base was not found.
    """
    run = RunDir(Path(source))
    if run.is_run():
        if out and out.resolve() != run.path.resolve():
            raise UsageError(f"{source} is a run directory: what is made stays in it", "leave out -o")
        return run.path, read_config(run.config)
    if stage := run.last_stage():
        hint = f"its adapter can begin another run: name {stage.adapter}"
        raise UsageError(f"{source} is a run directory that has lost its config.json", hint)
    tuned = tuned_model(source, ModelConfig())
    folder = Path() if tuned else find_adapter(source)
    place = str(Path(source).resolve()) if os.path.exists(source) else source
    run = RunDir(out or Path("runs") / Path(place.partition("@")[0]).name)
    if run.is_run():
        saved = read_config(run.config)
        return run.path, {**saved, "workflow": saved["workflow"] | {"start": place}}
    tree: dict[str, Any] = {"start": place}
    origins = {"start": "argument"}
    if tuned and not base:
        hint = "--base BASE names the model that it was fine-tuned from"
        raise UsageError(f"{source} is a whole model, which does not name its base", hint)
    if not base:
        tree["model"] = _base(source, folder)
        origins["model.id"] = f"{source}/adapter_config.json"
    elif not tuned and (template := template_beside(folder, ModelConfig(id=base))):
        tree["model"] = {"chat_template": template}
        origins["model.chat_template"] = source
    return run.path, {"workflow": tree, "origins": origins}


def _base(source: str, folder: Path) -> dict[str, Any]:
    """Return the settings of the base that an adapter names, if it can be had."""
    from opdcl.model.load import check_exists

    base = base_of(source, folder)
    try:
        check_exists(base)
    except UsageError as fault:
        hint = "--base BASE names the folder or Hub id of the model that the adapter was trained on"
        raise UsageError(f"the base of adapter {source} was not found: {fault.message}", hint) from fault
    id = str(Path(base.id).resolve()) if os.path.exists(base.id) else base.id
    template = {"chat_template": base.chat_template} if base.chat_template else {}
    return {"id": id, "revision": base.revision, **template}
