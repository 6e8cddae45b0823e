"""The report: run directory -> numbers -> report.md, report.html and the model card. It loads no model.

opdcl report runs/quickstart
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.hub import HUB_IDS
from opdcl.results.format import (
    clock,
    code,
    cut,
    fence,
    interval,
    markdown,
    memory,
    percent,
    score,
    span,
    yaml,
)
from opdcl.results.scores import STATES, Suite, load_suites, read_record, section
from opdcl.results.summary import summarise, summarise_suites
from opdcl.results.verdict import why_no_domain_retention, why_no_recovery
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

if TYPE_CHECKING:
    import jinja2


__all__ = ["harmless", "summarise", "write"]

SAMPLES_PER_GROUP = 4

LONGEST_PROMPT, LONGEST_ANSWER = 900, 700


def pick_samples(suite: Suite | None) -> list[dict[str, Any]]:
    """Pick prompts whose pass or fail the fine-tune changed, lowest numbers first, by what recovery made of them."""
    if suite is None or not {"base", "tuned"} <= set(suite.rows):
        return []
    share = {state: [sum(p) / max(len(p), 1) for p in suite.parts(state)] for state in suite.rows}
    whole = 1.0 if any(len(p) != 1 for p in suite.parts("base")) else 0.5
    passed = {state: [s >= whole for s in shares] for state, shares in share.items()}
    lost = suite.role == "retention"
    changed = [
        i
        for i, (b, t) in enumerate(zip(passed["base"], passed["tuned"], strict=True))
        if b == lost and t != b
    ]
    verb = "Lost by the fine-tune" if lost else "Learned by the fine-tune"
    if "recovered" not in suite.rows:
        groups = [(verb, changed)]
    else:
        after = passed["recovered"]
        good, bad = ("back after recovery", "not back") if lost else ("kept by recovery", "lost again")
        groups = [
            (f"{verb}, {good}", [i for i in changed if after[i]]),
            (f"{verb}, {bad}", [i for i in changed if not after[i]]),
        ]

    def answer(state: str, i: int) -> dict[str, Any]:
        one = share[state][i]
        mark = ("pass" if passed[state][i] else "fail") if one in (0, 1) else f"{100 * one:.0f} %"
        text = cut(str(suite.rows[state][i].get("response") or ""), LONGEST_ANSWER)
        return {"state": state, "text": text, "passed": passed[state][i], "mark": mark}

    def sample(i: int) -> dict[str, Any]:
        row = suite.rows["base"][i]
        line = " ".join(str(row["prompt"]).split())
        return {
            "number": row["doc_id"],
            "head": line if len(line) <= 90 else f"{line[:90]}…",
            "prompt": cut(str(row["prompt"]), LONGEST_PROMPT),
            "target": cut(str(row["target"]), LONGEST_ANSWER) if row.get("target") else None,
            "answers": [answer(state, i) for state in suite.rows],
        }

    return [
        {
            "title": title,
            "count": len(found),
            "of": len(changed),
            "samples": [sample(i) for i in found[:SAMPLES_PER_GROUP]],
        }
        for title, found in groups
    ]


def write(run: RunDir, summary: dict[str, Any] | None = None) -> list[Path]:
    """Write `report.md`, `report.html` and the model card `README.md` into the run; return their paths.

    The same run gives the same bytes: nothing in them depends on when or where they are written.
    """
    from markupsafe import Markup

    from opdcl.results import plots

    suites = load_suites(run)
    summary = summary or summarise_suites(run, suites)
    context = _context(run, summary, suites)
    figures = {
        "loss": plots.finetune_loss(_rows(run, "finetune")),
        "kl": plots.recovery_kl(_rows(run, "recover"), _teachers(run)),
        "tradeoff": plots.tradeoff(summary),
    }

    html, text = environment(harmless, escape=True), environment(markdown, escape=False)
    files = {
        "report.md": text.get_template("report.md.j2").render(context),
        "report.html": html.get_template("report.html.j2").render(
            context | {"figures": {name: svg and Markup(svg) for name, svg in figures.items()}}
        ),
        "README.md": text.get_template("card.md.j2").render(context),
    }
    for name, content in files.items():
        write_atomic(run.path / name, content)
    return [run.path / name for name in files]


def card(run: RunDir, state: str, base: str, place: str, license: str | None, datasets: list[str]) -> str:
    """Return the model card of one adapter as the hub is to show it.

    Args:
        run: The run that made it.
        state: Whose adapter it is: its results are the card's.
        base: The base's hub id.
        place: The hub id under which the adapter will be.
        license: Its licence, if known.
        datasets: Hub ids of what it learned from.
    """
    suites = load_suites(run)
    context = _context(run, summarise_suites(run, suites), suites)
    # Of its machine and places a public card says no more than the run's own does; its command may name private files.
    facts = {
        name: value
        for name, value in context["facts"].items()
        if name not in ("command", "base") and not name.startswith("adapter ")
    }
    changed = {
        "card_state": state,
        "base_model": base,
        "adapter_path": place,
        "datasets": datasets,
        "facts": facts,
    }
    return (
        environment(markdown, escape=False)
        .get_template("card.md.j2")
        .render(context | changed | {"base": context["base"] | {"license": license}})
    )


def environment(show: Callable[[str], str], escape: bool) -> jinja2.Environment:
    """Return the templates' environment: every string printed passes through `show`, unless a filter marked it ready."""
    import jinja2
    from markupsafe import Markup

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=escape,
        undefined=jinja2.StrictUndefined,
        finalize=lambda v: show(v) if isinstance(v, str) and not isinstance(v, Markup) else v,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ready = {
        "percent": percent,
        "interval": interval,
        "span": span,
        "score": score,
        "clock": clock,
        "memory": memory,
    }
    if not escape:
        ready |= {"code": code, "fence": fence, "yaml": yaml}
    made.filters |= {name: lambda v, f=f: Markup(f(v)) for name, f in ready.items()}
    return made


