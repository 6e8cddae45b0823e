"""Lay out what a run shows, once for every form: tables, bars, R and D, facts. A page is one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from opdcl.config.shipped import SHIPPED_DATA
from opdcl.errors import typed
from opdcl.hub import HUB_IDS
from opdcl.results import format
from opdcl.results.estimates import Summary, Verdict
from opdcl.results.format import Table, by_state, cell, distance_cells
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import section
from opdcl.results.origins import as_named
from opdcl.results.ratios import AS_WRITTEN, FROM_BASE, Figure
from opdcl.results.samples import Group, PickedExample, pick_examples, sort_samples
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.results.verdict import at_place
from opdcl.rundir.layout import RunDir

# Where the axis of a pair of bars may end.
AXES = (0.05, 0.1, 0.25, 0.5, 1.0)

WHAT_SCORES_ARE = (
    "Brackets are 95 % intervals over prompts, for one training seed. The floor is the score of the best "
    "content-free answer, such as a copy of the prompt; in multiple choice, of a guess. R counts from tuned, "
    "D from base, or from the floor where that is higher. Answers that do not end were cut at the token "
    "limit. A repeated 4-gram is four words in a row that occurred earlier in the same answer."
)
WHAT_DISTANCE_IS = (
    "{} prompts that no stage has learned from, answered at temperature 1. Both models give their "
    "distributions at every token of base's answers and of the state's own. The distance of a request is the "
    "larger divergence; base's own is the noise of 16-bit arithmetic. "
)
WHAT_C_IS = (
    "C is 1 for base, and 0 for a model as far from it as what it is compared with: tuned, or base's answers "
    "to unrelated prompts, whichever is nearer."
)
COPY_IN_4_BITS = (
    "All scores are of the embedded copy of {}, whose weights were quantized to 4 bits and dequantized "
    "again. On the original weights, base and adapters score slightly differently."
)
QUANTIZED = (
    "In this run, bitsandbytes quantized the linear layers of {} ({}). All scores are of this quantized "
    "base, and where base taught, it was the teacher. On the original weights, scores can differ."
)


@dataclass(frozen=True)
class Page:
    """What a run or a comparison shows; each form takes what it has room for."""

    name: str
    verdict: Verdict
    """Of a comparison: what it has found, and what was compared."""
    sections: list[Table]
    faults: list[str]
    notes: list[str]
    """They begin with the faults."""

    details: list[Table] = field(default_factory=list)
    """Tables that few readers look up."""
    place: str = "RUN"
    """Where the run is, in the verdict's command."""
    bars: list[dict[str, Any]] = field(default_factory=list)
    about_base: list[str] = field(default_factory=list)
    """What is special about the weights that the scores are of."""
    made: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    """What it takes to repeat the run."""
    examples: list[PickedExample] = field(default_factory=list)
    answers: dict[str, list[Group]] = field(default_factory=dict)
    """Suite -> all its prompts, by what became of them."""
    model: dict[str, Any] = field(default_factory=dict)
    """What the card says about the adapter: state, place, licence, opdcl's version, the model that it is for;
    the base that this is a fine-tune `of`, if it is one, and the id of an `embedded` base."""


def run_page(results: Results) -> Page:
    """Lay out a run. Its commands name its place, but for an absolute path, which may be private."""
    run = results.run
    place = "RUN" if run.path.is_absolute() else typed(run.path)
    summary = at_place(results.summary, place)
    manifest = {"created": None, "device": None, "opdcl": None} | run.read_manifest()
    base = dict.fromkeys(("id", "revision", "license", "quantization")) | section(run, "model")
    base |= manifest.get("base") or {}
    answers = {suite.name: groups for suite in results.suites if (groups := sort_samples(suite))}
    headline = {suite.name: answers.get(suite.name, []) for suite in results.headline.values()}
    embedded, model = str(base["id"]) in HUB_IDS, _public(str(base["id"] or "unknown"))
    about_base = [COPY_IN_4_BITS.format(model)] if embedded else []
    if base["quantization"]:
        about_base.append(QUANTIZED.format(model, base["quantization"]))
    return Page(
        name=summary.name,
        verdict=summary.verdict,
        sections=main_tables(summary),
        details=cost_table(summary),
        faults=summary.faults,
        notes=summary.notes,
        place=place,
        bars=bars(summary),
        examples=pick_examples(headline),
        answers=answers,
        made=_made(run, manifest, model),
        about_base=about_base,
        facts=_facts(manifest),
        model=_model(results, manifest, model, base) | {"embedded": base["id"] if embedded else ""},
    )


