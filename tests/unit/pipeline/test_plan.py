"""What a run would do: run, skip, resume or stale, and why."""

import json
from pathlib import Path

import pytest

from opdcl.config.workflow import Workflow
from opdcl.pipeline.plan import Task, make_plan, read_records, stage_folder
from opdcl.rundir.files import write_json
from opdcl.rundir.hashes import ADAPTER, Identity, file_hash, seal
from opdcl.rundir.layout import RunDir

DATA = {"finetune.data": "rows-1", "recover.general": "prompts-1", "recover.domain": "rows-1"}
FINETUNE = {"data": "rows.jsonl"}
RECOVER = {"sample_ahead": 1, "general": "prompts.jsonl", "domain": "rows.jsonl"}
EVALUATION = {"retention": ["instructions"], "domain": ["handbook"]}
FULL = {"finetune": FINETUNE, "recover": RECOVER, "eval": EVALUATION}


STATES = ("base", "tuned", "recovered")


def flow(tree: dict) -> Workflow:
    return Workflow.model_validate(tree)


def plan(tree: dict, run: RunDir, data: dict[str, str] = DATA) -> dict[str, Task]:
    """Return the tasks by name; an evaluation is `state/suite`."""
    tasks = make_plan(flow(tree), data, read_records(run))
    return {t.name if t.name != "eval" else f"{t.state}/{t.suite}": t for t in tasks}


def actions(tasks: dict[str, Task]) -> dict[str, str]:
    return {name: task.action for name, task in tasks.items()}


def finish(tree: dict, run: RunDir, data: dict[str, str] = DATA, status: str = "done") -> None:
    """Write what the stages and evaluations of a workflow would have left behind."""
    for task in plan(tree, run, data).values():
        if task.name == "eval":
            result = {"metric": "acc", "metrics": {"acc": 0.5}, "n": 2, "fingerprint": task.fingerprint}
            write_json(run.eval_result(task.state, task.suite), result)
        else:
            stage = stage_folder(run, task.name)
            stage.adapter.mkdir(parents=True, exist_ok=True)
            (stage.adapter / ADAPTER).write_bytes(task.name.encode())
            record = {"status": status, "fingerprint": task.fingerprint, "inputs": task.inputs}
            write_json(stage.record, record | {"adapter_sha256": file_hash(stage.adapter / ADAPTER)})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def done(run: RunDir) -> RunDir:
    """A run directory in which everything of `FULL` is finished."""
    finish(FULL, run)
    return run


def changed(section: str, **values: object) -> dict:
    return {**FULL, section: {**FULL.get(section, {}), **values}}


def test_what_the_defaults_made_is_done_when_the_saved_configuration_is_read_again(done):
    """`opdcl recover RUN` reads config.json, which must not turn a float into an int or the reverse."""
    saved = json.loads(json.dumps(flow(FULL).model_dump()))
    for tree in (FULL, saved):
        assert {*actions(plan(tree, done)).values()} == {"skip"}


def test_a_new_run_does_everything_in_order_and_writes_nothing(run):
    tasks = plan(FULL, run)
    measured = [f"{state}/{suite}" for suite in ("instructions", "handbook", "closeness") for state in STATES]
    assert list(tasks) == ["finetune", "recover", *measured]
    assert {*actions(tasks).values()} == {"run"}
    assert tasks["tuned/handbook"].role == "domain"
    assert not run.path.exists()


def test_a_finished_stage_whose_adapter_is_damaged_or_gone_is_not_done(done):
    weights = done.stage(1, "finetune").adapter / ADAPTER
    weights.write_bytes(b"other")
    task = plan(FULL, done)["finetune"]
    assert (task.action, task.why) == ("stale", "was done, but its adapter has changed")
    weights.unlink()
    assert plan(FULL, done)["finetune"].why == "was done, but its adapter is missing"
    assert plan(FULL, done)["recover"].action == "skip"


def add_checkpoint(run):
    checkpoint = run.stage(1, "finetune").trainer / "checkpoint-50"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").touch()
    seal(checkpoint)


def test_a_stopped_stage_resumes_from_its_checkpoint(run):
    finish({"finetune": FINETUNE}, run, status="running")
    assert plan({"finetune": FINETUNE}, run)["finetune"].why == "stopped before its first checkpoint"
    add_checkpoint(run)
    task = plan({"finetune": FINETUNE}, run)["finetune"]
    assert task.action == "resume"
    assert "checkpoint-50" in task.why


