"""The written report of small synthetic runs."""

import re

import pytest
import yaml
from helpers.page import HOSTILE, PAYLOAD, safe_page
from helpers.synthetic import STRICT, alter, change, measure_states, pages, rewrite_samples
from markdown_it import MarkdownIt

from opdcl.errors import UsageError
from opdcl.results import plots, render
from opdcl.results.measurements import load_suites
from opdcl.results.render import markdown, summarise
from opdcl.results.samples import PROMPTS_SHOWN, RULE, regained_prompts, sort_samples
from opdcl.results.status import STATES
from opdcl.results.summary import Results
from opdcl.rundir.layout import read_samples
from opdcl.sanitize import harmless


def test_the_bars_have_the_scores_of_the_summary(run):
    html, summary = pages(run)["report.html"], summarise(run)
    blocks = re.findall(r'<div class="bars">.*?</h2>(.*?)</div>\s*</div>', html, re.S)
    for block, name in zip(blocks, ("instructions", "handbook"), strict=True):
        shown = re.findall(
            r'<rect class="(base|tuned|recovered)" width="([\d.]+)%".*?<b>([\d.]+) %</b>', block
        )
        score = {state: 100 * summary["suites"][name][state]["value"] for state in STATES}
        assert {state: (float(width), float(text)) for state, width, text in shown} == {
            state: pytest.approx((value, value)) for state, value in score.items()
        }


def test_low_scores_get_a_shorter_axis_that_is_named(run):
    measure_states(run, "instructions", (40, 4, 36), 400)
    html = pages(run)["report.html"]
    assert "the bars end at 25.0 %" in html
    assert '<rect class="base" width="40.0%"' in html
    assert html.count("the bars end at") == 1


def test_html_loads_nothing_from_outside_and_runs_no_script(trained):
    measure_states(trained, "instructions", (32, 8, 28), response=HOSTILE, prompt=HOSTILE)
    page = safe_page(pages(trained)["report.html"])
    assert not [value for name, value in page.attributes if "http:" in value or "https:" in value]
    assert PAYLOAD in page.text  # shown, as text


def test_names_from_outside_cannot_break_a_page(run):
    alter(run.config, workflow={"name": HOSTILE})
    change(run, "eval", control=[HOSTILE.replace("/", "")[:60]])
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
    measure_states(run, "instructions", (32, 8, 28), response="```\n# Recovered: 100 %\n````\n<b>")
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
    assert harmless("a\u115f\u1160\u3164\uffa0\u2800b") == "a⟨U+115F⟩⟨U+1160⟩⟨U+3164⟩⟨U+FFA0⟩⟨U+2800⟩b"
    assert harmless("line\r\n\ttab ä 漢 👩\u200d🔬") == "line\n\ttab ä 漢 👩\u200d🔬"


@pytest.mark.parametrize(
    "text",
    ["@octocat", "(@octo-cat)", "a@b.example", "https://evil.example/x", "WWW.evil.example", "ftp://a.b"],
)
def test_markdown_mentions_nobody_and_links_nowhere(text):
    """As GitHub reads it, which finds addresses in what is written, and mentions in what is shown."""
    written = markdown(f"see {text} there")
    assert not re.search(r"(?i)(?<!\\)://|www\.", written)
    shown = MarkdownIt().render(written)
    assert not re.search(r"(?<!\w)@\w|\w@\w+\.", shown)
    assert shown.replace("\u2060", "") == f"<p>see {text} there</p>\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", "no date"),
        ("created", 5),
        ("opdcl", [1]),
        ("versions", ["torch"]),
        ("seconds", float("inf")),
        ("base", {"parameters": "many"}),
        ("base", {"id": 7}),
        ("device", {"name": 3}),
        ("device", {"cores": "two", "kind": "cpu"}),
        ("device", {"memory_bytes": {}}),
    ],
)
def test_a_manifest_that_later_code_cannot_read_is_named(run, key, value):
    alter(run.manifest, **{key: value})
    with pytest.raises(UsageError, match=rf"manifest\.json is damaged: {key}"):
        run.read_manifest()


def test_every_prompt_is_in_the_group_of_what_came_of_it(run):
    """Base passes 32 of 40, tuned the first 8, recovered the first 28; on the domain 4, 36 and 32."""
    groups = sort_samples(load_suites(run)[0])
    assert [(group.title, group.count) for group in groups] == [
        ("Lost by the fine-tune, regained by recovery", 20),
        ("Lost by the fine-tune, not regained", 4),
        ("Never lost", 8),
        ("Passed by neither base nor recovered", 8),
    ]
    came_back, lost = groups[:2]
    assert sorted(sample.number for sample in came_back.samples) == [*range(8, 28)]
    assert [sample.number for sample in lost.samples] == [28, 29, 30, 31]
    assert [answer.mark for answer in came_back.samples[0].answers] == ["pass", "fail", "pass"]
    kept, gone, known, never = sort_samples(load_suites(run)[1])
    assert (kept.count, gone.count, known.count, never.count) == (28, 4, 4, 4)
    html = pages(run)["report.html"]
    shown = [len(re.findall(rf"Prompt number {i} of instructions\b", html)) for i in range(40)]
    example = came_back.samples[0].number
    assert shown == [2 if i == example else 1 for i in range(40)]


def test_suggested_prompts_are_short_single_questions_that_came_back(run):
    samples = sort_samples(load_suites(run)[0])[0].samples
    for state in STATES:
        rows = read_samples(run.eval_samples(state, "instructions"))
        rows[samples[0].number]["prompt"] += " please" * 40
        rows[samples[1].number]["question"] = "And then?"
        rewrite_samples(run, state, "instructions", rows)
    expected = [sample.prompt for sample in samples if sample not in samples[:2]]
    assert regained_prompts(load_suites(run), 3) == expected[:3]


