"""The evaluation's progress, and the length of its answers."""

import pytest

from opdcl.config.evaluate import EvalConfig
from opdcl.errors import UsageError
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.stages.answers import counter
from opdcl.stages.evaluate import max_answer_tokens


class Counter:
    """A report that keeps what it is told."""

    def __init__(self):
        self.told = []

    def progress(self, done, total):
        self.told.append((done, total))

    def note(self, text): ...


def test_progress_counts_finished_answers_on_top_of_those_of_an_earlier_run():
    report = Counter()
    count = counter(report, 3, 9)
    count([Rollout(Prompt([1]), [5, 5]), Rollout(Prompt([2]), [5, 5])])
    count([Rollout(Prompt([3]), [5] * 4)])
    assert report.told == [(5, 9), (6, 9)]


def test_an_answer_has_the_shorter_of_both_limits_and_its_thought_if_the_context_has_room():
    assert max_answer_tokens(EvalConfig(), 100, 10, 512) == 100
    assert max_answer_tokens(EvalConfig(max_new_tokens=6), 100, 10, 16) == 6
    assert max_answer_tokens(EvalConfig(max_new_tokens=200, thought_tokens=50), 100, 10, 512) == 150
    with pytest.raises(UsageError, match="exceed the context of 15"):
        max_answer_tokens(EvalConfig(max_new_tokens=6), 100, 10, 15)
