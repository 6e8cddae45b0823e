"""Write the report: run directory -> report.md, report.html and the model card. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from markupsafe import Markup

from opdcl.hub import HUB_IDS
from opdcl.results import format, report_tables
from opdcl.results.samples import RULE, pick_examples, pick_samples, worst_samples
from opdcl.results.scores import Suite, section
from opdcl.results.status import STATES
from opdcl.results.summary import Results, further_teachers
from opdcl.results.tables import MISSING, different_raw
from opdcl.results.verdict import split, tone, why_no_domain_retention, why_no_recovery
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_metrics
from opdcl.sanitize import harmless

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
    """Write `report.md`, `report.html` and the model card `README.md` into the run; return their paths.

    The same run gives the same bytes: nothing depends on the time or place of writing.
    """
    from opdcl.results import plots

    context = _context(results)
    figures = {
        "loss": plots.finetune_loss(context["metrics"]["finetune"]),
        "kl": plots.recovery_kl(context["metrics"]["recover"], _teachers(results.run)),
        "tradeoff": plots.tradeoff(results.summary),
        "writing": plots.writing(results.summary),
    }
    texts = [
        render("report.md", context),
        render("report.html", context | {"figures": figures}),
        _render_card(context, context["base_model"], context["base"]["license"], []),
    ]
    for file, text in zip(results.run.reports, texts, strict=True):
        write_atomic(file, text)
    return list(results.run.reports)


def pull_request(run: RunDir, summary: dict[str, Any]) -> str:
    """Return the results as Markdown of about thirty lines, with the worst three prompts."""
    retention = Results(run).headline.get("retention")
    worst = worst_samples(retention, WORST_PROMPTS) if retention else {}
    page = {"summary": summary, "tables": report_tables.main_tables(summary), "worst": [], **worst}
    return render("pull_request.md", page).strip() + "\n"


def card(run: RunDir, state: str, base: str, place: str, license: str | None, datasets: list[str]) -> str:
    """Return the model card of one state's adapter for the Hugging Face Hub.

    `base` and `datasets` are the Hub ids of base and training data, `place` is the adapter's folder.
    """
    context = _context(Results(run))
    # The command and the paths may name private files, so a public card leaves them out.
    private = ("base", "adapter tuned", "adapter recovered")
    facts = {
        name: value
        for name, value in context["facts"].items()
        if name not in private and not name.startswith("command")
    }
    context |= {"card_state": state, "base_model": base, "adapter_path": place, "facts": facts}
    return _render_card(context, base, license, datasets)


def _render_card(context: dict[str, Any], base: str, license: str | None, datasets: list[str]) -> str:
    """Render the model card; its metadata holds the scores of the state that it describes."""
    state = context["card_state"]
    scores = [
        EvalResult(
            task_type="text-generation",
            dataset_type=harmless(name),
            dataset_name=harmless(name),
            metric_type=harmless(suite["metric"]),
            metric_value=suite[state]["value"],
            metric_name=harmless(f"{suite['metric']}, {state}, n = {suite['n']}"),
        )
        for name, suite in context["summary"]["suites"].items()
        if state and suite[state]
    ]
    metadata = ModelCardData(
        base_model=harmless(base),
        library_name="peft",
        pipeline_tag="text-generation",
        license=license and harmless(license),
        datasets=[harmless(name) for name in datasets] or None,
        tags=["lora", "peft", "opdcl", "on-policy-distillation"],
        model_name=harmless(context["summary"]["name"]) if scores else None,
        eval_results=scores or None,
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{render('card.md', context)}"


def render(page: str, context: dict[str, Any]) -> str:
    """Render the template of an `md` or `html` page; strings are escaped unless they are `Markup`."""
    kind = page.rsplit(".", 1)[1]
    escape = harmless if kind == "html" else format.markdown
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=kind == "html",
        undefined=jinja2.StrictUndefined,
        finalize=lambda v: escape(v) if isinstance(v, str) and not isinstance(v, Markup) else v,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = [format.percent, format.interval, format.value, format.bounds]
    if kind == "md":
        filters += [format.code, format.fence, format.quoted, format.nats]
    environment.filters |= {f.__name__: lambda v, f=f: Markup(f(v)) for f in filters}
    environment.filters["unbroken"] = format.unbroken
    environment.globals |= {"states": STATES, "missing": MISSING, "sample_rule": RULE}
    return environment.get_template(f"{page}.j2").render(context)


def _context(results: Results) -> dict[str, Any]:
    """Return what the three templates print."""
    run, summary, headline = results.run, results.summary, results.headline
    manifest = {"created": None, "device": None, "opdcl": None} | run.read_manifest()
    base = dict.fromkeys(("id", "revision", "license", "quantization")) | section(run, "model")
    base |= manifest.get("base") or {}
    name = str(base["id"] or "unknown")
    base_model, tuned = _public(name), run.stage_record("finetune").get("tuned_model")
    adapters = manifest.get("adapters") or {}
    metrics = {stage: _metrics(run, stage) for stage in ("finetune", "recover")}
    losses = [row["loss"] for row in metrics["finetune"] if row.get("loss") is not None]
    validations = [row for row in metrics["recover"] if row.get("validation")]
    states = {state for suite in results.suites for state in suite.rows}
    samples = {suite.name: groups for suite in headline.values() if (groups := pick_samples(suite))}
    heading, sentence = split(summary["verdict"])
    return {
        "summary": summary,
        "heading": heading,
        "sentence": sentence,
        "tone": tone(summary),
        "made": report_tables.made(run, manifest, base_model),
        "bars": report_tables.bars(summary),
        "ratios": _ratios(summary, headline.get("domain")),
        "tables": report_tables.main_tables(summary),
        "details": report_tables.detail_tables(summary),
        "examples": pick_examples(samples),
        "samples": samples,
        "metrics": metrics,
        "loss_ends": losses[:1] + losses[-1:],
        "validations": validations,
        "best_step": max((r["step"] for r in validations if r["validation"].get("best")), default=None),
        "manifest": manifest,
        "base": base,
        # The model that the adapters are for, and if that was tuned as a whole, its base.
        "base_model": _public(tuned["id"]) if tuned else base_model,
        "its_base": base_model if tuned else "",
        "facts": _facts(run, manifest, base, adapters),
        "card_state": next((state for state in ("recovered", "tuned") if state in states), None),
        "embedded": EMBEDDED.format(base_model) if name in HUB_IDS else "",
        "quantized": QUANTIZED.format(base_model, base["quantization"]) if base["quantization"] else "",
        "adapter_path": next((adapters[s].get("path") for s in reversed(STATES) if s in adapters), None),
    }


def _public(model: str) -> str:
    """Return a model's Hub id, or its folder's name: a path means nothing to readers, and may be private."""
    return HUB_IDS.get(model, Path(model).name if Path(model).is_absolute() else model)


def _ratios(summary: dict, domain: Suite | None) -> list[dict[str, Any]]:
    """Return R, D and C with what they mean, or why there is none."""
    recovered = "Share of the lost score that came back, counted from tuned or the floor, whichever is higher"
    kept = "Share of the domain gain that was kept, counted from base or the floor, whichever is higher"
    gone = (
        "Share of the distance to base that is gone, token by token, counted from tuned or from base's "
        "answers to other prompts, whichever is nearer"
    )
    near = summary["closeness"]

    def ratio(name: str, key: str, meaning: str, why: str, start: str = "") -> dict[str, Any]:
        estimate = summary[key] if summary[key] and summary[key]["value"] is not None else None
        raw = different_raw(summary, key) if start else ""
        meaning += f"; from {start} alone, {raw}." if raw else "."
        return {"name": name, "meaning": meaning, "estimate": estimate, "why": why}

    return [
        ratio("Recovery R", "recovery", recovered, why_no_recovery(summary), "tuned"),
        ratio("Domain retention D", "domain_retention", kept, why_no_domain_retention(domain), "base"),
        *([ratio("Closeness C", "closeness", gone, near["why"])] if near else []),
    ]


def _facts(run: RunDir, manifest: dict, base: dict, adapters: dict) -> dict[str, str]:
    """Return what a reader needs to repeat the run and to check that the result is the same."""
    versions = {"opdcl": manifest["opdcl"], **(manifest.get("versions") or {})}
    seeds = {stage: section(run, stage).get("seed") for stage in ("finetune", "recover")}
    device = manifest["device"] or {}
    cores, size = device.get("cores"), device.get("memory_bytes")
    cpu_and_memory = [cores and f"{cores} cores", size and format.memory(size)]
    hardware = [device.get("name"), device.get("dtype"), *cpu_and_memory]
    weights = " at ".join(str(base[key]) for key in ("id", "revision") if base[key])
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    check = f"CHANGED to {after}" if after else "not checked after"
    facts = {
        **_commands(manifest),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "device": ", ".join(filter(None, hardware)),
        "seeds": ", ".join(f"{stage} {seed}" for stage, seed in seeds.items() if seed is not None),
        "base": weights + (f", quantized ({base['quantization']})" if base["quantization"] else ""),
        "base fingerprint": before
        and f"{before}, {'identical before and after' if before == after else check}",
    }
    for state, adapter in adapters.items():
        facts[f"adapter {state}"] = f"{adapter.get('path', '')} sha256 {adapter.get('sha256', 'unknown')}"
    facts["whole run, min:s"] = manifest.get("seconds") and format.clock(manifest["seconds"])
    return {name: value for name, value in facts.items() if value}


def _commands(manifest: dict) -> dict[str, str]:
    """Return the commands that made the run, in order: one for each verb."""
    commands = manifest.get("commands") or [manifest.get("command", "")]
    if len(commands) == 1:
        return {"command": commands[0]}
    return {f"command {number}": command for number, command in enumerate(commands, 1)}


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
