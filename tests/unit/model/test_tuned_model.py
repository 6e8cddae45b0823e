"""A tuned model beside its base: each state computes what its model computes alone, forward and backward."""

import copy
import json

import pytest
import torch
from helpers.adapters import logits
from helpers.recovering import PROMPT, short_recovery, whole_and_resumed
from peft import PeftModel
from transformers import AutoModelForCausalLM

from opdcl.config.model import LoraSection, ModelConfig
from opdcl.errors import UsageError
from opdcl.model.adapters import start_files, tuned_model
from opdcl.model.load_backbone import load_backbone
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.sampling.sample import sample
from opdcl.train.checkpoints import save_adapter
from opdcl.train.teachers import Teacher
from opdcl.words import Prompt, Rollout

IDS = torch.arange(40, 60)[None]


@pytest.fixture(scope="module")
def alone(tiny_model, whole_model):
    """Base and tuned, each loaded by transformers alone."""
    load = AutoModelForCausalLM.from_pretrained
    return {k: load(p, dtype=torch.float32) for k, p in (("base", tiny_model), ("tuned", whole_model))}


@pytest.fixture
def pair(tiny_model, whole_model, tmp_path):
    """Both on one backbone; `tuned` and `student` begin with an adapter that changes nothing."""
    base = ModelConfig(id=str(tiny_model), dtype="float32")
    backbone = load_backbone(base, tuned_model(str(whole_model), base))
    backbone.new_adapter(LoraSection(r=4, alpha=8), seed=0)
    save_adapter(backbone, tmp_path / "tuned")
    backbone.drop_adapters()
    backbone.load_adapter(tmp_path / "tuned", "student", trainable=True)
    backbone.load_adapter(tmp_path / "tuned", "tuned")
    backbone.causal_lm.eval()
    return backbone


def move(backbone):
    torch.manual_seed(5)
    for name, weight in backbone.causal_lm.named_parameters():
        if ".student" in name:
            weight.data += torch.randn_like(weight) * 0.1


def test_each_state_computes_what_its_model_computes_alone(pair, alone, tmp_path):
    expected = {name: logits(model) for name, model in alone.items()}
    assert (expected["base"] - expected["tuned"]).abs().max() > 0.1, "the fine-tune has changed something"
    move(pair)
    save_adapter(pair, tmp_path / "moved")
    reference = PeftModel.from_pretrained(copy.deepcopy(alone["tuned"]), str(tmp_path / "moved")).eval()
    expected["student"] = logits(reference)
    before = pair.fingerprint()
    for _ in range(2):  # in any order, and again
        for name in ("student", "base", "tuned"):
            with pair.state(name) as model:
                assert torch.allclose(logits(model), expected[name], atol=1e-5), name
            with pair.merged(name) as model:
                assert torch.allclose(logits(model), expected[name], atol=1e-3), name
    with pair.state("base") as model:
        assert torch.equal(logits(model), expected["base"])
    with pair.state("tuned") as model:
        assert torch.equal(logits(model), expected["tuned"])
    with pair.scaled(0.0):
        assert torch.equal(logits(pair.causal_lm), expected["base"])
    assert torch.equal(logits(pair.causal_lm.eval()), logits(pair.peft))
    assert pair.fingerprint() == before


@pytest.mark.parametrize("state", ["base", "tuned"])
def test_a_teacher_grades_with_its_own_model_and_head(state, pair, alone):
    move(pair)
    rollout = Rollout(Prompt(PROMPT), [9, 8, 7])
    teacher = Teacher(pair, state)
    graded = teacher.distribution([rollout]).log_probs(slice(None), len(pair.head_VH))
    ids = torch.tensor([PROMPT + rollout.completion_ids])
    logits_TV = alone[state](ids).logits[0, len(PROMPT) - 1 : -1]
    assert torch.allclose(graded, logits_TV.log_softmax(-1), atol=1e-4)
    with teacher.as_sampler() as model:
        (written,) = sample(model, [Prompt(PROMPT)], max_new_tokens=6, eos_ids=[], temperature=0)
    greedy = alone[state].generate(
        torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert written.completion_ids == greedy[0, len(PROMPT) :].tolist()


def test_teachers_read_between_forward_and_backward_change_no_gradient(pair, alone, tmp_path):
    move(pair)
    save_adapter(pair, tmp_path / "moved")

    def gradients(model, between):
        loss = model(input_ids=IDS).logits.log_softmax(-1)[..., 7].mean()
        between()
        loss.backward()
        grads = [w.grad.clone() for n, w in model.named_parameters() if w.requires_grad]
        model.zero_grad()
        return grads

    def read_teachers():
        for state in ("base", "tuned"):
            Teacher(pair, state).distribution([Rollout(Prompt(PROMPT), [9, 8])])
            with pair.merged(state) as model, torch.no_grad():
                model(IDS)

    plain = PeftModel.from_pretrained(
        copy.deepcopy(alone["tuned"]), str(tmp_path / "moved"), is_trainable=True
    )
    expected = gradients(plain.eval(), lambda: None)
    actual = gradients(pair.causal_lm, read_teachers)
    assert max(float(g.abs().max()) for g in expected) > 1e-4
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_recovery_resumes_with_the_same_adapter(pair, tmp_path, alone):
    for name in ("general", "domain"):
        rows = [{"prompt": f"Say {name} {i}."} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Random weights are close to uniform.
    config = short_recovery(tmp_path, validate_every=2, learning_rate=1e-3, health=False)
    before = pair.fingerprint()
    pair.drop_adapters()
    whole, _ = whole_and_resumed(pair, tmp_path, config, stop=3)
    assert pair.fingerprint() == before
    adapter = read_json(whole.adapter / "adapter_config.json")
    assert adapter["base_model_name_or_path"] == alone["tuned"].name_or_path
    start, *_, last = [row for row in read_jsonl(whole.metrics) if "validation" in row]
    # Base is the student of the first comparison: without general KL to itself, far from tuned's domain.
    assert abs(start["base"]["general_kl"]) < 1e-4
    assert abs(start["validation"]["domain_kl"]) < 1e-4
    assert start["base"]["domain_kl"] > 0.01
    assert last["validation"]["general_kl"] < start["validation"]["general_kl"]


def test_a_model_is_told_from_an_adapter_and_a_run(whole_model, tuned, tmp_path):
    base = ModelConfig(dtype="float32", trust_remote_code=True)
    found = tuned_model(str(whole_model), base)
    assert (found.id, found.dtype, found.trust_remote_code) == (str(whole_model), "float32", False)
    assert {f.name for f in start_files(str(whole_model))} == {"config.json", "model.safetensors"}
    for place in (None, str(tuned / "tuned"), str(tmp_path / "nowhere"), "owner/not-cached", "runs/nowhere"):
        assert tuned_model(place, base) is None


def test_a_pickled_model_is_refused(whole_model, tmp_path):
    (tmp_path / "config.json").write_text((whole_model / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(UsageError, match="holds no safetensors; a pickle can run code"):
        start_files(str(tmp_path))
