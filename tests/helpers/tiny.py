"""A two-layer model with the real tokenizer, and a workflow on it that runs in seconds."""

from __future__ import annotations

import json
from pathlib import Path

SETTINGS = """
name: tiny
model: {{id: {model}, dtype: float32}}
finetune:
  {{data: rows.jsonl, epochs: 4, batch_size: 4, learning_rate: 1e-2, save_steps: 3, lora: {{r: 4, alpha: 8}}}}
recover:
  general: prompts.jsonl
  steps: 8
  rollouts: 4
  sample_ahead: 2
  lmbda: 1
  teacher_first: 1
  max_new_tokens: 8
  validate_every: 4
  validation_prompts: 2
  save_steps: 3
  learning_rate: 1e-2
eval:
  {{retention: [instructions], domain: [questions], limit: 6, max_new_tokens: 12,
   data: {{questions: rows.jsonl}}}}
"""


def make_model(folder: Path, intermediate_size: int = 96) -> Path:
    """Save a Llama with two layers, random weights, and the embedded model's tokenizer and chat template."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from opdcl.model.load import embedded_folder

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    torch.manual_seed(0)
    # Wide weights make confident predictions: recovery refuses a teacher that is close to uniform.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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
