"""Find what a run may start from, here or on the Hub: an adapter that opdcl can recover, or a tuned model."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import ROW_FILES
from opdcl.errors import UsageError, nearest_path
from opdcl.hub import HUB_IDS, Repository, holds, parse, snapshot
from opdcl.model.check_adapter import check_adapter, checked_settings
from opdcl.model.check_model import SAVE_AGAIN
from opdcl.model.consent import base_of_run, stored_model
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import ADAPTER
from opdcl.rundir.layout import TEMPLATE, RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_adapter(place: str) -> Path:
    """Return the adapter folder of `place`: a run's last adapter, the folder itself, or a Hub download.

    Raises:
        UsageError: There is no adapter, or recovery could not keep all that it has learned.
    """
    path = Path(place)
    if repository := _on_hub(place):
        path = snapshot(repository)
    if (path / ADAPTER).is_file():
        check_adapter(path)
        return path
    if last_stage := RunDir(path).last_stage():
        if tuned := stands_on(RunDir(path)):
            hint = f"opdcl export {shlex.quote(place)} -o MODEL writes one model, from which a run can start"
            raise UsageError(f"the adapter of {place} stands on {tuned.id}, not on its base", hint)
        RunDir(path).intact_adapters()
        return last_stage.adapter
    raise _not_found(place, path)


def tuned_model(start: str | None, base: ModelConfig) -> ModelConfig | None:
    """Return the model that a run starts from, to be loaded as `base` is; None if it starts from an adapter.

    It was fine-tuned as a whole, or an adapter was merged into it. Its own code is never run.
    """
    if start is None:
        return None
    path, own = Path(start), {"trust_remote_code": False}
    if repository := _on_hub(start):
        if holds(repository, "adapter_config.json") or not holds(repository, "config.json"):
            return None
        return base.model_copy(update=own | {"id": repository.id, "revision": repository.revision})
    if not (path / "config.json").is_file() or (path / ADAPTER).is_file() or RunDir(path).is_run():
        return None
    return base.model_copy(update=own | {"id": str(path), "revision": None})


def stands_on(run: RunDir) -> ModelConfig | None:
    """Return the tuned model to which the adapters of a run belong; None if they belong to its base.

    Its own code is never run.
    """
    record = run.stage_record("finetune").get("tuned_model")
    return stored_model(record | {"trust_remote_code": False}, run.path) if record else None


def start_files(start: str, may_be_model: bool = True) -> list[Path]:
    """Return the files that hold what a run starts from: an adapter, or a tuned model."""
    if not (may_be_model and tuned_model(start, ModelConfig())):
        folder = find_adapter(start)
        return [folder / ADAPTER, folder / "adapter_config.json"]
    repository = _on_hub(start)
    folder = snapshot(Repository("model", repository.id, repository.revision)) if repository else Path(start)
    if not (weights := sorted(folder.glob("*.safetensors"))):
        raise UsageError(f"model {start} holds no safetensors; a pickle can run code", SAVE_AGAIN)
    return [folder / "config.json", *weights]


def _on_hub(place: str) -> Repository | None:
    """Return the repository that a text names, if it is no path."""
    # `runs/x` has the form of a Hub id, but is the place of a run; next to its folder, any path is mistyped.
    parent = Path(place).parent
    mistyped = "@" not in place and (parent == Path("runs") or (parent != Path() and parent.is_dir()))
    return None if mistyped or os.path.exists(place) else parse("adapter", place)


def _not_found(place: str, path: Path) -> UsageError:
    typed = shlex.quote(place)
    if path.suffix.lower() in ROW_FILES and path.is_file():
        hint = f"opdcl finetune {typed} -o runs/mine  # then: opdcl recover runs/mine; opdcl eval runs/mine"
        return UsageError(f"{place} holds rows, not an adapter", hint)
    hint = "name a run (opdcl finetune makes one), an adapter folder, or a Hub id: owner/name[@revision]"
    if not path.exists() and (near := nearest_path(place)):
        hint = f"did you mean {near}?"
    if (path / "adapter_model.bin").is_file():
        hint = "load it with peft and save it again: save_pretrained writes safetensors"
        return UsageError(f"{place} holds its adapter as a pickle, which can run code", hint)
    if (path / "config.json").is_file() and not RunDir(path).is_run():
        hint = f"opdcl eval {typed} --base BASE measures what it cost; without --base, the model alone"
        return UsageError(f"{place} is a model folder: it holds no adapter", hint)
    if inner := sorted(path.glob(f"*/{ADAPTER}"), key=lambda file: file.stat().st_mtime):
        hint = f"name the folder of one of its adapters, such as {inner[-1].parent}"
    return UsageError(f"{place} holds no adapter" if path.exists() else f"{place} does not exist", hint)


def refuse_unserved(settings: dict[str, Any]) -> None:
    """Refuse an adapter that vLLM does not load, or loads wrongly (its pull requests 41384 and 52198)."""
    unserved = {"use_dora": "DoRA adapters", "target_parameters": "adapters of stacked experts"}
    for key, kind in unserved.items():
        if settings.get(key):
            hint = "leave the server out; opdcl export RUN -o MODEL writes a merged model, which vLLM serves"
            raise UsageError(f"vLLM cannot load {kind}", hint)


def adapter_scale(config: dict[str, Any]) -> float:
    """Return the factor on an adapter's update: alpha / r, or with rsLoRA alpha / sqrt(r)."""
    return float(config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1))


