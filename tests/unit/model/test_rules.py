"""Each fault of what others have made is found by one thing, which has no other, and says what to do."""

import ast
import inspect

import pytest
import torch

from opdcl.model import check_adapter
from opdcl.model.check_adapter import (
    MERGED,
    MORE_THAN_LOW_RANK,
    faults_of_kind,
    faults_of_weights,
    faults_on_base,
)
from opdcl.model.check_model import Found, faults_of_files

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ONES, ZEROS = torch.ones(2, 3), torch.zeros(2, 3)


def adapter(name=Q, **settings):
    return {"peft_type": "LORA", "r": 4, "bias": "none"} | settings, [name]


def found(**faults):
    return (Found(**{"missing": [], "unexpected": [], "mismatched": [], "total": 9} | faults),)


# What finds faults -> what it is given that has none, and for each fault something that has it.
CASES = {
    faults_of_kind: (
        adapter(),
        {
            "type LOHA, not LORA": adapter(peft_type="LOHA"),
            "model of another task": adapter(task_type="SEQ_CLS"),
            "does not know what use_brand_new does": adapter(use_brand_new=True),
            "start was subtracted": adapter(init_lora_weights="pissa"),
            "not by low rank": adapter("base_model.model.model.norm.weight"),
            "embeddings or the head": adapter(Q.replace("self_attn.q_proj", "embed_tokens")),
            **{why: adapter(**{key: ["a"]}) for key, why in (MORE_THAN_LOW_RANK | MERGED).items()},
        },
    ),
    faults_of_weights: (
        ({"a.lora_A.weight": ONES, "a.lora_B.weight": ONES, "b.lora_A.weight": ZEROS},),
        {
            "no weights": ({},),
            "of type int32": ({"a.lora_A.weight": ONES.int()},),
            "NaN": ({"a.lora_A.weight": ONES * torch.nan},),
            "changes nothing": ({"a.lora_A.weight": ONES, "a.lora_B.weight": ZEROS},),
        },
    ),
    faults_on_base: (
        found(),
        {
            "no counterpart": found(unexpected=["a.default.weight"]),
            "a is 2, and would have to be 3": found(mismatched=[("a", (2,), (3,))]),
            "lacks 1 of the weights": found(missing=["a.weight"]),
        },
    ),
    faults_of_files: (
        found(unexpected=["visual.weight"]),
        {
            "not in its files": found(missing=["a.weight"], unexpected=["module.a.weight"]),
            "is 2 in its files, and 3": found(mismatched=[("a", (2,), (3,))]),
            "leaves no place": found(left_over=["a.bias"]),
        },
    ),
}


def test_every_fault_has_a_case():
    in_tables = len(MORE_THAN_LOW_RANK | MERGED) - 2  # two loops yield these
    for finds, (_, cases) in CASES.items():
        nodes = ast.walk(ast.parse(inspect.getsource(finds)))
        written = sum(isinstance(node, ast.Yield) for node in nodes)
        assert len(cases) == written + (in_tables if finds is faults_of_kind else 0), finds
    assert {n for n in vars(check_adapter) if n.startswith("faults_")} <= {finds.__name__ for finds in CASES}


@pytest.mark.parametrize("finds", CASES)
def test_a_fault_is_the_only_one_of_its_case(finds):
    without, cases = CASES[finds]
    assert list(finds(*without)) == []
    for reason, case in cases.items():
        ((problem, hint),) = finds(*case)
        assert reason in problem
        assert hint, reason
