"""Synthetic runs whose every number is known beforehand."""

import pytest
from helpers.synthetic import BASE, TUNED, measure, measure_states, workflow, write

from opdcl.rundir.layout import RunDir


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a run; it passes `retention` and `domain` prompts after recovery."""

    def made(name: str, retention: int | None, domain: int | None, tuned: dict = TUNED, **recover) -> RunDir:
        run = RunDir(tmp_path / name)
        write(run.config, {"workflow": workflow(**recover), "origins": {}})
        measure(run, "base", BASE)
        measure(run, "tuned", tuned)
        passes = {"instructions": retention, "handbook": domain}
        measure(run, "recovered", {suite: range(k) for suite, k in passes.items() if k is not None})
        return run

    return made


@pytest.fixture
def three(make) -> list[RunDir]:
    """The method, a baseline that trains and one that only scales, all from one tuned adapter."""
    general = make("general", 28, 12, method="general")
    return [make("ours", 28, 32), general, make("scaled", 20, 20, method="interpolate")]


@pytest.fixture
def empty(tmp_path) -> RunDir:
    """A run that was planned but not started."""
    run = RunDir(tmp_path / "quickstart")
    evaluation = {"retention": ["instructions"], "domain": ["handbook"], "control": ["neighbours"]}
    sections = {"finetune": {"seed": 11}, "recover": {"seed": 12}}
    sections |= {"eval": evaluation, "model": {"id": "smollm2-135m"}}
    write(run.config, {"workflow": {"name": "quickstart", **sections}, "origins": {}})
    return run


@pytest.fixture
def run(empty) -> RunDir:
    """A whole run: retention 32, 8 and 28 of 40; domain 4, 36 and 32 of 40."""
    measure_states(empty, "instructions", (32, 8, 28))
    measure_states(empty, "handbook", (4, 36, 32))
    cost = {"seconds": 451.0, "tokens": 123456, "peak_memory_bytes": 3 * 2**30, "steps": 3}
    for index, stage in enumerate(("finetune", "recover"), 1):
        write(empty.stage(index, stage).record, {"stage": stage, "status": "done", "cost": cost})
    manifest = {
        "created": "2026-01-02T03:04:05Z",
        "opdcl": "0.1.0",
        "command": "opdcl run quickstart",
        "versions": {"torch": "2.13.0"},
        "device": {"name": "two cores", "cores": 2, "memory_bytes": 8 * 2**30, "dtype": "bfloat16"},
        "base": {
            "id": "smollm2-135m",
            "revision": None,
            "license": "apache-2.0",
            "fingerprint_before": "feedbeef",
            "fingerprint_after": "feedbeef",
        },
        "adapters": {
            "tuned": {"path": "stages/01-finetune/adapter", "sha256": "tuned-hash"},
            "recovered": {"path": "stages/02-recover/adapter", "sha256": "recovered-hash"},
        },
        "seconds": 1234,
    }
    write(empty.manifest, manifest)
    return empty


@pytest.fixture
def trained(run) -> RunDir:
    """The same run with training metrics, which take time to plot."""
    write(run.stage(1, "finetune").metrics, [{"step": s, "loss": 3.0 / s} for s in range(1, 30)])
    training = [
        {"step": s, "stream": "domain" if s % 4 == 0 else "general", "loss": 1 / s, "kl": 1 / s}
        for s in range(1, 17)
    ]
    checks = [
        {"step": s, "validation": {"general_kl": 1 / (1 + s), "domain_kl": s / 1000, "best": s == 16}}
        for s in (0, 8, 16)
    ]
    write(run.stage(2, "recover").metrics, training + checks)
    return run
