"""What is wrong between an adapter, its own base, and the one that it is put on, is told or refused."""

import json
import shutil

import pytest
import torch
from helpers.adapters import made_by_peft
from safetensors.torch import load_file, save_file

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.check_adapter import check_adapter, check_on_base
from opdcl.model.check_model import INDEX, weight_files


@pytest.fixture
def adapter(loaded, tiny_model, tmp_path):
    """An adapter of a copy of the tiny model, `base`."""
    shutil.copytree(tiny_model, tmp_path / "base")
    folder = made_by_peft(loaded, tmp_path / "theirs", r=3, target_modules=["q_proj", "up_proj"])
    change_settings(folder, base_model_name_or_path=str(tmp_path / "base"))
    return folder


def change_settings(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(file, change):
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_a_base_is_compared_by_its_contents_where_both_are_here(adapter, tiny_model, tmp_path):
    base = ModelConfig(id=str(tiny_model), dtype="float32")
    assert check_on_base(adapter, base) == [], "a copy under another name"
    change_weights(tmp_path / "base/model.safetensors", lambda t: t | {"model.norm.weight": torch.zeros(48)})
    (note,) = check_on_base(adapter, base)
    assert f"was trained on {tmp_path / 'base'}, whose weights are not those of {tiny_model}" in note
    change_settings(adapter, base_model_name_or_path="acme/tiny-bnb-4bit")
    assert check_on_base(adapter, base) == [
        f"adapter {adapter} names acme/tiny-bnb-4bit as its base, and is put on {tiny_model}"
    ]


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM"])
def test_an_adapter_of_another_task_is_refused_with_and_without_its_head(adapter, task):
    change_settings(adapter, task_type=task)
    for head in ({}, {"base_model.model.score.weight": torch.zeros(1, 48)}):
        change_weights(adapter / "adapter_model.safetensors", lambda t, head=head: t | head)
        with pytest.raises(UsageError, match=f"another task .task_type: {task}"):
            check_adapter(adapter)
        change_settings(adapter, modules_to_save=["score"])


@pytest.mark.parametrize(
    ("prefix", "wrapper"),
    [("base_model.model.", "PEFT's wrapper was saved twice"), ("pretrained_model.", "TRL's wrapper")],
)
def test_a_wrapper_in_the_names_is_named(adapter, tiny_model, prefix, wrapper):
    file = adapter / "adapter_model.safetensors"
    change_weights(file, lambda tensors: {prefix + name: t for name, t in tensors.items()})
    with pytest.raises(UsageError) as refused:
        check_on_base(adapter, ModelConfig(id=str(tiny_model), dtype="float32"))
    assert refused.value.hint.startswith(wrapper)


def test_biases_of_mergekit_are_left_out_where_they_are_zero(adapter, tiny_model):
    file, base = adapter / "adapter_model.safetensors", ModelConfig(id=str(tiny_model), dtype="float32")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"
    change_weights(file, lambda tensors: tensors | {name: torch.zeros(48)})
    check_adapter(adapter)
    assert check_on_base(adapter, base) == []
    change_weights(file, lambda tensors: tensors | {name: torch.ones(48)})
    with pytest.raises(UsageError, match="1 of its 9 weights have no counterpart there"):
        check_on_base(adapter, base)


def test_two_sets_of_weights_are_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "stale")
    one, shard = folder / "model.safetensors", folder / "model-00001-of-00001.safetensors"
    index = {"weight_map": {"lm_head.weight": one.name}}
    (folder / INDEX).write_text(json.dumps(index))
    assert weight_files(folder, "stale") == [one]
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard.name}}))
    assert weight_files(folder, "stale") == [one], "the index of files that are not here"
    shutil.copy(one, shard)
    with pytest.raises(UsageError, match="holds two sets of weights"):
        weight_files(folder, "stale")
    one.unlink()
    assert weight_files(folder, "stale") == [shard]
