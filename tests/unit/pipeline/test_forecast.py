"""The forecast of memory beside what PyTorch counts on models of real sizes without storage."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Qwen3Config

from opdcl.config.model import LoraSection
from opdcl.model import llama
from opdcl.model.backbone import Backbone
from opdcl.pipeline import forecast
from opdcl.pipeline.forecast import size_of


def of_shape(kind, vocabulary, hidden, inner, layers, heads, keys, tied=True):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": hidden // heads}
    return kind(vocab_size=vocabulary, tie_word_embeddings=tied, **sizes)


SHAPES = {
    "135M": of_shape(LlamaConfig, 49_152, 576, 1536, 30, 9, 3),
    "1.7B": of_shape(Qwen3Config, 151_936, 2048, 6144, 28, 16, 8),
    "8B": of_shape(Qwen3Config, 151_936, 4096, 12_288, 36, 32, 8, tied=False),
}
TOKENS, RANK = 512, 32


class Kernel(torch.autograd.Function):
    """Keeps what a GPU's kernel keeps: its inputs, and of attention its result."""

    @staticmethod
    def forward(ctx, keep_result, *inputs):
        result = torch.empty_like(inputs[0])
        ctx.save_for_backward(*inputs, *[result] * keep_result)
        return result


def counted(config, layers, dtype, packed=False) -> int:
    """Return the bytes that a pass over one row keeps for the gradient, without attention's scores."""
    from transformers import AutoModelForCausalLM

    small = type(config)(**config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small, dtype=dtype)
    backbone = Backbone.__new__(Backbone)
    backbone.causal_lm, backbone.base_lm, backbone.peft, backbone.merged_weights = model, None, None, None
    backbone.new_adapter(LoraSection(r=RANK), 0)
    weights = {p.untyped_storage()._cdata for p in backbone.causal_lm.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Fused attention keeps no scores, and copies of weights in another precision are no activations.
        if storage._cdata not in weights and tensor.shape[-1] != TOKENS and TOKENS in tensor.shape:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if packed:
            states, _ = llama.packed_states(backbone.causal_lm, [], [[0] * TOKENS], True)
            assert len(states) == TOKENS
            return sum(storage.nbytes() for storage in kept.values())
        # With a cache, transformers does not look for packed rows, which needs values.
        states = backbone.causal_lm.base_model(ids, past_key_values=DynamicCache(), use_cache=True)
    assert states.last_hidden_state.shape[1] == TOKENS
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_to_a_hundredth(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name])
    true = sum(p.numel() for p in model.parameters())
    assert size_of(SHAPES[name], "bfloat16", "cpu", RANK).parameters == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_are_within_a_fifth_of_what_is_kept_for_the_gradient(monkeypatch, name, dtype):
    monkeypatch.setattr("opdcl.model.lora._is_plain", lambda layer, x: True)
    config = SHAPES[name]
    one, three = (counted(config, layers, getattr(torch, dtype)) for layers in (1, 3))
    per_token = (three - one) / 2 / TOKENS * config.num_hidden_layers
    assert size_of(config, dtype, "cpu", RANK).trained_token == pytest.approx(per_token, rel=0.2)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    def attention(query, key, value, *rows, scale, window_size, enable_gqa):
        return Kernel.apply(True, query, key, value)

    monkeypatch.setattr("opdcl.model.lora._is_plain", lambda layer, x: True)
    monkeypatch.setattr(forecast, "attends_within_rows", lambda *given: True)
    monkeypatch.setattr(llama, "rms_norm", lambda x, norm: Kernel.apply(False, x))
    monkeypatch.setattr(llama, "varlen_attn", attention)


def of_a_layer(config) -> float:
    """Return the bytes per token that a packed layer keeps."""
    one, three = (counted(config, layers, torch.bfloat16, packed=True) for layers in (1, 3))
    return (three - one) / 2 / TOKENS


@pytest.mark.parametrize("name", SHAPES)
def test_packed_rows_keep_what_the_forecast_says_for_a_gpu(monkeypatch, as_on_a_gpu, name):
    config = SHAPES[name]
    wide, layers = config.hidden_size >= llama.WIDE, config.num_hidden_layers
    kept = of_a_layer(config)
    monkeypatch.setattr(llama, "WIDE", 10_000)  # the forecast keeps its own
    inside = of_a_layer(config)
    # A wide layer keeps its input, and while it is computed again, what is inside.
    assert kept == (2 * config.hidden_size if wide else inside)
    ours = size_of(config, "bfloat16", "cuda", RANK).trained_token
    assert ours == pytest.approx(kept * layers + inside * wide, rel=0.2)
