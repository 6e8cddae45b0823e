"""Write the report: run directory -> report.md, report.html and the model card. No model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup

from opdcl.hub import HUB_IDS
from opdcl.results import format, report_tables
from opdcl.results.intervals import Estimate
from opdcl.results.notes import of_the_student, started_elsewhere, validations_of
from opdcl.results.result_types import Summary
from opdcl.results.samples import RULE, pick_examples, sort_samples, worst_samples
from opdcl.results.scores import Suite, section
from opdcl.results.status import STATES
from opdcl.results.summary import Results, further_teachers
from opdcl.results.tables import MISSING
from opdcl.results.verdict import next_command, split, tone, why_no_domain_retention, why_no_ratio
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_metrics
from opdcl.sanitize import harmless

# Facts that a public card leaves out.
PRIVATE = ("base", "adapter tuned", "adapter recovered")

FILTERS = (format.percent, format.value, format.code, format.fence, format.quoted, format.nats)

# Of the prompts on which the model falls below base, in a pull request.
WORST_PROMPTS = 3

EMBEDDED = (
    "All scores are of the embedded copy of {}, whose weights were quantized to 4 bits and dequantized "
    "again. On the original weights, base and adapters score slightly differently."
)
QUANTIZED = (
    "In this run, bitsandbytes quantized the linear layers of {} ({}). All scores are of this quantized "
    "base, and where base taught, it was the teacher. On the original weights, scores can differ."
)


def write(results: Results) -> list[Path]:
    """Write report.md, report.html and the model card README.md into the run; return those that changed.

    The same run gives the same bytes: nothing depends on the time or place of writing.
    """
    from opdcl.results import plots

    context = _context(results)
    figures = {
        "kl": plots.recovery_kl(context["recovery"], _teachers(results.run)),
        "tradeoff": plots.tradeoff(results.summary),
    }
    texts = [
        render("report.md", context),
        render("report.html", context | {"figures": figures}),
        _render_card(context, context["base_model"], context["base"]["license"], []),
    ]
    changed = []
    for file, text in zip(results.run.reports, texts, strict=True):
        if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != text:
            write_atomic(file, text)
            changed.append(file)
    return changed


def pull_request(run: RunDir, summary: Summary, gates: Sequence[Mapping[str, str]]) -> str:
    """Return the results as Markdown of about thirty lines, with the worst three prompts."""
    retention = Results(run).headline.get("retention")
    heading, sentence = split(summary.verdict)
    page = {
        "summary": summary,
        "heading": heading,
        "sentence": sentence,
        "gates": gates,
        "tables": report_tables.main_tables(summary),
        "worst": worst_samples(retention, WORST_PROMPTS) if retention else None,
    }
    return render("pull_request.md", page).strip() + "\n"


def card(run: RunDir, state: str, base: str, place: str, license: str | None, datasets: list[str]) -> str:
    """Return the model card of one state's adapter for the Hugging Face Hub.

    `base` and `datasets` are the Hub ids of base and training data, `place` is the adapter's folder.
    """
    context = _context(Results(run))
    # The command and the paths may name private files, so a public card leaves them out.
    facts = {}
    for name, value in context["facts"].items():
        if name not in PRIVATE and not name.startswith("command"):
            facts[name] = value
    context |= {"card_state": state, "base_model": base, "adapter_path": place, "facts": facts}
    return _render_card(context, base, license, datasets)


def _render_card(context: dict[str, Any], base: str, license: str | None, datasets: list[str]) -> str:
    """Render the model card; its metadata holds the scores of the state that it describes."""
    state, summary = context["card_state"], context["summary"]
    scores = []
    for name, suite in summary.suites.items():
        if state in suite.states:
            scores.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=harmless(name),
                    dataset_name=harmless(name),
                    metric_type=harmless(suite.metric),
                    metric_value=suite.states[state].value,
                    metric_name=harmless(f"{suite.metric}, {state}, n = {suite.n}"),
                )
            )
    metadata = ModelCardData(
        base_model=harmless(base),
        library_name=None if summary.alone else "peft",
        pipeline_tag="text-generation",
        license=license and harmless(license),
        datasets=[harmless(name) for name in datasets] or None,
        tags=["opdcl"] if summary.alone else ["lora", "peft", "opdcl", "on-policy-distillation"],
        model_name=harmless(summary.name) if scores else None,
        eval_results=scores or None,
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{render('card.md', context)}"


def render(page: str, context: dict[str, Any]) -> str:
    """Render the template of an `md` or `html` page; strings are escaped unless they are `Markup`."""
    is_html = page.endswith(".html")
    escape = harmless if is_html else format.markdown

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
    for filter in FILTERS:
        environment.filters[filter.__name__] = _marked_up(filter)
    environment.filters["unbroken"] = format.unbroken
    environment.globals |= {"states": STATES, "missing": MISSING, "sample_rule": RULE}
    return environment.get_template(f"{page}.j2").render(context)


def _marked_up(filter: Callable[[Any], str]) -> Callable[[Any], Markup]:
    return lambda value: Markup(filter(value))


def _context(results: Results) -> dict[str, Any]:
    """Return what the three templates print."""
    run, summary, headline = results.run, results.summary, results.headline
    manifest = {"created": None, "device": None, "opdcl": None} | run.read_manifest()
    base = dict.fromkeys(("id", "revision", "license", "quantization")) | section(run, "model")
    base |= manifest.get("base") or {}
    name = str(base["id"] or "unknown")
    base_model, tuned = _public(name), run.stage_record("finetune").get("tuned_model")
    adapters = manifest.get("adapters") or {}
    recovery = _metrics(run, "recover")
    samples = {suite.name: groups for suite in results.suites if (groups := sort_samples(suite))}
    heading, sentence = split(summary.verdict)
    latest = adapter_path = None
    for state in STATES[1:]:
        if any(state in suite.rows for suite in results.suites):
            latest = state
        if state in adapters:
            adapter_path = adapters[state].get("path")
    return {
        "summary": summary,
        "heading": heading,
        "sentence": sentence,
        "differs": [line for line in summary.further if line != summary.to_do],
        "next": next_command(run, summary, "RUN"),
        "tone": tone(summary),
        "made": report_tables.made(run, manifest, base_model),
        "bars": report_tables.bars(summary),
        "ratios": _ratios(summary, headline.get("domain")),
        "tables": report_tables.main_tables(summary),
        "details": report_tables.detail_tables(summary),
        "examples": pick_examples({suite.name: samples.get(suite.name, []) for suite in headline.values()}),
        "samples": samples,
        "recovery": recovery,
        "validations": _validations(recovery),
        "best_step": validations_of(recovery)[1],
        "manifest": manifest,
        "base": base,
        # The model that the adapters are for, and if that was tuned as a whole, its base.
        "base_model": _public(tuned["id"]) if tuned else base_model,
        "its_base": base_model if tuned else "",
        "facts": _facts(run, manifest, base, adapters),
        "card_state": "base" if summary.alone else latest,
        "embedded": EMBEDDED.format(base_model) if name in HUB_IDS else "",
        "quantized": QUANTIZED.format(base_model, base["quantization"]) if base["quantization"] else "",
        "adapter_path": adapter_path,
    }


def _validations(recovery: list[dict]) -> list[dict[str, Any]]:
    """Return the held-out numbers of the student by step; before them tuned's, if it started elsewhere."""
    rows: list[dict[str, Any]] = []
    for row in recovery:
        if row.get("validation"):
            if started_elsewhere(row):
                rows.append({"step": "tuned", "validation": row["validation"]})
            rows.append({"step": row["step"], "validation": of_the_student(row)})
    return rows


