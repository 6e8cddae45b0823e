"""What runs and comparisons show, in every form, as approved text; and that no word claims too much.

    OPDCL_APPROVE=1 .venv/bin/python -m pytest tests/unit/results/test_approved.py    writes the texts anew

Read the difference before you commit it: the texts are what users see.
"""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers import shown
from helpers.command import ROOT
from helpers.synthetic import STRICT, alter, change, measure, measure_states, measured, with_faults, write
from matplotlib.figure import Figure

from opdcl import api
from opdcl.results.compare import MOST_RUNS
from opdcl.results.render import markdown
from opdcl.results.status import STATES, Domain, Retention
from opdcl.results.verdict import DOMAIN_HEADINGS, OUTCOMES
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

APPROVED = Path(__file__).parent / "approved"

KEPT = (0, 250, 248)


# Name -> what is measured of the fixture `run`, whose domain score falls from 36 to 32 of 40 in the recovery.
VERDICTS = {
    "recovered": ((320, 80, 320),),
    "partly recovered": ((320, 80, 280),),
    "a first look": ((48, 12, 40), 60),
    "not shown, few prompts": ((48, 12, 12), 60),
    "recovered, drop too small for R": ((320, 290, 320),),
    "partly recovered, drop too small for R": ((320, 290, 305),),
    "too few prompts": (({*range(0, 40, 2)}, {*range(0, 40, 3)}, 20), 40),
    "no measurable forgetting": ((320, 318, 320),),
    "no headroom": ((80, 20, 80), 400, (), 0, (70, 0)),
    "base little above the floor": ((60, 10, 48), 400, (), 0, (28, 0)),
    # Tuned is 15 points below base, which 60 prompts do not show; recovered is shown to be below base.
    "below base, tuned may be": ((29, {*range(17, 37)}, 16), 60),
    "recovered and kept": ((340, 5, 340), 600, KEPT),
    "kept, not shown": ((340, 5, 5), 600, KEPT),
    "domain partly kept": ((340, 5, 340), 600, (0, 250, 150)),
    "domain lost": ((340, 5, 340), 600, (0, 250, 0)),  # as if the adapter were deleted
    "domain not shown": ((340, 5, 340), 600, (2, 10, 4), 12),
    "domain gain not shown": ((340, 5, 340), 600, (57, 90, 88), 300, (0, 120)),  # tuned is at the floor
    "counted from the floor": ((400, 50, 120), 600, KEPT, 300, (180, 0)),
    "tuned above base": ((300, 360, 350), 600, KEPT),
    "harm": ((340, 340, 200), 600, KEPT),
    "nine prompts": ((8, 1, 7), 9, (0, 7, 6), 9),
}


def loops(run: RunDir) -> None:
    looped = {"response": "and so we met again " * 4, "ended": False}
    measured(run, (320, 80, 320), base=lambda i: {"ended": True}, recovered=lambda i: looped)


