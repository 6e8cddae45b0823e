"""Settings at `auto` become numbers that follow the model and the device, also when a run continues."""

import json

import numpy
import pytest
from safetensors.numpy import save_file

from opdcl.config.load import load_tree, validate
from opdcl.errors import UsageError
from opdcl.pipeline.defaults import resolve, resolve_for_machine, with_dtype, with_steps
from opdcl.pipeline.plan import make_plan, read_records
from opdcl.rundir.layout import RunDir

AUTOMATIC = {
    "finetune.learning_rate",
    "finetune.batch_size",
    "recover.learning_rate",
    "recover.rollouts",
    "recover.micro_batch_tokens",
    "eval.batch_size",
}


def flow(**recover):
    return validate({"finetune": {"data": "handbook"}, "recover": recover, "eval": {}})


@pytest.mark.parametrize(
    ("hidden", "finetune", "recover", "rollouts"),
    [(576, 1e-3, 5e-4, 8), (1536, 4.6e-4, 2.3e-4, 16), (4096, 2.2e-4, 1.1e-4, 32)],
)
def test_rates_and_rollouts_follow_the_hidden_size(hidden, finetune, recover, rollouts):
    workflow, _ = resolve(flow(), hidden, 2.0, "cpu")
    assert workflow.finetune.learning_rate == finetune
    assert workflow.recover.learning_rate == recover
    assert workflow.recover.rollouts == rollouts
    assert workflow.finetune.batch_size == 16


def test_a_larger_adapter_scale_lowers_the_rates():
    workflow, _ = resolve(flow(), 576, 4.0, "cpu")
    assert (workflow.finetune.learning_rate, workflow.recover.learning_rate) == (5e-4, 2.5e-4)


def test_an_extreme_scale_still_gives_a_valid_rate():
    workflow, _ = resolve(flow(), 48, 0.01, "cpu")
    assert validate(workflow.model_dump()) == workflow


@pytest.mark.parametrize(("device", "tokens", "batch"), [("cpu", 2048, 320), ("cuda:1", 8192, 256)])
def test_batches_follow_the_device(device, tokens, batch):
    workflow, origins = resolve(flow(), 576, 2.0, device)
    assert (workflow.recover.micro_batch_tokens, workflow.eval.batch_size) == (tokens, batch)
    assert origins["eval.batch_size"] == f"auto: {device}"


def test_the_origins_say_why():
    _, origins = resolve(flow(rollouts=4), 576, 2.0, "cpu")
    assert {*origins} == AUTOMATIC - {"recover.rollouts"}
    assert origins["finetune.learning_rate"] == "auto: hidden size 576, alpha/r 2"


def test_explicit_numbers_stay_and_need_no_model():
    numbers = {"learning_rate": 5e-3, "rollouts": 3, "micro_batch_tokens": 99}
    workflow = validate({"model": {"id": "no/such-model", "dtype": "float32"}, "recover": numbers})
    assert resolve_for_machine(workflow) == (workflow, {})


def test_every_model_gets_a_dtype_unless_it_has_one():
    teachers = {
        "big": {"kind": "model", "model": {"id": "big"}},
        "a": {"kind": "model", "model": {"id": "own", "dtype": "float32"}},
    }
    workflow, origins = with_dtype(flow(teachers=teachers), "bfloat16", "cuda:0")
    assert [m.dtype for m in workflow.models()] == ["bfloat16", "bfloat16", "float32"]
    assert origins == dict.fromkeys(("model.dtype", "recover.teachers.big.model.dtype"), "auto: cuda:0")
    assert validate(workflow.model_dump()) == workflow
    assert with_dtype(workflow, "float32", "cpu") == (workflow, {})


def test_a_teachers_model_has_the_chat_template_that_is_set_for_base():
    variables = {"chat_template_kwargs": {"enable_thinking": True}}
    recover = {"teachers": {"big": {"kind": "model", "model": {"id": "big"}}}}
    workflow = validate({"model": {"id": "base", **variables}, "recover": recover})
    assert [(m.id, m.chat_template_kwargs) for m in workflow.models()] == [
        (name, variables["chat_template_kwargs"]) for name in ("base", "big")
    ]