def _public(model: str) -> str:
    """Return a model's Hub id, or its folder's name: a path means nothing to readers, and may be private."""
    return HUB_IDS.get(model, Path(model).name if Path(model).is_absolute() else model)


@dataclass(frozen=True)
class Ratio:
    """R or D as the report's head shows it."""

    name: str
    meaning: str
    estimate: Estimate | None
    why: str
    """Why there is none."""
    n: int
    """Number of prompts."""

    @property
    def bounds(self) -> str:
        """The interval; empty without one, and over too few prompts."""
        return "" if self.estimate is None or format.is_few(self.n) else format.bounds(self.estimate)


def _ratios(summary: Summary, domain: Suite | None) -> list[Ratio]:
    """Return R and D with what they mean, or why there is none; of base alone, nothing."""
    findings, no_d = summary.findings, why_no_domain_retention(domain)
    if summary.alone:
        return []
    general, of_domain = summary.prompts_of("retention"), summary.prompts_of("domain")
    recovered = "the share of the lost score that came back, counted from tuned or the floor, the higher one"
    kept = "the share of the domain gain that was kept, counted from base or the floor, the higher one"
    return [
        Ratio("Recovery R", recovered, findings.recovery, why_no_ratio(summary), general),
        Ratio("Domain retention D", kept, findings.domain_retention, no_d, of_domain),
    ]


def _facts(run: RunDir, manifest: dict, base: dict, adapters: dict) -> dict[str, str]:
    """Return what a reader needs to repeat the run and to check that the result is the same."""
    commands = manifest.get("commands") or [manifest.get("command", "")]
    facts = {"command": commands[0]}
    if len(commands) > 1:
        facts = {f"command {number}": command for number, command in enumerate(commands, 1)}
    versions = {"opdcl": manifest["opdcl"], **(manifest.get("versions") or {})}
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    device = manifest["device"] or {}
    hardware = [device.get("name"), device.get("dtype")]
    if device.get("cores"):
        hardware.append(f"{device['cores']} cores")
    if device.get("memory_bytes"):
        hardware.append(format.memory(device["memory_bytes"]))
    facts["device"] = ", ".join(filter(None, hardware))
    seeds = {stage: section(run, stage).get("seed") for stage in ("finetune", "recover")}
    facts["seeds"] = ", ".join(f"{stage} {seed}" for stage, seed in seeds.items() if seed is not None)
    facts["base"] = " at ".join(str(base[key]) for key in ("id", "revision") if base[key])
    if base["quantization"]:
        facts["base"] += f", quantized ({base['quantization']})"
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before:
        check = f"CHANGED to {after}" if after else "not checked after"
        facts["base fingerprint"] = f"{before}, {'identical before and after' if before == after else check}"
    for state, adapter in adapters.items():
        facts[f"adapter {state}"] = f"{adapter.get('path', '')} sha256 {adapter.get('sha256', 'unknown')}"
    if manifest.get("seconds"):
        facts["whole run, min:s"] = format.clock(manifest["seconds"])
    return {name: value for name, value in facts.items() if value}


def _teachers(run: RunDir) -> dict[str, str]:
    """Return the names of each stream's teachers: base and tuned unless configured otherwise."""
    config = run.stage_record("recover").get("config", {})
    further = further_teachers(config)
    own = [config.get("domain_teacher", "tuned")] if config.get("domain") or not further else []
    return {
        "general": config.get("general_teacher", "base"),
        "domain": " and ".join(map(str, [*own, *further])),
    }


def _metrics(run: RunDir, stage: str) -> list[dict]:
    """Return a stage's metric rows by step; if a resumed run repeated a step, its last row counts."""
    folder = run.find_stage(stage)
    rows = read_metrics(folder.metrics) if folder else []
    last = {(row.get("step", 0), "validation" in row, "loss" in row): row for row in rows}
    return [last[key] for key in sorted(last)]
