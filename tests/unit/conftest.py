"""An adapter to recover from."""

import json

import pytest
import torch


@pytest.fixture
def tuned(backbone, tmp_path):
    """An adapter that has left base, and the files to recover it with."""
    from opdcl.config import LoraSection
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
