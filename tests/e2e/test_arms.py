"""One workflow as several runs: shared stages run once, each run resumes by itself, and all are compared."""

import json

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project

from opdcl.rundir.files import read_json

ARMS = """
seeds: [1, 2]
arms:
  ours: {}
  general-only: {recover: {method: general}}
"""


@pytest.fixture(scope="module")
def family(tiny_model, tmp_path_factory):
    """A project whose workflow is even shorter."""
    folder = make_project(tmp_path_factory.mktemp("family"), tiny_model)
    settings = (folder / "tiny.yaml").read_text()
    for usual, short in (("epochs: 4", "epochs: 1"), ("steps: 8", "steps: 4"), ("limit: 6", "limit: 3")):
        settings = settings.replace(usual, short)
    (folder / "tiny.yaml").write_text(settings.replace("eval:\n  {", "eval:\n  {closeness: null, "))
    (folder / "arms.yaml").write_text(ARMS)
    return folder


def test_all_arms_run_over_all_seeds_and_share_stages(family):
    planned = opdcl("run", "tiny.yaml", "arms.yaml", "-o", "all", "--dry-run", "--json", cwd=family, code=0)
    plans = {p["run"]: p["tasks"] for p in json.loads(planned.stdout)}
    assert list(plans) == ["ours-1", "general-only-1", "ours-2", "general-only-2"]
    planned_copies = [
        (t["stage"], t["state"], t["why"]) for tasks in plans.values() for t in tasks if t["action"] == "take"
    ]
    assert not (family / "all").exists()

    done = opdcl("run", "tiny.yaml", "arms.yaml", "-o", "all", cwd=family, code=0)
    compared = json.loads((family / "all" / "compare.json").read_text())
    assert [(arm["name"], arm["seeds"]) for arm in compared["arms"]] == [("ours", 2), ("general-only", 2)]
    assert (family / "all" / "compare.html").exists()

    def adapter(run, stage):
        folder = family / "all" / run / "stages" / stage / "adapter"
        return (folder / "adapter_model.safetensors").read_bytes()

    assert adapter("ours-1", "01-finetune") == adapter("general-only-1", "01-finetune")
    assert adapter("ours-1", "01-finetune") != adapter("ours-2", "01-finetune")
    assert adapter("ours-1", "02-recover") != adapter("general-only-1", "02-recover")
    # Base is measured once overall, tuned once per seed, and no stage is trained twice.
    assert done.stderr.count("eval instructions base: taken from") == 3
    assert done.stderr.count("finetune: taken from") == 2
    assert done.stderr.count("eval instructions tuned: taken from") == 2
    assert "recover: taken from" not in done.stderr
    # The dry run predicted this.
    assert len(planned_copies) == done.stderr.count(": taken from ")
    assert [why for stage, _, why in planned_copies if stage == "finetune"] == ["from ours-1", "from ours-2"]

    made = (family / "all" / "ours-2" / "stages" / "02-recover" / "stage.json").stat().st_mtime
    again = opdcl("run", "tiny.yaml", "arms.yaml", "-o", "all", "--json", cwd=family, code=0)
    assert json.loads(again.stdout) == compared
    assert (family / "all" / "ours-2" / "stages" / "02-recover" / "stage.json").stat().st_mtime == made


@pytest.mark.nightly
def test_a_recipe_reuses_stages_of_another_one_in_the_same_folder(family):
    (family / "other.yaml").write_text("arms:\n  imitation: {}\n  shorter: {recover: {steps: 2}}\n")
    assert opdcl("run", "tiny.yaml", "arms.yaml", "-o", "all", cwd=family).returncode == 0
    seeds = ["--set", "finetune.seed=1", "--set", "recover.seed=1"]
    words = ("run", "tiny.yaml", "other.yaml", "-o", "all", *seeds)
    planned = json.loads(opdcl(*words, "--dry-run", "--json", cwd=family).stdout)
    copies = [task for plan in planned for task in plan["tasks"] if task["action"] == "take"]
    known = {(task["stage"], task["why"]) for task in copies}
    assert ("recover", "from ours-1, if base has the same weights") in known
    done = opdcl(*words, cwd=family, code=0)
    assert len(copies) == done.stderr.count(": taken from ")
    assert done.stderr.count("recover: taken from ours-1") == 1
    # Nothing was left to do for `imitation`, and its manifest tells how its parts were made.
    manifests = [read_json(family / "all" / name / "manifest.json") for name in ("imitation", "ours-1")]
    assert manifests[0]["base"]["fingerprint_before"] == manifests[1]["base"]["fingerprint_before"]
    assert manifests[0]["adapters"] == manifests[1]["adapters"]
    assert manifests[0]["created"] >= manifests[1]["created"]
    assert done.stderr.count("finetune: taken from") == 2
    compared = read_json(family / "all" / "compare.json")
    assert [arm["name"] for arm in compared["arms"]] == ["imitation", "shorter"]


def test_an_arm_that_halts_stops_only_the_arms_that_need_it(family):
    (family / "halting.yaml").write_text(
        "arms:\n  bad: {recover: {learning_rate: 0.9, validate_every: 1, steps: 8}}\n"
        "  next: {start: 'arm:bad'}\n  good: {description: 'arm:bad'}\n"
    )
    done = opdcl("run", "tiny.yaml", "halting.yaml", "-o", "halting", cwd=family, code=1)
    assert "2 of 3 runs failed: bad, next" in done.stderr
    assert "next needs bad, which failed" in done.stderr
    assert "recovery halted at step" in done.stderr
    assert (family / "halting" / "good" / "report.html").exists()


def test_an_arm_that_misses_a_gate_is_compared_with_the_others_and_the_exit_code_is_3(family):
    (family / "gated.yaml").write_text(
        "eval: {closeness: requests_quick, limit: 12}\n"
        "arms:\n  strict: {gates: {max_drop: {closeness: 0.0001}}}\n  other: {recover: {steps: 2}}\n"
    )
    words = ["run", "tiny.yaml", "gated.yaml", "-o", "gated"]
    done = opdcl(*words, cwd=family, code=3)
    assert "gate missed: closeness: recovered is" in done.stderr
    assert "1 of 2 runs missed a gate: strict" in done.stderr
    compared = read_json(family / "gated" / "compare.json")
    assert [arm["name"] for arm in compared["arms"]] == ["strict", "other"]
    assert opdcl(*words, cwd=family).returncode == 3  # though everything is done


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms:\n  ours: {recover: {step: 3}}\n", "arms.ours: unknown key recover.step"),
        ("arms:\n  ../ours: {}\n", "arms"),
        ("seeds: [1, 1]\n", "a seed is repeated"),
        ("arms:\n  one: {start: 'arm:two'}\n  two: {}\n", "arms.one: arm:two names no earlier arm"),
        ("arms:\n  one: {start: nowhere}\n", "nowhere does not exist"),
    ],
)
def test_invalid_arms_are_refused_before_anything_runs(family, text, message):
    (family / "wrong.yaml").write_text(text)
    done = opdcl("run", "tiny.yaml", "wrong.yaml", "-o", "wrong", cwd=family)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not any((family / "wrong").rglob("stage.json"))
