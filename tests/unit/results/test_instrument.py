"""What the instrument itself does: base against itself, and suites on which base has no room."""

import json

import numpy as np
import pytest
from helpers.synthetic import STATES, alter, measure_states, rewrite_samples, write

from opdcl.results.intervals import difference
from opdcl.results.summary import Results
from opdcl.rundir.files import read_jsonl


def notes_on(run, suite: str) -> list[str]:
    return [note for note in Results(run).summary.notes if note.startswith(f"{suite}: ")]


@pytest.mark.parametrize("passed", [30, 36, 38, 40])
def test_a_suite_at_its_ceiling_says_what_it_cannot_show(run, passed):
    measure_states(run, "instructions", (passed, 8, 28))
    said = [note for note in notes_on(run, "instructions") if "a loss can be seen, a gain cannot" in note]
    assert bool(said) == (passed >= 38)
    if said:
        assert f"base scores {100 * passed / 40:.1f} %" in said[0]
    measure_states(run, "handbook", (passed, 40, 40))
    assert any("for the fine-tune to learn" in note for note in notes_on(run, "handbook")) == (passed >= 38)


def test_base_against_itself_is_told_where_its_answers_were_drawn_twice(run):
    rows = read_jsonl(run.eval_samples("base", "instructions"))
    metric = json.loads(run.eval_result("base", "instructions").read_text())["metric"]
    first = np.array([row["scores"][metric] for row in rows], float)
    second = np.roll(first, 3)
    for row, score in zip(rows, second, strict=True):
        row["again"] = bool(score)
    assert notes_on(run, "instructions") == []
    rewrite_samples(run, "base", "instructions", rows)
    apart = difference(second, first)
    noise = 100 * (apart.high - apart.low) / 2
    assert f"instructions: base against itself, with other draws: ±{noise:.1f} points." in notes_on(
        run, "instructions"
    )


@pytest.mark.parametrize("scores", [(0.0, 0.75), (0.75, 0.0), (0.0, 0.0), (0.5, 0.75)])
def test_a_filter_by_which_base_scores_nothing_is_said(run, scores):
    strict, flexible = "exact_match,strict-match", "exact_match,flexible-extract"
    for state in STATES:
        rows = read_jsonl(run.eval_samples(state, "instructions"))
        for i, row in enumerate(rows):
            row["scores"] = {strict: i < scores[0] * len(rows), flexible: i < scores[1] * len(rows)}
        write(run.eval_samples(state, "instructions"), rows)
        means = dict(zip((strict, flexible), scores, strict=True))
        alter(run.eval_result(state, "instructions"), metric=strict, metrics=means)
    said = [note for note in notes_on(run, "instructions") if "strict-match is used" in note]
    assert bool(said) == (min(scores) == 0 < max(scores))
    if said:
        for score, name in zip(scores, ("strict-match", "flexible-extract"), strict=True):
            assert f"{100 * score:.1f} % by the filter {name}" in said[0]