def test_a_stopped_stage_with_other_settings_is_stale_not_resumed(run):
    finish({"finetune": FINETUNE}, run, status="running")
    other = {"finetune": {**FINETUNE, "epochs": 9}}
    # Nothing was made yet, so there is nothing to protect.
    assert plan(other, run)["finetune"].action == "run"
    add_checkpoint(run)
    assert plan(other, run)["finetune"].action == "stale"


@pytest.mark.parametrize(
    ("section", "values", "stage", "keys"),
    [
        ("recover", {"steps": 9, "seed": 3}, "recover", "seed, steps"),
        ("recover", {"server": {"url": "http://one/v1"}, "lmbda": 1.0}, "recover", "lmbda, server"),
        ("finetune", {"lora": {"r": 4}}, "finetune", "lora"),
        ("finetune", {"epochs": 9}, "recover", "finetune stage"),
        ("model", {"id": "another"}, "finetune", "model"),
        ("model", {"dtype": "float32"}, "recover", "dtype, finetune stage"),
    ],
)
def test_a_changed_setting_makes_its_stage_stale_and_is_named(done, section, values, stage, keys):
    task = plan(changed(section, **values), done)[stage]
    assert task.action == "stale"
    names = [
        name.partition(" ")[0] if "->" in name else name
        for name in task.why.removeprefix("changed: ").split(", ")
    ]
    assert ", ".join(names) == keys


@pytest.mark.parametrize(
    ("field", "stage"),
    [("finetune.data", "finetune"), ("recover.general", "recover"), ("recover.domain", "recover")],
)
def test_changed_content_under_the_same_name_makes_the_stage_stale(done, field, stage):
    task = plan(FULL, done, {**DATA, field: "edited"})[stage]
    assert (task.action, task.why) == ("stale", f"changed: content of {field.split('.')[1]}")


def test_recovery_alone_continues_a_finished_finetune(run):
    finish({"finetune": FINETUNE}, run)
    tasks = plan({"recover": RECOVER, "eval": FULL["eval"]}, run)
    assert tasks["recover"].action == "run"
    assert {"base/handbook", "tuned/handbook", "recovered/handbook"} <= {*tasks}
    assert stage_folder(run, "recover").path.name == "02-recover"


def test_recovery_alone_is_the_same_stage_as_in_the_whole_workflow(done):
    assert actions(plan({"recover": RECOVER}, done)) == {"recover": "skip"}


def test_recovery_alone_is_stale_once_the_finetune_was_done_again_otherwise(done):
    finish({"finetune": {**FINETUNE, "epochs": 9}}, done)
    assert plan({"recover": RECOVER}, done)["recover"].why == "changed: finetune stage"


def test_evaluation_alone_measures_the_states_that_are_there(run):
    evaluation = {"eval": {"retention": ["instructions"], "closeness": None}}
    assert [*plan(evaluation, run)] == ["base/instructions"]
    finish({"finetune": FINETUNE}, run)
    assert [*plan(evaluation, run)] == ["base/instructions", "tuned/instructions"]
    finish({"finetune": FINETUNE, "recover": RECOVER}, run)
    assert [*plan(evaluation, run)] == ["base/instructions", "tuned/instructions", "recovered/instructions"]


def test_an_unfinished_finetune_is_not_evaluated(run):
    finish({"finetune": FINETUNE}, run, status="running")
    assert [*plan({"eval": {"retention": ["instructions"]}}, run)] == ["base/instructions"]


def test_an_evaluation_trains_nothing_and_measures_the_states_that_are_finished(run):
    finish({"finetune": FINETUNE}, run)
    tasks = make_plan(flow(FULL), DATA, read_records(run), trains=False)
    assert [task.action for task in tasks if task.name != "eval"] == ["skip"]
    assert {task.state for task in tasks if task.name == "eval"} == {"base", "tuned"}


def test_another_file_of_prompts_changes_closeness_alone_and_none_leaves_it_out(done):
    tasks = plan(FULL, done, {**DATA, "eval.closeness": "other prompts"})
    again = {name for name, task in tasks.items() if task.action == "run"}
    assert again == {f"{state}/closeness" for state in STATES}
    assert not any("closeness" in name for name in plan(changed("eval", closeness=None), done))


