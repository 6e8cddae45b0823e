"""What opdcl refuses of adapters and models that others have made: one table.

A rule says what is required, how an adapter or a model breaks it, and what to do then. `refuse_broken` checks
a table's rules in order, and refuses what breaks one with that rule's reason. `adapter_files` refuses
impossible values in an adapter's configuration, and `compatibility` refuses other tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import UsageError
from opdcl.model.tensors import Found, shown_shape

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Rule:
    """What a thing must be."""

    asks: str
    fault: Callable[[Any], str]
    """Returns why a thing is not that; "" if it is."""
    hint: str | Callable[[Any], str]
    """What its owner can do then."""


def refuse_broken(rules: Iterable[Rule], thing: Any, subject: str) -> None:
    """Refuse a thing by the first rule that it breaks; `subject` begins the message, up to the reason.

    Raises:
        UsageError: It breaks one.
    """
    for rule in rules:
        if reason := rule.fault(thing):
            raise UsageError(subject + reason, rule.hint if isinstance(rule.hint, str) else rule.hint(thing))


# -- An adapter in a folder


@dataclass(frozen=True)
class AdapterFiles:
    """The settings of an adapter, and the names of its weights."""

    folder: Path
    settings: dict[str, Any]
    names: list[str]


OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# Settings of an adapter without a rule of their own. PEFT ignores what it does not know, with a warning only.
KNOWN = {
    *("peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "fan_in_fan_out", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
    # Settings of a start, which `init_lora_weights` switches on.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # It concerns embeddings and heads, which are merged only.
    "ensure_weight_tying",
}
# These ways to initialise an adapter do not change the base; all others subtract their start from it.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

EMBEDDINGS = re.compile("embed|wte|lm_head")
COPIES = re.compile(r"(embed_tokens|embed_in|word_embeddings|wte|lm_head|embed_out)\.weight$")

OTHER_SETTINGS = "train it without that; docs/repair.md lists what an adapter may have"


MERGE_FIRST = (
    "merge it with PEFT first, as docs/repair.md shows; "
    "then opdcl recover MODEL --base BASE, with both models in memory"
)


def off(key: str, why: str, hint: str = OTHER_SETTINGS) -> Rule:
    """Return the rule that a setting of an adapter is off, or the adapter is refused for a reason."""

    def fault(adapter: AdapterFiles) -> str:
        value = adapter.settings.get(key)
        return "" if value in OFF else f"{why} ({key}: {value})"

    return Rule(key, fault, hint)


def other_type(adapter: AdapterFiles) -> str:
    kind = adapter.settings.get("peft_type")
    return "" if kind == "LORA" else f"it is of type {kind}, not LORA"


def other_task(adapter: AdapterFiles) -> str:
    task = adapter.settings.get("task_type")
    return "" if task in (None, "", "CAUSAL_LM") else f"it is for a model of another task (task_type: {task})"


def unknown_setting(adapter: AdapterFiles) -> str:
    known = KNOWN.union(rule.asks for rule in LOW_RANK)
    for key, value in adapter.settings.items():
        if key not in known and value not in OFF:
            return f"opdcl does not know what {key} does, which it sets to {str(value)[:60]}"
    return ""


def subtracted_start(adapter: AdapterFiles) -> str:
    start = adapter.settings.get("init_lora_weights")
    if start in PLAIN_STARTS:
        return ""
    return f"its start was subtracted from its base (init_lora_weights: {start})"


def other_weights(adapter: AdapterFiles) -> str:
    whole_modules = adapter.settings.get("modules_to_save") not in OFF
    for name in adapter.names:
        if not ("lora_" in name or whole_modules or EMBEDDINGS.search(name)):
            return f"it changes more than linear layers and experts, or not by low rank ({name})"
    return ""


def own_embeddings(adapter: AdapterFiles) -> str:
    copies = copied_weights(adapter.names)  # these are compared with the base when it is known
    for name in adapter.names:
        if EMBEDDINGS.search(name) and name not in copies:
            return f"it changes embeddings or the head ({name})"
    return ""


def copied_weights(names: Iterable[str]) -> list[str]:
    """Return which of an adapter's weights are a base's embeddings or head.

    PEFT saves them with an adapter whenever the vocabulary was resized, trained or not.
    """
    return [name for name in names if "lora_" not in name and COPIES.search(name)]


# Recovery switches between base and adapters on one set of base weights, so all that an adapter has learned
# must be in its low-rank matrices. A rule about a setting is named after it.
LOW_RANK = (
    Rule("peft_type", other_type, OTHER_SETTINGS),
    Rule(
        "task_type",
        other_task,
        "name a chat model's adapter; a reward model's has learned scores, not answers",
    ),
    off("bias", "it changes the biases of its base"),
    off("lora_bias", "its low-rank matrices have biases"),
    off("layer_replication", "it repeats layers of its base"),
    off("alora_invocation_tokens", "it is an activated LoRA, which acts on a part of each text only"),
    off("arrow_config", "it routes between adapters"),
    off("use_qalora", "it is a QALoRA adapter, which needs its quantized base"),
    off("use_bdlora", "its matrices are block-diagonal"),
    off("kasa_config", "it changes the weights of its base"),
    off("monteclora_config", "its matrices are random"),
    Rule("all settings are known", unknown_setting, OTHER_SETTINGS),
    Rule("init_lora_weights", subtracted_start, OTHER_SETTINGS),
    Rule("all weights are of low rank", other_weights, OTHER_SETTINGS),
    # A merged model has all that adapters with these have learned.
    off("modules_to_save", "it replaces whole modules of its base", MERGE_FIRST),
    off("trainable_token_indices", "it changes the embeddings of some tokens", MERGE_FIRST),
    Rule("embeddings and head are the base's", own_embeddings, MERGE_FIRST),
)

# -- An adapter's weights by name


def other_numbers(weights: Mapping[str, torch.Tensor]) -> str:
    for name, weight in weights.items():
        if not weight.is_floating_point():
            kind = str(weight.dtype).removeprefix("torch.")
            return f"{name} holds numbers of type {kind}, which is none for weights"
    return ""


def no_numbers(weights: Mapping[str, torch.Tensor]) -> str:
    for name, weight in weights.items():
        if not weight.float().isfinite().all():  # which types of eight bits do not have
            return f"{name} holds NaN or infinity"
    return ""


def changes_nothing(weights: Mapping[str, torch.Tensor]) -> str:
    # The change of a layer is the product of its matrices, so one that is zero is enough.
    layers: dict[str, bool] = {}
    for name, weight in weights.items():
        layer = re.sub(r"lora_(embedding_)?[AB]", "lora", name)
        layers[layer] = layers.get(layer, False) or not weight.float().any()
    if not layers or not all(layers.values()):
        return ""
    return "it changes nothing: in each layer one of its matrices is zero"


TRAIN_AGAIN = "train it again, or copy the right file"
WEIGHTS = (
    Rule("there are some", lambda weights: "" if weights else "it has no weights", TRAIN_AGAIN),
    Rule("they are of a type for weights", other_numbers, TRAIN_AGAIN),
    Rule("they are numbers", no_numbers, TRAIN_AGAIN),
    Rule("they change something", changes_nothing, TRAIN_AGAIN),
)

# -- The weights of an adapter, beside those of its base

# What a name in the file holds that it should not -> what left it there, and what to do.
TRACES_IN_ADAPTERS = {
    "base_model.model.base_model.model.": "PEFT's wrapper was saved twice: take one `base_model.model.` out "
    "of the names in the file",
    "pretrained_model.": "TRL's wrapper with a value head was saved too: take `pretrained_model.` out of the "
    "names in the file",
    "_orig_mod.": "torch.compile's wrapper was saved too: take `_orig_mod.` out of the names in the file",
    "_fsdp_wrapped_module.": "FSDP's wrapper was saved too: save the adapter's full state dict",
    ".default.": "PEFT's name of the adapter was saved too: save it with save_pretrained, or take `.default` "
    "out of the names in the file",
    "language_model.": "it was trained on a model with a vision tower: name that one with --base, or take "
    "`language_model.` out of the names in the file",
}
# The same of a model's files and its own names.
TRACES_IN_MODELS = {
    "base_model.model.": "PEFT's wrapper was saved too: merge_and_unload() first, then save the model",
    "base_layer.": "PEFT's layers were saved too: merge_and_unload() first, then save the model",
    "_orig_mod.": "torch.compile's wrapper was saved too: save model._orig_mod",
    "_fsdp_wrapped_module.": "FSDP's wrapper was saved too: save the full state dict",
    "language_model.": "their names are those of a model with a vision tower: use its config.json",
    "module.": "DataParallel's wrapper was saved too: save model.module",
}

COPY_AGAIN = "copy it again from where the adapter was trained"
OTHER_BASE = "use the base model that the adapter was trained on"


def by_trace(traces: Mapping[str, str], otherwise: str) -> Callable[[Found], str]:
    """Return the hint that belongs to the first of these traces in a tensor's name."""

    def hint_on(found: Found) -> str:
        for trace, hint in traces.items():
            if any(trace in name for name in found.unexpected):
                return hint
        return otherwise

    return hint_on


