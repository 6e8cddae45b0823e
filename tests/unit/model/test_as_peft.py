"""Adapters on every kind of layer: opdcl computes what PEFT does, in each state, merged and backward."""

import copy

import pytest
import torch
from helpers.adapters import logits, made_by_peft
from helpers.tiny import make_mixture
from peft import LoraConfig, PeftModel

from opdcl.config.model import LoraSection, ModelConfig
from opdcl.model.adapters import adapter_scale, find_adapter
from opdcl.model.check_adapter import check_adapter, check_on_base
from opdcl.model.load_backbone import load_backbone
from opdcl.model.lora import adapter_weights, lora_config
from opdcl.rundir.files import read_json
from opdcl.train.checkpoints import save_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ALL}
LINEAR = {
    "rank 2": {"r": 2, "lora_alpha": 16, "target_modules": ALL},
    "rank 16 on all linear layers": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear"},
    "rsLoRA": {"r": 9, "lora_alpha": 3, "use_rslora": True, "target_modules": ALL},
    "DoRA": PLAIN | {"use_dora": True},
    "DoRA with rsLoRA": PLAIN | {"use_dora": True, "use_rslora": True},
    "two targets": PLAIN | {"target_modules": ["q_proj", "v_proj"]},
    "one layer": PLAIN | {"layers_to_transform": [1]},
    "ranks by module": PLAIN | {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}},
    "bf16": PLAIN,
    "dropout": PLAIN | {"lora_dropout": 0.5},
}
# Experts are stored as (experts, out, in), in gpt-oss as (experts, in, out) and with biases.
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")
# As other trainers write adapters of experts.
EXPERTS = {
    "parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "experts alone": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "all-linear of a mixture": {"target_modules": "all-linear"},
}
IDS = torch.arange(40, 60)[None]


@pytest.fixture(params=[*LINEAR, *MIXTURES, *EXPERTS])
def made(request, tiny_model, tmp_path):
    """Return a model's settings, its backbone, and the folder of an adapter that PEFT has made on it."""
    kind, folder, dtype = request.param, tiny_model, torch.bfloat16 if request.param == "bf16" else None
    if kind not in LINEAR:
        family = kind if kind in MIXTURES else "olmoe"
        folder = make_mixture(tmp_path / "base", tiny_model, family)
    model = ModelConfig(id=str(folder), dtype="float32")
    backbone = load_backbone(model)
    if kind in MIXTURES:
        config = lora_config(LoraSection(r=8, alpha=16), backbone.causal_lm)
    else:
        config = LoraConfig(**({"r": 4, "lora_alpha": 8} | (LINEAR | EXPERTS)[kind]), task_type="CAUSAL_LM")
    return model, backbone, made_by_peft(backbone, tmp_path / "adapter", dtype, config)


def weights_of(model):
    named = model.named_parameters()
    return {name.replace(".base_layer", ""): weight.clone() for name, weight in named if "lora_" not in name}


def gradients(model):
    model(input_ids=IDS).logits.float().log_softmax(-1)[0, :, 7].sum().backward()
    found = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            found[name.replace("base_model.model.", "").replace(".student", ".default")] = weight.grad
    return found


def test_every_state_and_its_gradient_are_those_of_peft_and_base_stays_bit_for_bit(made, tmp_path):
    model, backbone, adapter = made
    untouched, base = copy.deepcopy(backbone.causal_lm), logits(backbone.causal_lm)
    before = backbone.fingerprint()
    assert find_adapter(str(adapter)) == adapter
    assert check_on_base(adapter, model) == []
    backbone.load_adapter(adapter, "student", trainable=True)
    backbone.load_adapter(adapter, "tuned")
    backbone.causal_lm.eval()
    reference = PeftModel.from_pretrained(copy.deepcopy(untouched), str(adapter), is_trainable=True).eval()
    expected = logits(reference)
    change = float((expected - base).abs().max())
    assert change > 0.01, "the adapter changes something"

    def assert_near(actual, wanted):
        assert float((actual - wanted).abs().max()) < 1e-3 * max(1, change)

    whole = logits(backbone.causal_lm)
    assert_near(whole, expected)
    ours, theirs = gradients(backbone.causal_lm), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, atol=1e-3, rtol=1e-3), name
    by_peft = weights_of(reference.merge_and_unload())
    with backbone.merged("student") as merged:
        assert_near(logits(merged), expected)
        for name, weight in weights_of(merged).items():
            assert torch.allclose(weight, by_peft[name], atol=1e-5), name
    with backbone.state("base") as state:
        assert torch.equal(logits(state), base)
    with backbone.state("tuned") as state:
        assert_near(logits(state), expected)
    with backbone.scaled(0.0):
        assert_near(logits(backbone.causal_lm), base)
    assert torch.equal(logits(backbone.causal_lm), whole)
    assert backbone.fingerprint() == before
    for layer in backbone.adapted_layers("student"):
        for weight in adapter_weights(layer, "student"):
            weight.data *= 1.1
    save_adapter(backbone, tmp_path / "saved")
    check_adapter(tmp_path / "saved")
    again = PeftModel.from_pretrained(untouched, str(tmp_path / "saved")).eval()
    assert_near(logits(again), logits(backbone.causal_lm))


@pytest.mark.parametrize("kind", ["rank 2", "rsLoRA"])
def test_the_scale_is_the_one_that_peft_uses(kind, loaded, tmp_path):
    adapter = made_by_peft(loaded, tmp_path, **LINEAR[kind])
    model = PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), str(adapter))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    settings = read_json(adapter / "adapter_config.json")
    assert adapter_scale(settings) == pytest.approx(layer.scaling["default"])