def bars(summary: Summary) -> list[dict[str, Any]]:
    """Return what a page draws as bars: each measured headline suite, and where their axis ends."""
    blocks = []
    for role in HEADLINE_ROLES:
        suite = summary.headline_suite(role)
        if suite and suite.states:
            highest = max(estimate.high for estimate in suite.states.values())
            axis = next((end for end in AXES if end >= highest), 1.0)
            blocks.append({"role": role, "suite": suite, "axis": axis, "spans": not format.is_few(suite.n)})
    return blocks


def shown(*tables: Table) -> list[Table]:
    """Return the tables with rows, without the columns of states in which nothing is."""
    found = []
    for table in tables:
        kept = []
        for i, name in enumerate(table.columns):
            if name not in STATES or any(row[i] for row in table.rows):
                kept.append(i)
        rows = [[row[i] for i in kept] for row in table.rows]
        if rows:
            found.append(table._replace(columns=[table.columns[i] for i in kept], rows=rows))
    return found


def brief_table(summary: Summary) -> list[Table]:
    """Return what a terminal shows at the end of a run: the headline suites and the distance to base."""
    rows = []
    for role in HEADLINE_ROLES:
        suite = summary.headline_suite(role)
        if suite and suite.n:
            what = f"{suite.plain}\n{suite.words}\n{suite.n} prompts"
            rows.append([what, *by_state(suite.states, n=suite.n)])
    if near := summary.closeness:
        rows.append([f"distance to base\nnats, {near.n} requests", *distance_cells(near.states, near.n)])
    return shown(Table("", ["", *STATES], rows))


def main_tables(summary: Summary) -> list[Table]:
    """Return the scores with R and D, and closeness to base."""
    rows: list[list[str]] = []
    for name, suite in summary.suites.items():
        if suite.n:
            floor = "" if suite.floor is None else f", floor {format.percent(suite.floor)}"
            what = f"{name}\n{suite.role}: {suite.words}\n{suite.n} prompts{floor}"
            rows.append([what, *by_state(suite.states, n=suite.n)])
            if suite.role == "retention":
                rows += _figure_rows(AS_WRITTEN, suite.writing, suite.n, f"\n{name}, {suite.decoding}")
    for label, role, ratio in (
        ("R\nof the lost score, the share that is back", "retention", summary.findings.recovery),
        ("D\nof the domain gain, the share that is kept", "domain", summary.findings.domain_retention),
    ):
        if ratio:
            rows.append([label, "", "", cell(ratio, n=summary.prompts_of(role))])
    tables = [Table("Scores", ["suite", *STATES], rows, WHAT_SCORES_ARE)]
    if near := summary.closeness:
        distances = _figure_rows(FROM_BASE, near.states, near.n)
        if near.c:
            distances.append([f"C\ncompared with {near.start}", "", "", cell(near.c, n=near.n)])
        about_c = f"There is no C: {near.why}." if near.why else WHAT_C_IS
        what = WHAT_DISTANCE_IS.format(near.n) + about_c
        tables.append(Table("Closeness to base", ["", *STATES], distances, what))
    return shown(*tables)


def _figure_rows(
    figures: Mapping[str, Figure], found: Mapping[str, Mapping[str, Estimate]], n: int, small: str = ""
) -> list[list[str]]:
    """Return a row for each labelled figure that a state has; `found` is state -> key -> estimate."""
    rows = []
    for key, figure in figures.items():
        shares = {state: of_state[key] for state, of_state in found.items() if key in of_state}
        is_plain = key == "script" and all(share.value == 1 for share in shares.values())
        if figure.label and shares and not is_plain:
            rows.append([figure.label + small, *by_state(shares, figure.unit, n)])
    return rows


