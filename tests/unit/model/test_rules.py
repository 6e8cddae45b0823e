"""Each rule about what others have made is broken by one thing, and names a reason and what to do."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opdcl.errors import UsageError
from opdcl.model import rules
from opdcl.model.rules import AdapterFiles, Probe, refuse_broken
from opdcl.model.tensors import Found

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ONES, ZEROS = torch.ones(1, 2, 3), torch.zeros(2, 3)


def adapter(name=Q, **settings):
    return AdapterFiles(Path("mine"), {"peft_type": "LORA", "r": 4, "bias": "none"} | settings, [name])


def found(**faults):
    return Found(**{"missing": [], "unexpected": [], "mismatched": [], "total": 9} | faults)


def model(**changes):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=9, **sizes))
    for name, value in changes.items():
        setattr(lm, name, value)
    return lm


# Table -> something that keeps all of its rules, and for each rule something that breaks it.
CASES = {
    "LOW_RANK": (
        adapter(),
        {
            "peft_type": adapter(peft_type="LOHA"),
            "task_type": adapter(task_type="SEQ_CLS"),
            "bias": adapter(bias="all"),
            "all settings are known": adapter(use_brand_new=True),
            "init_lora_weights": adapter(init_lora_weights="pissa"),
            "all weights are of low rank": adapter("base_model.model.model.norm.weight"),
            "modules_to_save": adapter(modules_to_save=["lm_head"]),
            "trainable_token_indices": adapter(trainable_token_indices=[5]),
            "embeddings and head are the base's": adapter(Q.replace("self_attn.q_proj", "embed_tokens")),
            **{
                key: adapter(**{key: {"a": 1}})
                for key in (
                    *("lora_bias", "layer_replication", "alora_invocation_tokens", "arrow_config"),
                    *("use_qalora", "use_bdlora", "kasa_config", "monteclora_config"),
                )
            },
        },
    ),
    "WEIGHTS": (
        {"a.lora_A.weight": ONES, "a.lora_B.weight": ONES, "b.lora_A.weight": ZEROS},
        {
            "there are some": {},
            "they are of a type for weights": {"a.lora_A.weight": ONES.int()},
            "they are numbers": {"a.lora_A.weight": ONES * torch.nan},
            "they change something": {"a.lora_A.weight": ONES, "a.lora_B.weight": ZEROS},
        },
    ),
    "ON_BASE": (
        found(),
        {
            "base has a place for each weight": found(unexpected=["a.default.weight"]),
            "the shapes are base's": found(mismatched=[("a", (2,), (3,))]),
            "no weight is missing": found(missing=["a.weight"]),
        },
    ),
    "SERVED": ({}, {"use_dora": {"use_dora": True}, "target_parameters": {"target_parameters": ["a"]}}),
    "CONFIG": (AutoConfig.for_model("llama"), {"it is a language model": AutoConfig.for_model("gemma3")}),
    "FILES_OF_A_MODEL": (
        found(unexpected=["visual.weight"]),
        {
            "no tensor is missing": found(missing=["a.weight"], unexpected=["module.a.weight"]),
            "the shapes are those of config.json": found(mismatched=[("a", (2,), (3,))]),
            "no layer has a tensor left over": found(left_over=["a.bias"]),
        },
    ),
    "HEAD": (
        model(),
        {
            "there is an output head": model(lm_head=None),
            "the head has no bias": model(lm_head=torch.nn.Linear(8, 9)),
        },
    ),
    "LOGITS": (Probe(ONES, ONES), {"the logits are states times head": Probe(2 * ONES, ONES)}),
}


def test_every_rule_has_a_case():
    tables = {n: t for n, t in vars(rules).items() if isinstance(t, tuple) and n.isupper()}
    ruled = {n: {r.asks for r in t} for n, t in tables.items() if all(isinstance(r, rules.Rule) for r in t)}
    assert ruled == {name: set(broken) for name, (_, broken) in CASES.items()}


@pytest.mark.parametrize("table", CASES)
def test_a_rule_is_broken_by_its_case_alone(table):
    kept, broken = CASES[table]
    rules_of_table = getattr(rules, table)
    refuse_broken(rules_of_table, kept, "it ")
    for rule in rules_of_table:
        with pytest.raises(UsageError, match=r"^it .") as refused:
            refuse_broken([rule], broken[rule.asks], "it ")
        assert refused.value.hint, rule.asks
        refuse_broken([one for one in rules_of_table if one.asks != rule.asks], broken[rule.asks], "it ")
