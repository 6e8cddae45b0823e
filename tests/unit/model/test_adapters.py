"""Adapters made by plain PEFT: what opdcl computes what PEFT does, or refuses them."""

import copy
import json
import shutil

import pytest
import torch
from helpers.adapters import made_by_peft
from helpers.recovering import run
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from opdcl.errors import UsageError
from opdcl.model.adapters import adapter_scale, base_of, check_adapter, find_adapter
from opdcl.model.lora import parts
from opdcl.rundir.files import read_json
from opdcl.training import save_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES = {
    "rank 2": {"r": 2, "lora_alpha": 16, "target_modules": ALL},
    "rank 16 on all linear layers": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear"},
    "rsLoRA": {"r": 9, "lora_alpha": 3, "use_rslora": True, "target_modules": ALL},
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ALL},
    "DoRA with rsLoRA": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ALL,
    },
    "two targets": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "layers_to_transform": [1]},
    "ranks by module": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"v_proj": 32},
    },
    "bf16": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "dropout": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.5, "target_modules": ALL},
}


@pytest.fixture
def made(loaded, tmp_path):
    """Return a function that makes an adapter with PEFT alone, as any trainer does, and saves it."""

    def make(name="", **settings):
        dtype = torch.bfloat16 if name == "bf16" else None
        return made_by_peft(loaded, tmp_path / "adapter", dtype, **settings)

    return make


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


def logits(model):
    ids = torch.arange(40, 60)[None]
    return model(input_ids=ids).logits.detach()


def peft_model(loaded, adapter):
    return PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), str(adapter)).eval()


def test_every_state_computes_what_peft_does(shape, made, loaded, backbone):
    adapter = made(shape, **SHAPES[shape])
    assert find_adapter(str(adapter)) == adapter
    before = backbone.fingerprint()
    base = logits(loaded.causal_lm)
    backbone.load_adapter(adapter, "student")
    reference = peft_model(loaded, adapter)
    expected = logits(reference)
    assert (expected - base).abs().max() > 0.1, "the adapter changes something"
    assert torch.allclose(logits(backbone.causal_lm), expected, atol=1e-3)
    with backbone.state("base") as model:
        assert torch.equal(logits(model), base)
    merged_by_peft = dict(reference.merge_and_unload().named_parameters())
    with backbone.merged("student") as model:
        assert torch.allclose(logits(model), expected, atol=1e-3)
        for key, weight in model.named_parameters():
            if "lora_" not in key:
                same = merged_by_peft[key.replace(".base_layer", "")]
                assert torch.allclose(weight, same, atol=1e-5), key
    assert backbone.fingerprint() == before


def test_an_adapter_scaled_to_nothing_is_base_and_scaled_back_is_itself(shape, made, loaded, backbone):
    backbone.load_adapter(made(shape, **SHAPES[shape]), "student", trainable=True)
    whole = logits(backbone.causal_lm.eval())
    with backbone.scaled(0.0):
        assert torch.allclose(logits(backbone.causal_lm), logits(loaded.causal_lm), atol=1e-3)
    assert torch.equal(logits(backbone.causal_lm), whole)


def test_a_saved_adapter_is_the_same_again_for_peft(shape, made, loaded, backbone, tmp_path):
    backbone.load_adapter(made(shape, **SHAPES[shape]), "student", trainable=True)
    for layer in backbone.adapted_layers("student"):
        for weight in parts(layer, "student"):
            weight.data *= 1.1
    save_adapter(backbone, tmp_path / "saved")
    check_adapter(tmp_path / "saved")
    expected = logits(backbone.causal_lm.eval())
    assert torch.allclose(logits(peft_model(loaded, tmp_path / "saved")), expected, atol=1e-3)


def test_every_shape_is_recovered_and_keeps_its_shape(shape, made, tuned, backbone, loaded):
    shutil.rmtree(tuned / "tuned")
    made(shape, **SHAPES[shape]).rename(tuned / "tuned")
    rows = run(backbone, tuned, steps=8, validate_every=2, learning_rate=2e-3, method="general")
    start, *later = (row["validation"] for row in rows if "validation" in row)
    # Its distance to base shrinks; sampling, on merged weights, and training see the same model.
    assert min(measured["general_kl"] for measured in later) < start["general_kl"]
    assert abs(start["domain_kl"]) < 1e-4
    assert all(row["mismatch"] == 0 for row in rows if "mismatch" in row)
    before, after = (read_json(tuned / f / "adapter_config.json") for f in ("tuned", "out/adapter"))
    kept = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "layers_to_transform")
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert set(after["target_modules"]) == set(before["target_modules"])
    # PEFT alone loads the result, and merged it is what opdcl computes.
    reference = peft_model(loaded, tuned / "out" / "adapter")
    backbone.load_adapter(tuned / "out" / "adapter", "student")
    with backbone.merged("student") as model:
        assert torch.allclose(logits(model), logits(reference.merge_and_unload()), atol=1e-3)


