"""An adapter to recover from; runs to be compared."""

import json

import pytest
import torch


@pytest.fixture
def tuned(backbone, tmp_path):
    """An adapter that has left base, and the files to recover it with."""
    from opdcl.config.finetune import LoraSection
    from opdcl.training import save_adapter

    backbone.new_adapter(LoraSection(r=4, alpha=8), 1)
    generator = torch.Generator().manual_seed(1)
    for name, p in backbone.peft.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.3
    save_adapter(backbone, tmp_path / "tuned")
    for name, text in (("general", "Write a line about {}."), ("domain", "What is the code of room {}?")):
        rows = [json.dumps({"prompt": text.format(i)}) for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


@pytest.fixture
def memory_for():
    """Let a training pass of more than so many rows through a decoder layer end with a fault, as it does where memory ends."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    hooks = []

    def limit(rows: int, fault: BaseException) -> None:
        def check(module, given):
            if isinstance(module, LlamaDecoderLayer) and torch.is_grad_enabled() and len(given[0]) > rows:
                raise fault

        hooks.append(register_module_forward_pre_hook(check))

    yield limit
    for hook in hooks:
        hook.remove()