def test_a_group_of_very_many_prompts_says_how_many_are_left_out(run):
    n = PROMPTS_SHOWN + 7
    measure_states(run, "instructions", (n, 0, n), n)
    html = pages(run)["report.html"]
    assert f"<small>({n})</small>" in html
    assert "7 more are in <code>evals/STATE/instructions.samples.jsonl</code>" in html


@pytest.mark.parametrize(
    ("kept", "more", "words"),
    [
        ([True, False], {"constraints": ["Use two sentences.", "Say why."]}, {"Violated: Say why."}),
        ([True, False], {}, {"Violated: 1 of 2 constraints"}),
        ([True, True], {}, set()),
        ([True, True], {"own_words": False}, {"Violated: words of its own"}),
        ([True, True], {"own_words": True}, {"Violated: being about the prompt"}),
    ],
)
def test_a_failed_answer_names_what_it_violates(run, kept, more, words):
    own = {key: value for key, value in more.items() if key == "own_words"}
    rows = read_samples(run.eval_samples("tuned", "instructions"))
    for row in rows:
        row |= {"scores": {STRICT: False, "inst_level_strict_acc": kept} | own} | more
    rewrite_samples(run, "tuned", "instructions", rows)
    shares = {"inst_level_strict_acc": sum(kept) / len(kept)} | own
    alter(run.eval_result("tuned", "instructions"), metrics=shares)
    html = pages(run)["report.html"]
    part = html.partition("<h3>instructions</h3>")[2].partition("<h3>handbook</h3>")[0]
    tuned = re.findall(r'<span class="tuned">tuned</span>.*?</div>', part, re.S)
    assert len(tuned) == 40
    assert {found for card in tuned for found in re.findall(r'<p class="fail">(.*?)</p>', card)} == words


READABLE = "A full sentence of ten words reads well right here."


def test_the_first_sample_is_the_shortest_readable_one(run):
    """Prompts 8 to 27 are regained; the first ones are degenerate, cut, too short and long."""

    def fields(i):
        answers = {
            8: "#Book Talk Talk Talk Talk Talk Talk Talk Talk Talk Talk Talk",
            9: "Short.",
            10: f"{READABLE} It also goes on, with more.",
            11: READABLE,
            12: READABLE[2:],
        }
        return {
            "response": answers.get(i, f"{READABLE} Number {i} says a good deal more than that."),
            "ended": i != 12,
        }

    measure_states(run, "instructions", (32, 8, 28), fields=fields)
    numbers = [sample.number for sample in sort_samples(load_suites(run)[0])[0].samples]
    assert numbers[:2] == [11, 10]
    assert {8, 9, 12} == set(numbers[-3:])
    text = pages(run)["report.md"]
    assert RULE.split(",")[0] in text.replace("\\", "")
    assert text.index("Prompt number 11 of instructions") < text.index("## Scores")


def test_an_empty_run_has_a_report(empty):
    assert all(text.strip() for text in pages(empty).values())
    assert "Not measured yet" in render.pull_request(empty, [])


@pytest.mark.parametrize("kind", render.KINDS)
def test_the_card_of_each_export_says_what_it_is_to_base_and_how_to_load_it(run, kind):
    text = render.card(run, "recovered", "owner/base", "mine", None, [], kind)
    _, front, body = text.split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["base_model"] == "owner/base"
    assert found["base_model_relation"] == ("adapter" if kind == "adapter" else "finetune")
    assert len(found["model-index"][0]["results"]) == 2
    loaded = {"adapter": 'PeftModel.from_pretrained(model, "mine")', "merged": 'from_pretrained("mine")'}
    assert loaded.get(kind, "ollama create my-model -f Modelfile") in body
    assert ("rounded the weights" in body) == (kind != "adapter")
    assert "\n\n\n" not in body


def test_a_local_base_model_does_not_put_its_path_into_the_card(run):
    alter(run.manifest, base={"id": "/home/someone/secret/my-model", "license": None})
    front = yaml.safe_load(pages(run)["README.md"].split("---\n")[1])
    assert front["base_model"] == "my-model"
    assert "license" not in front


def test_writing_twice_gives_the_same_bytes_and_leaves_no_other_file(trained):
    first, before = pages(trained), sorted(p.name for p in trained.path.iterdir())
    assert pages(trained) == first
    assert render.write(Results(trained)) == []  # looking changes nothing
    assert sorted(p.name for p in trained.path.iterdir()) == before
    assert set(first) == {"report.md", "report.html", "README.md"}


def test_a_step_repeated_after_a_resume_counts_once(trained):
    before, file = pages(trained), trained.stage(2, "recover").metrics
    file.write_text(file.read_text() + file.read_text().splitlines()[-1] + "\n")
    assert pages(trained) == before


def test_the_plot_of_training_has_a_legend_and_a_logarithmic_axis():
    """From 6 to 0.06: equal ratios are equal steps of the axis, and a KL of zero is on it."""
    rows = [
        {"step": step, "validation": {"general_kl": kl, "domain_kl": 0.0, "own_kl": kl, "best": step == 2}}
        for step, kl in enumerate((6.0, 0.6, 0.06))
    ]
    general, domain = plots.recovery_kl(rows, {"general": "base", "domain": "tuned"})
    for words in ("held-out answers", "the student's own", "adapter kept", "General prompts: KL to base"):
        assert words in general
    assert "training batches" not in general
    assert "Domain prompts: KL to tuned" in domain
    path = re.search(r'd="M ([\d. LM\n]+)" clip-path[^>]*stroke-dasharray: [\d., ]+', general)
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path[1])]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.01)
