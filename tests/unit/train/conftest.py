"""A student that has moved away from tuned, and domain rows with answers."""

import json

import pytest
import torch


@pytest.fixture
def adapted(backbone, tuned):
    """A backbone with a student that has moved away from tuned, and an EMA that has not."""
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    backbone.load_adapter(tuned / "tuned", "general")
    move(backbone)
    return backbone


def move(backbone, by=0.05):
    torch.manual_seed(9)
    with torch.no_grad():
        for layer in backbone.adapted_layers():
            layer.lora_B["student"].weight.add_(by * torch.randn_like(layer.lora_B["student"].weight))


@pytest.fixture
def answered(tuned):
    rows = [json.dumps({"question": f"What code has room {i}?", "answer": f"Code {i}"}) for i in range(8)]
    (tuned / "domain.jsonl").write_text("\n".join(rows))
    return tuned