def _context(run: RunDir, summary: dict, suites: list[Suite]) -> dict[str, Any]:
    """Return everything that the three templates print."""
    from opdcl.results import stats

    manifest = read_record(run.manifest)
    base = {"id": None, "revision": None, "license": None}
    base |= section(run, "model") | (manifest.get("base") or {})
    named = str(base["id"] or "unknown")
    headline = [next((s for s in suites if s.role == role), None) for role in ("retention", "domain")]
    adapters = manifest.get("adapters") or {}
    card_state = next((s for s in reversed(STATES[1:]) if any(s in suite.rows for suite in suites)), None)
    values = {
        s.name: {s.metric: {state: summary["suites"][s.name][state]["value"] for state in s.rows}}
        | summary["suites"][s.name]["metrics"]
        for s in suites
        if s.rows
    }
    losses = [r["loss"] for r in _rows(run, "finetune") if r.get("loss") is not None]
    validations = [r for r in _rows(run, "recover") if r.get("validation")]
    return {
        "summary": summary,
        "states": STATES,
        "tables": values,
        "lengths": {
            s.name: {
                state: sum(r.get("tokens") or 0 for r in rows) / len(rows) for state, rows in s.rows.items()
            }
            for s in suites
        },
        "why_no_r": why_no_recovery(summary),
        "why_no_d": why_no_domain_retention(headline[1]),
        "differences": _differences(summary["tests"]),
        "ceiling": {name: gap | _points(gap) for name, gap in summary["ceiling"].items()},
        "margin": f"{100 * stats.NON_INFERIORITY_MARGIN:g}",
        "samples": {s.name: groups for s in headline if s and (groups := pick_samples(s))},
        "loss_ends": losses[:1] + losses[-1:],
        "validations": validations,
        "best_step": max((r["step"] for r in validations if r["validation"].get("best")), default=None),
        "manifest": {"created": None, "device": None} | manifest,
        "base": base,
        # A path on this machine says nothing to a reader of the card, and may tell more than its owner wants.
        "base_model": HUB_IDS.get(named, Path(named).name if Path(named).is_absolute() else named),
        "version": manifest.get("opdcl"),
        "facts": _facts(run, manifest, base, adapters),
        "card_state": card_state,
        "datasets": [],
        "embedded": named in HUB_IDS,
        "adapter_path": next((adapters[s].get("path") for s in reversed(STATES) if s in adapters), None),
    }


def _facts(run: RunDir, manifest: dict, base: dict, adapters: dict) -> dict[str, str]:
    """Return what is needed to repeat the run and to check that it is the same."""
    versions = {"opdcl": manifest.get("opdcl"), **(manifest.get("versions") or {})}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    verdict = (
        "identical before and after"
        if before == after
        else f"CHANGED to {after}"
        if after
        else "not checked after"
    )
    seeds = {stage: section(run, stage).get("seed") for stage in ("finetune", "recover", "eval")}
    device = manifest.get("device") or {}
    facts = {
        "command": manifest.get("command"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "device": ", ".join(
            shown
            for shown in (
                device.get("name"),
                device.get("dtype"),
                device.get("cores") and f"{device['cores']} cores",
                device.get("memory_bytes") and memory(device["memory_bytes"]),
            )
            if shown
        ),
        "seeds": ", ".join(f"{stage} {seed}" for stage, seed in seeds.items() if seed is not None),
        "base": " at ".join(str(base[k]) for k in ("id", "revision") if base[k]),
        "base fingerprint": f"{before}, {verdict}" if before else "",
        **{
            f"adapter {state}": f"{a.get('path', '')} sha256 {a.get('sha256', 'unknown')}"
            for state, a in adapters.items()
        },
        "whole run, min:s": clock(manifest["seconds"]) if manifest.get("seconds") else "",
    }
    return {name: value for name, value in facts.items() if value}


def _differences(tests: dict) -> list[dict[str, str]]:
    """Return the retention suite's paired differences, in points, as table rows."""
    rows = []
    for pair, p in tests["mcnemar"].items():
        if change := tests[pair]:
            later, earlier = pair.split("_minus_")
            shown = "n/a" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
            rows.append({"pair": f"{later} - {earlier}", **_points(change), "p": shown})
    return rows


def _points(change: dict[str, float]) -> dict[str, str]:
    """Return a difference in points, with its interval, as a table shows them."""
    value, low, high = (f"{100 * change[k]:+.1f}" for k in ("value", "low", "high"))
    return {"value": value, "span": f"{low} to {high}"}


def _teachers(run: RunDir) -> dict[str, str]:
    """Return what to call each stream's teacher: base and tuned, unless the recovery had others."""
    stage = run.find_stage("recover")
    config = stage.state().get("config", {}) if stage else {}
    kinds = {
        stream: config.get(f"{stream}_teacher", {}).get("kind", usual)
        for stream, usual in (("general", "base"), ("domain", "tuned"))
    }
    if named := config.get("teachers"):
        kinds["domain"] = " and ".join([kinds["domain"], *named] if config.get("domain") else named)
    return kinds


def _rows(run: RunDir, stage: str) -> list[dict]:
    """Return a stage's metric rows by step; where a resumed run repeated a step, its last row counts."""
    found = run.find_stage(stage)
    rows = {
        (r.get("step", 0), "validation" in r, "loss" in r): r
        for r in (read_jsonl(found.metrics) if found else [])
    }
    return [rows[key] for key in sorted(rows)]
