"""The evaluation's progress."""

from opdcl.sampling.rollout import Rollout
from opdcl.stages.evaluate import _progress


class Counter:
    """A report that keeps what it is told."""

    def __init__(self):
        self.told = []

    def progress(self, done, total, **values):
        self.told.append((done, total))

    def note(self, text): ...


def test_progress_counts_finished_answers_on_top_of_those_of_an_earlier_run():
    report = Counter()
    count = _progress(report, 3, 9)
    count([Rollout([1]), Rollout([2])])
    count([Rollout([3])])
    assert report.told == [(5, 9), (6, 9)]
