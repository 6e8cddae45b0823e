"""The shipped recipes whose runs build on one another, at smoke size on a two-layer model."""

import json

import pytest
from helpers.command import opdcl, sets
from helpers.synthetic import alter
from helpers.tiny import make_model, make_project

from opdcl.rundir.files import read_jsonl
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
    folder = make_project(tmp_path_factory.mktemp("lineage"), tiny_model)
    (folder / "smoke.yaml").write_text(SMOKE.format(model=tiny_model, folder=folder))
    return folder


def adapter(folder, run, stage):
    return (folder / run / "stages" / stage / "adapter" / "adapter_model.safetensors").read_bytes()


def command(folder, *words):
    """Run a command that succeeds, and return what it prints."""
    return opdcl(*words, cwd=folder, code=0).stdout


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_domains_in_a_row(folder, seeds):
    made, end = f"two-{seeds}", "-1" if seeds == 1 else ""
    words = ("run", "continual-two-domains", "smoke.yaml", "-o", made)
    words += ("--set", f"seeds={[*range(1, seeds + 1)]}")
    planned = json.loads(command(folder, *words, "--dry-run", "--json"))
    waiting = {plan["run"]: plan.get("why") for plan in planned}
    assert waiting["then-site-1"] == "after staff-1"
    assert waiting["staff-1"] is None

    command(folder, *words)
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
    assert json.loads(command(folder, *words, "--json")) == found
    runs = [f"{made}/{name}-{n}" for name in (*first, *then) for n in range(1, seeds + 1)]
    beside = json.loads(command(folder, "compare", *runs, "--json"))
    for comparison in (beside, found):  # runs in another order: their notes too
        comparison["notes"].sort()
    assert beside == found


@pytest.mark.nightly
def test_two_specialists_into_one(folder):
    command(folder, "run", "specialists-into-one", "smoke.yaml", "-o", "special")
    found = json.loads((folder / "special" / "compare.json").read_text())
    assert [(k["step"], k["teacher"]) for k in found["kept"]] == [("one", "staff"), ("one", "site")]
    assert adapter(folder / "special", "one-1", "01-finetune") == adapter(
        folder / "special", "staff-1", "01-finetune"
    )
    rows = read_jsonl(folder / "special" / "one-1" / "stages" / "02-recover" / "metrics.jsonl")
    validation = next(row["validation"] for row in rows if "validation" in row)
    assert {"domain_kl/staff", "domain_kl/site"} <= {*validation}
    command(folder, "verify", "special/one-1")
    command(folder, "report", "special/one-1")
    command(folder, "chat", "special/one-1", "Hello", "--max-new-tokens", "4")

    # A changed starting adapter is noticed before anything is written; --force restarts from it.
    other = folder / "special/staff-1/stages/01-finetune/adapter/adapter_model.safetensors"
    other.write_bytes(adapter(folder / "special", "site-1", "01-finetune"))
    record = other.parents[1] / "stage.json"  # as if that stage had been done again
    alter(record, adapter_sha256=file_hash(other))
    specialist = RunDir(folder / "special" / "staff-1")
    forget(specialist, other, record)
    seal_new(specialist)
    again = ("run", "special/one-1/workflow.yaml", "-o", "special/one-1", "--set", "recover.steps=2")
    for name in ("site", "staff"):  # a run does not decide which adapters outside it a command reads
        again += ("--set", f"recover.teachers.{name}.adapter=special/{name}-1")
    before = (folder / "special" / "one-1" / "config.json").read_bytes()
    changed = opdcl(*again, cwd=folder, code=2)
    assert "finetune changed: start" in changed.stderr
    assert (folder / "special" / "one-1" / "config.json").read_bytes() == before
    command(folder, *again, "--force")
    assert adapter(folder / "special", "one-1", "01-finetune") == adapter(
        folder / "special", "site-1", "01-finetune"
    )


@pytest.mark.nightly
def test_a_reward_after_recovery(folder):
    small = ("steps=3", "rollouts=8", "reward.group=4", "max_new_tokens=8")
    settings = sets(*(f"arms.reinforced.recover.{each}" for each in small), "seeds=[1]")
    command(folder, "run", "then-reinforce", "smoke.yaml", *settings, "-o", "reward")
    found = json.loads((folder / "reward" / "compare.json").read_text())
    assert [s["name"] for s in found["steps"]] == ["recovered-1", "reinforced-1"]
    start, end = (adapter(folder / "reward", "reinforced-1", s) for s in ("01-finetune", "02-recover"))
    assert start == adapter(folder / "reward", "recovered-1", "02-recover") != end
    rows = read_jsonl(folder / "reward" / "reinforced-1" / "stages" / "02-recover" / "metrics.jsonl")
    assert ["reward" in r for r in rows if "loss" in r] == [True, True, False]

    words = ("run", "reward/reinforced-1/workflow.yaml", "-o", "other")
    refused = opdcl(*words, "--set", "recover.reward.suite=instructions", cwd=folder, code=2)
    assert "recover.reward trains on instructions" in refused.stderr


def test_a_stronger_model_teaches_a_weaker_one(folder, tiny_model):
    make_model(folder / "strong", intermediate_size=160)
    settings = {
        "recover.teachers.strong.model": f"{{id: {folder}/strong, dtype: float32}}",
        "finetune.data": str(folder / "rows.jsonl"),
        "seeds": "[]",
        "eval.retention": "[instructions]",
        "eval.data.domain": str(folder / "rows.jsonl"),
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words, sizes = ("run", "strong-to-weak", "smoke.yaml", *overrides, "-o", "weak"), []
    for more in ([], ["--set", "recover.general_teacher=base"]):
        planned = json.loads(command(folder, *words, *more, "--dry-run", "--json"))
        sizes.append(planned["memory_bytes"]["recover"])
    weights = sum(p.stat().st_size for p in (folder / "strong").glob("*.safetensors"))
    assert sizes[0] - sizes[1] == pytest.approx(weights, rel=0.01)
    command(folder, *words)
    config = json.loads((folder / "weak" / "config.json").read_text())["workflow"]["recover"]
    assert config["teachers"]["strong"]["model"]["id"].endswith("strong")
