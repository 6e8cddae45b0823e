"""The words of the verdict claim what the numbers show, and no more."""

import re
import shlex

import pytest
import typer
from helpers.page import Page
from helpers.synthetic import change, measure_fully, measure_states, pages

from opdcl import api
from opdcl.cli import app
from opdcl.config.recover import RecoverConfig
from opdcl.results.document import summarise
from opdcl.results.report_tables import terminal_rows
from opdcl.results.status import STATES
from opdcl.results.summary import Results


@pytest.fixture
def measured(run):
    """Return a function that measures the headline anew and returns the summary.

    It takes the number of passed prompts of base, tuned and recovered out of `n`; `fields` maps a state to a
    function from a prompt's number to further fields of its row.
    """

    def measure(*passed, n=400, **fields):
        for state, passes in zip(STATES, passed, strict=True):
            measure_fully(run, state, "instructions", passes, n, fields=fields.get(state, lambda i: {}))
        return summarise(run)

    return measure


def ending(share, n=400):
    return lambda i: {"ended": i < share * n}


@pytest.mark.parametrize(
    ("passed", "n", "floor", "status", "told"),
    [
        ((320, 80, 320), 400, 0, "recovered", "Recovered, |all of the lost|R = 1.00 [0.99, 1.01]|D = 0.88 ["),
        ((320, 80, 280), 400, 0, "partly recovered", "Partly recovered, domain|83 % of the lost|(R = 0.83 ["),
        ((48, 12, 40), 60, 0, "partly recovered", "78 % came back, |(60 prompts, a first look)|R = 0.78 ["),
        ((80, 20, 66), 100, 0, "partly recovered", "Partly recovered, domain"),
        ((48, 12, 12), 60, 0, "not shown", "Recovery not shown"),
        ((320, 80, 80), 400, 0, "not shown", "Recovery not shown, domain|20.0 % for recovered, R = 0.00"),
        ((320, 290, 320), 400, 0, "recovered", "Recovered, domain|no R, |7.5 points [4.|too small for"),
        ((320, 290, 305), 400, 0, "partly recovered", "Partly recovered, domain|no R, |too small for"),
        ((4, 2, 3), 6, 0, "too few prompts", "Too few prompts to tell|33.3 points|6 prompts show a drop"),
        ((320, 318, 320), 400, 0, "no measurable forgetting", "No measurable forgetting|0.5 points [-|show"),
        ((80, 20, 80), 400, 70, "no headroom", "Recovery not measured|where a content-free answer scores "),
        ((320, 80, 320), 400, 40, "recovered", "Recovered"),
        ((2, 0, 2), 8, 1, "too few prompts", "Too few prompts to tell|not shown to be above the floor; "),
        ((60, 10, 48), 400, 28, "partly recovered", "Partly recovered|less than 10 points above the floor"),
        # Tuned is 15 points below base, which 60 prompts do not show; recovered is shown to be below base.
        ((29, {*range(17, 37)}, 16), 60, 0, "not shown", "Recovery not shown|15.0 points [|may be chance"),
    ],
)  # fmt: skip
def test_the_verdict_claims_what_the_numbers_show(measured, passed, n, floor, status, told):
    """`told` is how it begins and what it says later, in order; an empty answer passes `floor` prompts."""
    fields = dict.fromkeys(STATES, lambda i: {"floor": i < floor}) if floor else {}
    summary = measured(*passed, n=n, **fields)
    assert summary["retention_status"] == status
    assert re.match(".*".join(map(re.escape, told.split("|"))), summary["verdict"]), summary["verdict"]


@pytest.mark.parametrize("recovered", [280, 80])
def test_what_to_do_next_is_said(measured, recovered):
    # D is 0.88.
    assert "keep more of the domain" in measured(320, 80, recovered)["to_do"]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"rollouts": 8, "max_new_tokens": 192, "domain_max_new_tokens": 32}, 48),
        ({"rollouts": 8, "max_new_tokens": 64, "domain_max_new_tokens": 32}, 16),
        ({"rollouts": 8, "domain_rollouts": 24}, 24),
    ],
)
def test_the_advice_to_learn_from_more_rows_doubles_those_of_a_step(run, measured, settings, rows):
    change(run, "recover", **settings)
    assert RecoverConfig(**settings).completions("domain") == rows
    assert f"recover.domain_rollouts={2 * rows} " in measured(320, 80, 280)["to_do"]


