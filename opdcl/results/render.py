"""Render what is shown: the pages of a run as files, Markdown for a pull request, the card, and JSON.

Scripts rely on the keys of the JSON, and on their order. No model is loaded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup

from opdcl.results import format
from opdcl.results.estimates import Summary
from opdcl.results.samples import EXAMPLE_ANSWER, LONGEST_ANSWER, RULE, WHAT_PASSES
from opdcl.results.sections import Page, run_page
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.rundir.stage import read_metrics
from opdcl.sanitize import harmless

if TYPE_CHECKING:
    from opdcl.results.arms import Arms
    from opdcl.results.chains import Chains
    from opdcl.results.intervals import Estimate

Document = dict[str, Any]

# Fields whose content stands in their place in the JSON, as do `states` and `c`; and fields for texts alone.
INLINE = ("findings", "changes")
HIDDEN = ("plain", "floor_is", "decoding", "trained", "verdict")

# What is exported -> its relation to base and the library that loads it, in the Hub's words. Its `merge`
# is made of several models.
KINDS = {"adapter": ("adapter", "peft"), "merged": ("finetune", "transformers"), "gguf": ("finetune", "gguf")}


def write(results: Results) -> list[Path]:
    """Write report.md, report.html and the model card README.md into the run; return those that changed.

    The same run gives the same bytes: nothing depends on the time or place of writing.
    """
    from opdcl.results import plots

    page, stage = run_page(results), results.run.find_stage("recover")
    # If a resumed run repeated a step, its last row counts.
    last = {}
    for row in read_metrics(stage.metrics) if stage else []:
        last[row.get("step", 0), "validation" in row, "loss" in row] = row
    rows = [last[key] for key in sorted(last)]
    texts = [
        render_page("page.md", page, form="report"),
        render_page("page.html", page, kl=plots.recovery_kl(rows, _teachers(results.run))),
        _render_card(page, results.summary, []),
    ]
    changed = []
    for file, text in zip(results.run.reports, texts, strict=True):
        if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != text:
            write_atomic(file, text)
            changed.append(file)
    return changed


def _teachers(run: RunDir) -> dict[str, str]:
    """Return the names of each stream's teachers: base and tuned unless configured otherwise."""
    config = run.stage_record("recover").get("config", {})
    general, domain = config.get("general_teacher", "base"), config.get("domain_teacher", "tuned")
    return {"general": general, "domain": "its teachers" if config.get("teachers") else domain}


def pull_request(run: RunDir, gates: Sequence[Mapping[str, str]]) -> str:
    """Return the results as Markdown of about thirty lines; the report has the answers."""
    return render_page("page.md", run_page(Results(run)), form="pull_request", gates=gates).strip() + "\n"


def card(
    run: RunDir, state: str, base: str, place: str, license: str | None, datasets: list[str], kind: str
) -> str:
    """Return the model card of one state's export for the Hugging Face Hub; `kind` is one of `KINDS`.

    `base` and `datasets` are the Hub ids of base and training data, `place` is the folder of the export.
    """
    results = Results(run)
    page, facts = run_page(results), {}
    for name, value in page.facts.items():
        if not name.startswith("command"):  # it may name private files
            facts[name] = value
    public = {"state": state, "base": base, "place": place, "license": license, "kind": kind}
    return _render_card(replace(page, facts=facts, model=page.model | public), results.summary, datasets)


