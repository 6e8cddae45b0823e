"""Write the report: run directory -> report.md, report.html and the model card. No model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from opdcl.hub import HUB_IDS
from opdcl.results import format, report_tables
from opdcl.results.estimates import Summary
from opdcl.results.measurements import MeasuredSuite, section
from opdcl.results.notes import validations_of
from opdcl.results.page import Page, render_page
from opdcl.results.samples import pick_examples, sort_samples
from opdcl.results.status import STATES
from opdcl.results.summary import Results
from opdcl.results.verdict import next_command, severity, why_no_domain_retention, why_no_ratio
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_metrics
from opdcl.sanitize import harmless

# Facts that a public card leaves out.
PRIVATE = ("base", "adapter tuned", "adapter recovered")

# What is exported -> its relation to base and the library that loads it, in the Hub's words. Its `merge`
# is made of several models.
KINDS = {"adapter": ("adapter", "peft"), "merged": ("finetune", "transformers"), "gguf": ("finetune", "gguf")}

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

    page, stage = run_page(results), results.run.find_stage("recover")
    # If a resumed run repeated a step, its last row counts.
    last = {}
    for row in read_metrics(stage.metrics) if stage else []:
        last[row.get("step", 0), "validation" in row, "loss" in row] = row
    rows = [last[key] for key in sorted(last)]
    measured = validations_of(rows)
    told = ({"tuned": measured.tuned} if measured.tuned else {}) | measured.by_step
    tradeoff, kl = plots.tradeoff(results.summary), plots.recovery_kl(rows, _teachers(results.run))
    texts = [
        render_page("report.md", page, recovery=rows, validations=told, best_step=measured.kept),
        render_page("report.html", page, tradeoff=tradeoff, kl=kl),
        _render_card(page, results.summary, []),
    ]
    changed = []
    for file, text in zip(results.run.reports, texts, strict=True):
        if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != text:
            write_atomic(file, text)
            changed.append(file)
    return changed


def pull_request(run: RunDir, summary: Summary, gates: Sequence[Mapping[str, str]]) -> str:
    """Return the results as Markdown of about thirty lines; the report has the answers."""
    return render_page("pull_request.md", run_page(Results(run), summary), gates=gates).strip() + "\n"


def card(
    run: RunDir, state: str, base: str, place: str, license: str | None, datasets: list[str], kind: str
) -> str:
    """Return the model card of one state's export for the Hugging Face Hub; `kind` is one of `KINDS`.

    `base` and `datasets` are the Hub ids of base and training data, `place` is the folder of the export.
    """
    results = Results(run)
    page = run_page(results)
    # The command and the paths may name private files, so a public card leaves them out.
    facts = {}
    for name, value in page.facts.items():
        if name not in PRIVATE and not name.startswith("command"):
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
    return f"---\n{metadata.to_yaml()}\n---\n\n{render_page('card.md', page)}"


def run_page(results: Results, summary: Summary | None = None) -> Page:
    """Lay out a run; `summary` is its own, perhaps with the place of the run in its commands."""
    run, summary = results.run, summary or results.summary
    manifest = {"created": None, "device": None, "opdcl": None} | run.read_manifest()
    base = dict.fromkeys(("id", "revision", "license", "quantization")) | section(run, "model")
    base |= manifest.get("base") or {}
    said = summary.verdict
    answers = {suite.name: groups for suite in results.suites if (groups := sort_samples(suite))}
    headline = {suite.name: answers.get(suite.name, []) for suite in results.headline.values()}
    embedded, model = str(base["id"]) in HUB_IDS, _public(str(base["id"] or "unknown"))
    about_base = [EMBEDDED.format(model)] if embedded else []
    if base["quantization"]:
        about_base.append(QUANTIZED.format(model, base["quantization"]))
    return Page(
        name=summary.name,
        heading=said.heading,
        sentence=said.sentence[:1].upper() + said.sentence[1:],
        sections=report_tables.main_tables(summary),
        details=report_tables.detail_tables(summary),
        faults=summary.faults,
        notes=summary.notes,
        verdict=said.text,
        further=[line for line in said.further if line != said.to_do],
        to_do=said.to_do,
        next=next_command(run, summary, "RUN"),
        severity=severity(summary),
        ratios=_ratios(summary, results.headline.get("domain")),
        bars=report_tables.bars(summary),
        examples=pick_examples(headline),
        answers=answers,
        made=report_tables.made(run, manifest, model),
        about_base=about_base,
        facts=_facts(run, manifest, base),
        model=_model(results, manifest, model, base) | {"embedded": base["id"] if embedded else ""},
    )


def _model(results: Results, manifest: dict, name: str, base: dict) -> dict[str, Any]:
    """Return what a card says about the last adapter, and about the model that it is for."""
    state, place, adapters = "base" if results.alone else None, None, manifest.get("adapters") or {}
    for later in STATES[1:]:
        if not results.alone and any(later in suite.rows for suite in results.suites):
            state = later
        if later in adapters:
            place = adapters[later].get("path")
    about = {"state": state, "place": place, "license": base["license"], "opdcl": manifest["opdcl"]}
    about["kind"] = "adapter"
    # The adapters of a model that was tuned as a whole are for that one.
    tuned = results.run.stage_record("finetune").get("tuned_model")
    return about | ({"base": _public(tuned["id"]), "of": name} if tuned else {"base": name, "of": ""})


def _public(model: str) -> str:
    """Return a model's Hub id, or its folder's name: a path means nothing to readers, and may be private."""
    return HUB_IDS.get(model, Path(model).name if Path(model).is_absolute() else model)


def _ratios(summary: Summary, domain: MeasuredSuite | None) -> list[dict[str, str]]:
    """Return R and D with what they mean, or why one is missing; nothing for base alone."""
    if summary.alone:
        return []
    recovered = "the share of the lost score that came back, counted from tuned or the floor, the higher one"
    kept = "the share of the domain gain that was kept, counted from base or the floor, the higher one"
    why, no_d, findings = why_no_ratio(summary), why_no_domain_retention(domain), summary.findings
    shown = []
    for name, role, meaning, ratio, reason in (
        ("Recovery R", "retention", recovered, findings.recovery, why),
        ("Domain retention D", "domain", kept, findings.domain_retention, no_d),
    ):
        bounds = format.bounds(ratio) if ratio and not format.is_few(summary.prompts_of(role)) else ""
        value = format.value(ratio) if ratio else ""
        shown.append({"name": name, "meaning": meaning, "value": value, "bounds": bounds, "why": reason})
    return shown


def _facts(run: RunDir, manifest: dict, base: dict) -> dict[str, str]:
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
    for state, adapter in (manifest.get("adapters") or {}).items():
        facts[f"adapter {state}"] = f"{adapter.get('path', '')} sha256 {adapter.get('sha256', 'unknown')}"
    if manifest.get("seconds"):
        facts["whole run, min:s"] = format.clock(manifest["seconds"])
    return {name: value for name, value in facts.items() if value}


def _teachers(run: RunDir) -> dict[str, str]:
    """Return the names of each stream's teachers: base and tuned unless configured otherwise."""
    config = run.stage_record("recover").get("config", {})
    of_streams = config.get("general_teacher"), config.get("domain_teacher")
    teachers = (config.get("teachers") or {}).items()
    # Those that grade a part of the domain prompts.
    further = [name for name, teacher in teachers if name not in of_streams or teacher.get("prompts")]
    own = [config.get("domain_teacher", "tuned")] if config.get("domain") or not further else []
    return {
        "general": config.get("general_teacher", "base"),
        "domain": " and ".join(map(str, [*own, *further])),
    }