def test_the_dtype_is_one_that_a_model_can_be_loaded_in(tiny_model):
    workflow, origins = resolve_for_machine(validate({"model": {"id": str(tiny_model)}, "eval": {}}))
    assert workflow.model.dtype in ("float32", "bfloat16")
    assert origins["model.dtype"].startswith("auto: ")


def test_rollouts_are_whole_groups_of_a_reward():
    reward = {"reward": {"suite": "s", "group": 6}, "keep": "last", "lmbda": 1.0}
    workflow, _ = resolve(flow(**reward), 576, 2.0, "cpu")
    assert workflow.recover.rollouts == 12
    assert validate(workflow.model_dump()) == workflow


@pytest.mark.parametrize(
    ("learned", "settings", "steps"),
    [
        (None, {}, 48),
        (10, {}, 32),
        (10**9, {}, 512),
        # 8 answers of 100 tokens, and 48 of 10: 1,280 tokens in two steps
        (128_000, {"max_new_tokens": 100, "domain_max_new_tokens": 10}, 200),
        (128_001, {"max_new_tokens": 100, "domain_max_new_tokens": 10}, 202),
        (128_000, {"max_new_tokens": 100, "domain_max_new_tokens": 10, "general_per_domain": 2}, 186),
        (128_000, {"max_new_tokens": 100, "method": "general"}, 160),
    ],
)
def test_a_recovery_learns_from_as_many_tokens_as_the_fine_tune(learned, settings, steps):
    workflow, origins = with_steps(resolve(flow(steps="auto", **settings), 576, 2.0, "cpu")[0], learned)
    assert workflow.recover.steps == steps
    assert origins["recover.steps"].startswith("auto: ")
    assert with_steps(workflow, 7) == (workflow, {})


def test_the_hidden_size_is_that_of_the_model(tiny_model):
    tree = {"model": {"id": str(tiny_model)}, "finetune": {"data": "handbook", "lora": {"r": 8, "alpha": 8}}}
    _, origins = resolve_for_machine(validate(tree))
    assert origins["finetune.learning_rate"] == "auto: hidden size 48, alpha/r 1"


def test_the_scale_is_that_of_the_adapter_to_start_from(tmp_path):
    save_file({"q.lora_A.weight": numpy.ones((8, 2))}, tmp_path / "adapter_model.safetensors")
    for rslora, scale in ((False, "2"), (True, "8")):
        config = {"peft_type": "LORA", "lora_alpha": 32, "r": 16, "use_rslora": rslora}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        _, origins = resolve_for_machine(validate({"start": str(tmp_path), "recover": {}}))
        assert origins["recover.learning_rate"] == f"auto: hidden size 576, alpha/r {scale}"


def test_a_run_that_is_continued_has_the_same_inputs(tmp_path):
    run, hashes = RunDir(tmp_path), {"finetune.data": "content"}
    workflow = validate({"finetune": {"data": "handbook"}})
    first, origins = resolve_for_machine(workflow)
    again, _ = resolve_for_machine(workflow)
    continued, kept = load_tree(json.loads(json.dumps(first.model_dump())), origins, [], {}, "recover")
    continued, added = resolve_for_machine(continued)
    plans = [make_plan(flow, hashes, read_records(run)) for flow in (first, again, continued)]
    inputs = [plan[0].inputs for plan in plans]
    assert inputs[0] == inputs[1] == inputs[2]
    assert inputs[0]["learning_rate"] == 1e-3
    assert kept["finetune.learning_rate"] == "auto: hidden size 576, alpha/r 2"
    assert "finetune.learning_rate" not in added
    assert added["recover.learning_rate"] == "auto: hidden size 576, alpha/r 2"


def test_a_run_of_an_earlier_version_goes_on_unless_somebody_had_set_what_is_gone():
    stored = validate({"finetune": {"data": "handbook"}}).model_dump()
    stored["gates"]["bound"] = "interval"
    stored["finetune"]["lora"]["bias"] = {"kind": "none"}
    flow, _ = load_tree(json.loads(json.dumps(stored)), {"finetune.data": "a.yaml:2"}, [], {}, "recover")
    assert flow.recover is not None
    with pytest.raises(UsageError, match=r"unknown key gates\.bound, a\.yaml:9"):
        load_tree(stored, {"gates.bound": "a.yaml:9"}, [], {}, "recover")