def domain_kept(run):
    measure_states(run, "handbook", (0, 400, 398), n=400)


@pytest.mark.parametrize(
    ("passed", "n", "limit", "command"),
    [
        ((48, 12, 40), 60, 60, "opdcl eval PLACE --limit 240"),
        ((48, 12, 40), 60, None, "opdcl suites ls"),
        ((48, 12, 40), 60, 300, "opdcl suites ls"),
        ((320, 80, 200), 400, None, "opdcl recover PLACE --steps 96 -o PLACE-2"),
        ((320, 80, 80), 400, 400, "opdcl eval PLACE --limit 1600; if not, take more steps: opdcl recover"),
    ],
)
def test_the_advice_is_a_command_without_holes(run, measured, passed, n, limit, command):
    domain_kept(run)
    change(run, "recover", steps=48)
    change(run, "eval", limit=limit)
    assert command.replace("PLACE", "RUN") in measured(*passed, n=n)["to_do"]
    result = api.report(run.path)
    assert command.replace("PLACE", str(run.path)) in result.sentence
    assert result.summary["further"][-1] == result.summary["to_do"]
    assert not re.search(r"\b(RUN|N)\b", result.sentence)


def test_too_few_prompts_are_as_many_in_the_advice_as_in_the_verdict(run, measured):
    domain_kept(run)
    change(run, "eval", limit=40)
    summary = measured({*range(0, 40, 2)}, {*range(0, 40, 3)}, 20, n=40)
    (told,) = re.findall(r"one of 10 points takes about (\d+);", summary["verdict"])
    assert summary["to_do"].endswith(f"opdcl eval RUN --limit {told}")


@pytest.mark.parametrize("passed", [(48, 12, 40), (320, 80, 320), (320, 318, 320), (80, 20, 20)])
def test_every_command_of_the_pages_is_one_that_opdcl_takes(run, measured, passed):
    measured(*passed, n=max(60, passed[0]))
    texts = pages(run) | {"terminal": api.report(run.path).sentence}
    commands = set()
    for name, text in texts.items():
        if name != "README.md":
            commands |= {*re.findall(r"opdcl [a-z]+ [^<>`()\n;“”]*", Page(text).text.split("Reproduce")[0])}
    assert any(command.startswith("opdcl export") for command in commands)
    for command in commands:
        parse(command)


def parse(command):
    """Parse a command as opdcl does, and run nothing."""
    name, *arguments = shlex.split(command)[1:]
    found = typer.main.get_command(app).commands[name]
    if not hasattr(found, "commands"):
        found.make_context(name, arguments)


def test_the_same_heading_stands_in_the_terminal_the_page_its_tab_the_pull_request_and_the_card(
    run, measured
):
    measured(48, 12, 40, n=60)
    result, texts = api.report(run.path), pages(run)
    heading = result.sentence.split(": ")[0]
    assert heading.endswith("(60 prompts, a first look)")
    page = texts["report.html"]
    assert re.search(r"<title>(.*?)</title>", page)[1].endswith(f": {heading}")
    assert re.search(r"<h1[^>]*>(.*?)</h1>", page)[1].replace("\N{NO-BREAK SPACE}", " ") == heading
    for text in (result.pull_request(), texts["README.md"], texts["report.md"]):
        assert text.count(heading) == 1
        assert result.summary["status"] not in text


def test_the_prompts_that_would_do_are_told_in_round_numbers(measured):
    summary = measured({*range(0, 40, 2)}, {*range(0, 40, 3)}, 20, n=40)
    exact = 40 * (summary["tests"]["detectable_drop"] / 0.1) ** 2
    (told,) = re.findall(r"one of 10 points takes about (\d+);", summary["verdict"])
    assert exact <= int(told) < exact + 10
    assert told.endswith("0")


def test_answers_that_do_not_end_and_repeat_themselves_are_not_recovered(measured):
    loops = {"recovered": lambda i: {"response": "and so we met again " * 4, "ended": False}}
    summary = measured(320, 80, 320, base=ending(1), tuned=ending(1), **loops)
    assert summary["retention_status"] == "partly recovered"
    assert summary["verdict"].startswith(
        "Score recovered, writing differs, domain partly kept: all of the lost"
    )
    ended = "Its answers still differ from base's: 0.0 % end before the token limit (base 100.0 %)"
    assert f"{ended}; 70.6 % of their 4-grams are repetitions (base 0.0 %)." in summary["further"]


