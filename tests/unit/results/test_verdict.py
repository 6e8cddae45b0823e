"""What decides a verdict: faults, floors, groups, closeness; and the commands that it advises."""

import math
import re
import shlex
from dataclasses import replace

import pytest
import typer
from helpers.page import Page
from helpers.synthetic import STRICT, change, compared, measured, pages, write

from opdcl import api
from opdcl.cli import app
from opdcl.config.recover import RecoverConfig
from opdcl.results.intervals import Estimate
from opdcl.results.ratios import Closeness, ResponseTest
from opdcl.results.render import run_document, summarise
from opdcl.results.status import STATES
from opdcl.results.summary import Results
from opdcl.results.verdict import conclude
from opdcl.rundir.files import read_jsonl

KEPT = (0, 250, 248)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"rollouts": 8, "max_new_tokens": 192, "domain_max_new_tokens": 32}, 48),
        ({"rollouts": 8, "max_new_tokens": 64, "domain_max_new_tokens": 32}, 16),
        ({"rollouts": 8, "domain_rollouts": 24}, 24),
    ],
)
def test_the_advice_to_learn_from_more_rows_doubles_those_of_a_step(run, settings, rows):
    change(run, "recover", **settings)
    assert RecoverConfig(**settings).completions("domain") == rows
    to_do = measured(run, (320, 80, 280), 400, (0, 250, 150))["to_do"]
    assert f"recover.domain_rollouts={2 * rows} " in to_do


@pytest.mark.parametrize(
    ("passed", "n", "limit", "command"),
    [
        ((48, 12, 40), 60, 60, "opdcl eval PLACE --limit 240"),
        ((48, 12, 40), 60, None, "opdcl suites ls"),
        ((48, 12, 40), 60, 300, "opdcl suites ls"),
        ((320, 80, 200), 400, None, "opdcl recover PLACE --steps 96 -o PLACE-2"),
        ((320, 80, 80), 400, 400, "opdcl recover PLACE --steps 96 -o PLACE-2"),
    ],
)
def test_the_advice_is_a_command_without_holes(run, passed, n, limit, command):
    change(run, "recover", steps=48)
    change(run, "eval", limit=limit)
    assert command.replace("PLACE", "RUN") in measured(run, passed, n, KEPT)["to_do"]
    result = api.report(run.path)
    assert command.replace("PLACE", str(run.path)) in result.notes[-1]
    assert not re.search(r"\b(RUN|N)\b", result.notes[-1])


@pytest.mark.parametrize("passed", [(48, 12, 40), (320, 80, 320), (320, 318, 320), (80, 20, 20)])
def test_every_command_of_the_pages_is_one_that_opdcl_takes(run, passed):
    measured(run, passed, max(60, passed[0]))
    texts = pages(run) | {"terminal": "\n".join(api.report(run.path).notes)}
    del texts["README.md"]
    commands = set()
    for text in texts.values():
        commands |= {*re.findall(r"opdcl [a-z]+ [^<>`()\n;“”]*", Page(text).text.split("Reproduce")[0])}
    assert any(command.startswith("opdcl export") for command in commands)
    for command in commands:  # parsed as opdcl does, and not run
        name, *arguments = shlex.split(command, comments=True)[1:]
        found = typer.main.get_command(app).commands[name]
        if not hasattr(found, "commands"):
            found.make_context(name, arguments)


def test_each_group_has_an_r_and_a_floor_of_its_own_and_one_alone_is_not_told_apart(run):
    def fields(i):
        return {"group": "seen" if i % 2 else "unseen", "floor": i % 2 == 1 and i < 100}

    # Recovered passes all of the seen ones that base passes, and half of the unseen ones.
    recovered = {i for i in range(320) if i % 2 or i < 160}
    groups = measured(run, (320, 0, recovered), **dict.fromkeys(STATES, fields))["groups"]
    seen, unseen = groups["seen"], groups["unseen"]
    assert [(group["n"], group["floor"]) for group in (seen, unseen)] == [(200, 0.25), (200, 0)]
    assert (seen["recovery"]["value"], unseen["recovery"]["value"]) == pytest.approx((1, 0.5))
    alone = dict.fromkeys(STATES, lambda i: {"group": "seen"})
    assert measured(run, (320, 0, 320), **alone)["groups"] == {}


