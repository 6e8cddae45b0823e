"""Every setting has an effect: something reads it, and where it would do nothing it is refused by name."""

import ast
from pathlib import Path

import pytest

from opdcl.config.load import load, load_tree, validate, without_effect
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


def test_every_setting_is_read_outside_the_schema():
    assert [key for key, *_ in describe_fields() if not is_read(key, READ)] == []


def test_a_setting_that_nothing_reads_is_noticed(tmp_path):
    (tmp_path / "stage.py").write_text("def stage(config):\n    config.old = 3\n    return config.steps\n")
    read = attributes(tmp_path)
    assert is_read("recover.steps", read)
    assert not is_read("recover.old", read)
    assert not is_read("recover.brand_new", read)


SERVER = {"url": "http://127.0.0.1:8000/v1"}
REMOTE = {"kind": "remote", "server": SERVER}
REWARD = {"reward": {"suite": "instructions_train"}, "keep": "last", "lmbda": 1.0}


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"recover": {"steps": 0, "loss": {"kind": "reverse_kl"}}}, "recover.loss"),
        ({"recover": {"steps": 0, "lmbda": 0.25}}, "recover.lmbda"),
        ({"recover": {"general": None, "general_per_domain": 0, "lmbda": 0.3}}, "recover.lmbda"),
        ({"recover": {"method": "general", "general_per_domain": 3}}, "recover.general_per_domain"),
        ({"recover": {"server": SERVER, "lmbda": 0}}, "recover.server"),
        ({"recover": {"lmbda": 0, "on_policy": {"domain": True}}}, "recover.on_policy.domain"),
        ({"recover": {"lmbda": 0, "on_policy": {"temperature": 0}}}, "recover.on_policy.temperature"),
        (
            {"recover": {"general": None, "general_per_domain": 0, "on_policy": {"temperature": 0}}},
            "recover.on_policy.temperature",
        ),
        (
            {"recover": {"loss": {"kind": "reverse_kl"}, "on_policy": {"reverse": 0.5}}},
            "recover.on_policy.reverse",
        ),
        ({"recover": {"loss": {"k": 5}}}, "recover.loss.k"),
        ({"recover": {"loss": {"beta": 0.1}}}, "recover.loss.beta"),
        ({"recover": {"teachers": {"a": {"kind": "base", "adapter": "x"}}}}, "recover.teachers.a.adapter"),
        ({"recover": {"teachers": {"a": {"kind": "ema", "model": {}}}}}, "recover.teachers.a.model"),
        ({"recover": {"teachers": {"a": {"kind": "ema", "server": SERVER}}}}, "recover.teachers.a.server"),
        ({"recover": REWARD | {"general": "mine.jsonl"}}, "recover.general"),
        ({"finetune": {"data": "d", "replay": {"share": 0, "prompts": "p"}}}, "finetune.replay.prompts"),
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
        {"steps": 0},
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


def test_a_start_alone_with_a_remote_teacher_may_name_the_loss_that_the_server_can_serve():
    loss = {"kind": "top_k", "k": 5}
    teacher = {"general_teacher": "far", "teachers": {"far": REMOTE}}
    assert validate({"recover": {"steps": 0, "loss": loss, **teacher}})


def test_an_override_leaves_out_what_it_makes_meaningless_and_says_so(tmp_path):
    (tmp_path / "trained.yaml").write_text("recover: {steps: 5, lmbda: 0.25}\n")
    said = []
    flow, origins = load([str(tmp_path / "trained.yaml")], ["recover.steps=0"], note=said.append)
    assert flow == validate({"recover": {"steps": 0}})
    assert "recover.lmbda" not in origins
    (lmbda,) = said
    assert lmbda.startswith("recover.lmbda is left out: it has no effect with steps 0")
    with pytest.raises(UsageError, match=r"recover\.lmbda has no effect with steps 0.*--set"):
        load(["quickstart"], ["recover.steps=0", "recover.lmbda=0.6"])
    (tmp_path / "taught.yaml").write_text("recover: {teachers: {a: {kind: adapter, adapter: runs/x}}}\n")
    flow, _ = load([str(tmp_path / "taught.yaml")], ["recover.teachers.a.kind=base"])
    assert flow.recover.teachers["a"].adapter is None


def test_an_override_excuses_no_setting_that_had_no_effect_before_it(tmp_path):
    (tmp_path / "flow.yaml").write_text("recover: {steps: 0, lmbda: 0.6}\n")
    for override in ("name=other", "recover.steps=0"):
        with pytest.raises(UsageError, match=r"recover\.lmbda has no effect"):
            load([str(tmp_path / "flow.yaml")], [override])


def test_all_settings_without_an_effect_are_named_at_once():
    with pytest.raises(UsageError) as caught:
        validate({"recover": {"lmbda": 0, "server": SERVER, "loss": {"kind": "jsd", "k": 5}}})
    lines = [line.partition(" has no effect")[0] for line in caught.value.message.splitlines()]
    assert lines == ["recover.server", "recover.loss.k"]
    assert caught.value.hint == "remove these settings"


