"""Adapters as other programs leave them: made with PEFT alone, or trained by TRL."""

import copy
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer


def made_by_peft(
    loaded, folder: Path, dtype: torch.dtype | None = None, config: LoraConfig | None = None, **lora
) -> Path:
    """Save an adapter with random weights, which changes what the loaded model says."""
    torch.manual_seed(3)
    config = config or LoraConfig(**lora, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(loaded.causal_lm), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data += torch.randn_like(weight) * 0.1
    model.to(dtype).save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    """Return what a model computes after each of twenty tokens, (1, 20, V)."""
    return model(input_ids=torch.arange(40, 60)[None]).logits.detach()


def made_by_trl(loaded, folder: Path, **lora) -> Path:
    """Train an adapter on a few rows with TRL's trainer, and save it as `trl sft` does."""
    rows = [{"prompt": f"What is {i}?", "completion": f" {i} is a number."} for i in range(8)]
    arguments = SFTConfig(
        output_dir=str(folder), max_steps=2, learning_rate=0.1, use_cpu=True, report_to="none"
    )
    trainer = SFTTrainer(
        model=copy.deepcopy(loaded.causal_lm),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=loaded.tokenizer,
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    return folder