def test_all_that_an_adapter_learns_is_trainable(made, backbone):
    backbone.load_adapter(made(**SHAPES["DoRA"]), "student", trainable=True)
    trained = {name for name, weight in backbone.causal_lm.named_parameters() if weight.requires_grad}
    kinds = {
        kind for kind in ("lora_A", "lora_B", "lora_magnitude_vector") if any(kind in n for n in trained)
    }
    assert kinds == {"lora_A", "lora_B", "lora_magnitude_vector"}
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"modules_to_save": ["lm_head"]},
            r"replaces whole modules of its base \(modules_to_save: .*lm_head",
        ),
        ({"modules_to_save": ["embed_tokens"]}, "replaces whole modules"),
        ({"bias": "lora_only"}, "changes the biases of its base"),
        ({"lora_bias": True}, "its low-rank matrices have biases"),
        ({"trainable_token_indices": [5, 6]}, "embeddings of some tokens"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            "changes more than linear layers and experts.*embed_tokens",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "changes more than linear layers and experts.*lm_head"),
        ({"init_lora_weights": "pissa"}, "subtracted from its base .*pissa"),
        ({"init_lora_weights": "olora"}, "subtracted from its base .*olora"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "repeats layers"),
        ({"alora_invocation_tokens": [7]}, "activated LoRA"),
    ],
)
def test_an_adapter_that_changes_more_is_refused_with_the_reason(settings, reason, made):
    adapter = made(**{"r": 4, "target_modules": ["q_proj"]} | settings)
    with pytest.raises(UsageError, match=reason):
        find_adapter(str(adapter))


def test_another_kind_of_adapter_is_refused(loaded, tmp_path):
    from peft import LoHaConfig

    config = LoHaConfig(r=4, target_modules=["q_proj"])
    get_peft_model(copy.deepcopy(loaded.causal_lm), config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="of type LOHA"):
        find_adapter(str(tmp_path))


def edit(adapter, change):
    weights = change(load_file(adapter / "adapter_model.safetensors"))
    save_file(weights, adapter / "adapter_model.safetensors")


def test_embeddings_saved_with_an_adapter_are_refused(made):
    # PEFT writes them when a trainer has resized the embeddings.
    adapter = made(r=4, target_modules=["q_proj"])
    edit(adapter, lambda weights: weights | {"base_model.model.model.embed_tokens.weight": torch.zeros(2, 2)})
    with pytest.raises(UsageError, match=r"embed_tokens\.weight"):
        find_adapter(str(adapter))


@pytest.mark.parametrize("change", ["renamed", "missing"])
def test_weights_that_match_only_in_part_are_refused(change, made, backbone):
    adapter = made(r=4, target_modules=["q_proj"])
    if change == "renamed":  # as a wrapper around the language model names its layers
        edit(
            adapter, lambda weights: {k.replace("model.layers", "text.layers"): w for k, w in weights.items()}
        )
    else:
        edit(adapter, lambda weights: dict(sorted(weights.items())[:-1]))
    with pytest.raises(UsageError, match=r"does not fit the base model: \d+ of its weights"):
        backbone.load_adapter(adapter, "student")


def test_damaged_weights_are_refused(made):
    file = made(r=4, target_modules=["q_proj"]) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors is damaged"):
        find_adapter(str(file.parent))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_model.bin", "holds its adapter as a pickle"),
        ("config.json", "is a model folder: it holds no adapter"),
        ("notes.txt", "holds no adapter"),
        ("", "does not exist"),
    ],
)
def test_a_folder_without_an_adapter_is_named_for_what_it_is(file, message, tmp_path):
    if file:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / file).write_text("{}")
    with pytest.raises(UsageError, match=message):
        find_adapter(str(tmp_path / "folder"))


def test_the_newest_checkpoint_of_a_trainer_is_suggested(tmp_path):
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "adapter_model.safetensors").write_text("")
    with pytest.raises(UsageError, match="holds no adapter") as refused:
        find_adapter(str(tmp_path))
    assert "checkpoint-20" in refused.value.hint


def test_a_mistyped_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="runs/nosuch does not exist"):
        find_adapter("runs/nosuch")
    (tmp_path / "runs").rmdir()
    with pytest.raises(UsageError, match="runs/nosuch does not exist"):
        find_adapter("runs/nosuch")


@pytest.mark.parametrize("shape", ["rank 2", "rsLoRA"])
def test_the_scale_is_the_one_that_peft_uses(shape, made, loaded):
    adapter = made(**SHAPES[shape])
    layer = peft_model(loaded, adapter).base_model.model.model.layers[0].self_attn.q_proj
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert adapter_scale(config) == pytest.approx(layer.scaling["default"])


def test_the_base_is_the_one_that_the_adapter_names(made, tiny_model):
    adapter = made(r=4, target_modules=["q_proj"])
    assert base_of("mine", adapter).id == str(tiny_model)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="does not name its base") as refused:
        base_of("mine", adapter)
    assert "--base" in refused.value.hint