SERVED = {"general_teacher": "far", "teachers": {"far": REMOTE}}
INHERITED = [
    {"steps": 5, "lmbda": 0.5, "weighting": "tokens", "on_policy": {"domain": True, "reverse": 0.5}},
    {"loss": {"kind": "top_k", "k": 5}, "lmbda": 1.0, "server": SERVER},
    {"loss": {"kind": "reverse_kl"}, "general_per_domain": 3, "on_policy": {"domain": True}},
    {"loss": {"kind": "jsd", "beta": 0.1}, "on_policy": {"temperature": 0.5}},
    {"general": "mine.jsonl", "given_answers": True, "lmbda": 0.5, "keep": "last", "rollouts": 8},
    {"general": None, "general_per_domain": 0, "lmbda": 0.5, "on_policy": {"domain": True}},
    SERVED | {"loss": {"kind": "policy_gradient"}},
]
OVERRIDES = [
    *(f"recover.method={method}" for method in ("alternating", "general")),
    *("recover.steps=0", "recover.lmbda=0", "recover.lmbda=1"),
    *("recover.loss.kind=cross_entropy", "recover.general_per_domain=0"),
    *("recover.on_policy={}", "recover.teachers={}", "recover.reward={suite: instructions_train}"),
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_one_pass_leaves_out_all_that_an_override_makes_meaningless(override):
    """What is left out takes no effect from anything else, so there is nothing to go round for."""
    for inherited in INHERITED:
        stored = validate({"finetune": {"data": "d"}, "recover": inherited}).model_dump()
        try:
            result, _ = load_tree(stored, {}, [override], {}, "recover")
        except UsageError as fault:
            told = fault.message
            assert "has no effect" not in told or override.partition("=")[0] in told, inherited
        else:
            assert without_effect(result) == {}, inherited
            assert validate(result.model_dump()) == result, inherited


def test_a_stage_added_to_a_stored_run_leaves_out_what_it_makes_meaningless():
    stored = validate({"finetune": {"data": "d"}, "recover": {"lmbda": 0.25}}).model_dump()
    for origins, count in (({}, 0), ({"recover.lmbda": "flow.yaml:3"}, 1)):
        said = []
        override = ["recover.steps=0"]
        flow, _ = load_tree(stored, origins, override, {}, "recover", said.append)
        assert flow.recover.lmbda == 0.5
        assert len(said) == count, "what nobody has set is no news"


def test_an_arm_leaves_out_what_it_makes_meaningless_and_may_not_set_it(tmp_path):
    common = {"recover": {"steps": 5, "on_policy": {"domain": True}}, "seeds": [1, 2]}
    arms = {"ours": {}, "off": {"recover": {"lmbda": 0}}}
    said = []
    runs = expand(validate(common | {"arms": arms}), tmp_path, said.append)
    assert runs["ours-1"].recover.on_policy.domain
    assert not runs["off-1"].recover.on_policy.domain
    assert runs["off-2"].recover.steps == 5
    assert validate(runs["off-1"].model_dump()) == runs["off-1"]
    (line,) = said
    assert line.startswith("arms.off: recover.on_policy.domain is left out")
    wrong = {"off": {"recover": {"lmbda": 0, "on_policy": {"reverse": 0.5}}}}
    with pytest.raises(UsageError, match=r"arms\.off: recover\.on_policy\.reverse has no effect"):
        expand(validate(common | {"arms": wrong}), tmp_path)


def test_a_former_default_without_effect_is_no_fault_of_a_stored_run():
    """Runs of earlier versions hold `lmbda: 0.8`, which nobody had set, beside methods that do not use it."""
    stored = {"model": {}, "finetune": {"data": "rows"}, "recover": {"steps": 0, "lmbda": 0.8}}
    workflow, _ = load_tree(stored, {"recover.method": "flow.yaml:3"}, [], {}, "eval")
    assert workflow.recover.lmbda == 0.5
    stored = {"model": {}, "finetune": {"data": "rows"}, "recover": {"steps": 0, "lmbda": 0.8}}
    with pytest.raises(UsageError, match="lmbda has no effect"):
        load_tree(stored, {"recover.lmbda": "flow.yaml:4"}, [], {}, "eval")


@pytest.mark.parametrize("loss", [{"kind": "policy_gradient"}, {}])
def test_what_weighs_tokens_by_their_probability_is_written_at_temperature_1(loss):
    recover = {"loss": loss, "on_policy": {"temperature": 0.5}} if loss else REWARD
    with pytest.raises(UsageError, match=r"on_policy\.temperature must be 1"):
        validate({"recover": recover | {"on_policy": {"temperature": 0.5}}})
    assert validate({"recover": recover | {"on_policy": {"temperature": 1}}})