def test_another_model_is_measured_again_and_says_why(done):
    tasks = plan(changed("model", id="another"), done)
    assert {tasks[f"{state}/handbook"].action for state in STATES} == {"run"}
    assert "changed" in tasks["base/handbook"].why


@pytest.mark.parametrize("values", [{"limit": 5}, {"max_new_tokens": 5}, {"thought_tokens": 5}])
def test_a_measurement_made_in_another_way_is_repeated(done, values):
    again = actions(plan(changed("eval", **values), done))
    assert {again.pop(stage) for stage in ("finetune", "recover")} == {"skip"}
    assert {*again.values()} == {"run"}


@pytest.mark.parametrize("changed_suite", ["eval.data.own", "eval.suite.handbook"])
def test_only_a_changed_suite_is_measured_again(run, changed_suite):
    tree = changed("eval", domain=["own", "handbook"], data={"own": "own.jsonl"})
    data = {**DATA, "eval.data.own": "one", "eval.suite.handbook": "one"}
    finish(tree, run, data)
    tasks = actions(plan(tree, run, {**data, changed_suite: "two"}))
    suite = changed_suite.split(".")[-1]
    assert {name for name, action in tasks.items() if action == "run"} == {f"{s}/{suite}" for s in STATES}


def test_an_added_suite_and_what_a_changed_recovery_left_are_all_that_is_measured(done):
    tree = changed("eval", control=["neighbours"]) | {"recover": {**RECOVER, "steps": 9}}
    again = {name for name, action in actions(plan(tree, done)).items() if action == "run"}
    recovered = {f"recovered/{suite}" for suite in ("instructions", "handbook", "closeness")}
    assert again == recovered | {f"{state}/neighbours" for state in STATES}


def test_other_weights_of_a_teacher_make_another_recovery(run):
    tree = changed("recover", teachers={"big": {"kind": "model", "model": {"id": "big"}}})
    before = {**DATA, "recover.teachers.big.model": "weights-1"}
    finish(tree, run, before)
    assert actions(plan(tree, run, before))["recover"] == "skip"
    after = plan(tree, run, {**before, "recover.teachers.big.model": "weights-2"})["recover"]
    assert (after.action, after.why) == ("stale", "changed: content of teachers.big.model")


def test_a_recovery_of_an_earlier_version_is_done_although_it_names_no_weights_of_its_teacher(run):
    tree = changed("recover", teachers={"big": {"kind": "model", "model": {"id": "big"}}})
    finish(tree, run)
    now = plan(tree, run, {**DATA, "recover.teachers.big.model": "weights-1"})
    assert {*actions(now).values()} == {"skip"}


REPLAYING = {"finetune": {**FINETUNE, "replay": {"share": 0.5}}}


def recorded(run: RunDir, status: str = "done", **config: object) -> dict:
    """Write the fine-tune of `REPLAYING` as earlier versions did, and return what its key was made of."""
    finish(REPLAYING, run, status=status)
    file = stage_folder(run, "finetune").record
    record = json.loads(file.read_text())
    del record["inputs"]["replay"]["most"]
    key = Identity(record["inputs"]).key
    write_json(file, record | {"fingerprint": key, "config": config})
    if status != "done":
        seal(stage_folder(run, "finetune").trainer / "checkpoint-2")
    return record["inputs"]


def test_a_fine_tune_that_replays_counts_the_limit_and_what_was_finished_without_stays_finished(run):
    unlimited = recorded(run)
    assert actions(plan(REPLAYING, run)) == {"finetune": "skip"}
    assert plan(REPLAYING, RunDir(run.path / "other"))["finetune"].fingerprint != Identity(unlimited).key
    limited = {"finetune": {**FINETUNE, "replay": {"share": 0.5, "most": 9}}}
    assert actions(plan(limited, run)) == {"finetune": "stale"}


@pytest.mark.parametrize(("config", "action"), [({}, "stale"), ({"replay": {"most": 2000}}, "resume")])
def test_a_fine_tune_that_was_begun_without_a_limit_is_not_continued(run, config, action):
    recorded(run, "running", **config)
    assert actions(plan(REPLAYING, run)) == {"finetune": action}


def test_a_fine_tune_that_replays_nothing_has_no_limit(run):
    keys = [plan({"finetune": {**FINETUNE, "replay": {"share": 0.0, **m}}}, run) for m in ({}, {"most": 9})]
    assert keys[0]["finetune"].fingerprint == keys[1]["finetune"].fingerprint
