"""Merge an adapter that holds embeddings, a head or other whole modules into its base, with its own tokens.

PEFT does the merging. Rows of new tokens that the adapter's file lacks would be filled at random, so such a
file is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.adapter_door import put_adapter
from opdcl.model.adapter_files import STATE, checked_settings, peft_faults, refuse_misfit
from opdcl.model.adapters import EMBEDDINGS, OFF
from opdcl.model.door import read_tokenizer
from opdcl.model.load import load_base, to_user_error
from opdcl.model.portable import make_portable
from opdcl.model.tensors import headers
from opdcl.rundir.hashes import ADAPTER

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# After a resize, PEFT saves whole modules a second time, by the names that they have in its wrapper.
COPY = re.compile(r"(modules_to_save|original_module)\.(?=weight$)")
HEADS = re.compile("lm_head|embed_out")
SAVE_ROWS = "save it again where it was trained: save_pretrained(FOLDER, save_embedding_layers=True)"

NO_CODE = "opdcl does not run an adapter's code; save its tokenizer there as a class of transformers' own"


def holds_rows(adapter: Path) -> bool:
    """Return whether an adapter's file holds more than low-rank changes of linear layers."""
    is_whole = checked_settings(adapter).get("modules_to_save") not in OFF
    return is_whole or any(EMBEDDINGS.search(name) for name in headers([adapter / ADAPTER]))


def merge_rows(base: ModelConfig, adapter: Path, target: Path) -> None:
    """Write base and adapter as one model, with the adapter's tokenizer if that has more tokens.

    Raises:
        UsageError: The adapter does not fit its base, lacks rows of new tokens or the tokenizer that names
            them, or PEFT would merge something else.
    """
    model, tokenizer = load_base(base.model_copy(update={"quantization": None}), as_stored=True)
    held = headers([adapter / ADAPTER])
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if tied and any("lora_" in name and EMBEDDINGS.search(name) for name in held):
        problem = "its low-rank changes of embeddings or head are on weights that its base ties"
        hint = "merge it where it was trained, and compare the answers before and after"
        raise UsageError(f"adapter {adapter} cannot be merged: {problem}", hint)
    own_rows = len(model.get_input_embeddings().weight)
    rows = _grow(model, held, adapter, tied)
    tokenizer = _with_its_tokens(adapter, tokenizer, rows, is_grown=rows > own_rows)
    with peft_faults(adapter):
        adapted, found = put_adapter(model, adapter, STATE)
    copies = {name for name in held if COPY.search(name) and COPY.sub("", name) in held}
    if tied:  # the head's tokens are those of the embeddings, under a second name
        copies |= {name for name in held if HEADS.search(name) and ".token_adapter." in name}
    unexpected = [name for name in found.unexpected_keys if name not in copies]
    refuse_misfit(adapter, adapted, STATE, found.missing_keys, unexpected)
    merged = adapted.merge_and_unload()
    merged.config.use_cache = True
    merged.save_pretrained(target)
    tokenizer.save_pretrained(target)
    make_portable(target)


def _grow(model: PreTrainedModel, held: dict[str, torch.Tensor], adapter: Path, tied: bool) -> int:
    """Give a base as many rows of embeddings as the adapter's file holds; return their number."""
    whole = {n: len(t) for n, t in held.items() if EMBEDDINGS.search(n) and "lora_" not in n}
    whole = {name: rows for name, rows in whole.items() if not name.endswith("trainable_tokens_delta")}
    own = len(model.get_input_embeddings().weight)
    rows = max([own, *whole.values()])
    if rows > own:
        in_head = {bool(HEADS.search(name)) for name, count in whole.items() if count == rows}
        if False not in in_head or not (tied or True in in_head):
            lost = "the head" if False in in_head else "the embeddings"
            problem = (
                f"it has {rows - own} tokens more than its base, and its file lacks their rows of {lost}"
            )
            raise UsageError(f"adapter {adapter} cannot be merged: {problem}", SAVE_ROWS)
        model.resize_token_embeddings(rows, mean_resizing=False)  # PEFT fills all of them from the file
    return rows


def _with_its_tokens(
    adapter: Path, tokenizer: PreTrainedTokenizerBase, rows: int, is_grown: bool
) -> PreTrainedTokenizerBase:
    """Return the adapter's tokenizer if it has more tokens than base's, which is returned otherwise."""
    refused = f"adapter {adapter} cannot be merged"
    if not (adapter / "tokenizer_config.json").is_file():
        if is_grown:
            problem = "it has more tokens than its base, and its folder no tokenizer that names them"
            raise UsageError(f"{refused}: {problem}", "copy the tokenizer's files of its trainer there")
        return tokenizer
    with to_user_error(ModelConfig(id=str(adapter)), NO_CODE):
        own = read_tokenizer(str(adapter), trust_remote_code=False)
    if len(own) > rows:
        problem = (
            f"its tokenizer has {len(own)} tokens, and neither it nor its base has more than {rows} rows"
        )
        raise UsageError(f"{refused}: {problem}", SAVE_ROWS)
    if len(own) <= len(tokenizer):
        return tokenizer
    own.chat_template = own.chat_template or tokenizer.chat_template
    return own