def without_place(found: Found) -> str:
    if not found.unexpected:
        return ""
    count = f"{len(found.unexpected)} of its {found.total} weights have no counterpart there"
    return f"{count}, such as {found.unexpected[0]}"


def other_shape(sentence: str) -> Callable[[Found], str]:
    """Return the fault that a tensor's shape differs, in a sentence with its name and both shapes."""

    def fault(found: Found) -> str:
        if not found.mismatched:
            return ""
        name, here, there = found.mismatched[0]
        return sentence.format(name, shown_shape(here), shown_shape(there))

    return fault


def weights_lacking(found: Found) -> str:
    if not found.missing:
        return ""
    count = f"its file lacks {len(found.missing)} of the weights that its settings ask for"
    return f"{count}, such as {found.missing[0]}"


ON_BASE = (
    Rule("base has a place for each weight", without_place, by_trace(TRACES_IN_ADAPTERS, OTHER_BASE)),
    Rule("the shapes are base's", other_shape("{} is {}, and would have to be {}"), OTHER_BASE),
    Rule("no weight is missing", weights_lacking, COPY_AGAIN),
)

# vLLM does not load these, or loads them wrongly (its pull requests 41384 and 52198).
NOT_SERVED = "leave the server out; opdcl export RUN -o MODEL writes a merged model, which vLLM serves"
SERVED = (
    Rule("use_dora", lambda settings: "DoRA adapters" if settings.get("use_dora") else "", NOT_SERVED),
    Rule(
        "target_parameters",
        lambda settings: "adapters of stacked experts" if settings.get("target_parameters") else "",
        NOT_SERVED,
    ),
)

