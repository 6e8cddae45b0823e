"""The evaluation's progress, and the length of its answers."""

import math
import time

import pytest

from opdcl.config.evaluate import EvalConfig
from opdcl.errors import UsageError
from opdcl.model.costs import Costs
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.stages.evaluate import _progress, max_answer_tokens
from opdcl.stages.pace import Pace


class Counter:
    """A report that keeps what it is told."""

    def __init__(self):
        self.told, self.left = [], []

    def progress(self, done, total, left=None):
        self.told.append((done, total))
        self.left.append(left)

    def note(self, text): ...


def test_progress_counts_finished_answers_on_top_of_those_of_an_earlier_run():
    report, costs = Counter(), Costs({"step": 1.0, "write": 0.0, "answer suite base 8": 4.0})
    count = _progress(report, 3, 9, Pace(costs, "suite base", (8, [1] * 6), []))
    costs.running = 6, 4
    count([Rollout(Prompt([1]), [5, 5]), Rollout(Prompt([2]), [5, 5])])
    costs.running = 4, 3
    count([Rollout(Prompt([3]), [5] * 4)])
    costs.running = 0, 0
    count([Rollout(Prompt([3]), [5] * 8)] * 3)
    assert report.told == [(5, 9), (6, 9), (9, 9)]
    first, second, last = report.left
    assert 0 < second <= first <= 6
    assert last == 0


def test_the_batches_to_come_are_counted_with_the_length_of_the_answers_so_far():
    costs = Costs({"step": 1.0, "write": 0.0, "read": 0.0})
    alone, followed = (Pace(costs, "suite base", (8, [1] * 3), later) for later in ([], [(64, [1] * 5)]))
    for pace, steps in ((alone, 0), (followed, 4 * (1 + math.log(5)))):
        costs.running = 0, 0
        assert pace.left([Rollout(Prompt([1]), [5] * 4)] * 3) == pytest.approx(steps)


def test_an_engine_that_does_not_tell_its_steps_is_counted_by_answers():
    pace = Pace(Costs(), "suite base", (8, [1] * 4), [])
    time.sleep(0.05)
    assert pace.left([Rollout(Prompt([1]), [5])]) == pytest.approx(0.15, rel=0.5)


def test_an_answer_has_the_shorter_of_both_limits_and_its_thought_if_the_context_has_room():
    assert max_answer_tokens(EvalConfig(), 100, 10, 512) == 100
    assert max_answer_tokens(EvalConfig(max_new_tokens=6), 100, 10, 16) == 6
    assert max_answer_tokens(EvalConfig(max_new_tokens=200, thought_tokens=50), 100, 10, 512) == 150
    with pytest.raises(UsageError, match="exceed the context of 15"):
        max_answer_tokens(EvalConfig(max_new_tokens=6), 100, 10, 15)
