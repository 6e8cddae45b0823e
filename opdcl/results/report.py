"""Write the report: run directory -> report.md, report.html and the model card. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl.hub import HUB_IDS
from opdcl.results import format
from opdcl.results.scores import STATES, Suite, headline_of, load_suites, section
from opdcl.results.summary import summarise
from opdcl.results.tables import writing_rows
from opdcl.results.verdict import why_no_domain_retention, why_no_recovery
from opdcl.results.writing import MARGINS
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

SAMPLES_PER_GROUP = 4
GROUP_NOTE = "Seen: types of constraints that also occur in the recovery prompts. Unseen: types that do not."
LONGEST_HEAD, LONGEST_PROMPT, LONGEST_ANSWER = 90, 900, 700


def write(run: RunDir, summary: dict[str, Any] | None = None) -> list[Path]:
    """Write `report.md`, `report.html` and the model card `README.md` into the run; return their paths.

    The same run gives the same bytes: nothing depends on the time or place of writing.
    """
    from opdcl.results import plots

    suites = load_suites(run)
    context = _context(run, summary or summarise(run, suites), suites)
    figures = {
        "loss": plots.finetune_loss(_metrics(run, "finetune")),
        "kl": plots.recovery_kl(_metrics(run, "recover"), _teachers(run)),
        "tradeoff": plots.tradeoff(context["summary"]),
        "writing": plots.writing(context["summary"]),
    }
    texts = [
        render("report.md", context),
        render("report.html", context | {"figures": figures}),
        _render_card(context, context["base_model"], context["base"]["license"], []),
    ]
    for file, text in zip(run.reports, texts, strict=True):
        write_atomic(file, text)
    return list(run.reports)


def card(run: RunDir, state: str, base: str, place: str, license: str | None, datasets: list[str]) -> str:
    """Return the model card of one state's adapter for the Hugging Face Hub.

    `base`, `place` and `datasets` are the Hub ids of base, adapter and training data.
    """
    suites = load_suites(run)
    context = _context(run, summarise(run, suites), suites)
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
    from huggingface_hub import EvalResult, ModelCardData

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
    import jinja2
    from markupsafe import Markup

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
    filters = [format.percent, format.interval, format.span, format.score, format.clock, format.memory]
    if kind == "md":
        filters += [format.code, format.fence, format.quoted, format.nats]
    environment.filters |= {f.__name__: lambda v, f=f: Markup(f(v)) for f in filters}
    return environment.get_template(f"{page}.j2").render(context)


def _context(run: RunDir, summary: dict, suites: list[Suite]) -> dict[str, Any]:
    """Return what the three templates print."""
    from opdcl.results import stats

    manifest = {"created": None, "device": None, "opdcl": None} | run.read_manifest()
    base = dict.fromkeys(("id", "revision", "license")) | section(run, "model") | (manifest.get("base") or {})
    name = str(base["id"] or "unknown")
    adapters = manifest.get("adapters") or {}
    headline = headline_of(suites)
    losses = [row["loss"] for row in _metrics(run, "finetune") if row.get("loss") is not None]
    validations = [row for row in _metrics(run, "recover") if row.get("validation")]
    measured = [s for s in suites if s.rows]
    states = {state for suite in suites for state in suite.rows}
    return {
        "summary": summary,
        "states": STATES,
        "tables": {s.name: _all_metrics(s, summary["suites"][s.name]) for s in measured},
        "writing": {name: writing_rows(suite["writing"]) for name, suite in summary["suites"].items()},
        "why_no_r": why_no_recovery(summary),
        "why_no_d": why_no_domain_retention(headline.get("domain")),
        "differences": _difference_rows(summary["tests"]),
        "ceiling": {n: gap | _in_points(gap) | _place(gap) for n, gap in summary["ceiling"].items()},
        "margin": f"{100 * stats.NON_INFERIORITY_MARGIN:g}",
        "writing_margin": f"{100 * max(MARGINS.values()):g}",
        "group_note": GROUP_NOTE if {*summary["groups"]} == {"seen", "unseen"} else "",
        "samples": {s.name: groups for s in headline.values() if (groups := pick_samples(s))},
        "loss_ends": losses[:1] + losses[-1:],
        "validations": validations,
        "best_step": max((r["step"] for r in validations if r["validation"].get("best")), default=None),
        "manifest": manifest,
        "base": base,
        # A local path means nothing to readers of the card, and may reveal more than its owner wants.
        "base_model": HUB_IDS.get(name, Path(name).name if Path(name).is_absolute() else name),
        "facts": _facts(run, manifest, base, adapters),
        "card_state": next((state for state in ("recovered", "tuned") if state in states), None),
        "embedded": name in HUB_IDS,
        "adapter_path": next((adapters[s].get("path") for s in reversed(STATES) if s in adapters), None),
    }


def _all_metrics(suite: Suite, estimates: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return metric -> state -> value, the headline metric first."""
    return {suite.metric: {state: estimates[state]["value"] for state in suite.rows}} | estimates["metrics"]


