"""Who writes the answers of each step, counted for every shipped recipe: as its author says, and as it
runs."""

from collections import Counter

from helpers.recovering import run

from opdcl.config.load import load
from opdcl.config.shipped import package_folder
from opdcl.pipeline.sweep import expand
from opdcl.train.rollouts import plan_steps

# Recipe, arm -> general steps of the teacher and of the student, domain steps of the teacher and of the
# student, as planned: the general ones of the teacher become the student's once its answers are long enough.
WRITTEN = {
    "quickstart": (12, 12, 24, 0),
    "handbook": (28, 28, 56, 0),
    "own-data": (12, 12, 24, 0),
    "repair": (12, 12, 24, 0),
    "recover-thinking": (12, 12, 24, 0),
    "qwen3-1.7b-24gb": (30, 30, 60, 0),
    "qwen3-8b-80gb": (30, 30, 60, 0),
    "strong-to-weak": (9, 51, 60, 0),
    "specialists-into-one one": (32, 32, 64, 0),
    "continual-two-domains staff": (16, 16, 32, 0),
    "continual-two-domains then-site": (16, 16, 32, 0),
    "then-reinforce recovered": (16, 16, 32, 0),
    "then-reinforce reinforced": (0, 40, 20, 0),
    "ablation ours": (16, 16, 32, 0),
    "ablation from-tuned": (16, 16, 32, 0),
    "ablation general-only": (16, 16, 0, 0),
    "ablation replay": (32, 0, 32, 0),
    "ablation off-policy": (32, 0, 32, 0),
    "ablation on-policy": (0, 32, 32, 0),
    "ablation sampled-token": (16, 16, 32, 0),
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
    of_auto = 48 if config.steps == "auto" else config.steps
    config = config.model_copy(update={"rollouts": rollouts, "steps": of_auto})
    steps = plan_steps(config, general, 0 if config.method == "general" else domain)
    count = Counter((step.stream, step.on_policy) for step in steps)
    return tuple(count[s, on_policy] for s in ("general", "domain") for on_policy in (False, True))


def test_teachers_and_student_write_as_many_steps_as_every_recipe_says(tmp_path):
    written = {n: counted(one.recover) for n, one in recipes(tmp_path) if one.recover and one.recover.steps}
    assert written == WRITTEN


def test_every_row_of_the_metrics_names_the_author(backbone, tuned):
    rows = [row for row in run(backbone, tuned, lmbda=0.67) if "loss" in row]
    assert " ".join(row["author"][0] for row in rows) == "t t s t s t"
