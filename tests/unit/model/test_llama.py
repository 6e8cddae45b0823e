"""The packed pass against transformers' and PEFT's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from opdcl.model import forward, llama
from opdcl.model.forward import Pass, answer_states, pick_pass
from opdcl.model.llama import rms_norm
from opdcl.model.lora import fuse
from opdcl.words import Example

FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 12, "attention_bias": True},
}
PREFIX = [5, 6, 7, 8]
ROWS = [
    Example.of([*PREFIX, 20 + i, 21 + i], [*range(22 + i, 20 + i + length)])
    for i, length in enumerate((6, 3, 6, 4, 3))
]


def model_of(family: str, **options):
    """Return a two-layer model with random weights and an adapter that is not zero."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = AutoConfig.for_model(family, **sizes, **heads, **FAMILIES[family], attn_implementation="sdpa")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    )
    peft = get_peft_model(model, lora)
    with torch.no_grad():
        for name, weight in peft.named_parameters():
            if "lora_B" in name or "norm" in name or "bias" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    fuse(model)
    return peft.eval()


def run(peft, way: Pass, monkeypatch):
    weights = [weight for weight in peft.parameters() if weight.requires_grad]
    with monkeypatch.context() as patch:
        patch.setattr(forward, "pick_pass", lambda *given: way)
        states = answer_states(peft.get_base_model(), ROWS)
    direction = torch.linspace(-1, 1, states.numel()).view(states.shape)
    grads = torch.autograd.grad((states * direction).sum(), weights, allow_unused=True)
    return states.detach(), dict(
        zip((n for n, w in peft.named_parameters() if w.requires_grad), grads, strict=True)
    )


def assert_same(peft, monkeypatch, way=Pass.BY_LENGTH) -> dict[str, torch.Tensor]:
    assert pick_pass(peft.get_base_model()) == Pass.BY_LENGTH
    expected, reference = run(peft, Pass.PADDED, monkeypatch)
    states, grads = run(peft, way, monkeypatch)
    assert len(states) == sum(sum(row.learned) for row in ROWS)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    for name, grad in grads.items():
        assert (grad is None) == (reference[name] is None)
        if grad is not None:
            scale = float(reference[name].abs().max())
            torch.testing.assert_close(grad, reference[name], rtol=1e-3, atol=1e-4 * scale, msg=name)
    return {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_forward_and_backward(family, monkeypatch):
    peft = model_of(family)
    grads = assert_same(peft, monkeypatch)
    assert len(grads) == 2 * 7 * 2
    assert all(grad.abs().max() > 0 for grad in grads.values())


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_dropout": 0.5},  # without effect in evaluation mode
        {"lora_bias": True},
        {"target_modules": ["layers.1.self_attn.q_proj", "up_proj"]},
        {"exclude_modules": ["v_proj", "down_proj"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_adapters_are_left_to_peft(options, monkeypatch):
    assert assert_same(model_of("qwen3", **options), monkeypatch)


def test_adapters_together_and_switched_off(monkeypatch):
    peft = model_of("llama")
    peft.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    peft.base_model.set_adapter(["default", "second"])
    together = assert_same(peft, monkeypatch)
    assert any("second" in name for name in together)
    with torch.no_grad(), peft.disable_adapter():
        bare = answer_states(peft.get_base_model(), ROWS)
        monkeypatch.setattr(forward, "pick_pass", lambda *given: Pass.PADDED)
        torch.testing.assert_close(bare, answer_states(peft.get_base_model(), ROWS), rtol=1e-4, atol=1e-4)


def test_dropout_draws_for_each_pass(monkeypatch):
    peft = model_of("llama", lora_dropout=0.5).train()
    states = [answer_states(peft.get_base_model(), ROWS).detach() for _ in range(2)]
    assert (states[0] - states[1]).abs().max() > 0.01


def each_row_alone(query, key, value, start, start_k, longest, longest_k, scale, window_size, enable_gqa):
    """What `varlen_attn` computes, which PyTorch has on a GPU only."""
    assert (window_size, start.dtype, len(query)) == ((-1, 0), torch.int32, start[-1])
    assert start.equal(start_k)
    assert longest == longest_k == int(start.diff().max())
    out = torch.empty_like(query)
    for begin, end in itertools.pairwise(start.tolist()):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        scores = scale * (q @ k.mT) + torch.full((end - begin,) * 2, -torch.inf).triu(1)
        out[begin:end] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


@pytest.mark.parametrize("wide", [32, 64])  # computed again for the gradient, or kept
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_attend_in_one_kernel(family, wide, monkeypatch):
    monkeypatch.setattr(llama, "WIDE", wide)
    monkeypatch.setattr(llama, "varlen_attn", each_row_alone)
    assert assert_same(model_of(family), monkeypatch, Pass.IN_ONE_KERNEL)


@pytest.mark.parametrize(
    ("expected", "change"),
    [
        (True, {}),
        (False, {"device": torch.device("cpu")}),
        (False, {"dtype": torch.float32}),
        (False, {"head_dim": 12}),
        (False, {"head_dim": 512}),
        (False, {"capability": (7, 5)}),  # Turing
    ],
)
def test_the_kernel_within_rows_is_for_gpus_that_have_it(monkeypatch, expected, change):
    given = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "capability": (8, 0)}
    given |= change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    config = model_of("qwen3").get_base_model().config
    config.head_dim = given["head_dim"]
    assert llama.attends_within_rows(config, given["device"], given["dtype"]) == expected


@pytest.mark.parametrize("rows", [ROWS[:1], [Example(ROWS[0].ids[4:], ROWS[0].learned[4:])] * 2])
def test_rows_without_a_common_beginning(rows, monkeypatch):
    peft = model_of("llama")
    with torch.no_grad():
        packed = answer_states(peft.get_base_model(), rows)
        monkeypatch.setattr(forward, "pick_pass", lambda *given: Pass.PADDED)
        torch.testing.assert_close(packed, answer_states(peft.get_base_model(), rows), rtol=1e-4, atol=1e-4)


def test_other_models_are_left_to_transformers():
    peft = model_of("llama")
    model = peft.get_base_model()
    assert pick_pass(model) == Pass.BY_LENGTH
    model.config.hidden_act = "gelu"
    assert pick_pass(model) == Pass.BEHIND_PREFIX
    model.config.hidden_act, model.config._attn_implementation = "silu", "eager"
    assert pick_pass(model) == Pass.BEHIND_PREFIX


def test_rms_norm_is_transformers_in_bf16_too():
    peft = model_of("qwen3")
    norm = peft.get_base_model().model.norm
    x = torch.randn(5, 32, requires_grad=True)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        norm.to(dtype)
        grads = [
            torch.autograd.grad(f(x.to(dtype)).float().cumsum(1).sum(), x)[0]
            for f in (norm, lambda y: rms_norm(y, norm))
        ]
        torch.testing.assert_close(*grads, rtol=near, atol=near * float(grads[0].abs().max()))
        torch.testing.assert_close(rms_norm(x.to(dtype), norm), norm(x.to(dtype)), rtol=near, atol=near)
