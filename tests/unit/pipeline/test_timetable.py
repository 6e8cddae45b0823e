"""Times in real runs of the tiny model: after three steps, before a second run, with a damaged history."""

import json
import re

import pytest
import torch
from helpers.command import opdcl
from helpers.tiny import make_project

from opdcl.config.load import load
from opdcl.console import Output
from opdcl.pipeline import earlier_times
from opdcl.pipeline.job import Job
from opdcl.pipeline.timetable import Timetable
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir

LEFT = re.compile(r"^(\w+) (\d+)/(\d+) .*left \d+ (?:s|min|h), all stages \d+ (?:s|min|h)$", re.M)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A project, and a cache without history."""
    folder = make_project(tmp_path_factory.mktemp("times"), tiny_model)
    (folder / "cache").mkdir()
    return folder


@pytest.fixture
def command(folder):
    def command(*words, cache="cache"):
        done = opdcl(*words, cwd=folder, env={"OPDCL_CACHE": str(folder / cache)})
        assert done.returncode == 0, done.stderr
        return done

    return command


@pytest.fixture
def plan(command):
    """Return a function that returns a dry run's data."""
    return lambda *words, **options: json.loads(
        command("run", "tiny.yaml", "-o", "other", "--dry-run", "--json", *words, **options).stdout
    )