def test_too_few_answers_to_show_that_they_end_as_often_do_not_count_as_recovered(measured):
    # Equally many end, but not always the same.
    other = {"recovered": lambda i: {"ended": (i // 2) % 2 == 0}}
    summary = measured(320, 80, 320, base=lambda i: {"ended": i % 2 == 0}, tuned=ending(1), **other)
    test = summary["tests"]["writing"]["ended"]
    assert (test["shown"], test["different"]) == (False, False)
    assert summary["retention_status"] == "partly recovered"
    assert summary["verdict"].startswith("Score recovered, writing uncertain, ")


def test_bad_writing_is_told_without_a_recovery_too(measured):
    summary = measured(320, 318, 320, base=ending(0.9), tuned=ending(1), recovered=ending(0.3))
    assert summary["verdict"].startswith("No measurable forgetting")
    assert "differ from base's: 30.0 % end before the token limit (base 90.0 %)" in summary["further"][0]


def grouped(i):
    return {"group": "seen" if i % 2 else "unseen"}


def test_seen_and_unseen_constraint_types_have_an_r_each(run, measured):
    everyone = dict.fromkeys(STATES, grouped)
    # Recovered passes all of the seen ones that base passes, and half of the unseen ones.
    recovered = {i for i in range(320) if i % 2 or i < 160}
    summary = measured(320, 0, recovered, **everyone)
    groups = summary["groups"]
    assert {name: group["n"] for name, group in groups.items()} == {"seen": 200, "unseen": 200}
    assert groups["seen"]["recovery"]["value"] == pytest.approx(1)
    assert groups["unseen"]["recovery"]["value"] == pytest.approx(0.5)
    page = pages(run)["report.md"]
    assert "| seen (200 prompts" in page
    assert "| unseen (200 prompts" in page


def test_one_group_alone_is_not_told_apart(measured):
    everyone = dict.fromkeys(STATES, lambda i: {"group": "seen"})
    assert measured(320, 0, 320, **everyone)["groups"] == {}


def test_each_group_has_its_own_floor(measured):
    def fields(i):
        return grouped(i) | {"floor": i % 2 == 1 and i < 100}

    groups = measured(320, 0, 320, **dict.fromkeys(STATES, fields))["groups"]
    assert (groups["seen"]["floor"], groups["unseen"]["floor"]) == (0.25, 0)


def test_the_report_names_the_smallest_drop_that_its_prompts_can_show(run, measured):
    least = measured(320, 318, 320)["tests"]["detectable_drop"]
    words = f"if it is {100 * least:.1f} points or more."
    assert all(words in pages(run)[page] for page in ("report.md", "report.html"))


def test_the_page_shows_how_answers_are_written(run, measured):
    measured(320, 80, 320, base=ending(0.48), tuned=ending(1), recovered=ending(0.18))
    page = pages(run)["report.md"]
    assert "| answers that end (instructions, greedy) | 48.0 % [" in page
    assert "| answers that end, recovered - base | -30.0 |" in page
    assert "answers that end" in Page(pages(run)["report.html"]).text
    rows = terminal_rows(Results(run).summary)
    (cells,) = [row for row in rows if row[0] == "answers that end"]
    assert [cell.split("\n")[0] for cell in cells[3:]] == ["48.0 %", "100.0 %", "18.0 %"]
    assert [row[0] for row in rows].count("answers that end") == 1


@pytest.mark.parametrize("floor", [0, 100])
def test_r_counts_from_the_floor_where_that_is_higher(run, measured, floor):
    states = dict.fromkeys(STATES, lambda i: {"floor": i < floor})
    summary = measured(320, 40, 280, **states)
    assert summary["recovery"]["value"] == pytest.approx((280 - max(floor, 40)) / (320 - max(floor, 40)))
    assert summary["recovery_raw"]["value"] == pytest.approx((280 - 40) / (320 - 40))
    assert [row[0] for row in terminal_rows(Results(run).summary) if row[0][0] in "RD"] == ["R", "D"]


def test_a_changed_script_has_a_line_of_its_own(run, measured):
    def russian(i):
        return {"response": "Пиши коротко." if i < 100 else "Keep it short."}

    measured(320, 80, 320)
    assert "prompt's script" not in pages(run)["report.md"]
    measured(320, 80, 320, recovered=russian)
    line = next(line for line in pages(run)["report.md"].splitlines() if "prompt's script" in line)
    assert line.split(" | ")[-1].startswith("75.0 %")
