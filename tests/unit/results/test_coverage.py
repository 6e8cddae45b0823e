"""The intervals cover a known truth about 95 times in 100 (benchmarks/coverage.py at a small size)."""

import json

import pytest
from helpers.command import ROOT
from helpers.scripts import load_script

from opdcl.results import intervals

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def simulation():
    """The script, as a module."""
    return load_script(ROOT / "benchmarks" / "coverage.py")


# With 2,000 draws the standard error of a share of 95 % is half a point.
@pytest.mark.parametrize(
    ("kind", "rates", "seed_sds", "size"),
    [
        ("score", [0.4], [0.01], (1, 100, None)),
        ("score", [0.02], [0.0], (1, 308, None)),
        ("score", [0.7], [0.09], (3, 120, 40)),
        ("difference", [0.41, 0.36], [0.0, 0.03], (1, 300, 100)),
        ("R", [0.5, 0.05, 0.4], [0.0, 0.02, 0.05], (3, 150, None)),
        ("D", [0.02, 0.8, 0.7], [0.0, 0.05, 0.05], (5, 300, 100)),
    ],
)
def test_an_interval_covers_the_truth_in_95_of_100_evaluations(simulation, kind, rates, seed_sds, size):
    models = tuple(simulation.Model(*pair) for pair in zip(rates, seed_sds, strict=True))
    found = simulation.cover(kind, simulation.World(models, *size), draws=2000, seed=5)
    assert 0.93 <= found["coverage"] <= 0.97
    assert found["not_computed"] < 20


def test_an_interval_without_clusters_or_with_the_normal_quantile_would_be_found_out(simulation, monkeypatch):
    world = simulation.World((simulation.Model(0.6, 0.09),), 3, 300, 100)
    monkeypatch.setattr(intervals, "student", lambda probability, freedom: 1.96)
    assert simulation.cover("score", world, draws=1000)["coverage"] < 0.91
    monkeypatch.undo()
    world = simulation.World((simulation.Model(0.6),), 1, 120, 40)
    monkeypatch.setattr(intervals, "cluster_ids", lambda n, clusters: (simulation.np.arange(n), n))
    assert simulation.cover("score", world, draws=1000)["coverage"] < 0.9


def test_recovered_is_rare_for_a_model_at_the_margin(simulation):
    rates = (0.41, 0.05, 0.41 - 0.035)
    world = simulation.World(tuple(map(simulation.Model, rates)), 1, 308)
    statuses = simulation.judge(world, draws=1000)["statuses"]
    assert 0.01 <= statuses["recovered"] <= 0.045


def test_the_record_holds_intervals_that_cover():
    record = json.loads((ROOT / "benchmarks" / "coverage.json").read_text())
    assert record["draws"] >= 2000
    cells = [cell for cell in record["intervals"] if cell["seeds"] != 2]
    assert {(cell["kind"], cell["seeds"]) for cell in cells} == {
        (kind, seeds) for kind in ("score", "difference", "R", "D") for seeds in (1, 3, 5)
    }
    # The standard error of a cell is half a point; three seeds of D are the worst.
    assert all(0.91 <= cell["coverage"] <= 0.98 for cell in cells)
    within = [0.93 <= cell["coverage"] <= 0.97 for cell in cells]
    assert sum(within) >= 0.95 * len(within)
    at_margin = [cell for cell in record["verdicts"] if cell["kind"] == "recovered at the margin"]
    assert at_margin
    assert all(cell["statuses"].get("recovered", 0) < 0.04 for cell in at_margin)