def spoil(run, state, suite, **rows):
    """Give prompts of a state other scores, by `pNUMBER`; without one, the metric is missing."""
    samples = read_jsonl(run.eval_samples(state, suite))
    for number, scores in rows.items():
        samples[int(number[1:])]["scores"] = scores
    write(run.eval_samples(state, suite), samples)


@pytest.mark.parametrize(
    ("scores", "fault"),
    [
        ({STRICT: math.nan}, "nan, not a number"),
        ({STRICT: math.inf}, "inf, not a number"),
        ({STRICT: None}, "missing"),
        ({STRICT: "none"}, "none, not a number"),
        ({STRICT: [True, math.nan]}, "nan, not a number"),
        ({}, "missing"),
    ],
)
@pytest.mark.parametrize("suite", ["instructions", "handbook"])
def test_a_score_that_is_not_a_number_is_a_fault(run, suite, scores, fault):
    spoil(run, "recovered", suite, p17=scores, p20=scores)
    summary = summarise(run)
    problem = f"{suite}, recovered: the score of prompt 17 is {fault} (and those of 1 more prompts)"
    assert summary["status"] == "fault"
    assert summary["verdict"].startswith(f"Fault: {problem}. ")
    assert summary["recovery" if suite == "instructions" else "domain_retention"] is None
    assert any(text.startswith(problem) for text in summary["faults"])


def test_a_floor_that_is_no_number_is_a_fault_too(run):
    spoil(run, "tuned", "instructions", p3={})
    rows = read_jsonl(run.eval_samples("base", "handbook"))
    write(run.eval_samples("base", "handbook"), [rows[0] | {"floor": math.nan}, *rows[1:]])
    told = "Fault: instructions, tuned: the score of prompt 3 is missing; 1 more of this kind. "
    assert summarise(run)["verdict"].startswith(told)


def test_a_fault_of_one_run_does_not_stop_a_comparison(three):
    spoil(three[0], "recovered", "instructions", p2={"accuracy": math.nan})
    comparison = compared(three)
    assert "the score of prompt 2 is nan" in comparison["faults"][0]
    assert comparison["arms"][0]["recovery"] is None
    assert comparison["arms"][0]["runs"][0]["status"] == "fault"
    assert comparison["arms"][1]["recovery"] is not None


def concluded(run, c, **tests):
    """Return the JSON with the verdict that follows from a run's numbers and this C."""
    near = Closeness(
        n=300,
        c=None if c is None else Estimate(c, c - 0.04, c + 0.04),
        raw=None,
        why=None,
        floor=None,
        noise=0.02,
        states={"tuned": dict.fromkeys(("distance", "domain_manner"), Estimate(0.9, 0.8, 1.0))},
        writing=tests,
        seconds=0.0,
    )
    results = Results(run)
    return run_document(conclude(replace(results.measured, closeness=near), run))


@pytest.mark.parametrize(
    ("c", "heading", "status"),
    [
        (0.87, "Partly recovered, domain kept", "partly recovered"),
        (0.99, "Recovered and kept", "recovered"),
        (0.02, "Recovery not shown, domain kept", "not shown"),
        (None, "Suite unfit for this model, domain kept", "no headroom"),
    ],
)
def test_where_the_suite_is_unfit_closeness_carries_the_verdict(run, c, heading, status):
    measured(run, (103, 30, 95), 600, KEPT, floors=(137, 0))
    summary = concluded(run, c)
    assert summary["verdict"].startswith(f"{heading}: ")
    assert (summary["retention_status"], summary["recovery"]) == (status, None)
    told = "of the distance to base is gone, counted from tuned, 0.90 nats, on 300 prompts"
    assert (told in summary["verdict"]) == (c is not None)


def test_closeness_does_not_replace_a_suite_that_has_headroom(run):
    measured(run, (340, 5, 340), 600, KEPT)
    assert concluded(run, 0.02)["status"] == "recovered and kept"


def test_sampled_answers_that_are_shorter_are_told_as_such(run):
    shorter = {"base": 80.0, "recovered": 60.8, "margin": 0.1, "shown": False, "different": True}
    measured(run, (103, 30, 95), 600, KEPT, floors=(137, 0))
    summary = concluded(run, 0.99, tokens=ResponseTest(-0.24, -0.29, -0.19, **shorter))
    assert summary["retention_status"] == "partly recovered"
    assert " But at temperature 1, its answers are 24 % shorter than base's." in summary["verdict"]
