"""Every setting has an effect: something reads it, and where it would do nothing it is refused by name."""

import ast
from pathlib import Path

import pytest

from opdcl.config.load import dump, load, load_tree, validate
from opdcl.config.reference import describe_fields
from opdcl.errors import UsageError
from opdcl.pipeline.sweep import expand

PACKAGE = Path(__file__).parents[3] / "opdcl"

# Settings that are read by a method of the schema itself, and who calls that method.
READ_BY_A_METHOD = {
    "recover.domain_rollouts": "completions",
    **dict.fromkeys(("eval.retention", "eval.domain", "eval.control"), "suites"),
    "recover.lmbda": "on_policy_share",
    "recover.general": "general_sources",
    "finetune.replay.most": "replayed",
    **dict.fromkeys(("recover.general_teacher", "recover.domain_teacher"), "teacher_of"),
}
# Settings that are read by their dumped name.
READ_BY_NAME = dict.fromkeys(
    ("gates.recovery", "gates.domain_retention", "gates.closeness", "gates.max_drop"), "model_dump"
)


def attributes(folder: Path, without: str = "") -> set[str]:
    """Return the names of all attributes that the code in a folder reads."""
    files = [file for file in folder.rglob("*.py") if not (without and file.is_relative_to(folder / without))]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}


READ = attributes(PACKAGE, without="config")


def is_read(key: str, read: set[str]) -> bool:
    return (READ_BY_A_METHOD.get(key) or READ_BY_NAME.get(key) or key.rpartition(".")[2]) in read


@pytest.mark.parametrize("key", [key for key, *_ in describe_fields()])
def test_every_setting_is_read_outside_the_schema(key):
    assert is_read(key, READ)


def test_a_setting_that_nothing_reads_is_noticed(tmp_path):
    (tmp_path / "stage.py").write_text("def stage(config):\n    config.old = 3\n    return config.steps\n")
    read = attributes(tmp_path)
    assert is_read("recover.steps", read)
    assert not is_read("recover.old", read)
    assert not is_read("recover.brand_new", read)


SERVER = {"url": "http://127.0.0.1:8000/v1"}
REMOTE = {"kind": "remote", "server": SERVER}
DISTILL = {"data": "d", "method": "self-distill"}
REWARD = {"reward": {"suite": "instructions_train"}, "keep": "last", "lmbda": 1.0}


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"recover": {"method": "interpolate", "loss": {"kind": "reverse_kl"}}}, "recover.loss"),
        ({"recover": {"method": "interpolate", "lmbda": 0.25}}, "recover.lmbda"),
        ({"recover": {"method": "interpolate", "steps": 5}}, "recover.steps"),
        ({"recover": {"method": "replay", "loss": {"kind": "reverse_kl"}}}, "recover.loss.kind"),
        ({"recover": {"method": "replay", "lmbda": 0.25}}, "recover.lmbda"),
        ({"recover": {"general": None, "general_per_domain": 0, "lmbda": 0.3}}, "recover.lmbda"),
        ({"recover": {"method": "general", "general_per_domain": 3}}, "recover.general_per_domain"),
        ({"recover": {"server": SERVER, "lmbda": 0}}, "recover.server"),
        ({"recover": {"lmbda": 0, "on_policy": {"domain": True}}}, "recover.on_policy.domain"),
        ({"recover": {"method": "replay", "on_policy": {"reverse": 0.5}}}, "recover.on_policy.reverse"),
        (
            {"recover": {"loss": {"kind": "reverse_kl"}, "on_policy": {"reverse": 0.5}}},
            "recover.on_policy.reverse",
        ),
        ({"recover": {"loss": {"k": 5}}}, "recover.loss.k"),
        ({"recover": {"teachers": {"a": {"kind": "base", "mix": 0.5}}}}, "recover.teachers.a.mix"),
        ({"recover": {"teachers": {"a": {"kind": "base", "adapter": "x"}}}}, "recover.teachers.a.adapter"),
        ({"recover": {"teachers": {"a": {"kind": "ema", "model": {}}}}}, "recover.teachers.a.model"),
        ({"recover": {"teachers": {"a": {"kind": "ema", "server": SERVER}}}}, "recover.teachers.a.server"),
        ({"recover": REWARD | {"general": "mine.jsonl"}}, "recover.general"),
        ({"finetune": {"data": "d", "self_distill": {"max_new_tokens": 9}}}, "finetune.self_distill"),
        ({"finetune": DISTILL | {"max_length": 5}}, "finetune.max_length"),
        ({"finetune": DISTILL | {"replay": {"share": 0.1}}}, "finetune.replay"),
        ({"finetune": {"data": "d", "replay": {"share": 0, "prompts": "p"}}}, "finetune.replay.prompts"),
        ({"finetune": {"data": "d", "replay": {"share": 0, "author": "student"}}}, "finetune.replay.author"),
        ({"finetune": {"data": "d", "replay": {"share": 0, "most": 9}}}, "finetune.replay.most"),
        ({"start": "runs/x", "finetune": {"data": "d", "lora": {"r": 8}}}, "finetune.lora"),
    ],
)
def test_a_setting_without_an_effect_is_refused_by_name(tree, key):
    with pytest.raises(UsageError) as caught:
        validate(tree)
    assert f"{key} has no effect" in caught.value.message


