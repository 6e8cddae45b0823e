"""An adapter to recover from, and a limit on the memory of training."""

import json

import pytest
import torch


@pytest.fixture
def tuned(backbone, tmp_path):
    """An adapter that differs from base, and the prompt files to recover it with."""
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
def memory_for(monkeypatch):
    """Return a function that makes training passes of more than `rows` rows fail, as if memory ran out."""
    from opdcl.model import forward

    def limit(rows: int, fault: BaseException) -> None:
        states = forward._states

        def limited(causal_lm, sequences, share_prefix):
            if torch.is_grad_enabled() and len(sequences) > rows:
                raise fault
            return states(causal_lm, sequences, share_prefix)

        monkeypatch.setattr(forward, "_states", limited)

    return limit
