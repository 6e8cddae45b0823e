"""Check what others have made of a model: its files, its logits, and its tokens beside another model's.

A function that begins with `faults` yields each reason to refuse a thing, with what its owner can do;
`refuse_first` raises the first.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.data.chat import PROBE, on_one_day, render
from opdcl.errors import UsageError
from opdcl.rundir.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Why a thing is refused, and what its owner can do.
Faults = Iterator[tuple[str, str]]


def refuse_first(faults: Faults, subject: str) -> None:
    """Refuse a thing by its first fault, if it has any; `subject` begins the message, up to the reason."""
    for reason, hint in faults:
        raise UsageError(subject + reason, hint)


# -- Files: transformers gives a tensor that it does not find random values, and says so in a warning only

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAVE_AGAIN = "load it with transformers and save it again: save_pretrained writes safetensors"
OTHER_CONFIG = "use the config.json of these weights"

# What a name in a model's files holds that it should not -> what left it there, and what to do.
TRACES_IN_MODELS = {
    "base_model.model.": "PEFT's wrapper was saved too: merge_and_unload() first, then save the model",
    "base_layer.": "PEFT's layers were saved too: merge_and_unload() first, then save the model",
    "_orig_mod.": "torch.compile's wrapper was saved too: save model._orig_mod",
    "_fsdp_wrapped_module.": "FSDP's wrapper was saved too: save the full state dict",
    "language_model.": "their names are those of a model with a vision tower: use its config.json",
    "module.": "DataParallel's wrapper was saved too: save model.module",
}


@dataclass(frozen=True)
class Found:
    """What is reported on loading a model or an adapter: names in its files, and shapes that differ."""

    missing: list[str]
    unexpected: list[str]
    mismatched: Sequence[tuple[str, Sequence[int], Sequence[int]]]
    """A name, the shape in the file, and the shape in the model."""
    total: int
    """How many tensors the model has, or the file of an adapter holds."""
    left_over: Sequence[str] = ()
    """Unexpected tensors that bear the name of one of the model's layers."""

    @classmethod
    def of(cls, model: PreTrainedModel, report: Mapping[str, Any]) -> Found:
        """Return what the report of `from_pretrained(..., output_loading_info=True)` says about a model."""
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        missing = set(report["missing_keys"])
        # One of two tied tensors in the files is enough; if both are missing, one of them is named.
        missing = {name for name in missing if tied.get(name) not in missing}
        total = len(set(model.state_dict()) - set(tied))
        unexpected, layers = sorted(report["unexpected_keys"]), {name for name, _ in model.named_modules()}
        left_over = [key for key in unexpected if key.rpartition(".")[0] in layers]
        return cls(sorted(missing), unexpected, sorted(report["mismatched_keys"]), total, left_over)

    def hint(self, traces: Mapping[str, str], otherwise: str) -> str:
        """Return the hint that belongs to the first of these traces in an unexpected tensor's name."""
        for trace, hint in traces.items():
            if any(trace in name for name in self.unexpected):
                return hint
        return otherwise


def shown_shape(shape: Sequence[int]) -> str:
    """Return the sizes of a tensor as text."""
    return " x ".join(map(str, shape)) or "one number"


def refuse_unfit(name: str, found: Found) -> list[str]:
    """Refuse a model that its files do not give whole; return notes on tensors that are not part of it."""
    refuse_first(faults_of_files(found), f"model {name!r} cannot be used: ")
    if not found.unexpected:
        return []
    count = f"{len(found.unexpected)} tensors in the files of {name} are not part of the language model"
    return [f"{count}, such as {found.unexpected[0]}: they are not used"]