def test_defaults_that_a_stored_run_names_are_accepted():
    for recover in (
        {"method": "interpolate"},
        {"method": "replay"},
        {"method": "general"},
        {"server": SERVER, "lmbda": 1.0},
        {"health": False},
        {"general": None, "general_per_domain": 0},
        {"general": None, "general_per_domain": 0, "lmbda": 1.0, "on_policy": {"domain": True}},
        {"general_teacher": "far", "teachers": {"far": REMOTE}, "loss": {"kind": "policy_gradient"}},
        {"domain_teacher": "big", "teachers": {"big": {"kind": "model", "model": {"id": "b"}}}},
        REWARD,
    ):
        workflow = validate({"finetune": {"data": "d"}, "recover": recover, "eval": {"server": SERVER}})
        assert validate(workflow.model_dump()) == workflow


def test_interpolation_with_a_remote_teacher_may_name_the_loss_that_the_server_can_serve():
    loss = {"kind": "top_k", "k": 5}
    teacher = {"general_teacher": "far", "teachers": {"far": REMOTE}}
    assert validate({"recover": {"method": "interpolate", "loss": loss, **teacher}})


def test_an_override_resets_what_it_makes_meaningless(tmp_path):
    (tmp_path / "trained.yaml").write_text("recover: {steps: 5, lmbda: 0.25}\n")
    flow, origins = load([str(tmp_path / "trained.yaml")], ["recover.method=interpolate"])
    assert flow.recover.steps == validate({"recover": {}}).recover.steps
    assert not {"recover.steps", "recover.lmbda"} & {*origins}
    with pytest.raises(UsageError, match=r"recover\.steps has no effect with method interpolate.*--set"):
        load(["quickstart"], ["recover.method=interpolate", "recover.steps=5"])
    (tmp_path / "flow.yaml").write_text("recover: {method: interpolate, steps: 5}\n")
    with pytest.raises(UsageError, match=r"recover\.steps has no effect"):
        load([str(tmp_path / "flow.yaml")], ["name=other"])
    (tmp_path / "taught.yaml").write_text("recover: {teachers: {a: {kind: adapter, adapter: runs/x}}}\n")
    flow, _ = load([str(tmp_path / "taught.yaml")], ["recover.teachers.a.kind=base"])
    assert flow.recover.teachers["a"].adapter is None


def test_a_stage_added_to_a_stored_run_resets_what_it_makes_meaningless():
    stored = validate({"finetune": {"data": "d"}, "recover": {"steps": 5}}).model_dump()
    flow, _ = load_tree(stored, {}, ["recover.method=interpolate"], {}, "recover")
    assert flow.recover.steps == 96


def test_an_arm_resets_what_it_makes_meaningless_and_may_not_set_it(tmp_path):
    common = {"recover": {"steps": 5, "loss": {"kind": "reverse_kl"}}}
    arms = {"ours": {}, "replay": {"recover": {"method": "replay"}}}
    runs = expand(validate(common | {"arms": arms}), tmp_path)
    assert runs["ours"].recover.loss.kind == "reverse_kl"
    assert runs["replay"].recover.loss.kind == "forward_kl"
    assert runs["replay"].recover.steps == 5
    assert validate(runs["replay"].model_dump()) == runs["replay"]
    wrong = {"replay": {"recover": {"method": "replay", "lmbda": 0.25}}}
    with pytest.raises(UsageError, match=r"arms\.replay: recover\.lmbda has no effect"):
        expand(validate(common | {"arms": wrong}), tmp_path)


def test_a_written_workflow_names_automatic_settings_and_reads_back(tmp_path):
    flow = validate({"finetune": {"data": "d"}, "recover": {}, "eval": {}})
    (tmp_path / "flow.yaml").write_text(dump(flow))
    assert load([str(tmp_path / "flow.yaml")])[0].recover.learning_rate == "auto"


@pytest.mark.parametrize("recover", [{"method": "replay"}, {"method": "interpolate"}])
def test_a_former_default_without_effect_is_no_fault_of_a_stored_run(recover):
    """Runs of earlier versions hold `lmbda: 0.5`, which nobody had set, beside methods that do not use it."""
    stored = {"model": {}, "finetune": {"data": "rows"}, "recover": recover | {"lmbda": 0.5}}
    workflow, _ = load_tree(stored, {"recover.method": "flow.yaml:3"}, [], {}, "eval")
    assert workflow.recover.lmbda == "auto"
    stored = {"model": {}, "finetune": {"data": "rows"}, "recover": recover | {"lmbda": 0.5}}
    with pytest.raises(UsageError, match="lmbda has no effect"):
        load_tree(stored, {"recover.lmbda": "flow.yaml:4"}, [], {}, "eval")
