"""Adapters made by plain PEFT: what opdcl computes what PEFT does, or refuses them."""

import copy
import json
import shutil

import pytest
import torch
from helpers.adapters import logits, made_by_peft
from helpers.command import opdcl
from helpers.recovering import run
from peft import PeftModel
from safetensors.torch import load_file, save_file

from opdcl.config.model import ModelConfig
from opdcl.errors import OpdclError, UsageError
from opdcl.model.adapters import base_of, find_adapter
from opdcl.model.check_adapter import check_adapter, check_on_base
from opdcl.model.check_model import INDEX, weight_files
from opdcl.model.load_backbone import accept_adapter
from opdcl.rundir.files import read_json


@pytest.fixture
def made(loaded, tmp_path):
    """Return a function that makes an adapter with PEFT alone, as any trainer does, and saves it."""

    def make(**settings):
        return made_by_peft(loaded, tmp_path / "adapter", **settings)

    return make


@pytest.fixture
def checks(tiny_model, backbone):
    """The check before a run, and the one on loading, of an adapter's folder."""
    base = ModelConfig(id=str(tiny_model), dtype="float32")
    return [
        lambda folder: check_on_base(folder, base),
        lambda folder: accept_adapter(backbone, folder, "student"),
    ]


def peft_model(loaded, adapter):
    return PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), str(adapter)).eval()


def test_an_adapter_of_any_shape_is_recovered_and_keeps_it(tuned, backbone, loaded):
    shutil.rmtree(tuned / "tuned")
    shape = {"r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": True, "target_modules": "all-linear"}
    patterns = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 32}}
    made_by_peft(loaded, tuned / "tuned", torch.bfloat16, **shape, **patterns)
    rows = run(backbone, tuned, steps=4, validate_every=2, learning_rate=5e-4, method="general")
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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, r"whole modules of its base \(modules_to_save: .*lm_head"),
        ({"bias": "lora_only"}, "changes the biases of its base"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes embeddings or the head .*embed_tokens"),
        ({"init_lora_weights": "pissa"}, "subtracted from its base .*pissa"),
    ],
)
def test_an_adapter_that_changes_more_is_refused_with_the_reason(settings, reason, made):
    adapter = made(**{"r": 4, "target_modules": ["q_proj"]} | settings)
    with pytest.raises(UsageError, match=reason):
        find_adapter(str(adapter))


def edit(folder, change, name="adapter_model.safetensors"):
    save_file(change(load_file(folder / name)), folder / name, metadata={"format": "pt"})


EMBEDDINGS = "base_model.model.model.embed_tokens.weight"


def with_embeddings(values):
    return lambda weights: weights | {EMBEDDINGS: values}


@pytest.mark.parametrize("case", ["trained", "resized"])
def test_embeddings_saved_with_an_adapter_are_refused_if_they_are_not_base_s(case, made, checks, backbone):
    # PEFT writes them when a trainer has resized the vocabulary.
    values = backbone.causal_lm.model.embed_tokens.weight.detach().clone()
    if case == "trained":
        values[7, 3] += 0.5
    else:
        values = torch.cat([values, torch.zeros(1, values.shape[1])])
    adapter = made(r=4, target_modules=["q_proj"])
    edit(adapter, with_embeddings(values))
    before = backbone.fingerprint()
    for check in checks:
        with pytest.raises(UsageError, match=r"embed_tokens\.weight is not its base's"):
            check(adapter)
    assert backbone.fingerprint() == before


def test_embeddings_saved_unchanged_are_left_out_with_a_note(made, tiny_model, backbone, loaded):
    adapter = made(r=4, target_modules=["q_proj"])
    alone = logits(peft_model(loaded, adapter))
    edit(adapter, with_embeddings(loaded.causal_lm.model.embed_tokens.weight.detach().clone()))
    assert find_adapter(str(adapter)) == adapter
    (note,) = check_on_base(adapter, ModelConfig(id=str(tiny_model), dtype="float32"))
    assert EMBEDDINGS in note
    before = backbone.fingerprint()
    accept_adapter(backbone, adapter, "student")
    assert backbone.fingerprint() == before
    assert torch.allclose(logits(backbone.causal_lm), alone, atol=1e-3)