def _render_card(page: Page, summary: Summary, datasets: list[str]) -> str:
    """Render the model card; its metadata holds the scores of the state that it describes."""
    state, license = page.model["state"], page.model["license"]
    scores = []
    for name, suite in summary.suites.items():
        if state in suite.states:
            named = {"dataset_type": harmless(name), "dataset_name": harmless(name)}
            named["metric_type"] = harmless(suite.metric)
            named["metric_name"] = harmless(f"{suite.metric}, {state}, n = {suite.n}")
            scores.append(EvalResult("text-generation", metric_value=suite.states[state].value, **named))
    relation, library = (None, None) if summary.alone else KINDS[page.model["kind"]]
    metadata = ModelCardData(
        base_model=harmless(page.model["base"]),
        base_model_relation=relation,
        library_name=library,
        pipeline_tag="text-generation",
        license=license and harmless(license),
        datasets=[harmless(name) for name in datasets] or None,
        tags=["lora", library, "opdcl", "on-policy-distillation"] if library else ["opdcl"],
        model_name=harmless(summary.name) if scores else None,
        eval_results=scores or None,
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{render_page('page.md', page, form='card')}"


def render_page(template: str, page: Page, **more: Any) -> str:
    """Render a page as `md` or `html`, with what only this form shows."""
    return _environment(template.endswith(".html")).get_template(f"{template}.j2").render(page=page, **more)


@functools.cache
def _environment(is_html: bool) -> jinja2.Environment:
    """Return the templates of one kind; strings are escaped unless they are `Markup`."""
    escape = harmless if is_html else markdown

    def safe(value: Any) -> Any:
        return escape(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        finalize=safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for filter in (format.percent, code, fence, quoted):
        environment.filters[filter.__name__] = lambda value, write=filter: Markup(write(value))
    environment.filters |= {"unbroken": unbroken, "position": position, "shorten": format.shorten}
    environment.globals |= {"states": STATES, "missing": format.MISSING}
    environment.globals |= {"sample_rule": RULE, "what_passes": WHAT_PASSES}
    environment.globals |= {"example_answer": EXAMPLE_ANSWER, "longest_answer": LONGEST_ANSWER}
    return environment


def position(score: float, axis: float) -> str:
    """Return where a score lies on an axis that ends at `axis`, in percent of its length."""
    return f"{100 * min(max(score / axis, 0), 1):.1f}%"


def unbroken(text: str) -> str:
    """Keep a number and its percent sign, and an interval, on one line."""
    return re.sub(r" (?=%)|(?<=,) (?=-?\d+(?:\.\d+)?\])", "\N{NO-BREAK SPACE}", text)


def markdown(text: str) -> str:
    """Escape `text` so that Markdown shows it literally, on one line, without links and mentions.

    Where text is shown, GitHub makes a mention of `@name` and a link of `a@b.c` even if they are escaped,
    so a character without width (U+2060) follows that sign.
    """
    line = " ".join(harmless(text).split())
    line = re.sub(r"([\\`*_<>|~#$&!]|\](?=[(\[:])|:(?=//)|(?<=www)\.)", r"\\\1", line, flags=re.IGNORECASE)
    return re.sub(r"(?<!\w)@(?=\w)|(?<=\w)@(?=[\w-]+\.)", "@\N{WORD JOINER}", line)


def code(text: str) -> str:
    """Return `text` as a Markdown code span that its own backticks and pipes cannot close."""
    line = " ".join(harmless(str(text)).split()).replace("|", "¦") or " "
    marks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def fence(text: str) -> str:
    """Return `text` as a fenced Markdown block that its own fences cannot close."""
    text = harmless(text)
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}text\n{text}\n{marks}"


def quoted(text: str) -> str:
    """Return `text` as a double-quoted Python string."""
    return json.dumps(harmless(str(text)), ensure_ascii=False)


def summarise(run: RunDir) -> Document:
    """Return the results of a finished or unfinished run as JSON has them."""
    return run_document(Results(run).summary)


def run_document(summary: Summary) -> Document:
    """Return the results of a run with the keys of `opdcl report RUN --json`."""
    said = summary.verdict
    words = {"verdict": said.text, "further": said.further, "to_do": said.lead_on if said.why else ""}
    return words | _plain(summary)


def arms_document(board: Arms) -> Document:
    """Return arms side by side, with the keys of `opdcl compare --json`."""
    references, arms, further = [], [], []
    for column in board.references:
        named = {"state": column.state, "name": column.name, "results": column.seeds}
        references.append(named | _measured(HEADLINE_ROLES, board.means(column)))
    for arm in board.columns:
        runs = []
        for run in arm.members:
            found = run.summary.findings
            ratios = {"recovery": found.recovery, "domain_retention": found.domain_retention}
            named = {"path": run.path, "seeds": run.seeds, "state": run.end}
            status = {"status": run.status(found)}
            runs.append(named | _measured(HEADLINE_ROLES, run.ends) | _plain(ratios) | status)
        scores, writing = _measured(HEADLINE_ROLES, board.means(arm)), _plain({"writing": arm.writing})
        more = writing | {"closeness": _plain(arm.closeness), "runs": runs}
        arms.append({"name": arm.name, "seeds": arm.seeds} | scores | _plain(arm.findings) | more)
    for suite, scored in board.further:
        rows = []
        for name, states, kept in scored:
            ratio = _plain({"domain_retention": kept})
            rows.append({"name": name} | _measured(STATES, states) | ratio)
        further.append({"name": suite.name, **suite.description, "arms": rows})
    rivals = board.against_first.items()
    return {
        "headline": board.headline,
        "suites": {suite.name: suite.description for suite in board.suites.values() if suite.rows},
        "references": references,
        "arms": arms,
        "against_first": [{"name": name} | _measured(HEADLINE_ROLES, found) for name, found in rivals],
        "further": further,
        "differences": board.differences,
        "faults": board.faults,
        "notes": board.notes,
    }


def chains_document(board: Chains) -> Document:
    """Return steps that build on one another, with the keys of `opdcl compare --json`."""
    steps = []
    for step in board.columns:
        named = {"name": step.name, "seeds": step.seeds, "runs": [run.path for run in step.members]}
        steps.append(named | _plain({"scores": board.means(step), "distance": step.distance}))
    return {
        "suites": {name: suite.description for name, suite in board.suites.items()},
        "base": _plain(board.means(board.base)),
        "steps": steps,
        "chains": [{"name": c.name, "seeds": len(c.lines)} | _plain(c.figures) for c in board.chains],
        "differences": [_plain(row._asdict()) for row in board.differences],
        "kept": [_plain(row._asdict()) for row in board.kept],
        "faults": board.faults,
        "notes": board.notes,
    }


def _measured(names: Sequence[str], estimates: Mapping[str, Estimate]) -> Document:
    """Return all names with their estimates, and what is not measured as empty."""
    return {name: _plain(estimates[name]) if name in estimates else {} for name in names}


def _plain(value: Any) -> Any:
    """Return values with fields as dicts, and a status as its text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(content) for key, content in value.items()}
    if not is_dataclass(value):
        return value
    document: Document = {}
    for key, content in vars(value).items():
        if key == "states":
            document |= _measured(STATES, content)
        elif key == "c":
            document |= _plain(content) or dict.fromkeys(("value", "low", "high"))
        elif key in INLINE:
            document |= _plain(content)
        elif key not in HIDDEN:
            document[key] = _plain(content)
    return document