def cost_table(summary: Summary) -> list[Table]:
    """Return what each stage has cost."""
    rows = []
    for stage, spent in summary.cost.items():
        if spent:
            memory = format.memory(spent["peak_memory_bytes"])
            rows.append([stage, format.clock(spent["seconds"]), f"{spent['tokens']:,}", memory])
    return shown(Table("Cost", ["stage", "time, min:s", "tokens", "peak memory"], rows))


def _made(run: RunDir, manifest: dict[str, Any], base_model: str) -> dict[str, str]:
    """Return what a reader asks first: which model, what it learned, on what machine, when."""
    facts, record = {"Model": _short(base_model)}, run.stage_record("finetune")
    if count := (manifest.get("base") or {}).get("parameters"):
        size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
        facts["Model"] += f", {size:.{0 if size >= 10 else 1}f} {unit} parameters"
    if start := run.settings().get("start"):
        facts["Started from"] = _short(start)
    if record and (data := section(run, "finetune").get("data")):
        rows = f", {record['rows']:,} rows" if record.get("rows") else ""
        facts["Fine-tuned on"] = _short(as_named(run, str(data))) + rows
    if run.stage_record("recover"):
        sources = [section(run, "recover").get(stream) for stream in ("general", "domain")]
        prompts = [_short(as_named(run, source)) for source in sources if isinstance(source, str)]
        facts["Recovered with prompts of"] = " and ".join(prompts)
    if manifest["created"]:
        device, words = manifest.get("device") or {}, []
        if manifest.get("seconds"):
            words.append(f"in {max(1, round(manifest['seconds'] / 60))} minutes")
        if device.get("kind") == "cpu" and device.get("cores"):
            words.append(f"on {device['cores']} cores")
        elif device.get("name"):
            words.append(f"on {device['name']}")
        day = datetime.fromisoformat(manifest["created"].replace("Z", "+00:00"))
        facts["Made"] = ", ".join(filter(None, [f"{day.day} {day:%B %Y}", " ".join(words)]))
    return {label: value for label, value in facts.items() if value}


def _short(source: str) -> str:
    """Return the last part of a path, since a report may be shown to others; shipped data have no path."""
    return source if source in SHIPPED_DATA else source.rstrip("/").rsplit("/", 1)[-1]


def _facts(manifest: dict[str, Any]) -> dict[str, str]:
    """Return what a reader needs to repeat the run: the commands and the versions."""
    commands = manifest.get("commands") or [manifest.get("command", "")]
    facts = {"command": commands[0]}
    if len(commands) > 1:
        facts = {f"command {number}": command for number, command in enumerate(commands, 1)}
    versions = {"opdcl": manifest["opdcl"], **(manifest.get("versions") or {})}
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return {name: value for name, value in facts.items() if value}


def _model(results: Results, manifest: dict[str, Any], name: str, base: dict[str, Any]) -> dict[str, Any]:
    """Return what a card says about the last adapter, and about the model that it is for."""
    state, place, adapters = "base" if results.alone else None, None, manifest.get("adapters") or {}
    for later in STATES[1:]:
        if not results.alone and any(later in suite.rows for suite in results.suites):
            state = later
        if later in adapters:
            place = adapters[later].get("path")
    about = {"state": state, "place": place, "license": base["license"], "opdcl": manifest["opdcl"]}
    # The adapters of a model that was tuned as a whole are for that one.
    tuned = results.run.stage_record("finetune").get("tuned_model")
    of = {"base": _public(tuned["id"]), "of": name} if tuned else {"base": name, "of": ""}
    return about | {"kind": "adapter"} | of


def _public(model: str) -> str:
    """Return a model's Hub id, or its folder's name: a path means nothing to readers, and may be private."""
    return HUB_IDS.get(model, Path(model).name if Path(model).is_absolute() else model)
