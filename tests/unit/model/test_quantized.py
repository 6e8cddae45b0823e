"""A base in 4 or 8 bits: one model in training, sampling and grading, which nothing changes."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from helpers.command import opdcl
from helpers.recovering import PROMPT
from helpers.tiny import make_model, make_project
from peft.utils.integrations import dequantize_module_weight

from opdcl.config.load import validate
from opdcl.config.model import LoraSection, ModelConfig
from opdcl.deploy.serve import serve_command
from opdcl.errors import EnvironmentFault, UsageError
from opdcl.model import quantized
from opdcl.model.backbone import Backbone
from opdcl.model.forward import answer_states
from opdcl.model.llama import decodes_as_llama
from opdcl.model.load_backbone import load_backbone
from opdcl.pipeline.forecast import forecast
from opdcl.pipeline.job import Job
from opdcl.rundir.files import read_json, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sampling.sample import sample
from opdcl.words import Prompt

needs_bitsandbytes = pytest.mark.skipif(
    quantized.importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
SERVER = {"url": "http://127.0.0.1:8000/v1"}
KINDS = pytest.mark.parametrize("kind", ["4bit", "8bit"])
FOUR_BITS = ("--set", "model.quantization=4bit")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """The tiny model with rows of whole blocks."""
    return make_model(tmp_path_factory.mktemp("wide"), intermediate_size=128, hidden_size=64)


@pytest.fixture(scope="module")
def original(wide_model):
    return load_backbone(ModelConfig(id=str(wide_model), dtype="float32"))


@pytest.fixture(scope="module")
def loaded_quantized(wide_model):
    pytest.importorskip("bitsandbytes")
    models = {}

    def load(kind: str) -> Backbone:
        if kind not in models:
            models[kind] = load_backbone(ModelConfig(id=str(wide_model), dtype="float32", quantization=kind))
        backbone = models[kind]
        backbone.drop_adapters()
        return backbone

    return load


def add_adapter(backbone: Backbone) -> None:
    backbone.new_adapter(LoraSection(r=4, alpha=8), 1)
    generator = torch.Generator().manual_seed(1)
    for name, weight in backbone.peft.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.3


def logits(model, ids=(1, 520, 3690, 198, 28, 30)) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@KINDS
def test_a_quantized_base_is_close_to_its_original_and_has_the_same_fingerprint_each_time(
    kind, original, loaded_quantized, wide_model
):
    backbone = loaded_quantized(kind)
    first = backbone.fingerprint()
    assert first != original.fingerprint()
    config = ModelConfig(id=str(wide_model), dtype="float32", quantization=kind)
    assert load_backbone(config).fingerprint() == first
    assert backbone.causal_lm.num_parameters() == original.causal_lm.num_parameters()
    originals = dict(original.causal_lm.named_modules())
    for name, layer in quantized.quantized_layers(backbone.causal_lm).items():
        weight_NK = originals[name].weight
        error_N = (dequantize_module_weight(layer).float() - weight_NK).norm(dim=1) / weight_NK.norm(dim=1)
        assert error_N.min() > 0
        # Of normal weights, NF4 loses a tenth of a row's norm, eight bits less than a hundredth.
        assert error_N.max() < {"4bit": 0.15, "8bit": 0.02}[kind]


@KINDS
def test_the_fingerprint_covers_packed_weights_and_their_scales(kind, loaded_quantized):
    backbone = Backbone(copy.deepcopy(loaded_quantized(kind).causal_lm), loaded_quantized(kind).tokenizer)
    seen = {backbone.fingerprint()}
    layer = backbone.causal_lm.model.layers[1].mlp.up_proj
    layer.weight.data.flatten()[3] ^= 1
    seen.add(backbone.fingerprint())
    scales = layer.weight.quant_state.absmax if kind == "4bit" else layer.state_dict()["SCB"]
    scales[0] += 1
    seen.add(backbone.fingerprint())
    assert len(seen) == 3


@KINDS
def test_training_evaluation_and_sampling_use_the_same_model_and_leave_it_unchanged(kind, loaded_quantized):
    backbone = loaded_quantized(kind)
    add_adapter(backbone)
    before = backbone.fingerprint()
    model = backbone.causal_lm
    assert not decodes_as_llama(model)
    evaluated = logits(model)
    model.train()
    assert torch.equal(logits(model), evaluated)
    model.eval()
    batch = [Prompt([*PROMPT, i]) for i in range(20, 26)]
    options = {"max_new_tokens": 6, "eos_ids": [], "seed": 3}
    for state in ("student", "base"):
        with backbone.merged(state) as sampler:
            rollouts = sample(sampler, batch, **options)
            (alone,) = sample(sampler, batch[:1], **options)
        assert alone.completion_ids == rollouts[0].completion_ids
        with torch.no_grad(), backbone.state(state) as graded:
            states = answer_states(graded, [rollout.to_example() for rollout in rollouts])
        graded_logprobs = (states @ backbone.head_VH.T).log_softmax(-1)
        tokens = torch.tensor([token for r in rollouts for token in r.completion_ids])
        expected = torch.tensor([value for r in rollouts for value in r.logprobs])
        torch.testing.assert_close(graded_logprobs[range(len(tokens)), tokens], expected, atol=2e-3, rtol=0)
    assert backbone.fingerprint() == before


@KINDS
def test_the_gradient_is_that_of_the_dequantized_weights(kind, original, loaded_quantized):
    backbone = loaded_quantized(kind)
    plain = Backbone(copy.deepcopy(original.causal_lm), original.tokenizer)
    layers = dict(plain.causal_lm.named_modules())
    for name, layer in quantized.quantized_layers(backbone.causal_lm).items():
        layers[name].weight.data = dequantize_module_weight(layer).float()
    gradients = []
    for each in (plain, backbone):
        add_adapter(each)
        ids = torch.tensor([[1, 520, 3690, 198, 28, 30]])
        each.causal_lm(input_ids=ids, labels=ids).loss.backward()
        named = dict(each.peft.named_parameters()).items()
        gradients.append({name: weight.grad for name, weight in named if weight.requires_grad})
    assert gradients[0]
    for name, expected in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())
        )


@needs_bitsandbytes
def test_rows_that_the_4_bit_kernel_would_misread_are_refused(tiny_model):
    config = ModelConfig(id=str(tiny_model), dtype="float32", quantization="4bit")
    with pytest.raises(UsageError, match="has 48 inputs"):
        load_backbone(config)


@pytest.mark.nightly
@needs_bitsandbytes
def test_a_run_in_4_bits_goes_through_every_command(wide_model, tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path, wide_model))
    shutil.copytree(wide_model, tmp_path / "base")
    quiet = [word for s in ("recover.health=false", "recover.steps=4") for word in ("--set", s)]
    ran = opdcl("run", "tiny.yaml", "-o", "run", *FOUR_BITS, *quiet, "--set", "model.id=base", code=0)
    assert "bitsandbytes" not in ran.stderr
    manifest = RunDir(Path("run")).read_manifest()
    assert manifest["base"]["fingerprint_before"] == manifest["base"]["fingerprint_after"]
    for report in RunDir(Path("run")).reports:
        assert "quantized the linear layers of base (4bit)" in report.read_text()
    assert opdcl("chat", "run", "Hello").returncode == 0
    exported = opdcl("export", "run", "-o", "merged", code=0)
    assert "the adapter was trained and measured on base, quantized (4bit)" in exported.stderr
    assert "differ from the run's model by" in exported.stderr
    assert "quantization_config" not in read_json(Path("merged/config.json"))
    assert "on the original weights, scores can differ" in Path("merged/README.md").read_text()
    opdcl("eval", "merged", "--base", "base", "--retention", "instructions", "--limit", "2", code=0)
    opdcl("export", "run", "-o", "adapter", "--format", "adapter", code=0)
    assert "scores can differ" in Path("adapter/README.md").read_text()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"quantization": "4bit", "shard": True}}, "quantization excludes shard"),
        ({"model": {"quantization": "4bit", "id": "x.gguf"}}, "not a GGUF file"),
        ({"eval": {"server": SERVER}}, "eval.server would not hold the quantized base"),
    ],
)
def test_what_cannot_run_a_quantized_base_is_refused(tree, message):
    with pytest.raises(UsageError) as caught:
        validate({"model": {"quantization": "4bit"}} | tree)
    assert message in caught.value.message


def test_without_bitsandbytes_a_run_names_the_command_that_installs_it(tiny_folder, monkeypatch):
    found = quantized.importlib.util.find_spec
    monkeypatch.setattr(
        quantized.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    for words in (["--dry-run"], []):
        refused = opdcl("run", "tiny.yaml", "-o", "run", *FOUR_BITS, *words)
        assert refused.returncode == EnvironmentFault.exit_code
        assert "needs bitsandbytes" in refused.stderr
        assert "pip install 'bitsandbytes>=" in refused.stderr
    assert not Path("run").exists()


def test_a_server_of_a_quantized_run_is_refused(tiny_model, tmp_path):
    workflow = validate({"model": {"id": str(tiny_model), "quantization": "4bit"}})
    write_json(RunDir(tmp_path).config, {"workflow": workflow.model_dump(), "origins": {}})
    with pytest.raises(UsageError, match="unquantized, unlike the run"):
        serve_command(RunDir(tmp_path), shutil.which("true"), "127.0.0.1", 8000, [])


def test_the_forecast_counts_quantized_weights_and_no_merged_copy(tiny_model, tmp_path):
    needs = []
    for kind in (None, "8bit", "4bit"):
        tree = {
            "model": {"id": str(tiny_model), "quantization": kind},
            "eval": {"retention": ["instructions"], "batch_size": 4},
        }
        job = Job(validate(tree), RunDir(tmp_path / "run"))
        needs.append(forecast(job, job.plan())["memory_bytes"]["eval"])
    assert needs[0] > needs[1] > needs[2]
