"""Tokenizers of model families at tiny size: their special tokens and rules, one token per other character.

The chat templates are the families' own, as TRL ships them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from opdcl.model.backbone import Backbone
from opdcl.sampling.sample import sample
from opdcl.words import Prompt, Rollout

# The settings of a tiny model of any family.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """`ends` are the `eos_token_id` of the family's generation_config.json, by their names."""

    template: str
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    bos: str | None = None
    ordinary: tuple[str, ...] = ()


FAMILIES = {
    "qwen3": Family(
        "qwen3.jinja",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ordinary=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        eos="<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "llama3": Family(
        "llama3_2.jinja",
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>"),
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "gemma3": Family(
        "gemma3.jinja",
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        ends=("<eos>", "<end_of_turn>"),
    ),
    "gpt-oss": Family(
        "gptoss.jinja",
        special=(
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
}


def template(name: str) -> str:
    """Return one of the chat templates in TRL's package."""
    return (files("trl") / "chat_templates" / name).read_text(encoding="utf-8")


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer; as in the real ones, two line breaks are one token."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE({**vocabulary, "ĊĊ": len(vocabulary)}, [("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(family.special))
    core.add_tokens([AddedToken(token, special=False) for token in family.ordinary])
    if family.bos:  # these tokenizers begin every text with it
        bos = (family.bos, core.token_to_id(family.bos))
        core.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=family.bos, eos_token=family.eos)
    tokenizer.chat_template = template(family.template)
    return tokenizer


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer for one of TRL's chat templates, which knows the tokens that the template writes."""
    found = dict.fromkeys(re.findall(r"<[|\uff5c/a-zA-Z][^<>\s{}'\"+]*>", template(name)))
    ordinary = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    other = ("<function", "</function", "<parameter", "</parameter", "<tool", "</tool", "<arg", "</arg")
    special = [token for token in found if token not in ordinary and not token.startswith(other)]
    return make_tokenizer(Family(name, ("<bos>", "<eos>", *special), "<eos>", (), "<bos>", ordinary))


def spell(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return the text of each token."""
    return [tokenizer.decode([i]) for i in ids]


def scripted(tokenizer: Any, family: Family, prompt_ids: list[int], text: str) -> Backbone:
    """Return a model that continues a prompt with `text` whatever it reads: GPT-2 with positions alone."""
    import torch

    script = [*prompt_ids, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    size = -(-len(script) // 8) * 8
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=2 * size,
        n_embd=2 * size,
        n_layer=1,
        n_head=1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.transformer.wpe.weight.copy_(torch.eye(2 * size))
        model.lm_head.weight.zero_()
        for position, following in enumerate(script[1:]):
            model.lm_head.weight[following, position] = 1
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    model.generation_config = GenerationConfig(eos_token_id=ends)
    return Backbone(model, tokenizer)


def save(family: Family, folder: Path) -> Path:
    """Write a tokenizer with an untrained model's configuration, as a folder that `load_tokenizer` reads."""
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(folder)
    GPT2Config(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    return folder


def written(backbone: Backbone, prompt: list[int], limit: int = 60) -> Rollout:
    """Return what a scripted model writes after a prompt, greedily."""
    options = {"eos_ids": backbone.eos_ids, "temperature": 0, "engine": "generate"}
    (rollout,) = sample(backbone.causal_lm, [Prompt(prompt)], max_new_tokens=limit, **options)
    return rollout