def ends_elsewhere(run: RunDir) -> None:
    """Equally many answers of base and recovered end, but not to the same prompts."""
    other = {"recovered": lambda i: {"ended": (i // 2) % 2 == 0}}
    measured(run, (320, 80, 320), base=lambda i: {"ended": i % 2 == 0}, **other)


def shorter(run: RunDir) -> None:
    short = {"recovered": lambda i: {"tokens": round(0.76 * (60 + i % 41))}}
    measured(run, (340, 5, 340), 600, KEPT, base=lambda i: {"tokens": 60 + i % 41}, **short)


def seen_and_unseen(run: RunDir) -> None:
    grouped = dict.fromkeys(STATES, lambda i: {"group": "seen" if i % 2 else "unseen"})
    measured(run, (320, 0, {i for i in range(320) if i % 2 or i < 160}), **grouped)


def another_script(run: RunDir) -> None:
    measured(run, (320, 80, 320), recovered=lambda i: {"response": "Пиши коротко." if i < 100 else "Short."})


def before_recovery(run: RunDir) -> None:
    shutil.rmtree(run.stage(2, "recover").path)
    shutil.rmtree(run.evals / "recovered")
    alter(run.manifest, adapters={"tuned": {"path": "stages/01-finetune/adapter", "sha256": "tuned-hash"}})


def nothing_forgotten(run: RunDir) -> None:
    before_recovery(run)
    measured(run, (320, 318))


def few_prompts(run: RunDir) -> None:
    """Half of the score is gone, on five prompts, and the rows are not learned."""
    before_recovery(run)
    change(run, "eval", limit=5)
    measured(run, (2, 1), 5)


def not_learned(run: RunDir) -> None:
    before_recovery(run)
    write(run.workflow, {})
    change(run, "finetune", epochs=5)
    measured(run, (320, 80), 400, (6, 9))


def trained_only(run: RunDir) -> None:
    before_recovery(run)
    shutil.rmtree(run.evals)
    change(run, "eval", retention=[], domain=[], control=[])
    write(run.stage(1, "finetune").metrics, [{"step": s, "loss": 3.0 / s} for s in range(1, 30)])


def base_alone(run: RunDir) -> None:
    alter(run.config, workflow={"finetune": None, "recover": None})
    alter(run.manifest, adapters={})
    for folder in (run.path / "stages", run.evals / "tuned", run.evals / "recovered"):
        shutil.rmtree(folder)


def no_number(run: RunDir) -> None:
    rows = read_jsonl(run.eval_samples("recovered", "instructions"))
    rows[17]["scores"][STRICT] = rows[20]["scores"][STRICT] = math.nan
    write(run.eval_samples("recovered", "instructions"), rows)


def with_metrics(run: RunDir) -> None:
    """Write a recovery's metrics: a start elsewhere, held-out KL, an alarm; and what it cost."""
    tuned = {"general_kl": 2.0, "own_kl": 4.0, "domain_kl": 0.0, "own_length": 87.4, "own_ended": 0.625}
    start = {"alpha": 0.4, "validation": tuned | {"general_kl": 0.5, "domain_kl": 1.6}, "score": 2.6}
    base = {"general_kl": 0.0, "own_length": 120.0, "own_ended": 0.5}
    alarm = {"sign": "repetition", "value": 0.5, "bound": 0.2, "action": "rate halved"}
    end = tuned | {"general_kl": 0.25, "best": True, "missed_ends": 0.61, "domain_gap_closed": 0.61}
    step = {"step": 1, "stream": "general", "tokens": 500}
    rows = [
        {"step": 0, "validation": tuned | {"best": False}, "start": start, "base": base},
        step | {"loss": 1.0, "kl": 1.0, "mismatch": 0.01, "reward": 0.5},
        {"step": 8, "validation": end, "health": alarm},
    ]
    write(run.stage(2, "recover").metrics, rows)
    change(run, "recover", reward={"suite": "arithmetic"})
    graded = {"general": {"teacher": {"answers": 64, "tokens": 5560}}}
    alter(run.stage(2, "recover").record, cost={"graded": graded, "parts": {"sampling": 61.0}})


def on_other_weights(run: RunDir) -> None:
    """Start from an adapter, on a quantized base, with rows and commands of the user's own."""
    alter(run.config, workflow={"start": "someone/adapter"})
    change(run, "model", quantization="4bit")
    change(run, "finetune", data="/home/me/secret/rows.jsonl")
    change(run, "recover", general="replies", domain="/home/me/secret/prompts.jsonl", steps=48, rollouts=8)
    change(run, "eval", limit=60)
    alter(run.stage(1, "finetune").record, rows=1840, tuned_model={"id": "/home/me/secret/merged"})
    alter(run.manifest, base={"parameters": 134_515_008}, commands=["opdcl finetune", "opdcl recover"])
    measure_states(run, "neighbours", (30, 10, 25))


def with_constraints(run: RunDir) -> None:
    """Name the constraints that tuned violates; answers are long, and one prompt is a conversation."""
    rows = read_jsonl(run.eval_samples("tuned", "instructions"))
    for row in rows:
        row |= {"constraints": ["Use *two* sentences.", "Say <why>."], "response": "word " * 400}
    write(run.eval_samples("tuned", "instructions"), rows)

    def asked(i):
        question = f"Who signs form {i}?"
        prompt = f"system: {'Be brief. ' * 400}\n\nuser: {question}"
        return {"prompt": prompt, "question": question, "target": "Ida"}

    measure_states(run, "handbook", (4, 36, 32), fields=asked)


IN_EVERY_FORM = {
    "a whole run": lambda run: None,
    "not recovered yet": before_recovery,
    "no forgetting measured": nothing_forgotten,
    "trained only": trained_only,
    "base alone": base_alone,
    "no number": no_number,
    "faults": with_faults,
    "metrics": with_metrics,
    "other weights": on_other_weights,
    "constraints": with_constraints,
}
RUNS = {
    **{name: lambda run, found=found: measured(run, *found) for name, found in VERDICTS.items()},
    "writing differs": loops,
    "writing uncertain": ends_elsewhere,
    "shorter answers": shorter,
    "seen and unseen": seen_and_unseen,
    "another script": another_script,
    "five prompts before a recovery": few_prompts,
    "domain not learned": not_learned,
    **IN_EVERY_FORM,
}


def three_arms(make) -> list[RunDir]:
    runs = [make("ours", 28, 32), make("general", 28, 12, method="general"), make("scaled", 20, 20, steps=9)]
    for run in runs:
        change(run, "eval", domain=["handbook", "manual"])
        for state, passed in zip(STATES, (4, 36, 28), strict=True):
            measure(run, state, {"manual": range(passed)})
    return runs


def seeds_and_unfinished(make) -> list[RunDir]:
    seeds = [make(f"ours-s{seed}", k, 32, seed=seed) for seed, k in ((2, 30), (0, 20))]
    tuned = {"instructions": range(9), "handbook": range(36)}
    alone = make("mix", None, None, tuned=tuned)
    alter(alone.config, workflow={"recover": None})
    return [*seeds, make("half", 20, None, steps=9), alone]


def chain(make) -> list[RunDir]:
    first, second = make("first", 30, 36), make("second", 20, 34)
    alter(second.config, workflow={"start": str(first.path)})
    write(first.stage(2, "recover").record, {"status": "done"})
    return [first, second]


def answered(make, arms: int) -> list[RunDir]:
    """Arms with answers, one of which has the name of a model; each passes other prompts."""
    runs = []
    for number in range(arms):
        run = make("base" if number == 1 else f"arm_{number}", None, None, steps=number + 1)
        own = {"recovered": lambda i, name=run.path.name: {"response": f"Answer {i} of {name}."}}
        measured(run, (4, 1, {*range(number, min(number + 4, 6))}), 6, (0, 2, number % 3), 3, **own)
        runs.append(run)
    return runs


COMPARISONS = {
    "three arms": three_arms,
    "one arm": lambda make: [make(f"ours-s{seed}", 28 + seed, 32, seed=seed) for seed in range(3)],
    "one above": lambda make: [make("ours", 28, 32), make("general", 28, 12, method="general")],
    "one below": lambda make: [make("general", 28, 12, method="general"), make("ours", 28, 32)],
    "two arms alike": lambda make: [make("ours", 28, 32), make("twin", 28, 32, steps=47)],
    "three arms alike": lambda make: [make(f"arm{steps}", 28, 32, steps=steps) for steps in (46, 47, 48)],
    "nothing measured": lambda make: [make("a", None, None), make("b", None, None, steps=9)],
    "seeds and unfinished runs": seeds_and_unfinished,
    "a chain": chain,
    "answers of two arms": lambda make: answered(make, 2),
    "answers of more arms than there is room for": lambda make: answered(make, MOST_RUNS + 1),
}


def low(estimate):
    return estimate["low"] if estimate else -math.inf


def high(estimate):
    return estimate["high"] if estimate else math.inf


def writing(summary):
    return [test for test in summary["tests"]["writing"].values() if test]


# Words of a verdict -> what its numbers must show.
CLAIMS = {
    r"^Recovered(:|, domain| and)": lambda s: low(s["tests"]["recovered_minus_base"]) > -0.035,
    r"^(Partly recovered|Recovered at least|Score recovered)": lambda s: (
        low(s["tests"]["recovered_minus_tuned"]) > 0
    ),
    r"first look": lambda s: min(suite["n"] for suite in s["suites"].values() if suite["n"]) < 100,
    r"^Too few prompts": lambda s: s["tests"]["detectable_drop"] > 0.1,
    r"domain is not learned": lambda s: s["tests"]["domain_tuned_minus_base"]["value"] < 0.1,
    r"But .* token limit": lambda s: s["tests"]["writing"]["ended"]["different"],
    r"^No measurable forgetting": lambda s: (
        s["tests"]["detectable_drop"] <= 0.1 or low(s["tests"]["tuned_minus_base"]) > 0
    ),
    r"^Not recovered yet": lambda s: high(s["tests"]["tuned_minus_base"]) < 0,
    r"domain kept|and kept": lambda s: low(s["domain_retention"]) >= 0.9,
    r"domain lost": lambda s: high(s["domain_retention"]) < 0.5,
    r"domain not shown to be learned": lambda s: s["domain_retention"] is None,
    r"measurably below tuned": lambda s: high(s["tests"]["recovered_minus_tuned"]) < 0,
    r"measurably below base": lambda s: high(s["tests"]["recovered_minus_base"]) < 0,
    r"writing not": lambda s: not all(test["shown"] for test in writing(s)),
}


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Keep of each figure its description only: to draw them takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write("<svg></svg>"))


def approve(name: str, texts: dict[str, str], place: Path) -> None:
    """Compare texts with the approved ones, or put them in their place."""
    whole = "".join(f"===== {form}\n{text.strip()}\n\n" for form, text in texts.items())
    for written in (str(place), markdown(str(place))):
        whole = whole.replace(written, "PLACE")
    text = "\n".join(line.rstrip() for line in whole.splitlines()).strip() + "\n"
    file = APPROVED / f"{name.replace(',', '').replace(' ', '-')}.txt"
    if os.environ.get("OPDCL_APPROVE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_shows_is_what_was_approved_and_claims_no_more_than_its_numbers(run, tmp_path, name):
    RUNS[name](run)
    texts = shown.of_run(run.path)
    # Below the fold are all answers.
    page, _, _ = texts["report.html"].partition('<details class="fold more">')
    forms = ["terminal", "report.md"]
    if name in IN_EVERY_FORM:
        texts["report.html"] = shown.seen(page)
        forms += ["report.html", "README.md", "pull", "notebook"]
    approve(name, {form: texts[form] for form in forms}, tmp_path)
    summary = api.report(run.path).data
    for words, is_shown in CLAIMS.items():
        if re.search(words, summary["verdict"]):
            assert is_shown(summary), words


@pytest.mark.parametrize("name", COMPARISONS)
def test_what_a_comparison_shows_is_what_was_approved(make, tmp_path, name):
    texts = shown.of_comparison([made.path for made in COMPARISONS[name](make)], tmp_path / "comparison")
    texts["compare.html"] = shown.seen(texts["compare.html"])
    approve(name, {form: texts[form] for form in ("terminal", "compare.md", "compare.html")}, tmp_path)
    rivals = json.loads(texts["json"]).get("against_first", ())
    for clause in texts["terminal"].split("\n")[0].split("; ") if len(rivals) == 1 else ():
        change = rivals[0]["domain" if clause.endswith(" on the domain") else "retention"]
        assert ("points above" in clause) == (low(change) > 0)
        assert ("points below" in clause) == (high(change) < 0)


def test_every_claim_is_made_by_one_of_the_approved_verdicts():
    verdicts = [file.read_text(encoding="utf-8").split("\n")[1] for file in APPROVED.glob("*.txt")]
    assert [words for words in CLAIMS if not any(re.search(words, verdict) for verdict in verdicts)] == []


def test_the_page_about_reports_has_a_row_for_every_outcome():
    page = (ROOT / "docs" / "reading-the-report.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    headings = [(status, OUTCOMES[status].heading) for status in Retention]
    for status, heading in headings + [(status, DOMAIN_HEADINGS.get(status, "")) for status in Domain]:
        assert any(heading in begins and named.strip() == f"`{status}`" for begins, named in rows), status