def in_names(old, new):
    return lambda weights: {name.replace(old, new, 1): weight for name, weight in weights.items()}


def narrower(weights):
    return {n: w[:, :-8].contiguous() if "lora_A" in n else w for n, w in weights.items()}


Q = r"layers\.0\.self_attn\.q_proj"
# What was done to the file -> its name in the message, and a word of the hint.
MISFITS = {
    "a vision model's names": (
        in_names("model.layers", "model.language_model.layers"),
        rf"such as base_model\.model\.model\.language_model\.{Q}\.lora_A\.weight",
        "--base",
    ),
    "the adapter's name": (
        in_names(".lora_A.", ".lora_A.default."),
        rf"such as base_model\.model\.model\.{Q}\.lora_A\.default\.weight",
        "save_pretrained",
    ),
    "torch.compile's names": (
        in_names("base_model.model.", "base_model.model._orig_mod."),
        rf"such as base_model\.model\._orig_mod\.model\.{Q}\.lora_A\.weight",
        "_orig_mod.",
    ),
    "other names": (
        in_names("model.layers", "text.layers"),
        rf"4 of its 4 weights have no counterpart there, such as base_model\.model\.text\.{Q}",
        "use the base model",
    ),
    "one missing": (
        lambda weights: dict(sorted(weights.items())[:-1]),
        r"its file lacks 1 of the weights .* such as base_model\.model\.model\.layers\.1\.\S+lora_B\.weight",
        "copy it again",
    ),
    "another width": (
        narrower,
        rf"base_model\.model\.model\.{Q}\.lora_A\.weight is 4 x 40, and would have to be 4 x 48",
        "use the base model",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_are_named_as_in_the_file_before_and_on_loading(case, made, checks):
    change, message, hint = MISFITS[case]
    adapter = made(r=4, target_modules=["q_proj"])
    edit(adapter, change)
    for check in checks:
        with pytest.raises(UsageError, match=f"does not fit the base model: .*{message}") as refused:
            check(adapter)
        assert hint in refused.value.hint


def test_a_stage_does_not_train_what_was_accepted_if_it_has_changed_since(made, backbone):
    adapter = made(r=4, target_modules=["q_proj"])
    edit(adapter, in_names("q_proj", "other_proj"))
    with pytest.raises(OpdclError, match="does not fit the base model"):
        backbone.load_adapter(adapter, "student")


def test_the_dry_run_refuses_an_adapter_that_does_not_fit(made, tmp_path):
    adapter = made(r=4, target_modules=["q_proj"])
    edit(adapter, in_names("model.layers", "model.language_model.layers"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Who?"}\n' * 4)
    for words in (["recover", adapter, "--prompts", "prompts.jsonl"], ["eval", adapter]):
        refused = opdcl(*words, "-o", tmp_path / "out", "--dry-run", cwd=tmp_path, code=2)
        assert "model.language_model.layers.0" in refused.stderr


def setting(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return adapter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": 0}, "sets lora_alpha to 0: it must be a number above 0"),
        ({"lora_alpha": float("nan")}, "sets lora_alpha to nan"),
        ({"lora_alpha": "8"}, "sets lora_alpha to 8"),
        ({"r": 10**12}, "sets r to 10+: it must be a whole number"),
        ({"r": None}, "sets r to None"),
        ({"target_modules": 7}, "sets target_modules to 7"),
        ({"target_modules": [["q_proj"]]}, "sets target_modules to"),
        ({"alpha_pattern": {"q_proj": 0}}, "sets alpha_pattern to"),
        ({"rank_pattern": ["q_proj"]}, "sets rank_pattern to"),
        ({"base_model_name_or_path": {"a": 1}}, "sets base_model_name_or_path to"),
        ({"use_brand_new": True}, "opdcl does not know what use_brand_new does"),
        ({"velora_config": {"rank": 1}}, "opdcl does not know what velora_config does"),
        ({"init_lora_weights": {"a": 1}}, "its start was subtracted from its base"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(changes, message, made):
    adapter = setting(made(r=4, target_modules=["q_proj"]), **changes)
    with pytest.raises(UsageError, match=message) as refused:
        find_adapter(str(adapter))
    assert str(adapter) in refused.value.message


@pytest.mark.parametrize("text", ["[1]", "7", "null", "{", "[" * 100_000, ""])
def test_a_configuration_that_is_no_object_is_refused(text, made):
    adapter = made(r=4, target_modules=["q_proj"])
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        find_adapter(str(adapter))


@pytest.mark.parametrize("changes", [{"exclude_modules": "("}, {"target_modules": "q_proj("}])
def test_a_malformed_pattern_is_refused(changes, made, checks):
    adapter = setting(made(r=4, target_modules=["q_proj"]), **changes)
    for check in checks:
        with pytest.raises(UsageError, match=str(adapter)):
            check(adapter)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_weights_with_nan_are_refused(dtype, made):
    adapter = made(r=4, target_modules=["q_proj"])

    def broken(weights):
        name = next(iter(weights))
        return weights | {name: torch.full_like(weights[name], torch.nan).to(dtype)}

    edit(adapter, broken)
    with pytest.raises(UsageError, match="NaN"):
        find_adapter(str(adapter))


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


def test_the_base_is_the_one_that_the_adapter_names(made, tiny_model):
    adapter = made(r=4, target_modules=["q_proj"])
    assert base_of("mine", adapter).id == str(tiny_model)
    setting(adapter, base_model_name_or_path=None)
    with pytest.raises(UsageError, match="does not name its base") as refused:
        base_of("mine", adapter)
    assert "--base" in refused.value.hint


# Between an adapter, its own base, and the one that it is put on.


@pytest.fixture
def adapter(made, tiny_model, tmp_path):
    """An adapter of a copy of the tiny model, `base`."""
    shutil.copytree(tiny_model, tmp_path / "base")
    folder = made(r=3, target_modules=["q_proj", "up_proj"])
    return setting(folder, base_model_name_or_path=str(tmp_path / "base"))


def test_a_base_is_compared_by_its_contents_where_both_are_here(adapter, tiny_model, tmp_path):
    base = ModelConfig(id=str(tiny_model), dtype="float32")
    assert check_on_base(adapter, base) == [], "a copy under another name"
    edit(tmp_path / "base", lambda t: t | {"model.norm.weight": torch.zeros(48)}, "model.safetensors")
    (note,) = check_on_base(adapter, base)
    assert f"was trained on {tmp_path / 'base'}, whose weights are not those of {tiny_model}" in note
    setting(adapter, base_model_name_or_path="acme/tiny-bnb-4bit")
    assert check_on_base(adapter, base) == [
        f"adapter {adapter} names acme/tiny-bnb-4bit as its base, and is put on {tiny_model}"
    ]


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM"])
def test_an_adapter_of_another_task_is_refused_with_and_without_its_head(adapter, task):
    setting(adapter, task_type=task)
    for head in ({}, {"base_model.model.score.weight": torch.zeros(1, 48)}):
        edit(adapter, lambda t, head=head: t | head)
        with pytest.raises(UsageError, match=f"another task .task_type: {task}"):
            check_adapter(adapter)
        setting(adapter, modules_to_save=["score"])


@pytest.mark.parametrize(
    ("prefix", "wrapper"),
    [("base_model.model.", "PEFT's wrapper was saved twice"), ("pretrained_model.", "TRL's wrapper")],
)
def test_a_wrapper_in_the_names_is_named(adapter, tiny_model, prefix, wrapper):
    edit(adapter, lambda tensors: {prefix + name: t for name, t in tensors.items()})
    with pytest.raises(UsageError) as refused:
        check_on_base(adapter, ModelConfig(id=str(tiny_model), dtype="float32"))
    assert refused.value.hint.startswith(wrapper)


def test_biases_of_mergekit_are_left_out_where_they_are_zero(adapter, tiny_model):
    base = ModelConfig(id=str(tiny_model), dtype="float32")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"
    edit(adapter, lambda tensors: tensors | {name: torch.zeros(48)})
    check_adapter(adapter)
    assert check_on_base(adapter, base) == []
    edit(adapter, lambda tensors: tensors | {name: torch.ones(48)})
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
