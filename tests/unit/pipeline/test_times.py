"""The time of a run in all holds the truth, learns from earlier runs, and knows what is left of a stage."""

import json
import re
from dataclasses import replace

import pytest
from helpers.tiny import make_project

from opdcl.config.load import load
from opdcl.pipeline.dry_run import describe
from opdcl.pipeline.forecast import memory_words
from opdcl.pipeline.job import Job
from opdcl.pipeline.records import stage_folder
from opdcl.pipeline.times import (
    FILE,
    RUNS,
    Timetable,
    Work,
    machine_key,
    read_rates,
    time_of,
    work_of,
    write_rates,
)
from opdcl.rundir.files import write_atomic
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import RunDir

WORKS = {"finetune": Work("finetune", 40_000), "recover": Work("recover", 60_000)}
WORKS |= {f"eval {i}": Work("eval", 5_000) for i in range(6)}
GPU = {"finetune": 1e-3, "recover": 1.2e-3, "eval": 1.5e-3}
CPU = {"finetune": 4e-3, "recover": 20e-3, "eval": 14e-3}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def live(monkeypatch):
    """Return a function that does work at constant rates; it yields each range, and returns what was said."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def live(works, rates, steps=50):
        said, ranges = [], []
        table = Timetable(works, "key", said.append)
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
    assert all(re.fullmatch(r"about \d+ to \d+ (s|min) in all; stage \d of 3", text) for text in said)
    truth, ranges, said = live(WORKS, rates)
    assert said[0].endswith("stage 1 of 3")
    assert len(said) == 3, "an earlier run tells it at once, and nothing is corrected"
    assert all(low <= truth <= high for low, high in ranges)
    assert all(high < 2.3 * low for low, high in ranges)


def test_more_work_takes_longer_and_slower_earlier_runs_widen_the_range():
    rates = {"finetune": [4e-3, 5e-3]}
    short, long = (time_of([Work("finetune", n), Work("eval", n)], rates) for n in (1_000, 3_000))
    assert (long[0], long[1]) == pytest.approx((3 * short[0], 3 * short[1]))
    slower = time_of([Work("finetune", 1_000), Work("eval", 1_000)], {"finetune": [4e-3, 9e-3]})
    assert slower[0] == short[0]
    assert slower[1] > short[1]
    assert time_of([Work("recover", 10)], {}) is None


def test_what_goes_on_from_earlier_work_is_not_kept_and_short_runs_say_nothing(live, cache):
    live({"recover": Work("recover", 100, is_whole=False)}, CPU)
    assert not (cache / FILE).exists()
    _, _, said = live({"recover": Work("recover", 100)}, CPU)
    assert said == []
    assert read_rates()["key"] == {"recover": [pytest.approx(CPU["recover"])]}


def test_the_last_few_runs_are_kept_and_a_damaged_file_is_ignored_and_overwritten(live, cache):
    for i in range(RUNS + 2):
        live(WORKS, CPU | {"eval": 1e-3 * (i + 1)}, steps=2)
    assert read_rates()["key"]["eval"] == pytest.approx([3e-3, 4e-3, 5e-3, 6e-3, 7e-3])
    whole = (cache / FILE).read_bytes()
    damaged = [b"", b"\xff", whole[:40], b"[1]", b'{"key": 3}', b'{"key": {"eval": []}}', b"[" * 99_999]
    damaged += [b'{"key": {"eval": [%s]}}' % number for number in (b"NaN", b"-1", b'"fast"', b"1e999")]
    for content in damaged:
        (cache / FILE).write_bytes(content)
        assert read_rates() == {}
        write_rates("key", {"eval": [2.0]})
        assert read_rates() == {"key": {"eval": [2.0]}}
    (cache / FILE).unlink()
    (cache / FILE).mkdir()
    write_rates("key", {"eval": [2.0]})  # a cache that cannot be written stops no run
    assert read_rates() == {}


@pytest.fixture
def job(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path, tiny_model))
    return Job(load(["tiny.yaml"])[0], RunDir(tmp_path / "run"))


def test_a_resumed_stage_counts_what_is_left_after_its_checkpoint(job):
    tasks = job.plan()
    whole = work_of(job, tasks)
    assert list(whole) == [task.label for task in tasks]
    assert all(work.tokens > 0 and work.is_whole for work in whole.values())
    for name, step, steps in (("finetune", 9, 12), ("recover", 2, 8)):
        folder = stage_folder(job.run, name).trainer / f"checkpoint-{step}"
        write_atomic(folder / "weights", "some")
        seal(folder)
        left = work_of(job, [replace(task, action="resume") for task in tasks if task.name == name])
        share = 1 - step / steps
        assert left == {name: Work(name, pytest.approx(whole[name].tokens * share, abs=1), False)}
    assert work_of(job, [replace(task, action="skip") for task in tasks]) == {}


def test_a_dry_run_has_a_range_from_earlier_runs_and_the_memory_that_is_here(job, cache):
    def shown(first: str) -> str:
        return next(row[2] for row in describe(job)[0] if row[0] == first)

    assert shown("time") == "unknown until a run of this model has been timed here"
    write_rates(machine_key(job.workflow.model), {"finetune": [0.2, 0.3], "eval": [0.1]})
    assert re.fullmatch(r"about [\d.]+ to [\d.]+ (min|h) on this machine, from 2 earlier runs", shown("time"))
    assert re.fullmatch(r"needs about \d\.\d GiB; this machine has \d+", shown("memory"))
    vast = memory_words({"memory_bytes": {"eval": 2**60}, "device": "cpu"})
    assert re.search(r"this machine has \d+\. Warning: it may run out of memory", vast)
    text = json.dumps(json.loads((cache / FILE).read_text()))
    assert re.fullmatch(r'[0-9a-f{}\[\]":,. ]+', text.replace("finetune", "").replace("eval", ""))
