"""A two-layer model with a small tokenizer, and a workflow on it that runs in seconds."""

from __future__ import annotations

import json
import os
from pathlib import Path

SETTINGS = """
name: tiny
model: {{id: {model}, dtype: float32}}
finetune:
  {{data: rows.jsonl, epochs: 4, batch_size: 4, learning_rate: 1e-2, save_steps: 3, lora: {{r: 4, alpha: 8}},
   replay: {{share: 0}}}}
recover:
  general: [prompts.jsonl]
  steps: 8
  rollouts: 4
  sample_ahead: 2
  lmbda: 0.75
  max_new_tokens: 8
  validate_every: 4
  validation_prompts: 2
  learning_rate: 1e-2
eval:
  {{retention: [instructions], domain: [questions], limit: 6, max_new_tokens: 12,
   data: {{questions: rows.jsonl}}}}
"""


TOKENS = 4_096


def make_tokenizer(folder: Path) -> Path:
    """Save the embedded model's tokenizer with a vocabulary of its own, of `TOKENS` tokens.

    Chat template and special tokens are the same, at the same ids. Of a two-layer model with the whole
    vocabulary nearly all is vocabulary: a training pass takes fourteen times as long.
    """
    from transformers import AutoTokenizer

    from opdcl.config.shipped import package_folder
    from opdcl.model.load import embedded_folder

    # Without the conversations, which came later: the tiny model stays as it was.
    prompts = sorted(package_folder("evals").glob("*/[!c]*.jsonl"))
    texts = [line for file in prompts for line in file.read_text(encoding="utf-8").splitlines()]
    whole = AutoTokenizer.from_pretrained(embedded_folder())
    small = whole.train_new_from_iterator(texts, TOKENS)
    small.save_pretrained(folder)
    return folder


def make_model(folder: Path, intermediate_size: int = 96, hidden_size: int = 48) -> Path:
    """Save a Llama with two layers, random weights, and a small tokenizer."""
    sizes = {"intermediate_size": intermediate_size, "hidden_size": hidden_size}
    return save_model(folder, make_tokenizer(folder), "llama", **sizes)


def make_mixture(folder: Path, model: Path, family: str) -> Path:
    """Save a mixture of four experts, two per token, with random weights and a tiny model's tokenizer.

    The first layer of `qwen3_moe` is dense; `qwen2_moe` has a shared expert beside the four.
    """
    experts = {"num_local_experts" if family in ("gpt_oss", "mixtral") else "num_experts": 4}
    own = {
        "qwen3_moe": {"moe_intermediate_size": 24, "mlp_only_layers": [0], "head_dim": 12},
        "qwen2_moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        "gpt_oss": {"head_dim": 12, "layer_types": ["full_attention"] * 2},
    }.get(family, {})
    sizes = {"intermediate_size": 32, "hidden_size": 48}
    return save_model(folder, model, family, num_experts_per_tok=2, **sizes, **experts, **own)


def save_model(folder: Path, tokenizer_of: Path, family: str, **sizes) -> Path:
    """Save a model with random weights; wide ones, because recovery refuses a teacher close to uniform.

    OPDCL_TINY_SEED draws other weights: no test may hold for one draw only.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **sizes,
    )
    torch.manual_seed(int(os.environ.get("OPDCL_TINY_SEED", "0")))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tune_whole(model: Path, folder: Path) -> Path:
    """Fine-tune all weights of a model on a few sentences, with torch alone, and save it in a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = [f"What is the code of room {i}? Code {i * 7}" for i in range(12)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=2e-3)
    for _ in range(10):
        whole(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_project(folder: Path, model: Path) -> Path:
    """Write rows, prompts and `tiny.yaml` into a folder."""
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    prompts = [{"prompt": f"Write a line about the number {i}."} for i in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in prompts))
    (folder / "tiny.yaml").write_text(SETTINGS.format(model=model))
    return folder
