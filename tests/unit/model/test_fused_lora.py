"""The fused LoRA layer against its formula, and in half precision; `test_as_peft` has its gradients."""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, get_peft_model

from opdcl.model.lora import fuse


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 5)
        self.second = torch.nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def adapted(**options):
    model = get_peft_model(
        Net(), LoraConfig(r=2, lora_alpha=6, target_modules=["first", "second"], **options)
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    fused = copy.deepcopy(model)
    fuse(fused)
    return model.double(), fused.double()


def run(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return out.detach(), x.grad, grads


def test_dropout_is_left_to_peft():
    _, fused = adapted(lora_dropout=0.5)
    fused.train()
    x = torch.ones(64, 7, dtype=torch.double)
    assert not torch.equal(fused(x)[0], fused(x)[1])
    fused.eval()
    torch.testing.assert_close(fused(x)[0], fused(x)[1])


def test_a_half_precision_base_keeps_its_adapter_in_fp32():
    plain, fused = adapted()
    plain.float()
    fused.float()
    for layer in (fused.base_model.model.first, fused.base_model.model.second):
        layer.base_layer.bfloat16()
        layer.lora_A["default"].weight.data *= 0.1
    for layer in (plain.base_model.model.first, plain.base_model.model.second):
        layer.lora_A["default"].weight.data *= 0.1
    x = torch.randn(64, 7, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_f, _, grads_f = run(fused, x.bfloat16())
    out, _, grads = run(plain, x)
    assert out_f.dtype == torch.bfloat16
    torch.testing.assert_close(out_f.float(), out, rtol=0.05, atol=0.05)
    for name in grads:
        assert grads_f[name].dtype == torch.float32
        assert torch.cosine_similarity(grads_f[name].flatten(), grads[name].flatten(), 0) > 0.999


def test_outside_autocast_other_precisions_than_the_bases_are_left_to_peft():
    plain, fused = adapted()
    plain.float()
    fused.float()
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused(x), plain(x))