def faults_of_files(found: Found) -> Faults:
    """Yield why a model's files do not give it whole."""
    if found.missing:
        rest = f"; the files hold {found.unexpected[0]} instead" if found.unexpected else ""
        count = f"{len(found.missing)} of {found.total} tensors of the model are not in its files"
        hint = found.hint(TRACES_IN_MODELS, "save the model again, or copy all its files")
        yield f"{count}, such as {found.missing[0]}{rest}", hint
    for name, here, there in found.mismatched[:1]:
        shapes = f"is {shown_shape(here)} in its files, and {shown_shape(there)} by its config.json"
        yield f"{name} {shapes}", OTHER_CONFIG
    for name in found.left_over[:1]:
        yield f"its files hold {name}, for which its config.json leaves no place", OTHER_CONFIG


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the safetensors files that transformers loads from a folder.

    Raises:
        UsageError: There are none, or one that the index names is missing.
    """
    one, shards = folder / ONE_FILE, list[Path]()
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not (isinstance(named, dict) and named and all(isinstance(file, str) for file in named.values())):
            raise UsageError(f"{folder / INDEX} does not say which file holds which tensor", "copy it again")
        shards = [folder / file for file in sorted(set(named.values()))]
    if one.is_file():
        if other := next((file for file in shards if file != one and file.is_file()), None):
            problem = f"model {name!r} holds two sets of weights: {ONE_FILE}, and {other.name} of {INDEX}"
            raise UsageError(problem, "programs differ in which they take: move the old ones away")
        return [one]
    if shards:
        if lost := [file for file in shards if not file.is_file()]:
            problem = f"{len(lost)} of {len(shards)} files of model {name!r} are missing, such as {lost[0]}"
            raise UsageError(problem, "copy it again, with all its files")
        return shards
    if pickle := next((file for kind in PICKLES for file in sorted(folder.glob(kind))), None):
        raise UsageError(
            f"model {name!r} holds its weights as a pickle ({pickle.name}), which can run code", SAVE_AGAIN
        )
    raise UsageError(f"model {name!r} holds no weights: there is no {ONE_FILE}", SAVE_AGAIN)


def headers(files: Collection[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of safetensors files by name, without their values.

    Raises:
        UsageError: A file is damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    shape = file.get_slice(key).get_shape()
                    tensors[key] = torch.empty(shape, device="meta")
        except (SafetensorError, OSError, json.JSONDecodeError) as fault:
            raise UsageError(f"{path} is damaged: {fault}", "copy it again") from fault
    return tensors


# -- Logits: a model reads a few tokens

OTHER_MODEL = "choose another model: docs/install.md says which families work"

# Tokens that are read, and the largest logit that their states are scaled to: soft caps lie below it.
TOKENS, LARGE = 8, 200.0

# By how much of the largest logit two products may differ: bfloat16 rounds to 1/256.
LOGIT_ROUNDING = 0.02


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not its last hidden states times its head.

    Losses, teachers and the closeness to base are computed from these alone. A bias, a scale or a soft cap
    that the model applies besides would be missing from them without a sign.

    Raises:
        UsageError: The logits are something else, or the states are no numbers.
    """
    import torch

    head, reason = model.get_output_embeddings(), ""
    if head is None or model.base_model is model:
        reason = "they have no output head"
    elif getattr(head, "bias", None) is not None:
        reason = "their output head has a bias"
    else:
        try:
            with torch.no_grad():
                what = beside_product(*read_probe(model))
            reason = what and f"their logits {what}, which the losses would miss"
        except AttributeError as fault:
            reason = str(fault)
    if reason:
        kind = model.config.model_type
        raise UsageError(f"models of type {kind} cannot be used: {reason}", OTHER_MODEL)


def beside_product(logits_1TV: torch.Tensor, product_1TV: torch.Tensor) -> str:
    """Say what the result of `read_probe` shows of logits besides states times head; "" if nothing."""
    if (logits_1TV - product_1TV).abs().max() <= LOGIT_ROUNDING * product_1TV.abs().max():
        return ""
    factor = float((logits_1TV * product_1TV).sum() / product_1TV.square().sum())
    if logits_1TV[:, 0].abs().max() > 0:  # where the states are zero
        return "have a bias"
    if (logits_1TV - factor * product_1TV).abs().max() <= LOGIT_ROUNDING * logits_1TV.abs().max():
        return f"are scaled by {factor:.3g}"
    return "are capped, or changed in another way"


