"""Open the run that a command continues, or begin one from an adapter or a model tuned elsewhere.

opdcl recover my-adapter --domain prompts.jsonl -o runs/mine
opdcl recover my-model --base its-base --domain prompts.jsonl -o runs/mine
opdcl eval my-model -o runs/mine  # the scores of this model alone
opdcl recover runs/mine --steps 60 -o runs/mine-60
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError, typed
from opdcl.hub import HUB_IDS
from opdcl.model.adapters import base_of, find_adapter, template_beside, tuned_model
from opdcl.rundir.layout import RunDir, read_config


def open_or_begin(
    source: str, out: Path | None, base: str | None, next_stage: str = "recover"
) -> tuple[Path, dict[str, Any]]:
    """Return the run directory of `source`, a run, an adapter or a model, and its settings so far.

    `out` is the run directory for an adapter, a model or a second recovery of a fine-tune; a run that is
    there continues. `base` replaces the base that the adapter names. A model names none: without `base` it is
    measured alone, if `next_stage` is `eval`. Nothing is written.

    Raises:
        UsageError: `source` is none of these, or its base was not found.
    """
    run = RunDir(Path(source))
    if donor := run_beside(source, out):
        if "tuned" not in donor.intact_adapters():
            hint = typed("opdcl", "run", donor.workflow, "-o", source)
            raise UsageError(f"{source} has no fine-tuned adapter", hint)
        second = RunDir(out)
        return second.path, read_config((second if second.is_run() else donor).config)
    if run.is_run():
        return run.path, read_config(run.config)
    if stage := run.last_stage():
        hint = f"its adapter can begin another run: name {stage.adapter}"
        raise UsageError(f"{source} is a run directory that has lost its config.json", hint)
    tuned = tuned_model(source, ModelConfig())
    place = str(Path(source).resolve()) if os.path.exists(source) else source
    run = RunDir(out or Path("runs") / Path(place.partition("@")[0]).name)
    saved = read_config(run.config) if run.is_run() else {"workflow": {}, "origins": {}}
    is_whole = tuned or source in HUB_IDS or (source.endswith(".gguf") and os.path.isfile(source))
    if is_whole and next_stage == "eval" and not base and not saved["workflow"].get("start"):
        return run.path, _alone(saved, tuned, place)
    if is_whole and not tuned:
        hint = "a tuned model is a folder with safetensors, or a Hub id; opdcl eval MODEL measures one alone"
        raise UsageError(f"{source} cannot be compared with a base", hint)
    folder = Path() if tuned else find_adapter(source)
    if run.is_run():
        if tuned and not saved["workflow"].get("start"):
            hint = "choose another directory with -o"
            raise UsageError(f"{run.path} is a run without a tuned model, and can have none later", hint)
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


def _alone(saved: dict[str, Any], found: ModelConfig | None, place: str) -> dict[str, Any]:
    """Return the settings of a run whose base is the model that was named, which is measured alone."""
    model = {"id": place}
    if found and found.revision:
        model = {"id": found.id, "revision": found.revision}
    workflow = saved["workflow"]
    origins = saved["origins"] | {"model.id": "argument"}
    return {**saved, "workflow": workflow | {"model": workflow.get("model", {}) | model}, "origins": origins}


def run_beside(source: str, out: Path | None) -> RunDir | None:
    """Return the run whose fine-tune is recovered again, in `out`; None if `source` is no other run."""
    run = RunDir(Path(source))
    is_elsewhere = out is not None and out.resolve() != run.path.resolve()
    return run if is_elsewhere and run.is_run() else None


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