@pytest.fixture(scope="module")
def first(folder):
    """The first run on this machine, after a dry run that could not know its time."""
    env = {"OPDCL_CACHE": str(folder / "cache")}
    dry = opdcl("run", "tiny.yaml", "-o", "run", "--dry-run", "--json", cwd=folder, env=env)
    done = opdcl("run", "tiny.yaml", "-o", "run", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(dry.stdout), done.stderr


def test_a_machine_without_history_is_silent_and_says_why(first):
    dry, log = first
    assert dry["seconds"] is None
    assert "no earlier run has measured this on this machine" in dry["seconds_from"]
    assert "once three steps are done" in dry["seconds_from"]
    assert {"eval_seconds", "flops_per_second"}.isdisjoint(dry)
    assert "the time left is shown once three steps are done; in run" in log.splitlines()[0]


def test_after_three_steps_the_log_says_the_time_left_of_stage_and_run(first):
    found = LEFT.findall(first[1])
    assert ("finetune", "3", "12") in found
    assert ("recover", "3", "8") in found


def test_a_stage_keeps_what_it_announced_and_what_it_took(first, folder):
    for name in ("01-finetune", "02-recover"):
        announced = read_json(folder / "run" / "stages" / name / "stage.json")["announced"]
        assert 0 < announced["stage"] <= announced["all"]
        assert announced["took"] > 0
        assert announced["at"] > 0


def test_a_second_run_of_the_kind_is_announced_by_what_the_first_took(first, folder, plan, command):
    made = plan()
    taken = read_json(folder / "run" / "manifest.json")["seconds"]
    assert "measured in earlier runs on this machine" in made["seconds_from"]
    assert 0 < made["seconds"] < 3 * taken
    shown = command("run", "tiny.yaml", "-o", "other", "--dry-run").stdout
    assert re.search(r"finetune +run +12 steps, about [\d.]+ GiB, about \d+ s; not started", shown)


def test_more_work_of_a_known_kind_takes_longer(first, plan):
    longer = plan("--set", "finetune.epochs=4000", "--set", "recover.steps=8000")["seconds"]
    assert longer > 20 * plan()["seconds"]


@pytest.mark.parametrize(
    "setting", ["finetune.batch_size=1", "recover.max_new_tokens=64", "eval.max_new_tokens=90"]
)
def test_other_work_than_was_measured_is_not_announced(first, plan, setting):
    made = plan("--set", setting)
    assert made["seconds"] is None
    assert "no earlier run has measured " in made["seconds_from"]


def test_other_conditions_are_another_machine(first, plan, monkeypatch):
    assert plan()["seconds"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert plan()["seconds"] is None
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(earlier_times, "machine", lambda: {"name": "Another Processor"})
    made = plan()
    assert made["seconds"] is None
    assert "Another Processor" in made["seconds_from"]


def test_what_is_done_takes_no_time(first, folder, command):
    words = ["run", "tiny.yaml", "-o", "run", "--dry-run", "--json"]
    assert json.loads(command(*words).stdout)["seconds"] == 0
    redone = [*words, "--set", "eval.limit=5"]
    part = json.loads(command(*redone).stdout)
    assert {task["action"] for task in part["tasks"] if task["stage"] != "eval"} == {"skip"}


def timetable(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OPDCL_CACHE", str(folder / "cache"))
    job = Job.of(load(["tiny.yaml"])[0], RunDir(folder / "new"))
    return Timetable(job, job.plan())


def test_the_tasks_after_the_last_one_take_no_time_and_each_earlier_one_adds(first, folder, monkeypatch):
    times = timetable(folder, monkeypatch)
    after = [times.after(task) for task in times.tasks]
    assert after[-1] == 0
    assert after == sorted(after, reverse=True)
    assert times.announced() == pytest.approx(after[0] + times.seconds(times.tasks[0]))


def test_a_probe_tells_what_no_earlier_run_has_told(folder, loaded, monkeypatch):
    times = timetable(folder, monkeypatch)
    times.costs.known.clear()
    assert times.after(times.tasks[0]) is None
    times.probe(loaded)
    times.costs.add("train ~256", 100, 1.0)
    assert times.after(times.tasks[0]) > 0
    assert times.announced() is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"a": 1}', "null", '{"MACHINE": 3}', '{"MACHINE": {"MODEL": []}}', "\x00\xff"],
)
def test_a_history_that_cannot_be_read_is_passed_over_and_replaced(tmp_path, monkeypatch, content):
    monkeypatch.setenv("OPDCL_CACHE", str(tmp_path))
    earlier_times.times_file().write_text(
        content.replace("MACHINE", "m").replace("MODEL", "x"), encoding="utf-8"
    )
    assert earlier_times.read_times("m", "x") == ({}, "")
    earlier_times.save_times("m", "x", {"step": 0.5})
    assert earlier_times.read_times("m", "x")[0] == {"step": 0.5}


def test_numbers_that_are_none_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCL_CACHE", str(tmp_path))
    entry = {"step": 0.5, "read": "fast", "write": -1, "train": True, "learn": None, "measure": float("nan")}
    earlier_times.times_file().write_text(json.dumps({"m": {"x": entry}}))
    assert earlier_times.read_times("m", "x")[0] == {"step": 0.5}


def test_a_later_run_keeps_the_units_that_it_did_not_measure(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCL_CACHE", str(tmp_path))
    earlier_times.save_times("m", "x", {"step": 0.5, "read": 1.0})
    earlier_times.save_times("m", "x", {"step": 0.25})
    earlier_times.save_times("m", "y", {"step": 9.0})
    assert earlier_times.read_times("m", "x")[0] == {"step": 0.25, "read": 1.0}


def test_a_history_that_cannot_be_written_ends_no_run(folder, command):
    blocked = folder / "blocked"
    (blocked / "times.json").mkdir(parents=True)  # neither readable nor replaceable
    words = ["run", "tiny.yaml", "-o", "blocked-run", "--set", "recover=null", "--set", "eval=null"]
    assert "left" in command(*words, cache="blocked").stderr
    assert (blocked / "times.json").is_dir()


def test_the_terminal_shows_the_time_left(capsys):
    with Output().stage("recover", lambda: 600.0) as line:
        line.progress(1, 9)
        line.progress(3, 9, left=120.0)
        line.progress(4, 9, left=100.0)
        line.progress(9, 9, left=0.0)
    assert capsys.readouterr().err.splitlines() == [
        "recover 1/9",
        "recover 3/9 left 2 min, all stages 12 min",
        "recover 9/9",
    ]
    for after, text in ((0.0, "left 2 min"), (None, "left 2 min, all stages not known yet")):
        with Output().stage("recover", lambda after=after: after) as line:
            line.progress(3, 9, left=120.0)
        assert capsys.readouterr().err == f"recover 3/9 {text}\n"
