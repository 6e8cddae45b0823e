"""A two-layer model with the real tokenizer, made once per session."""

import os
from pathlib import Path

os.environ.setdefault("TERM", "dumb")
os.environ.pop("FORCE_COLOR", None)
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers and random weights, saved with the embedded model's tokenizer and chat template."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from opdcl.models import _embedded_folder

    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(_embedded_folder())
    torch.manual_seed(0)
    # Wide weights make confident predictions: recovery refuses a teacher that is close to uniform.
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         tie_word_embeddings=True, initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def backbone(tiny_model: Path):
    """The tiny model, loaded anew."""
    from opdcl.config import ModelConfig
    from opdcl.distill.backbone import Backbone

    return Backbone.load(ModelConfig(id=str(tiny_model), dtype="float32"))
