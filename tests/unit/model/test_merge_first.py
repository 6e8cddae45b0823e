"""PEFT's adapters with trained embeddings or tokens of their own: refused, and accepted once merged."""

import copy
import re
import shutil

import pytest
import torch
from helpers.command import ROOT, opdcl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW = ["<one>", "<two>"]
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}
# What was trained besides low-rank matrices -> whether base has got new tokens, and PEFT's settings.
CASES = {
    "new tokens, not trained": (True, {}),
    "new tokens, embeddings and head trained": (True, WHOLE),
    "new tokens alone trained": (True, {"trainable_token_indices": [4096, 4097]}),
    "some tokens trained": (False, {"trainable_token_indices": [5, 6]}),
    "head trained": (False, {"modules_to_save": ["lm_head"]}),
}
PAGE = ROOT / "docs" / "repair.md"


def from_disk(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def project(tiny_folder, tiny_model):
    """A folder with `tied`, the tiny model, and `untied`, whose head is another matrix."""
    shutil.copytree(tiny_model, "tied")
    model = from_disk("tied")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.01)
    model.save_pretrained("untied")
    AutoTokenizer.from_pretrained("tied").save_pretrained("untied")
    return tiny_folder


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


@pytest.mark.parametrize(
    ("base", "case"),
    [*(("tied", case) for case in CASES), ("untied", "new tokens, embeddings and head trained")],
)
def test_recovery_refuses_and_the_page_says_how_to_merge_first(case, base, project):
    grow, settings = CASES[case]
    expected = train(base, grow, **settings)
    (project / base).rename("its-base")
    (project / "adapter").rename("my-adapter")
    options = ("--base", "its-base", "--prompts", "prompts.jsonl", "--dry-run")
    refused = opdcl("recover", "my-adapter", *options, code=2)
    assert "merge it with PEFT first, as docs/repair.md shows" in refused.stderr
    (code,) = re.findall(r"```python\n(from peft .*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(compile(code, "repair.md", "exec"), {})
    assert torch.allclose(logits(from_disk("my-merged-adapter"), grow), expected, atol=1e-3)
    opdcl("recover", "my-merged-adapter", *options, code=0)


def test_no_format_exports_an_adapter_of_that_kind(project):
    train("tied", False, **WHOLE)
    for form in ("adapter", "merged"):
        refused = opdcl("export", "adapter", "-o", "copy", "--format", form, code=2)
        assert "it replaces whole modules of its base (modules_to_save: " in refused.stderr


def test_tokens_that_a_plain_adapter_does_not_bring_are_named(project):
    train("tied", False)
    dry = ("recover", "adapter", "--prompts", "prompts.jsonl", "--dry-run")
    assert "tokens that base lacks" not in opdcl(*dry).stderr
    tokenizer = AutoTokenizer.from_pretrained("tied")
    tokenizer.add_tokens(NEW)
    tokenizer.save_pretrained("adapter")
    assert "was saved with tokens that base lacks: <one>, <two>; they are not used" in opdcl(*dry).stderr
