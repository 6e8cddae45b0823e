"""Settings that earlier versions had: what a run has stored is read, what a user still sets is explained."""

import pytest
from pydantic import BaseModel

from opdcl.config.load import load, load_tree, validate
from opdcl.config.section import FINGERPRINT, Section
from opdcl.errors import UsageError
from opdcl.model.consent import base_of_run
from opdcl.pipeline.plan import Records, make_plan
from opdcl.rundir.files import write_json
from opdcl.rundir.layout import RunDir

SERVER = {"url": "http://one/v1"}
# A workflow that has every section.
FLOW = {
    "finetune": {"data": "d", "method": "sft", "self_distill": {"max_new_tokens": 64}},
    "recover": {
        "server": SERVER,
        "teachers": {
            "a": {"kind": "model", "model": {"id": "b"}},
            "b": {"kind": "remote", "server": SERVER | {"model": "base"}},
        },
    },
    "eval": {"server": SERVER},
}


def former_of(section: BaseModel, place: str = "") -> dict[str, tuple]:
    """Return the former settings of a section and those below it: key -> value that holds, other value."""
    found = {f"{place}{name}": value for name, (value, _) in section.former.items()}
    for name, value in section:
        parts = value if isinstance(value, dict) else {"": value}
        for key, part in parts.items():
            if isinstance(part, Section):
                found |= former_of(part, f"{place}{name}.{key}".strip(".") + ".")
    return found


FORMER = former_of(validate(FLOW))


def with_setting(tree: dict, key: str, value: object) -> dict:
    """Return a copy of the tree with one more setting."""
    name, _, rest = key.partition(".")
    return tree | {name: with_setting(tree.get(name, {}), rest, value) if rest else value}


def test_there_are_former_settings_in_all_kinds_of_sections():
    assert {
        "model.device",
        "finetune.warmup",
        "finetune.self_distill",
        "recover.save_steps",
        "recover.teachers.a.rate",
        "recover.teachers.a.model.quantization",
        "recover.server.model",
        "eval.server.model",
    } <= {*FORMER}


def test_a_former_setting_may_have_its_value_and_no_other():
    flow = validate(FLOW)
    for key, value in FORMER.items():
        assert validate(with_setting(FLOW, key, value)) == flow, key
        with pytest.raises(UsageError) as caught:
            validate(with_setting(FLOW, key, "other"), {key: "mine.yaml:7"})
        assert caught.value.message == f"unknown key {key}, mine.yaml:7"
        assert caught.value.hint.startswith("it is gone: "), key


def test_the_place_of_a_former_setting_is_named(tmp_path):
    (tmp_path / "flow.yaml").write_text("recover:\n  steps: 3\n  save_steps: 5\n")
    with pytest.raises(UsageError, match=r"recover\.save_steps, .*flow\.yaml:3") as caught:
        load([str(tmp_path / "flow.yaml")])
    assert "validate_every" in caught.value.hint
    with pytest.raises(UsageError, match=r"unknown key finetune\.warmup \(in --set\)"):
        load(["quickstart"], ["finetune.warmup=0.1"])


def test_a_stored_run_of_an_earlier_version_is_read_and_its_stages_keep_their_fingerprints():
    flow = validate(FLOW)
    stored = flow.model_dump(context=FINGERPRINT)
    assert stored["recover"]["teachers"]["a"]["rate"] == 0.05
    assert stored["recover"]["teachers"]["b"]["server"]["model"] == "base"
    # Neither changes a result, so it is no matter that somebody had set them.
    stored["recover"]["save_steps"], stored["model"]["device"] = 7, "cuda:1"
    origins = dict.fromkeys(("recover.save_steps", "model.device"), "old.yaml:3")
    read, _ = load_tree(stored, origins, [], {}, "eval")
    assert read == flow
    inputs = {t.name: t.inputs for t in make_plan(read, {}, Records()) if t.name != "eval"}
    assert (inputs["finetune"]["schedule"], inputs["finetune"]["warmup"]) == ("cosine", 0.05)
    assert inputs["recover"]["server"] == {"model": None}
    assert inputs["recover"]["teachers"]["a"]["model"]["revision"] is None


def test_a_stored_run_that_was_made_with_another_value_is_refused():
    stored = validate(FLOW).model_dump() | {"finetune": {"data": "d", "warmup": 0.5}}
    with pytest.raises(UsageError, match=r"unknown key finetune\.warmup, old\.yaml:3"):
        load_tree(stored, {"finetune.warmup": "old.yaml:3"}, [], {}, "eval")


def test_method_replay_of_a_stored_run_is_the_imitation_that_it_was():
    imitates = {"recover": {"loss": {"kind": "cross_entropy"}, "lmbda": 0}}
    stored = validate({"recover": {"lmbda": 0.5}}).model_dump()
    stored["recover"]["method"] = "replay"
    read, _ = load_tree(stored, {"recover.method": "old.yaml:3"}, [], {}, "eval")
    assert read.recover == validate(imitates).recover
    with pytest.raises(UsageError, match="method replay is gone: set loss"):
        validate({"recover": {"method": "replay"}})


def test_a_kind_of_teacher_that_is_gone_is_refused_with_its_replacement(tmp_path):
    teachers = {"near": {"kind": "trust_region", "mix": 0.05, "reference": "base"}}
    recover = {"general_teacher": "near", "teachers": teachers}
    with pytest.raises(UsageError, match=r"recover\.teachers\.near.*trust_region is gone: use kind base"):
        validate({"recover": recover})
    stored = validate({"recover": {}}).model_dump(context=FINGERPRINT)
    stored["recover"] |= recover
    for stage in ("recover", "eval"):
        with pytest.raises(UsageError, match=r"trust_region is gone: use kind base.*old\.yaml:3"):
            load_tree(stored, {"recover.teachers.near.kind": "old.yaml:3"}, [], {}, stage)


def test_the_base_of_a_run_that_named_a_device_is_read(tmp_path):
    run = RunDir(tmp_path)
    write_json(run.config, {"workflow": {"model": {"id": "b", "device": "cuda:1"}}, "origins": {}})
    assert base_of_run(run, trust_remote_code=False).id == "b"


def test_no_former_setting_is_one_of_today():
    def overlaps(section: type[Section]) -> list[str]:
        below = [name for inner in section.__subclasses__() for name in overlaps(inner)]
        return [f"{section.__name__}.{key}" for key in section.former if key in section.model_fields] + below

    assert overlaps(Section) == []
