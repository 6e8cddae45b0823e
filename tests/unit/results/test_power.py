"""What a run can show, said before it starts: against simulated evaluations with the assumed spread."""

import numpy as np
import pytest

from opdcl.results import power, stats
from opdcl.results.power import DISAGREEMENT, SEED_SD


def repeated(prompts, seeds, gap, draws, rng):
    """Yield scores of base and recovered that differ as a plan assumes, recovered `gap` below base."""
    for _ in range(draws):
        luck = rng.normal(0, SEED_SD, seeds) if seeds > 1 else np.zeros(1)
        base = (rng.random(prompts) < 0.5).astype(float)
        # Where the two differ, one of them is right; all seeds share which prompts are hard for them.
        draw = rng.random(prompts)
        rows = []
        for shift in gap - luck:
            lost, gained = (DISAGREEMENT + shift) / 2, (DISAGREEMENT - shift) / 2
            changes = np.where(draw < lost / 0.5, -1.0, 0.0) * base
            changes += np.where(draw < gained / 0.5, 1.0, 0.0) * (1 - base)
            rows.append(base + changes)
        yield base, np.array(rows)


@pytest.mark.parametrize(("prompts", "seeds"), [(600, 1), (1600, 1), (600, 3)])
def test_a_plan_says_how_often_a_full_recovery_is_shown(prompts, seeds):
    rng = np.random.default_rng(0)
    plan = power.planned(prompts, seeds)
    pairs = list(repeated(prompts, seeds, 0.0, 500, rng))
    shown = np.mean([stats.non_inferiority(recovered, base).shown for base, recovered in pairs])
    # Three seeds say little about their spread, and where it seems small, more is shown.
    assert shown == pytest.approx(plan.recovered_shown, abs=0.07 if seeds == 1 else 0.12)


def test_a_plan_names_the_difference_that_is_found_four_times_in_five():
    rng = np.random.default_rng(1)
    plan = power.planned(600)
    pairs = repeated(600, 1, plan.detectable, 500, rng)
    found = np.mean([stats.difference(recovered, base).high < 0 for base, recovered in pairs])
    assert found == pytest.approx(0.8, abs=0.05)


def test_more_prompts_make_recovered_possible_for_one_adapter_and_not_for_the_method():
    assert power.planned(600).recovered_shown < 0.5
    assert power.planned(1600).recovered_shown == pytest.approx(0.8, abs=0.01)
    assert power.planned(10**7, seeds=3).half_width == pytest.approx(0.0447, abs=1e-4)
    assert power.planned(10**7, seeds=3).recovered_shown < 0.2
    assert power.planned(10**7, seeds=5).recovered_shown > 0.9


def test_a_plan_is_two_lines_that_tell_the_two_questions_apart():
    (_, adapter, shown), (_, method, method_shown) = power.plan_rows(600)
    assert (adapter, method) == ("this adapter", "the method")
    assert shown == (
        "600 prompts: finds 5.7 points, knows R to ±0.08, hardly shows a full recovery as recovered (40%)"
    )
    assert method_shown.startswith("1 seed: nothing; 3 seeds: finds ")
    assert "±4.5 points of it by seeds; if answers differ on 25% of prompts" in method_shown
    assert power.plan_rows(600, 5)[1][2].startswith("5 seeds: finds ")
    assert "hardly" not in power.plan_rows(3000)[0][2]
