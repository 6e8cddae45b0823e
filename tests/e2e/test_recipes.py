"""The shipped recipes whose runs build on one another, at smoke size on a two-layer model."""

import json

import pytest
from helpers.command import ROOT, opdcl
from helpers.tiny import make_model, make_project
from ruamel.yaml import YAML

from opdcl.config.load import load
from opdcl.pipeline.sweep import expand
from opdcl.rundir.hashes import file_hash
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import forget, seal_new

SMOKE = """
model: {{id: {model}, dtype: float32}}
finetune: {{epochs: 0.05, batch_size: 4, learning_rate: 1e-2, lora: {{r: 4, alpha: 8}}}}
recover: {{general: {folder}/prompts.jsonl, steps: 4, rollouts: 4, domain_rollouts: 4, lmbda: 0.75,
          max_new_tokens: 8, domain_max_new_tokens: 4, validate_every: 2,
          validation_prompts: 2, learning_rate: 1e-2, keep: last, health: false}}
eval: {{limit: 6, max_new_tokens: 8}}
seeds: [1, 2]
"""


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lineage")
    make_project(folder, tiny_model)
    (folder / "smoke.yaml").write_text(SMOKE.format(model=tiny_model, folder=folder))
    return folder


def adapter(folder, run, stage):
    return (folder / run / "stages" / stage / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_domains_in_a_row(folder, seeds):
    made, end = f"two-{seeds}", "-1" if seeds == 1 else ""
    words = ("run", "continual-two-domains", "smoke.yaml", "-o", made)
    words += ("--set", f"seeds={[*range(1, seeds + 1)]}")
    planned = opdcl(*words, "--dry-run", "--json", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    waiting = {p["run"]: p.get("why") for p in json.loads(planned.stdout)}
    assert waiting["then-site-1"] == "after staff-1"
    assert waiting["staff-1"] is None

    done = opdcl(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / made / "compare.json").read_text())
    first, then = ("staff", "staff-unrecovered"), ("then-site", "then-site-unrecovered")
    assert [c["name"] for c in found["chains"]] == [
        f"{a}{end} → {b}{end}" for a, b in zip(first, then, strict=True)
    ]
    steps = [(s["name"], s["seeds"]) for s in found["steps"]]
    assert steps == [(f"{name}{end}", seeds) for name in (*first, *then)]
    suites = {"instructions", "handbook_staff", "handbook_site"}
    assert all({*s["scores"]} == suites for s in found["steps"])
    (difference,) = found["differences"]
    assert difference["average"]["value"] == pytest.approx(
        found["chains"][0]["average"]["value"] - found["chains"][1]["average"]["value"], abs=1e-5
    )
    assert [(k["step"], k["teacher"], k["suite"]) for k in found["kept"]] == [
        (f"then-site{end}", "staff", "handbook_staff")
    ]
    assert "After each step" in (folder / made / "compare.html").read_text()

    # Each step started from the result of the step before.
    config = json.loads((folder / made / f"then-site-{seeds}" / "config.json").read_text())["workflow"]
    assert config["start"].endswith(f"{made}/staff-{seeds}")
    assert adapter(folder / made, "then-site-1", "01-finetune") != adapter(
        folder / made, "then-site-unrecovered-1", "01-finetune"
    )
    again = opdcl(*words, "--json", cwd=folder)
    assert json.loads(again.stdout) == found
    runs = [f"{made}/{name}-{n}" for name in (*first, *then) for n in range(1, seeds + 1)]
    beside = opdcl("compare", *runs, "--json", cwd=folder)
    # Runs in another order: their notes too.
    assert in_any_order(json.loads(beside.stdout)) == in_any_order(found)


def in_any_order(comparison):
    return comparison | {"notes": sorted(comparison["notes"])}


@pytest.mark.nightly
def test_two_specialists_into_one(folder):
    done = opdcl("run", "specialists-into-one", "smoke.yaml", "-o", "special", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "special" / "compare.json").read_text())
    assert [(k["step"], k["teacher"]) for k in found["kept"]] == [("one", "staff"), ("one", "site")]
    assert adapter(folder / "special", "one-1", "01-finetune") == adapter(
        folder / "special", "staff-1", "01-finetune"
    )
    rows = [
        json.loads(line)
        for line in (folder / "special" / "one-1" / "stages" / "02-recover" / "metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    assert {"domain_kl/staff", "domain_kl/site"} <= set(
        next(r["validation"] for r in rows if "validation" in r)
    )
    for command in (
        ["verify", "special/one-1"],
        ["report", "special/one-1"],
        ["chat", "special/one-1", "Hello", "--max-new-tokens", "4"],
    ):
        checked = opdcl(*command, cwd=folder)
        assert checked.returncode == 0, checked.stderr
    page = (folder / "special" / "one-1" / "report.md").read_text()
    assert "Held-out KL to site on its domain prompts" in page

    # A changed starting adapter is noticed before anything is written; --force restarts from it.
    other = (
        folder / "special" / "staff-1" / "stages" / "01-finetune" / "adapter" / "adapter_model.safetensors"
    )
    other.write_bytes(adapter(folder / "special", "site-1", "01-finetune"))
    record = other.parents[1] / "stage.json"  # as if that stage had been done again
    state = json.loads(record.read_text())
    record.write_text(json.dumps(state | {"adapter_sha256": file_hash(other)}))
    specialist = RunDir(folder / "special" / "staff-1")
    forget(specialist, other, record)
    seal_new(specialist)
    again = ("run", "special/one-1/workflow.yaml", "-o", "special/one-1", "--set", "recover.steps=2")
    before = (folder / "special" / "one-1" / "config.json").read_bytes()
    changed = opdcl(*again, cwd=folder)
    assert changed.returncode == 2
    assert "finetune changed: start" in changed.stderr
    assert (folder / "special" / "one-1" / "config.json").read_bytes() == before
    restarted = opdcl(*again, "--force", cwd=folder)
    assert restarted.returncode == 0, restarted.stderr
    assert adapter(folder / "special", "one-1", "01-finetune") == adapter(
        folder / "special", "site-1", "01-finetune"
    )


@pytest.mark.nightly
def test_self_distillation_beside_imitation(folder):
    done = opdcl("run", "self-distillation", "smoke.yaml", "--set", "seeds=[1]", "-o", "self", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "self" / "compare.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == ["imitation-1", "self-distillation-1"]
    assert adapter(folder / "self", "imitation-1", "01-finetune") != adapter(
        folder / "self", "self-distillation-1", "01-finetune"
    )
    record = json.loads(
        (folder / "self" / "self-distillation-1" / "stages" / "01-finetune" / "stage.json").read_text()
    )
    assert record["config"]["method"] == "self-distill"
    assert record["cost"]["tokens"] > 0


@pytest.mark.nightly
def test_a_reward_after_recovery(folder):
    small = {"steps": 3, "rollouts": 8, "group": 4, "max_new_tokens": 8}
    sets = [
        word
        for k, v in small.items()
        for word in ("--set", f"arms.reinforced.recover.{'reward.' if k == 'group' else ''}{k}={v}")
    ]
    done = opdcl(
        "run", "then-reinforce", "smoke.yaml", *sets, "--set", "seeds=[1]", "-o", "reward", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "reward" / "compare.json").read_text())
    assert [s["name"] for s in found["steps"]] == ["recovered-1", "reinforced-1"]
    run = folder / "reward" / "reinforced-1"
    assert adapter(folder / "reward", "reinforced-1", "01-finetune") == adapter(
        folder / "reward", "recovered-1", "02-recover"
    )
    assert adapter(folder / "reward", "reinforced-1", "02-recover") != adapter(
        folder / "reward", "recovered-1", "02-recover"
    )
    rows = [
        json.loads(line)
        for line in (run / "stages" / "02-recover" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["reward" in r for r in rows if "loss" in r] == [True, True, False]
    summary = json.loads(opdcl("report", "reward/reinforced-1", "--json", cwd=folder).stdout)
    assert any("reward of instructions_train" in note for note in summary["notes"])

    refused = opdcl(
        "run",
        "reward/reinforced-1/workflow.yaml",
        "-o",
        "other",
        "--set",
        "recover.reward.suite=instructions",
        cwd=folder,
    )
    assert refused.returncode == 2
    assert "recover.reward trains on instructions" in refused.stderr


def test_a_stronger_model_teaches_a_weaker_one(folder, tiny_model):
    make_model(folder / "strong", intermediate_size=160)
    settings = {
        "recover.teachers.strong.model": f"{{id: {folder}/strong, dtype: float32}}",
        "finetune.data": str(folder / "rows.jsonl"),
        "seeds": "[]",
        "eval.retention": "[instructions]",
        "eval.data.domain": str(folder / "rows.jsonl"),
        "recover.general_per_domain": "1",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    sizes = []
    for more in ([], ["--set", "recover.general_teacher=base"]):
        planned = opdcl(
            "run",
            "strong-to-weak",
            "smoke.yaml",
            *overrides,
            *more,
            "-o",
            "weak",
            "--dry-run",
            "--json",
            cwd=folder,
        )
        sizes.append(json.loads(planned.stdout)["memory_bytes"]["recover"])
    weights = sum(p.stat().st_size for p in (folder / "strong").glob("*.safetensors"))
    assert sizes[0] - sizes[1] == pytest.approx(weights, rel=0.01)
    done = opdcl("run", "strong-to-weak", "smoke.yaml", *overrides, "-o", "weak", cwd=folder)
    assert done.returncode == 0, done.stderr
    config = json.loads((folder / "weak" / "config.json").read_text())["workflow"]["recover"]
    assert config["teachers"]["strong"]["model"]["id"].endswith("strong")


@pytest.mark.nightly
def test_recovery_and_replay_side_by_side(folder, tmp_path):
    recipe = ROOT / "benchmarks" / "decided.yaml"
    assert len(expand(load(["quickstart", str(recipe)])[0], tmp_path)) == 4 * 8
    smoke = YAML(typ="safe").load((folder / "smoke.yaml").read_text())
    smoke["finetune"] |= {"data": str(folder / "rows.jsonl"), "epochs": 4}
    smoke |= {"seeds": [1]}
    with open(folder / "small.yaml", "w") as file:
        YAML().dump(smoke, file)
    done = opdcl("run", recipe, "small.yaml", "-o", "decided", cwd=folder)
    assert done.returncode == 0, done.stderr
    made = folder / "decided"
    arms = ("half", "start-alone", "mix-kl", "mix-kl-then")
    assert [arm["name"] for arm in json.loads((made / "compare.json").read_text())["arms"]] == [
        f"{arm}-1" for arm in arms
    ]
    plain, start, mixed, then = (adapter(made, f"{arm}-1", "01-finetune") for arm in arms)
    assert plain == start != mixed == then
    cured = [adapter(made, f"{arm}-1", "02-recover") for arm in arms if arm != "mix-kl"]
    assert len({*cured}) == 3