def base_of(place: str, folder: Path) -> ModelConfig:
    """Return the base model that an adapter's configuration names."""
    config = checked_settings(folder)
    base = config.get("base_model_name_or_path")
    if not base:
        hint = "name it with --base, or set base_model_name_or_path in its adapter_config.json"
        raise UsageError(f"adapter {place} does not name its base model", hint)
    embedded = {hub_id: name for name, hub_id in HUB_IDS.items()}
    model = ModelConfig(id=embedded.get(base, base), revision=config.get("revision"))
    template = template_beside(folder, model)
    return model.model_copy(update={"chat_template": template}) if template else model


def template_beside(folder: Path, base: ModelConfig) -> str | None:
    """Return the chat template in an adapter's folder if it is the one to use: base's own comes first.

    Trainers save a template with its tokenizer, and that is mostly base's. Alone, it is another one.
    """
    from opdcl.model.load import has_template

    template = own_template(folder)
    if template and (folder / "tokenizer_config.json").is_file():
        try:
            return None if has_template(base) else template
        except UsageError:  # base is not here, which those who need it say
            return None
    return template


def own_template(folder: Path) -> str | None:
    """Return the chat template in an adapter's folder."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8", errors="replace")
    if not (folder / "tokenizer_config.json").is_file():
        return None
    settings = read_json(folder / "tokenizer_config.json")
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    return template if isinstance(template, str) and template.strip() else None


def new_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that the tokenizer in an adapter's folder has been given and this one lacks."""
    if not (folder / "tokenizer.json").is_file():
        return []
    settings = read_json(folder / "tokenizer.json")
    added = settings.get("added_tokens") if isinstance(settings, dict) else None
    known = tokenizer.get_vocab()
    return [token["content"] for token in added or [] if token["content"] not in known]


def find_states(
    place: str, trust_remote_code: bool = False
) -> tuple[ModelConfig, ModelConfig | None, dict[str, Path]]:
    """Return base, tuned model and adapters by state, of a run directory, an adapter folder or a Hub id.

    `trust_remote_code` is the consent of the command to run code that comes with the base.
    """
    run = RunDir(Path(place))
    if run.is_run():
        adapters = run.intact_adapters()
        return base_of_run(run, trust_remote_code), stands_on(run), adapters
    folder = find_adapter(place)
    base = base_of(place, folder).model_copy(update={"trust_remote_code": trust_remote_code})
    return base, None, {"adapter": folder}
