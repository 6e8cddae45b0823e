"""Find what a run may start from, here or on the Hub: an adapter that opdcl can recover, or a tuned model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import ROW_FILES
from opdcl.errors import UsageError, nearest_path
from opdcl.hub import HUB_IDS, Repository, holds, parse, snapshot
from opdcl.model.adapter_files import OTHER_SETTINGS, checked_settings, copied_weights, merge_hint
from opdcl.model.consent import base_of_run, stored_model
from opdcl.model.tensors import headers
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import ADAPTER
from opdcl.rundir.layout import TEMPLATE, RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What an adapter's configuration may set -> why it is refused. Recovery switches between base and adapters on
# one set of base weights, so all that an adapter has learned must lie in its low-rank matrices.
REFUSED = {
    "bias": "it changes the biases of its base",
    "lora_bias": "its low-rank matrices have biases",
    "layer_replication": "it repeats layers of its base",
    "alora_invocation_tokens": "it is an activated LoRA, which acts on a part of each text only",
    "arrow_config": "it routes between adapters",
    "use_qalora": "it is a QALoRA adapter, which needs its quantized base",
    "use_bdlora": "its matrices are block-diagonal",
    "kasa_config": "it changes the weights of its base",
    "monteclora_config": "its matrices are random",
}
# The same of embeddings, head and other whole modules. A merged model has all that such adapters learned.
MERGED_ONLY = {
    "modules_to_save": "it replaces whole modules of its base",
    "trainable_token_indices": "it changes the embeddings of some tokens",
}
EMBEDDINGS = re.compile("embed|wte|lm_head")
# What an adapter's configuration may set besides. PEFT ignores what it does not know, with a warning only.
KNOWN = {
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "fan_in_fan_out", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
    # Settings of a start, which `init_lora_weights` switches on.
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # It concerns embeddings and heads, which are merged only.
    "ensure_weight_tying",
}
OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# These ways to initialise an adapter leave the base as it is; all others subtract their start from it.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def find_adapter(place: str, to_merge: bool = False) -> Path:
    """Return the adapter folder of `place`: a run's last adapter, the folder itself, or a Hub download.

    Raises:
        UsageError: There is no adapter; or recovery, or with `to_merge` a merged model, could not keep all
            that it has learned.
    """
    path = Path(place)
    if repository := _on_hub(place):
        path = snapshot(repository)
    if (path / ADAPTER).is_file():
        check_adapter(path, to_merge)
        return path
    if last_stage := RunDir(path).last_stage():
        if tuned := stands_on(RunDir(path)):
            hint = f"opdcl export {place} -o MODEL writes it as one model, from which a run can start"
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
    """Return the tuned model on which the adapters of a run stand; None if that is its base.

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
        hint = "load it with transformers and save it again: save_pretrained writes safetensors"
        raise UsageError(f"model {start} holds no safetensors; a pickle can run code", hint)
    return [folder / "config.json", *weights]


def _on_hub(place: str) -> Repository | None:
    """Return the repository that a text names, if it is no path."""
    # `runs/x` has the form of a Hub id, but is the place of a run; next to its folder, any path is mistyped.
    parent = Path(place).parent
    mistyped = "@" not in place and (parent == Path("runs") or (parent != Path() and parent.is_dir()))
    return None if mistyped or os.path.exists(place) else parse("adapter", place)


def _not_found(place: str, path: Path) -> UsageError:
    if path.suffix.lower() in ROW_FILES and path.is_file():
        hint = f"opdcl finetune {place} -o runs/mine  # then: opdcl recover runs/mine; opdcl eval runs/mine"
        return UsageError(f"{place} holds rows, not an adapter", hint)
    hint = "name a run (opdcl finetune makes one), an adapter folder, or a Hub id: owner/name[@revision]"
    if not path.exists() and (near := nearest_path(place)):
        hint = f"did you mean {near}?"
    if (path / "adapter_model.bin").is_file():
        hint = "load it with peft and save it again: save_pretrained writes safetensors"
        return UsageError(f"{place} holds its adapter as a pickle, which can run code", hint)
    if (path / "config.json").is_file() and not RunDir(path).is_run():
        hint = f"opdcl eval {place} --base BASE measures what it cost; without --base, the model alone"
        return UsageError(f"{place} is a model folder: it holds no adapter", hint)
    if inner := sorted(path.glob(f"*/{ADAPTER}"), key=lambda file: file.stat().st_mtime):
        hint = f"name the folder of one of its adapters, such as {inner[-1].parent}"
    return UsageError(f"{place} holds no adapter" if path.exists() else f"{place} does not exist", hint)