# -- A model: its configuration, its files, and its head


def other_parts(config: PretrainedConfig) -> str:
    if config.get_text_config(decoder=True) is config:
        return ""
    return f"models of type {config.model_type} have a vision tower, or other parts besides text"


def tensors_lacking(found: Found) -> str:
    if not found.missing:
        return ""
    rest = f"; the files hold {found.unexpected[0]} instead" if found.unexpected else ""
    count = f"{len(found.missing)} of {found.total} tensors of the model are not in its files"
    return f"{count}, such as {found.missing[0]}{rest}"


def left_over(found: Found) -> str:
    if not found.left_over:
        return ""
    return f"its files hold {found.left_over[0]}, for which its config.json leaves no place"


TEXT_ONLY = "choose a model for text only, or save its language model alone, with transformers"
SAVE_WHOLE = "save the model again, or copy all its files"
OTHER_CONFIG = "use the config.json of these weights"
OTHER_MODEL = "choose another model: docs/install.md says which families work"

IN_CONFIG = "{} is {} in its files, and {} by its config.json"

CONFIG = (Rule("it is a language model", other_parts, TEXT_ONLY),)
FILES_OF_A_MODEL = (
    Rule("no tensor is missing", tensors_lacking, by_trace(TRACES_IN_MODELS, SAVE_WHOLE)),
    Rule("the shapes are those of config.json", other_shape(IN_CONFIG), OTHER_CONFIG),
    Rule("no layer has a tensor left over", left_over, OTHER_CONFIG),
)


def no_head(model: PreTrainedModel) -> str:
    lacks = model.get_output_embeddings() is None or model.base_model is model
    return "they have no output head" if lacks else ""


def head_with_bias(model: PreTrainedModel) -> str:
    bias = getattr(model.get_output_embeddings(), "bias", None)
    return "" if bias is None else "their output head has a bias"


# Losses, teachers and the closeness to base are computed from the last hidden states and the head alone. A
# bias, a scale or a soft cap that the model applies besides would be missing from them without a sign.
HEAD = (
    Rule("there is an output head", no_head, OTHER_MODEL),
    Rule("the head has no bias", head_with_bias, OTHER_MODEL),
)

# By how much of the largest logit two products may differ: bfloat16 rounds to 1/256.
LOGIT_ROUNDING = 0.02


@dataclass(frozen=True)
class Probe:
    """A model's logits of a few tokens, and their states times its head, up to a constant per position."""

    logits_1TV: torch.Tensor
    product_1TV: torch.Tensor

    def difference(self) -> str:
        """Say what the logits have besides; "" if nothing."""
        logits, product = self.logits_1TV, self.product_1TV
        if (logits - product).abs().max() <= LOGIT_ROUNDING * product.abs().max():
            return ""
        factor = float((logits * product).sum() / product.square().sum())
        if logits[:, 0].abs().max() > 0:  # where the states are zero
            return "have a bias"
        if (logits - factor * product).abs().max() <= LOGIT_ROUNDING * logits.abs().max():
            return f"are scaled by {factor:.3g}"
        return "are capped, or changed in another way"


def more_than_product(probe: Probe) -> str:
    what = probe.difference()
    return f"their logits {what}, which the losses would miss" if what else ""


LOGITS = (Rule("the logits are states times head", more_than_product, OTHER_MODEL),)