def _facts(run: RunDir, manifest: dict, base: dict, adapters: dict) -> dict[str, str]:
    """Return what a reader needs to repeat the run and to check that the result is the same."""
    versions = {"opdcl": manifest["opdcl"], **(manifest.get("versions") or {})}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    check = f"CHANGED to {after}" if after else "not checked after"
    seeds = {stage: section(run, stage).get("seed") for stage in ("finetune", "recover")}
    device = manifest["device"] or {}
    cores, size = device.get("cores"), device.get("memory_bytes")
    cpu_and_memory = [cores and f"{cores} cores", size and format.memory(size)]
    hardware = [device.get("name"), device.get("dtype"), *cpu_and_memory]
    facts = {
        **_commands(manifest),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "device": ", ".join(filter(None, hardware)),
        "seeds": ", ".join(f"{stage} {seed}" for stage, seed in seeds.items() if seed is not None),
        "base": " at ".join(str(base[k]) for k in ("id", "revision") if base[k]),
        "base fingerprint": before
        and f"{before}, {'identical before and after' if before == after else check}",
        **{
            f"adapter {state}": f"{a.get('path', '')} sha256 {a.get('sha256', 'unknown')}"
            for state, a in adapters.items()
        },
        "whole run, min:s": manifest.get("seconds") and format.clock(manifest["seconds"]),
    }
    return {name: value for name, value in facts.items() if value}


def _commands(manifest: dict) -> dict[str, str]:
    """Return the commands that made the run, in order: one for each verb."""
    commands = manifest.get("commands") or [manifest.get("command", "")]
    names = [f"command {number}" for number in range(1, len(commands) + 1)] if commands[1:] else ["command"]
    return dict(zip(names, commands, strict=True))


def _difference_rows(tests: dict) -> list[dict[str, str]]:
    """Return the paired differences on the retention suite, in points."""
    rows = []
    for pair, p in tests["mcnemar"].items():
        if change := tests[pair]:
            p_value = "n/a" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
            rows.append({"pair": pair.replace("_minus_", " - "), **_in_points(change), "p": p_value})
    for measure, label in (("cut", "answers that do not end"), ("repetition", "repeated 4-grams")):
        if change := tests["writing"][measure]:
            rows.append({"pair": f"{label}, recovered - base", **_in_points(change), "p": "n/a"})
    return rows


def _place(gap: dict[str, Any]) -> dict[str, str]:
    """Say where the student is; to find no difference does not make it level."""
    if gap["place"] != "not shown":
        return {"place": gap["place"]}
    detectable = f"{gap['n']} prompts can show {100 * gap['detectable']:.1f} points"
    return {"place": f"not shown to differ: {detectable}"}


def _in_points(change: dict[str, float]) -> dict[str, str]:
    low, high = format.points(change["low"]), format.points(change["high"])
    return {"value": format.points(change["value"]), "span": f"{low} to {high}"}


def _teachers(run: RunDir) -> dict[str, str]:
    """Return the names of each stream's teachers: base and tuned unless configured otherwise."""
    config = run.stage_record("recover").get("config", {})
    kinds = {"general": "base", "domain": "tuned"}
    for stream, default in kinds.items():
        kinds[stream] = config.get(f"{stream}_teacher", {}).get("kind", default)
    if named := config.get("teachers"):
        kinds["domain"] = " and ".join([kinds["domain"], *named] if config.get("domain") else named)
    return kinds


def _metrics(run: RunDir, stage: str) -> list[dict]:
    """Return a stage's metric rows by step; if a resumed run repeated a step, its last row counts."""
    folder = run.find_stage(stage)
    rows = read_jsonl(folder.metrics) if folder else []
    last = {(row.get("step", 0), "validation" in row, "loss" in row): row for row in rows}
    return [last[key] for key in sorted(last)]


def pick_samples(suite: Suite) -> list[dict[str, Any]]:
    """Return prompts whose outcome the fine-tune changed, grouped by their outcome after recovery."""
    if not {"base", "tuned"} <= set(suite.rows):
        return []
    # Several parts must all pass; one fractional score passes from a half on.
    needed = 1.0 if any(len(parts) != 1 for parts in suite.parts("base")) else 0.5
    shares = {state: [sum(p) / max(len(p), 1) for p in suite.parts(state)] for state in suite.rows}
    passed = {state: [share >= needed for share in values] for state, values in shares.items()}
    lost = suite.role == "retention"
    outcomes = enumerate(zip(passed["base"], passed["tuned"], strict=True))
    changed = [i for i, (base, tuned) in outcomes if base == lost and tuned != base]
    title = "Lost by the fine-tune" if lost else "Learned by the fine-tune"
    groups = {title: changed}
    if "recovered" in suite.rows:
        good, bad = ("regained by recovery", "not regained") if lost else ("kept by recovery", "lost again")
        groups = {
            f"{title}, {word}": [i for i in changed if passed["recovered"][i] == ok]
            for word, ok in ((good, True), (bad, False))
        }
    rows = []
    for title, indices in groups.items():
        samples = [_sample(suite, i, shares, passed) for i in indices[:SAMPLES_PER_GROUP]]
        rows.append({"title": title, "count": len(indices), "of": len(changed), "samples": samples})
    return rows


def _sample(suite: Suite, i: int, shares: dict[str, list], passed: dict[str, list]) -> dict[str, Any]:
    """Return one prompt with its expected answer and the answer of every state."""
    row = suite.rows["base"][i]
    line = " ".join(str(row["prompt"]).split())
    answers = []
    for state, rows in suite.rows.items():
        share, ok = shares[state][i], passed[state][i]
        mark = ("pass" if ok else "fail") if share in (0, 1) else f"{100 * share:.0f} %"
        text = format.cut(str(rows[i].get("response") or ""), LONGEST_ANSWER)
        answers.append({"state": state, "text": text, "passed": ok, "mark": mark})
    return {
        "number": row["doc_id"],
        "head": line if len(line) <= LONGEST_HEAD else f"{line[:LONGEST_HEAD]}…",
        "prompt": format.cut(str(row["prompt"]), LONGEST_PROMPT),
        "target": format.cut(str(row["target"]), LONGEST_ANSWER) if row.get("target") else None,
        "answers": answers,
    }
