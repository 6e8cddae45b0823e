"""Adapters on the experts of a mixture, which transformers stacks in 3-D parameters."""

import copy
import json

import pytest
import torch
from helpers.adapters import logits
from helpers.synthetic import alter
from helpers.tiny import make_mixture
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig

from opdcl.config.model import LoraSection, ModelConfig
from opdcl.errors import UsageError
from opdcl.model.check_adapter import check_on_base
from opdcl.model.load_backbone import load_backbone
from opdcl.model.lora import base_weight
from opdcl.pipeline.checks import check_targets
from opdcl.train.checkpoints import save_adapter

# Stored as (experts, out, in), in gpt-oss as (experts, in, out) and with biases.
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    return {name: make_mixture(tmp_path_factory.mktemp(name), tiny_model, name) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def mixture(family, folders):
    return load_backbone(ModelConfig(id=str(folders[family]), dtype="float32"))


def stir(model, seed=3):
    """Give every adapter weight a random part, so that the adapter changes something."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if "lora_" in key:
            weight.data += torch.randn(weight.shape, generator=generator) * 0.1


def test_all_linear_means_every_product_but_head_and_router(mixture, family, folders):
    bare = {key: weight.numel() for key, weight in mixture.causal_lm.named_parameters()}
    outside = ("norm", "bias", "embed", "lm_head", "mlp.gate.", "router", "sinks")
    products = {key for key in bare if not any(word in key for word in outside)}
    mixture.new_adapter(LoraSection(r=8, alpha=16), seed=1)
    names = {id(p): n.replace(".base_layer", "") for n, p in mixture.causal_lm.named_parameters()}
    adapted = {names[id(base_weight(layer))] for layer in mixture.adapted_layers("student")}
    assert adapted == products
    for layer in mixture.adapted_layers():
        is_stack = base_weight(layer).ndim == 3
        assert (layer.r["student"], layer.scaling["student"]) == (4 if is_stack else 8, 2.0)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            ["gate_up_proj", "down_proj"],
            {"experts.gate_up_proj", "experts.down_proj", "mlp.down_proj.weight"},
        ),
        (["experts.down_proj"], {"experts.down_proj"}),
        (r".*experts\..*", {"experts.gate_up_proj", "experts.down_proj"}),
        (["q_proj"], {"q_proj.weight"}),
        (["layers.0.mlp.up_proj"], {"mlp.up_proj.weight"}),
    ],
)
def test_targets_name_experts_as_they_name_layers(targets, expected, folders, tmp_path):
    model = ModelConfig(id=str(folders["qwen3_moe"]), dtype="float32")
    lora = LoraSection(r=4, alpha=8, target_modules=targets)
    check_targets(model, lora)
    mixture = load_backbone(model)
    mixture.new_adapter(lora, seed=1)
    names = {id(p): n.replace(".base_layer", "") for n, p in mixture.causal_lm.named_parameters()}
    adapted = {names[id(base_weight(layer))] for layer in mixture.adapted_layers()}
    assert {next(e for e in expected if name.endswith(e)) for name in adapted} == expected
    stir(mixture.causal_lm)
    tuned = logits(mixture.causal_lm)
    save_adapter(mixture, tmp_path / "adapter")
    mixture.drop_adapters()
    mixture.load_adapter(tmp_path / "adapter", "student")
    assert torch.equal(logits(mixture.causal_lm), tuned)


def test_a_target_without_a_layer_is_refused(folders):
    model = ModelConfig(id=str(folders["olmoe"]))
    with pytest.raises(UsageError, match="'gate_proj' matches no linear layer") as refused:
        check_targets(model, LoraSection(target_modules=["q_proj", "gate_proj"]))
    assert "gate_up_proj" in refused.value.hint
    check_targets(model, LoraSection(target_modules=["q_proj", "v_proj"]))


def test_no_sum_of_weights_waits_for_the_backward_pass(folders):
    mixture = load_backbone(ModelConfig(id=str(folders["olmoe"]), dtype="float32"))
    alone = get_peft_model(copy.deepcopy(mixture.causal_lm), LoraConfig(r=4, target_modules="all-linear"))
    mixture.new_adapter(LoraSection(r=8, alpha=16), seed=1)
    kept = []
    for model in (mixture.causal_lm, alone):
        frozen = {weight.data_ptr() for weight in model.parameters()}
        stacked = {shape for w in model.parameters() if w.ndim == 3 for shape in (w.shape, w.mT.shape)}
        sums = []

        def note(tensor, stacked=stacked, frozen=frozen, sums=sums):
            if tensor.shape in stacked and tensor.data_ptr() not in frozen:
                sums.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(input_ids=torch.arange(40, 60)[None]).logits.sum()
        kept.append(sums)
    ours, by_peft = kept
    assert by_peft, "PEFT alone keeps the sums"
    assert not ours


def as_transformers_4(folder, base, dropout):
    """Write an adapter with a pair of matrices for each expert, as PEFT did before experts were stacked."""
    config = AutoConfig.from_pretrained(base)
    width, hidden = config.moe_intermediate_size, config.hidden_size
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for layer in set(range(config.num_hidden_layers)) - set(config.mlp_only_layers):
        for expert in range(config.num_experts):
            for name, (rows, columns) in shapes.items():
                place = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                weights[f"{place}.lora_A.weight"] = torch.randn(2, columns, generator=generator) * 0.1
                weights[f"{place}.lora_B.weight"] = torch.randn(rows, 2, generator=generator) * 0.1
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
    settings |= {"lora_dropout": dropout, "target_modules": list(shapes)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_dropout_of_an_adapter_on_experts_is_left_out(folders, tmp_path):
    config = ModelConfig(id=str(folders["qwen3_moe"]), dtype="float32")
    found = []
    for dropout in (0.0, 0.05):
        adapter = as_transformers_4(tmp_path / str(dropout), config.id, dropout)
        check_on_base(adapter, config)
        mixture = load_backbone(config)
        base = logits(mixture.causal_lm)
        mixture.load_adapter(adapter, "student", trainable=True)
        mixture.load_adapter(adapter, "tuned")
        found.append(logits(mixture.causal_lm.train()))
        with mixture.state("tuned") as model:
            assert torch.equal(logits(model), found[0])
    assert torch.equal(*found)
    assert (found[0] - base).abs().max() > 0.01


def test_a_setting_that_peft_has_not_for_experts_is_no_fault_of_the_base(folders, tmp_path):
    config = ModelConfig(id=str(folders["qwen3_moe"]), dtype="float32")
    adapter = as_transformers_4(tmp_path / "adapter", config.id, 0.0)
    alter(adapter / "adapter_config.json", use_dora=True)
    with pytest.raises(UsageError, match=r"PEFT cannot put adapter .*use_dora") as refused:
        check_on_base(adapter, config)
    assert "train it without that" in refused.value.hint


def test_in_bfloat16_the_merged_experts_are_those_that_train(folders):
    mixture = load_backbone(ModelConfig(id=str(folders["olmoe"]), dtype="bfloat16"))
    mixture.new_adapter(LoraSection(r=8, alpha=16, target_modules=["gate_up_proj", "down_proj"]), seed=1)
    stir(mixture.causal_lm)
    trained = logits(mixture.causal_lm)
    with mixture.merged("student") as model:
        assert torch.equal(logits(model), trained)
