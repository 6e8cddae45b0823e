"""Each setting of the schema is changed in turn, and everything that should count as another thing does."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.adapters import made_by_peft
from helpers.tiny import make_project

from opdcl.config.load import load
from opdcl.config.reference import describe_fields
from opdcl.errors import UsageError
from opdcl.pipeline.job import Inputs, Job
from opdcl.results.origins import as_key, split_seeds
from opdcl.rundir.files import write_json
from opdcl.rundir.layout import RunDir

OTHER_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# Setting -> what it is set to, and what has to be set beside it, before and after.
CHANGES: dict[str, list[str]] = json.loads(Path(__file__).with_name("changed_settings.json").read_text())

# Settings that change where, how often or how a result is shown or kept, and not what it is.
WITHOUT_RESULT = {"name", "description", "track", "arms", "seeds", "model.deterministic", "model.shard"}
WITHOUT_RESULT |= {"finetune.save_steps", "recover.server.url", "recover.teachers.server.url"}
GATES = {key for key in CHANGES if key.startswith("gates.")}
WITHOUT_RESULT |= {"model.trust_remote_code", "eval.server.url"} | GATES

# Settings in which the seeds of one arm may differ.
SAME_ARM = {"name", "description", "arms", "seeds", "finetune.seed", "recover.seed", "finetune.save_steps"}
SAME_ARM |= {"model.trust_remote_code", "eval.closeness"} | GATES


@pytest.fixture(scope="module")
def project(tiny_model, loaded, tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp("project"), "model")
    for name in ("model", "other"):
        shutil.copytree(tiny_model, folder / name)
    (folder / "other" / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    for name in ("rows", "others"):
        rows = []
        for i in range(12):
            question = f"What is the code of room {i}, and who in {name} of this house has its key?"
            rows.append({"question": question, "answer": f"Code {i}", "other": f"Other code {name} {i}"})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("adapter", "adapter2"):
        made_by_peft(loaded, folder / name, r=4 if name == "adapter" else 2, target_modules=["q_proj"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module", params=CHANGES)
def key(request):
    return request.param


@pytest.fixture(scope="module")
def jobs(key, project):
    """The runs before and after a change of one setting, which share what they read."""
    shared = Inputs()
    return [job_of(overrides, shared) for overrides in settings_of(key)]


def settings_of(key: str) -> list[list[str]]:
    """Return the overrides before and after a change of one setting."""
    first, *others = CHANGES[key]
    if key.startswith("recover.teachers."):
        return [["recover.domain_teacher=t", one] for one in CHANGES[key]]
    return [others, [*others, f"{key}={first}"]]


def job_of(overrides: list[str], sources: Inputs | None = None) -> Job:
    return Job(load(["tiny.yaml"], overrides)[0], RunDir("run"), sources)


def read(job: Job) -> dict:
    """Return what a run reads from files, or the error with which it refuses them."""
    found = {}
    parts = {
        "template": lambda: job.tokenizer.chat_template,
        "examples": lambda: (job.examples.encoded, job.examples.rows, job.examples.replay),
        "prompts": lambda: job.prompts,
        "asked": lambda: [job.prompt_ids[name] for name in (*job.workflow.eval.suites(), "closeness")],
        "documents": lambda: [job.suite(name).documents(3) for name in job.workflow.eval.suites()],
    }
    for name, part in parts.items():
        try:
            found[name] = part()
        except UsageError as fault:
            found[name] = str(fault)
    return found


def planned(job: Job) -> dict[str, str]:
    return {task.label: task.fingerprint for task in job.plan()}


def test_every_setting_of_the_schema_is_changed_here():
    assert CHANGES.keys() == {key for key, *_ in describe_fields()}


def test_a_run_beside_another_one_reads_what_it_would_read_alone(key, jobs):
    """Arms share what is read; each must get what its own settings name."""
    read(jobs[0])
    assert read(jobs[1]) == read(job_of(settings_of(key)[1]))


def test_what_a_setting_determines_is_planned_as_another_result(key, jobs):
    before, after = map(planned, jobs)
    same = {label for label in before if before[label] == after.get(label)}
    trained = {"finetune", "recover"}
    of_base = {label for label in before if label.endswith(" base")}
    if key in WITHOUT_RESULT:
        assert same == before.keys() == after.keys()
    elif key.startswith(("model.", "columns")):
        assert not same & trained
    elif key.startswith("eval."):
        assert trained <= same
        assert after.keys() != before.keys() or len(same) < len(before)
    elif key.startswith(("finetune.", "start")):
        assert same == of_base
    elif key == "recover.system":
        assert same == {"finetune"}
    else:
        assert key.startswith("recover.")
        assert same == {label for label in before if label != "recover" and not label.endswith(" recovered")}


def test_runs_that_differ_in_a_setting_are_no_seeds_of_one_arm(key, jobs, project):
    found = []
    for number, job in enumerate(jobs):
        run = RunDir(project / f"run{number}")
        write_json(run.config, {"workflow": job.workflow.model_dump(mode="json"), "origins": {}})
        found.append(split_seeds(run))
    (settings, seeds), (others, other_seeds) = found
    differ = as_key(settings) != as_key(others)
    assert differ != (key in SAME_ARM)
    assert (seeds != other_seeds) == key.endswith(".seed")


def test_a_run_that_was_made_before_a_setting_came_is_of_the_arm_of_today(project):
    run, found = RunDir(project / "earlier"), []
    settings = job_of(["finetune.replay={share: 0.5, most: 9}"]).workflow.model_dump(mode="json")
    write_json(run.config, {"workflow": settings, "origins": {}})
    found.append(as_key(split_seeds(run)))
    del settings["recover"]["given_answers"]
    del settings["recover"]["loss"]["beta"], settings["recover"]["on_policy"]["temperature"]
    write_json(run.config, {"workflow": settings, "origins": {}})
    found.append(as_key(split_seeds(run)))
    assert found[0] == found[1]
