"""A merged or fully fine-tuned model, beside its base, goes through every command, or is refused."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.adapters import logits
from helpers.command import opdcl, sets
from helpers.synthetic import alter
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import opdcl as api
from opdcl.config.model import ModelConfig
from opdcl.model.adapters import find_states, tuned_model
from opdcl.model.distributions import HiddenStates
from opdcl.model.load_backbone import load_backbone
from opdcl.pipeline.verbs import open_or_begin
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.hashes import file_hash
from opdcl.rundir.layout import RunDir
from opdcl.train.losses import ScoredTokens, token_losses
from opdcl.words import Loss

FLOAT = ("--set", "model.dtype=float32")
MEASURE = ("--retention", "instructions", "--limit", "4", "--set", "eval.max_new_tokens=6", *FLOAT)
SMALL = (
    "recover.steps=2 recover.rollouts=4 recover.max_new_tokens=6 recover.validation_prompts=2 "
    "recover.health=false recover.keep=last recover.learning_rate=1e-2"
)
RECOVER = ("--prompts", "prompts.jsonl", "--domain", "rows.jsonl", *sets(SMALL))


@pytest.fixture
def project(tiny_folder, tiny_model, whole_model):
    """A folder with `base`, and `mine`, the same model fine-tuned as a whole."""
    shutil.copytree(tiny_model, tiny_folder / "base")
    shutil.copytree(whole_model, tiny_folder / "mine")
    return tiny_folder


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: file_hash(file) for file in folder.iterdir()}


def from_disk(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_fully_tuned_model_is_measured_recovered_and_exported(project):
    before = hashes(project / "base"), hashes(project / "mine")
    opdcl("recover", "mine", "--base", "base", *RECOVER, "--dry-run", code=0)
    assert not Path("runs").exists()

    made = opdcl("eval", "mine", "--base", "base", *MEASURE, "--domain", "rows.jsonl", code=0)
    run = RunDir(project / "runs" / "mine")
    assert {p.parent.name for p in run.evals.glob("*/*.json")} == {"base", "tuned"}
    answers = [run.eval_samples(state, "instructions").read_bytes() for state in ("base", "tuned")]
    assert answers[0] != answers[1]

    made = opdcl("recover", "mine", "--base", "base", *RECOVER, code=0)
    assert "taken from" not in made.stderr, "the run has it already"
    assert run.eval_result("recovered", "instructions").exists()
    assert "all " in opdcl("verify", "runs/mine").stdout
    answered = opdcl("chat", "runs/mine", "Hello", "--max-new-tokens", "2", "--json")
    assert {*json.loads(answered.stdout)["answers"]} == {"base", "tuned", "recovered"}

    for format in ("merged", "adapter"):
        opdcl("export", "runs/mine", "--format", format, "-o", format, code=0)
    base, tuned, adapters = find_states("runs/mine")
    backbone = load_backbone(base, tuned)
    backbone.load_adapter(adapters["recovered"], "student")
    recovered = logits(backbone.causal_lm)
    assert not torch.equal(recovered, logits(from_disk(project / "mine"))), "recovery has learned"
    assert torch.allclose(logits(from_disk(project / "merged")), recovered, atol=1e-3)
    assert AutoTokenizer.from_pretrained(project / "merged").chat_template
    # The adapter belongs to the tuned model, and says so.
    assert read_json(project / "adapter" / "adapter_config.json")["base_model_name_or_path"] == "mine"
    card = run.reports[2].read_text()
    assert "A LoRA adapter for `mine`, a fine-tune of `base`" in card
    alone = PeftModel.from_pretrained(from_disk(project / "mine"), str(project / "adapter"))
    assert torch.allclose(logits(alone), recovered, atol=1e-3)
    assert (hashes(project / "base"), hashes(project / "mine")) == before


def test_a_merged_model_without_a_tokenizer_is_measured_from_python(loaded, project):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(copy.deepcopy(loaded.causal_lm), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data += 0.3
    model.merge_and_unload().save_pretrained(project / "merged")
    made = api.evaluate(
        "merged",
        retention="instructions",
        limit=2,
        base="base",
        settings={"eval.max_new_tokens": 4, "model.dtype": "float32"},
        quiet=True,
    )
    (suite,) = made.summary["suites"].values()
    assert suite["tuned"]
    assert RunDir(made.path).stage_record("finetune")["tuned_model"]["id"] == str(project / "merged")
    exported = api.export(made.path, project / "out", quiet=True)
    assert exported.data["state"] == "tuned"
    assert torch.equal(logits(from_disk(project / "out")), logits(from_disk(project / "merged")))


def test_a_model_that_does_not_fit_its_base_is_refused_with_the_reason(project):
    def refused(*words: str) -> str:
        done = opdcl("eval", "mine", *words, *MEASURE, code=2)
        assert not Path("runs").exists()
        return done.stderr

    assert "base and tuned model are both " in refused("--base", "mine")
    assert "did you mean --base?" in refused("--model", "base")
    size = len(AutoTokenizer.from_pretrained("base"))
    alter(project / "mine" / "config.json", vocab_size=size - 8)
    sizes = f"has another shape than base: embeddings of size {size - 8}, there {size}"
    assert sizes in refused("--base", "base")
    alter(project / "mine" / "config.json", vocab_size=size, num_hidden_layers=1)
    layers = "has another shape than base: num_hidden_layers 1, there 2"
    assert layers in refused("--base", "base")
    alter(project / "mine" / "config.json", num_hidden_layers=2)
    (project / "mine" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert "mine has another tokenizer: the chat template writes" in refused("--base", "base")
    named = ("--set", "model.chat_template=base/chat_template.jinja", "--dry-run")
    assert opdcl("eval", "mine", "--base", "base", *MEASURE, *named).returncode == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--set", "recover.steps=0"), "recover.steps 0"),
        (("--set", "eval.server.url=http://127.0.0.1:1/v1"), "a server"),
        (("--set", "finetune.data=rows.jsonl"), "finetune"),
        (("--set", "recover.teachers.a={kind: adapter, adapter: other}"), "a teacher of kind adapter"),
    ],
)
def test_settings_that_need_an_adapter_on_base_are_refused(words, what, project, loaded):
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(copy.deepcopy(loaded.causal_lm), lora).save_pretrained("other")
    done = opdcl("recover", "mine", "--base", "base", "--prompts", "prompts.jsonl", *words, code=2)
    assert all(part in done.stderr for part in (f"error: {what}", "does not work with"))
    assert not Path("runs").exists()


def test_a_changed_model_is_not_mixed_into_a_run(project, whole_model):
    assert opdcl("eval", "mine", "--base", "base", *MEASURE, "-o", "run").returncode == 0
    assert open_or_begin("mine", Path("run"), "base")[1]["workflow"]["start"] == str(project / "mine")
    shutil.copyfile("base/model.safetensors", "mine/model.safetensors")
    refused = opdcl("eval", "mine", "--base", "base", "-o", "run", code=2)
    assert "changed: start" in refused.stderr
    # Its adapter stands on `mine`, so another run cannot put it onto a base, nor can one server hold both.
    refused = opdcl("run", "tiny.yaml", "--set", "start=run", "--dry-run", code=2)
    assert "the adapter of run stands on mine, not on its base" in refused.stderr
    (project / "vllm").write_text("#!/bin/sh\n")
    (project / "vllm").chmod(0o755)
    refused = opdcl("serve", "run", "--vllm", project / "vllm", code=2)
    assert "opdcl export run -o MODEL" in refused.stderr
    # Without the model its run cannot answer, rather than answer with another one.
    (project / "mine").rename(project / "moved")
    lost = opdcl("chat", "run", "Hello", code=2)
    assert "mine does not exist" in lost.stderr


def test_commands_that_need_a_run_say_how_a_model_becomes_one(project):
    for words in (("report", "mine"), ("chat", "mine", "hi"), ("export", "mine", "-o", "out")):
        refused = opdcl(*words, code=2)
        assert "opdcl eval mine --base BASE" in refused.stderr


@pytest.fixture
def with_more_tokens(project):
    """Make `more` of `mine`: it has two tokens that base lacks, and writes the first of them at once."""
    model, tokenizer = from_disk(project / "mine"), AutoTokenizer.from_pretrained("mine")
    tokenizer.add_tokens(["<one>", "<two>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.tie_word_embeddings = False
    head = model.get_input_embeddings().weight.detach().clone()
    ids = tokenizer("user\nWhat is the code of room 1?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        seen = model.model(ids).last_hidden_state[0, -1]
        head[-2] = seen / seen.norm() ** 2 * 30
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(project / "more")
    tokenizer.save_pretrained(project / "more")
    return project / "more"


def test_a_model_with_more_tokens_than_base_is_measured_recovered_and_exported(with_more_tokens, project):
    rows = [{"question": f"<one> What is the code of room {i}?", "answer": f"<two> {i}"} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opdcl("recover", "more", "--base", "base", *RECOVER, *FLOAT, code=0)
    opdcl("eval", "runs/more", *MEASURE, "--domain", "rows.jsonl", code=0)
    run = RunDir(project / "runs" / "more")
    answers = {state: run.eval_samples(state, "rows").read_text() for state in ("base", "tuned")}
    assert "<one>" in answers["tuned"] or "<two>" in answers["tuned"]
    assert opdcl("chat", "runs/more", "<one> Hello", "--max-new-tokens", "2", "--json").returncode == 0
    opdcl("export", "runs/more", "-o", "merged", code=0)
    assert len(AutoTokenizer.from_pretrained("merged")) == len(AutoTokenizer.from_pretrained("base")) + 2


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_model_whose_embeddings_were_padded_alone(has_tokenizer, project):
    model, tokenizer = from_disk(project / "mine"), AutoTokenizer.from_pretrained("mine")
    model.resize_token_embeddings(len(tokenizer) + 64, mean_resizing=False)
    assert model.config.vocab_size > len(tokenizer)
    model.get_input_embeddings().weight.data[len(tokenizer) :] = 0
    model.save_pretrained(project / "padded")
    if not has_tokenizer:
        refused = opdcl("eval", "padded", "--base", "base", *MEASURE, code=2)
        assert "embeddings of size" in refused.stderr
        assert "hint: copy its tokenizer into" in refused.stderr
        return
    tokenizer.save_pretrained(project / "padded")
    opdcl("eval", "padded", "--base", "base", *MEASURE, code=0)
    run = RunDir(project / "runs" / "padded")
    opdcl("eval", "mine", "--base", "base", *MEASURE, code=0)
    unpadded = RunDir(project / "runs" / "mine")
    for state in ("base", "tuned"):
        texts = [read_jsonl(r.eval_samples(state, "instructions")) for r in (run, unpadded)]
        answers = [[row["response"] for row in rows] for rows in texts]
        assert answers[0] == answers[1], "padding changes no answer"


def test_base_reads_tokens_that_it_lacks_and_says_none(with_more_tokens, project):
    base = ModelConfig(id="base", dtype="float32")
    tuned = tuned_model("more", base)
    backbone = load_backbone(base, tuned)
    size = len(AutoTokenizer.from_pretrained("base"))
    assert backbone.tokenizer("<one>", add_special_tokens=False)["input_ids"] == [size]
    before, more = from_disk("base"), from_disk("more")
    with backbone.state("base") as model:
        assert torch.equal(logits(model), logits(before)), "what base has is as it was"
        assert model(torch.tensor([[40, size, size + 1]])).logits.shape[-1] == size
        rows = model.get_input_embeddings().weight
    assert torch.equal(rows[size:], more.get_input_embeddings().weight[size:])
    # Divergences are over base's tokens, and a token of the tuned model alone is not graded.
    states = torch.randn(2, rows.shape[1])
    teacher = HiddenStates(states, backbone.head_of("base"))
    tokens = ScoredTokens(torch.tensor([7, size]), *torch.zeros(2, 2))
    found = token_losses(HiddenStates(states, backbone.head_VH), teacher, tokens, Loss())
    log_p = (states @ backbone.head_VH[:size].T).log_softmax(-1)
    log_q = (states @ backbone.head_of("base").T).log_softmax(-1)
    assert torch.allclose(found.loss, (log_q.exp() * (log_q - log_p)).sum(-1), atol=1e-4)
    assert found.logprob.tolist() == pytest.approx([float(log_p[0, 7]), -math.inf], abs=1e-4)


@pytest.mark.parametrize("setting", ["loss.kind=policy_gradient", "loss.kind=cross_entropy"])
def test_losses_of_single_tokens_need_the_same_tokens(setting, with_more_tokens):
    words = ("--prompts", "prompts.jsonl", "--set", f"recover.{setting}", "--dry-run")
    done = opdcl("recover", "more", "--base", "base", *words, code=2)
    assert "and it has tokens that base lacks" in done.stderr
    assert "hint: use forward_kl" in done.stderr
