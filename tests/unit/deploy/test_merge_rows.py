"""PEFT's adapters with trained embeddings or tokens of their own: merged as PEFT computes, or refused."""

import copy
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.command import opdcl
from helpers.tiny import make_project
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW = ["<one>", "<two>"]
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}
# What was trained besides low-rank matrices -> whether base has got new tokens, and PEFT's settings.
CASES = {
    "new tokens, not trained": (True, {}),
    "new tokens, embeddings and head trained": (True, WHOLE),
    "new tokens, both trained as one": (True, WHOLE | {"ensure_weight_tying": True}),
    "new tokens, embeddings trained": (True, {"modules_to_save": ["embed_tokens"]}),
    "new tokens alone trained": (True, {"trainable_token_indices": [4096, 4097]}),
    "some tokens trained": (False, {"trainable_token_indices": [5, 6]}),
    "embeddings and head trained": (False, WHOLE),
    "embeddings trained": (False, {"modules_to_save": ["embed_tokens"]}),
    "head trained": (False, {"modules_to_save": ["lm_head"]}),
}


def from_disk(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def project(tiny_model, tmp_path, monkeypatch):
    """A folder with `tied`, the tiny model, and `untied`, whose head is another matrix."""
    monkeypatch.chdir(make_project(tmp_path, tiny_model))
    shutil.copytree(tiny_model, "tied")
    model = from_disk("tied")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.01)
    model.save_pretrained("untied")
    AutoTokenizer.from_pretrained("tied").save_pretrained("untied")
    return tmp_path


def train(base, grow, **settings):
    """Save `adapter` and its tokenizer, as a trainer does; return what PEFT's model computes."""
    torch.manual_seed(0)
    model, tokenizer = from_disk(base), AutoTokenizer.from_pretrained(base)
    if grow:
        tokenizer.add_tokens(NEW)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    plain = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**plain | copy.deepcopy(settings))  # PEFT changes lists of names
    adapted = get_peft_model(model, config)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += torch.randn_like(weight) * 0.1
    adapted.save_pretrained("adapter")
    tokenizer.save_pretrained("adapter")
    return logits(adapted.eval(), grow)


def logits(model, grow):
    ids = torch.tensor([[40, 41, 5, 6, *([4096, 4097] if grow else [])]])
    return model(ids).logits.detach()


def merge(*words):
    return opdcl("export", "adapter", "-o", "merged", *words)


BOTH = ("tied", "untied")
PAIRS = [
    pytest.param(case, base, marks=[] if base == BOTH[number % 2] else pytest.mark.nightly)
    for number, case in enumerate(CASES)
    for base in BOTH
]


@pytest.mark.parametrize(("case", "base"), PAIRS)
def test_recovery_refuses_and_a_merged_model_has_all_of_it(case, base, project):
    grow, settings = CASES[case]
    expected = train(base, grow, **settings)
    refused = opdcl("recover", "adapter", "--prompts", "prompts.jsonl", "--dry-run")
    assert refused.returncode == 2
    assert "adapter -o MODEL merges all of it; then opdcl recover MODEL --base BASE" in refused.stderr
    made = merge()
    assert made.returncode == 0, made.stderr
    merged = from_disk("merged")
    assert torch.allclose(logits(merged, grow), expected, atol=1e-3)
    assert (logits(from_disk(base), False) - logits(merged, False)[..., :4096]).abs().max() > 0.1
    tokenizer = AutoTokenizer.from_pretrained("merged")
    ids = tokenizer("<one> and <two>", add_special_tokens=False)["input_ids"]
    assert ({4096, 4097} <= {*ids}) == grow
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template


def without(name):
    file = "adapter/adapter_model.safetensors"
    save_file({key: weight for key, weight in load_file(file).items() if name not in key}, file)


def test_rows_that_the_file_lacks_are_not_filled_at_random(project):
    train("untied", True)
    without("lm_head")
    assert "it has 2 tokens more than its base, and its file lacks their rows of the head" in merge().stderr
    train("untied", True, target_modules=["q_proj", "embed_tokens"])
    assert "its file lacks their rows of the head" in merge().stderr
    train("untied", True, trainable_token_indices=[4096, 4097])
    without("base_layer")
    without("lm_head")
    assert "its tokenizer has 4098 tokens, and neither it nor its base has more than 4096" in merge().stderr
    assert not (project / "merged").exists()


def test_a_merge_that_peft_computes_otherwise_is_refused(project):
    train("tied", False, target_modules=["q_proj", "embed_tokens"])
    assert "its low-rank changes of embeddings or head are on weights that its base ties" in merge().stderr
    expected = train("untied", False, target_modules=["q_proj", "embed_tokens"])
    assert merge().returncode == 0
    assert torch.allclose(logits(from_disk("merged"), False), expected, atol=1e-3)


def test_new_tokens_need_the_tokenizer_that_names_them(project):
    train("tied", True, **WHOLE)
    (project / "adapter" / "tokenizer_config.json").unlink()
    assert "its folder no tokenizer that names them" in (refused := merge()).stderr
    assert "hint: copy the tokenizer's files" in refused.stderr
    assert refused.returncode == 2


def test_a_named_base_replaces_the_one_in_the_adapter(project):
    expected = train("tied", True, **WHOLE)
    (project / "tied").rename(project / "moved")
    assert "hint: " in (refused := merge()).stderr
    assert refused.returncode == 2
    assert merge("--base", "moved").returncode == 0
    assert torch.allclose(logits(from_disk("merged"), True), expected, atol=1e-3)


def test_an_adapter_of_that_kind_is_no_adapter_file_to_copy(project):
    train("tied", False, **WHOLE)
    refused = opdcl("export", "adapter", "-o", "copy", "--format", "adapter")
    assert refused.returncode == 2
    assert "it replaces whole modules of its base (modules_to_save: " in refused.stderr
    config = json.loads((project / "adapter/adapter_config.json").read_text())
    (project / "adapter/adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    assert "it changes the biases of its base" in merge().stderr


def test_tokens_that_a_plain_adapter_does_not_bring_are_named(project):
    train("tied", False)
    dry = ("recover", "adapter", "--prompts", "prompts.jsonl", "--dry-run")
    assert "tokens that base lacks" not in opdcl(*dry).stderr
    tokenizer = AutoTokenizer.from_pretrained("tied")
    tokenizer.add_tokens(NEW)
    tokenizer.save_pretrained("adapter")
    assert "was saved with tokens that base lacks: <one>, <two>; they are not used" in opdcl(*dry).stderr


def test_code_of_an_adapters_tokenizer_is_neither_asked_about_nor_run(project, monkeypatch):
    train("untied", True, **WHOLE)
    settings = json.loads(Path("adapter/tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    Path("adapter/tokenizer_config.json").write_text(json.dumps(settings))
    code = "open('has_run', 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
    Path("adapter/own.py").write_text(f"{code}class Own(PreTrainedTokenizerFast): pass\n")
    asked = io.StringIO("y\ny\n")
    monkeypatch.setattr("sys.stdin", asked)
    for words in ((), ("--trust-remote-code",)):  # which is for the base's code
        refused = merge(*words)
        assert refused.returncode == 2, refused.stderr
        assert "comes with Python code" in refused.stderr
        assert "opdcl does not run an adapter's code" in refused.stderr
    assert not Path("has_run").exists()
    assert asked.tell() == 0, "nothing was read of what the user types"
