"""Who writes the answers of each step, counted for every shipped recipe: as its author says, and as it
runs."""

from collections import Counter

import pytest
from helpers.recovering import run

from opdcl.config.load import load
from opdcl.config.shipped import package_folder
from opdcl.distill.schedule import plan_steps
from opdcl.pipeline.sweep import expand
from opdcl.stages.finetune import as_distillation

# Recipe, arm -> general steps of the teacher and of the student, domain steps of the teacher and of the
# student.
WRITTEN = {
    "quickstart": (14, 2, 13, 3),
    "handbook": (48, 8, 47, 9),
    "own-data": (41, 7, 41, 7),
    "repair": (41, 7, 41, 7),
    "recover-thinking": (41, 7, 41, 7),
    "qwen3-1.7b-24gb": (77, 13, 25, 5),
    "qwen3-8b-80gb": (77, 13, 25, 5),
    "strong-to-weak": (14, 76, 4, 26),
    "specialists-into-one one": (56, 24, 56, 24),
    "continual-two-domains staff": (6, 18, 6, 18),
    "continual-two-domains then-site": (6, 18, 6, 18),
    "self-distillation imitation": (9, 27, 9, 27),
    "self-distillation self-distillation": (9, 27, 9, 27),
    "then-reinforce recovered": (9, 27, 9, 27),
    "then-reinforce reinforced": (0, 40, 0, 20),
    "ablation ours": (9, 27, 9, 27),
    "ablation general-only": (9, 27, 0, 0),
    "ablation replay": (36, 0, 36, 0),
    "ablation off-policy": (36, 0, 36, 0),
    "ablation without-warm-up": (0, 36, 0, 36),
    "ablation sampled-token": (9, 27, 9, 27),
}


def recipes(folder):
    """Yield name and workflow of every run of the first seed of every shipped recipe."""
    for file in sorted(package_folder("workflows").glob("*.yaml")):
        flow = load([str(file)])[0]
        runs = expand(flow.model_copy(update={"seeds": flow.seeds[:1]}), folder)
        for name, one in runs.items():
            arm = name.rsplit("-", 1)[0] if flow.seeds else ""
            yield f"{file.stem} {arm}".strip(), one


def counted(config, general=50, domain=50):
    rollouts = 8 if config.rollouts == "auto" else config.rollouts
    config = config.model_copy(update={"rollouts": rollouts})
    steps = plan_steps(config, general, 0 if config.method == "general" else domain)
    count = Counter((step.stream, step.on_policy) for step in steps)
    return tuple(count[s, on_policy] for s in ("general", "domain") for on_policy in (False, True))


def test_teachers_and_student_write_as_many_steps_as_every_recipe_says(tmp_path):
    written = {
        name: counted(one.recover)
        for name, one in recipes(tmp_path)
        if one.recover and one.recover.method != "interpolate"
    }
    assert written == WRITTEN


def test_the_student_writes_every_step_of_self_distillation_in_every_recipe(tmp_path):
    found = 0
    for name, one in recipes(tmp_path):
        if one.finetune and one.finetune.method == "self-distill":
            config = one.finetune.model_copy(update={"batch_size": 16})
            teacher, student = counted(as_distillation(config, 100), general=0)[2:]
            assert (teacher, student > 0) == (0, True), name
            found += 1
    assert found


@pytest.mark.parametrize(
    ("settings", "authors"),
    [
        ({"lmbda": 0.5}, ["teacher", "teacher", "teacher", "student", "student", "student"]),
        ({"lmbda": 0.5, "on_policy": {"domain": False}}, ["teacher"] * 4 + ["student", "teacher"]),
        ({"lmbda": 0}, ["teacher"] * 6),
        ({"lmbda": 1}, ["student"] * 6),
    ],
)
def test_every_row_of_the_metrics_names_phase_and_author(backbone, tuned, settings, authors):
    rows = [row for row in run(backbone, tuned, **settings) if "loss" in row]
    assert [row["author"] for row in rows] == authors
    warm_up = {0: 6, 0.5: 3, 1: 0}[settings["lmbda"]]
    assert [row["phase"] for row in rows] == ["warm-up"] * warm_up + ["on-policy"] * (6 - warm_up)
