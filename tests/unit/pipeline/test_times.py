"""The time of a run holds the truth, and knows what is left of a stage."""

import re
from dataclasses import replace

import pytest

from opdcl.config.load import load
from opdcl.pipeline.dry_run import describe
from opdcl.pipeline.forecast import Timetable, Work, memory_words, time_of, work_of
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import stage_folder
from opdcl.rundir.files import write_atomic
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import RunDir

WORKS = {"finetune": Work("finetune", 40_000), "recover": Work("recover", 60_000)}
WORKS |= {f"eval {i}": Work("eval", 5_000) for i in range(6)}
GPU = {"finetune": 1e-3, "recover": 1.2e-3, "eval": 1.5e-3}
CPU = {"finetune": 4e-3, "recover": 20e-3, "eval": 14e-3}


@pytest.fixture
def live(monkeypatch):
    """Return a function that does work at constant rates; it yields each range, and returns what was said."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def live(works, rates, steps=50):
        said, ranges = [], []
        table = Timetable(works, said.append)
        started = clock[0]
        for label, work in works.items():
            with table.timed(label):
                for step in range(1, steps + 1):
                    clock[0] += work.tokens * rates[work.kind] / steps
                    table.progress(step, steps)
                    ranges.append(table.time_in_all())
        return clock[0] - started, ranges, said

    return live


@pytest.mark.parametrize("rates", [GPU, CPU])
def test_every_range_holds_the_truth_at_constant_rates_and_is_said_once_a_stage_and_when_wrong(live, rates):
    truth, ranges, said = live(WORKS, rates)
    known = [each for each in ranges if each]
    assert ranges.index(known[0]) == 4, "after some steps of the first stage"
    assert all(low <= truth <= high for low, high in known)
    assert [text.rpartition("; ")[2] for text in said if "stage 1 of 3" in text] == ["stage 1 of 3"]
    assert 3 <= len(said) <= 6
    assert all(re.fullmatch(r"about \d+ to \d+ (s|min) for this run; stage \d of 3", text) for text in said)


def test_more_work_takes_longer():
    rates = {"finetune": 4e-3}
    short, long = (time_of([Work("finetune", n), Work("eval", n)], rates) for n in (1_000, 3_000))
    assert (long[0], long[1]) == pytest.approx((3 * short[0], 3 * short[1]))
    assert time_of([Work("recover", 10)], {}) is None


def test_short_runs_say_nothing(live):
    _, _, said = live({"recover": Work("recover", 100)}, CPU)
    assert said == []


@pytest.fixture
def job(tiny_folder):
    return Job(load(["tiny.yaml"])[0], RunDir(tiny_folder / "run"))


def test_a_resumed_stage_counts_what_is_left_after_its_checkpoint(job):
    tasks = job.plan()
    whole = work_of(job, tasks)
    assert list(whole) == [task.label for task in tasks]
    assert all(work.tokens > 0 for work in whole.values())
    for name, step, steps in (("finetune", 9, 12), ("recover", 2, 8)):
        folder = stage_folder(job.run, name).trainer / f"checkpoint-{step}"
        write_atomic(folder / "weights", "some")
        seal(folder)
        left = work_of(job, [replace(task, action="resume") for task in tasks if task.name == name])
        share = 1 - step / steps
        assert left == {name: Work(name, pytest.approx(whole[name].tokens * share, abs=1))}
    assert work_of(job, [replace(task, action="skip") for task in tasks]) == {}


def test_a_dry_run_has_the_memory_that_is_here(job):
    words = next(row[2] for row in describe(job)[0] if row[0] == "memory")
    assert re.fullmatch(r"needs about \d\.\d GiB; this machine has \d+", words)
    vast = memory_words({"memory_bytes": {"eval": 2**60}, "device": "cpu"})
    assert re.search(r"this machine has \d+\. Warning: it may run out of memory", vast)