def read_probe(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's logits of a few tokens, and states times head, up to a constant per position.

    The states are scaled before the head sees them, to show soft caps.
    """
    import torch

    head_VH: torch.Tensor = model.get_output_embeddings().weight
    seen: list[torch.Tensor] = []

    def replace(_module: Any, _inputs: Any, output: Any) -> Any:
        states_1TH = _scaled(output.last_hidden_state, head_VH, model.config.model_type)
        seen.append(states_1TH)
        output.last_hidden_state = states_1TH
        return output

    hook = model.base_model.register_forward_hook(replace)
    try:
        ids_1T = torch.arange(TOKENS, device=model.device)[None] % len(head_VH)
        logits_1TV = model(input_ids=ids_1T, use_cache=False).logits.float()
    finally:
        hook.remove()
    # Some models call a part of their decoder only, past the hook.
    states_1TH = seen[0] if seen else model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    product_1TV = (states_1TH.to(head_VH.dtype) @ head_VH.T).float()
    width = min(logits_1TV.shape[-1], product_1TV.shape[-1])  # some models leave padding rows out
    logits_1TV, product_1TV = (x[..., :width] - x[..., :1] for x in (logits_1TV, product_1TV))
    return logits_1TV, product_1TV


def _scaled(states_1TH: torch.Tensor, head_VH: torch.Tensor, name: str) -> torch.Tensor:
    """Return states: the first are zero, the others give large logits."""
    if not states_1TH.isfinite().all():
        hint = "copy its files again, or --set model.dtype=float32"
        raise UsageError(f"this model of type {name} computes NaN or infinity", hint)
    states_1TH = states_1TH.to(head_VH.dtype)
    largest = (states_1TH @ head_VH.T).float().abs().max().clamp(min=1e-6)
    states_1TH = states_1TH * (LARGE / largest).to(states_1TH.dtype)
    states_1TH[:, 0] = 0
    return states_1TH


# -- Tokens

# Spaces, case, digits, scripts, emoji, code, line ends: where tokenizers of equal size differ.
PROBES = (
    "The quick brown fox.",
    "  two  spaces",
    "12345 67,890.5",
    "naïve café",
    "Ünïcödé",
    "你好世界",
    "привет",
    "🙂👍🏽",
    "def f(x):\n\treturn x ** 2\n",
    "line one\r\nline two\n\n",
    "<|im_start|>user",
    "don't I'll we're",
    "https://a.example/b?c=d",
)

OTHER_FAMILY = "choose a teacher of the same family; for different tokenizers see TRL's GOLD trainer"


def differences(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, may_have_more: bool = False
) -> list[str]:
    """Describe the differences between two tokenizers that matter to distillation.

    With `may_have_more`, the second one may have further tokens.
    """
    pair = student, teacher
    reasons = []
    more: set[str] = set()
    if may_have_more:
        more = teacher.get_added_vocab().keys() - student.get_added_vocab().keys()
    for probe in PROBES:
        if any(token in probe for token in more):
            continue
        a, b = (t(probe, add_special_tokens=False)["input_ids"] for t in pair)
        if a != b:
            reasons.append(f"{probe!r} becomes {a[:8]} and {b[:8]}")
            break
    # Padding is never graded, so its token may differ.
    for name in ("bos_token_id", "eos_token_id"):
        a, b = (getattr(t, name) for t in pair)
        if a != b:
            reasons.append(f"{name} is {a} and {b}")
    a, b = (t.get_added_vocab() for t in pair)
    if differing := sorted(token for token in {*a, *b} - more if a.get(token) != b.get(token)):
        reasons.append(f"added tokens differ: {', '.join(differing[:5])}")
    a, b = (render(t, PROBE, False) if t.chat_template else None for t in pair)
    if a != b:
        reasons.append(f"the chat template writes {a!r} and {b!r}"[:300])
    return reasons


def template_difference(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Say how a conversation looks in a tokenizer's own chat template and in another; "" if alike."""
    own = render(tokenizer, PROBE, False)
    try:
        other = render(tokenizer, PROBE, False, chat_template=on_one_day(template))
    except UsageError as fault:
        other = f"nothing: {fault.message}"
    return "" if own == other else f"it writes {other!r:.300}, this run {own!r:.300}"


def check_same_tokenizer(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    name: str,
    hint: str = OTHER_FAMILY,
    may_have_more: bool = False,
) -> None:
    """Refuse a teacher, or another model, whose tokens are not the student's; `name` begins the message."""
    if reasons := differences(student, teacher, may_have_more):
        raise UsageError(f"{name} has another tokenizer: {'; '.join(reasons)}", hint)