def check_adapter(folder: Path, to_merge: bool = False) -> None:
    """Refuse an adapter that has learned more than low-rank changes of linear layers and experts.

    With `to_merge`, changes of embeddings, head and whole modules are not refused.

    Raises:
        UsageError: The adapter is of another kind, or damaged.
    """
    config = checked_settings(folder)
    names = list(headers([folder / ADAPTER]))
    reason = _outside_low_rank(config, names)
    merged_only = merged_only_reason(config, names)
    if merged_only and not (reason or to_merge):
        raise UsageError(f"adapter {folder} cannot be recovered: {merged_only}", merge_hint(folder))
    if reason:
        raise UsageError(f"adapter {folder} cannot be recovered: {reason}", OTHER_SETTINGS)
    if useless := _weights_fault(folder / ADAPTER):
        hint = "train it again, or copy the right file"
        raise UsageError(f"adapter {folder} cannot be used: {useless}", hint)


def _outside_low_rank(config: dict[str, Any], names: list[str]) -> str:
    """Say what an adapter learned beyond low-rank changes of linear layers and experts; else return ""."""
    if config.get("peft_type") != "LORA":
        return f"it is of type {config.get('peft_type')}, not LORA"
    for key, why in REFUSED.items():
        if config.get(key) not in OFF:
            return f"{why} ({key}: {config[key]})"
    for key, value in config.items():
        if key not in KNOWN | REFUSED.keys() | MERGED_ONLY.keys() and value not in OFF:
            return f"opdcl does not know what {key} does, which it sets to {str(value)[:60]}"
    start = config.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        return f"its start was subtracted from its base (init_lora_weights: {start})"
    for name in names:
        is_merged = EMBEDDINGS.search(name) or config.get("modules_to_save") not in OFF
        if "lora_" not in name and not is_merged:
            return f"it changes more than linear layers and experts, or not by low rank ({name})"
    return ""


def merged_only_reason(config: dict[str, Any], names: list[str]) -> str:
    """Say what an adapter learned that a merged model keeps and recovery does not; else return ""."""
    for key, why in MERGED_ONLY.items():
        if config.get(key) not in OFF:
            return f"{why} ({key}: {config[key]})"
    copies = copied_weights(names)  # these are compared with the base when it is known
    for name in names:
        if EMBEDDINGS.search(name) and name not in copies:
            return f"it changes embeddings or the head ({name})"
    return ""


def _weights_fault(file: Path) -> str:
    """Say why an adapter's weights are no fine-tune: none, NaN, or without effect; else return ""."""
    from safetensors.torch import load_file

    # The change of a layer is the product of its matrices, so one that is zero is enough.
    without_effect: dict[str, bool] = {}
    for name, weight in load_file(file).items():
        if not weight.is_floating_point():
            kind = str(weight.dtype).removeprefix("torch.")
            return f"{name} holds numbers of type {kind}, which is none for weights"
        values = weight.float()
        if not values.isfinite().all():
            return f"{name} holds NaN or infinity"
        layer = re.sub(r"lora_(embedding_)?[AB]", "lora", name)
        without_effect[layer] = without_effect.get(layer, False) or not values.any()
    if not without_effect:
        return "it has no weights"
    if all(without_effect.values()):
        return "it changes nothing: in each layer one of its matrices is zero"
    return ""


def refuse_unserved(config: dict[str, Any]) -> None:
    """Refuse an adapter that vLLM does not load, or loads wrongly (its pull requests 41384 and 52198)."""
    for key, kind in (("use_dora", "DoRA adapters"), ("target_parameters", "adapters of stacked experts")):
        if config.get(key):
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
    template = own_template(folder)
    alone = not (folder / "tokenizer_config.json").is_file()
    return template if template and (alone or _lacks_template(base)) else None


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


def _lacks_template(base: ModelConfig) -> bool:
    from opdcl.model.load import has_template

    try:
        return not has_template(base)
    except UsageError:  # it is not here, which those who need it say
        return False


def find_states(
    place: str, trust_remote_code: bool = False, to_merge: bool = False
) -> tuple[ModelConfig, ModelConfig | None, dict[str, Path]]:
    """Return base, tuned model and adapters by state, of a run directory, an adapter folder or a Hub id.

    `trust_remote_code` is the consent of the command to run code that comes with the base; `to_merge` as in
    `find_adapter`.
    """
    run = RunDir(Path(place))
    if run.is_run():
        adapters = run.intact_adapters()
        return base_of_run(run, trust_remote_code), stands_on(run), adapters
    folder = find_adapter(place, to_merge)
    base = base_of(place, folder).model_copy(update={"trust_remote_code": trust_remote_code})
    return base, None, {"adapter": folder}
