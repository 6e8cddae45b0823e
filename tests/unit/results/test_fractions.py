"""Scores that are fractions claim no more than passes and failures do."""

import json

import numpy as np
import pytest
from helpers.command import ROOT
from helpers.scripts import load_script

from opdcl.results import intervals, ratios
from opdcl.results.intervals import Estimate, total
from opdcl.results.measurements import States


@pytest.fixture(scope="module")
def simulation():
    """The script that simulates evaluations, as a module."""
    return load_script(ROOT / "benchmarks" / "coverage.py")


def width(estimate: Estimate) -> float:
    return estimate.high - estimate.low


@pytest.mark.parametrize("n", [3, 6, 20, 60])
def test_one_score_that_is_a_fraction_claims_no_more_than_all_passes(n):
    base, passes = np.zeros(n), np.ones(n)
    fractions = passes.copy()
    fractions[-1] = 0.67
    assert width(intervals.difference(fractions, fractions)) >= width(intervals.difference(passes, passes))
    assert width(intervals.mean(fractions)) >= width(intervals.mean(passes))
    assert ratios.detectable_difference(fractions, fractions) >= ratios.detectable_difference(passes, passes)
    kept, kept_of_passes = (ratios.domain_retention(States(base, x, x)) for x in (fractions, passes))
    if kept_of_passes is None:
        assert kept is None
    else:
        assert kept.low <= kept_of_passes.low < 1 < kept_of_passes.high <= kept.high


@pytest.mark.parametrize("seeds", [1, 3])
def test_answers_that_score_alike_on_few_questions_are_not_shown_to_be_kept(seeds):
    base, tuned = np.array([0.0, 0.0, 0.1]), np.array([0.8, 0.9, 0.7])
    rows = (base, *(np.tile(x, (seeds, 1)) for x in (tuned, tuned)))
    assert ratios.domain_status_of(States(*rows)) == "gain not shown"
    states = States(np.tile(tuned, 2), np.tile(base, 2), np.tile(tuned, 2))
    assert not ratios.non_inferiority(states.recovered, states.base).shown
    assert ratios.status_of(states) != "recovered"


def test_sixty_equal_fractions_do_not_show_that_nothing_was_forgotten():
    passes, fractions = (np.arange(60) < 9).astype(float), np.linspace(0, 1, 60)
    statuses = {ratios.status_of(States(x, x, x)) for x in (passes, fractions)}
    assert statuses == {"too few prompts"}


@pytest.mark.parametrize("kind", ["passes", "fractions", "lengths"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_of_one_cluster_nothing_is_known(kind, seeds):
    random = np.random.default_rng(0)
    a, b = random.random((2, seeds, 600)) ** [[[1]], [[3]]]
    if kind == "passes":
        a, b = (a > 0.5) * 1.0, (b > 0.5) * 1.0
    size = 400 if kind == "lengths" else 1
    a, b, one = size * a, size * b, np.zeros(600, int)
    assert intervals.ratio(a, a, one) is None
    change, level = intervals.difference(a, b, one), intervals.mean(a, one)
    assert change.low <= -size < size <= change.high
    if kind == "lengths":
        assert level.low < 0 < 2 * size < level.high
    else:
        assert level.low < 0.01 < 0.99 < level.high
    assert ratios.detectable_difference(a, b, one) > size


def test_distances_below_one_count_no_imagined_answers():
    """A distance has no upper end that two more answers could lie at."""
    near = np.array([0.2, 0.3, 0.25, 0.4])
    assert width(intervals.ratio(near / 2, near, of_scores=False)) == pytest.approx(0)
    assert width(intervals.ratio(near / 2, near) or Estimate(0, -np.inf, np.inf)) > 1
    assert width(total([([near, -near], None)])) == 0


# Before fractions counted imagined answers, 41 to 83 % of these intervals held the truth.
@pytest.mark.parametrize("kind", ["D", "R"])
@pytest.mark.parametrize(("share", "clustered"), [(0.15, False), (1.0, True)])
def test_intervals_of_few_fractions_cover_and_do_not_call_a_loss_kept(simulation, kind, share, clustered):
    for truth in (0.85, 0.95):
        world = simulation.Fractions(kind, truth, 20, share, clustered)
        found = simulation.try_fractions(world, draws=250, seed=3)
        assert found["coverage"] >= 0.95
        assert found["no_width"] == 0
        assert truth > 0.9 or found["good_verdicts"] <= 0.025


def test_the_record_holds_intervals_of_fractions_that_cover():
    record = json.loads((ROOT / "benchmarks" / "fractions.json").read_text())
    cells = record["fractions"]
    assert record["draws"] >= 1500
    assert {(cell["kind"], cell["share"]) for cell in cells} == {
        (kind, share) for kind in ("D", "R", "score") for share in (0.15, 1.0)
    }
    # With 1,500 draws the standard error is half a point.
    assert all(cell["coverage"] >= 0.93 for cell in cells if cell["coverage"] is not None)
    assert all(cell["good_verdicts"] <= 0.025 for cell in cells if cell["truth"] == 0.85)
    # A full recovery is found once there are enough prompts.
    assert all(cell["good_verdicts"] == 1 for cell in cells if (cell["truth"], cell["prompts"]) == (1, 200))
