"""The tables of arms that `pieces.py` has kept: means over seeds of scores, R, C and D."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from page_cells import NOT_MEASURED, of_seeds, ratio, read, rows_of, seeds_of, unbroken

STAGES = ("finetune", "recover")

# The README's methods by the names of their arms in benchmarks/methods.yaml.
METHODS = {
    "ours": "**opdcl**: the teachers write, then the student; every token is graded",
    "third": "the same with `lmbda: 0.33`: the student writes a third of the steps",
    "off-policy": "off-policy, `lmbda: 0`: the teachers write, every token is graded",
    "on-policy": "on-policy, `lmbda: 1`: the student writes",
    "replay": "replay, `method: replay`: imitate the texts that base and tuned wrote",
    "mixing": "no recovery; half of the fine-tune's rows are general, `finetune.replay`",
}


# Those of benchmarks/forgetting.yaml.
FORGETTING = {
    "ours": "**recovery** of a plain fine-tune",
    "replay-30-then-ours": "**mixing, then recovery**: three tenths of the fine-tune's rows are general",
    "longer": "recovery with half as many steps more",
    "public": "recovery with public requests, topped up",
    "public-half": "recovery with half public requests, half shipped prompts",
    "public-both": "mixing, then recovery, both with public requests",
    "replay-as-cure": "replay in place of the recovery",
    "replay-30": "mixing alone, three tenths",
    "replay-10": "mixing alone, a tenth",
    "replay-30-kl": "mixing three tenths, with KL to base in the loss",
    "tmkl": "KL to base among the other tokens in the fine-tune's loss",
    "kl": "KL to base in the fine-tune's loss",
    "rate-third": "a third of the learning rate",
    "none": "the plain fine-tune",
    "placebo": "placebo: the recovery with tuned in base's place",
    "placebo-texts": "placebo: the same with replay",
}


# Those of benchmarks/start.yaml, and `before` of benchmarks/start_before.yaml.
STARTS = {
    "before": "the default before: from tuned, a rate that falls from the first tenth on, the student last",
    "half": "**from a scaled adapter, a held rate**, the student writing half of the general answers",
    "off": "the same, the student writing none",
    "on": "the same, the student writing all of them",
    "start-alone": "the scaled adapter, without training",
    "reverse-0": "half, without reverse KL",
    "reverse-half": "half, with half of the loss reverse KL where the student writes",
    "both-streams": "half, of the domain's answers too",
}

SOURCES = {
    "shipped": "the everyday prompts of 23 November, half of them short questions",
    "shipped-last": "the same; the adapter of the last step",
    "even": "of the present everyday prompts, as many of each kind",
    "even-facts": "the same, but three tenths short questions",
    "even-facts-last": "the same; the adapter of the last step",
    "public": "public requests",
    "topped": "the same, topped up with the kinds that they lack",
    "topped-facts": "the same, with three tenths short questions",
    "topped-facts-last": "the same; the adapter of the last step",
    "everyday-own": "half everyday, half that base wrote",
}


def rivals(record: str = "methods", writing: bool = False, names: dict[str, str] = METHODS) -> str:
    """Return scores, R, C and D of the method and its rivals: means over seeds on the same prompts.

    `names` describes the arms. All arms of a seed count from its plain fine-tune, which the first one cures.
    With `writing`, also the length and the ends of its own answers, in percent of base's.
    """
    found = read(record)
    if not found:
        return NOT_MEASURED
    retention, domain = (found["suites"][role] for role in ("retention", "domain"))
    control = found["suites"].get("control")
    suites = [retention, domain, *([control] if control else [])]
    arms = {arm: [row for row in found["rows"] if row["arm"] == arm] for arm in names}
    plain = next(iter(arms.values()))
    cured = {row["seed"]: row for row in plain}
    table = [
        [state, *(of_seeds(scores(plain, suite, state), 1) for suite in suites)]
        for state in ("base", "tuned")
    ]
    for arm, rows in ((arm, rows) for arm, rows in arms.items() if rows):
        state = last_state(rows[0], retention)
        cells = [of_seeds(scores(rows, suite, state), 1) for suite in suites]
        shares = [shares_of(row, state, cured[row["seed"]], retention, domain) for row in rows]
        cells += [of_seeds([found[i] for found in shares], 2) for i in range(3)]
        if writing:
            texts = [row["closeness"]["written"] for row in rows]
            for key, scale in (("length", 1), ("ended", 100)):
                base = fmean(scale * one["base"][key] for one in texts)
                cells.append(f"{of_seeds([scale * one[state][key] for one in texts], 0)}, base {base:.0f}")
        fewer = f" ({seeds_of(len(rows))})" if len(rows) < len(cured) else ""
        table.append([names[arm] + fewer, *cells])
    kind = "general prompts" if names is SOURCES else "method"
    columns = [f"{kind}, {seeds_of(len(cured))}", *(f"`{suite}`, %" for suite in suites), "R", "C", "D"]
    columns += ["tokens", "answers that end, %"] if writing else []
    table = [row + [""] * (len(columns) - len(row)) for row in table]
    return rows_of(columns, unbroken(table, 1))


def each_seed() -> str:
    """Return R, C and D of every run of the sceptic's table, and the minutes of its stages."""
    found = read("forgetting")
    retention, domain = (found["suites"][role] for role in ("retention", "domain"))
    cured = {row["seed"]: row for row in found["rows"] if row["arm"] == "ours"}
    table = []
    for row in sorted(found["rows"], key=lambda row: ([*FORGETTING].index(row["arm"]), row["seed"])):
        shares = shares_of(row, last_state(row, retention), cured[row["seed"]], retention, domain)
        minutes = [f"{row['stages'][s] / 60:.0f}" if row["stages"].get(s) else "" for s in STAGES]
        table.append([FORGETTING[row["arm"]], str(row["seed"]), *(f"{s:.2f}" for s in shares), *minutes])
    columns = ["method", "seed", "R", "C", "D", "fine-tune, minutes", "recovery, minutes"]
    return rows_of(columns, table)


# What recoveries are compared by: shares, or the scores themselves where a fine-tune has no recovery.
SHARES = ("R", "D")
SCORES = ("instructions, %", "handbook, %")
DIGITS = {"R": 2, "D": 2, "instructions, %": 0, "handbook, %": 0}

# Those of benchmarks/replay.yaml, beside the recovery alone.
REPLAYED = {
    "half": "a plain fine-tune, then the recovery",
    "mix-kl": "three tenths replayed, base's distribution learned there; no recovery",
    "mix-kl-then": "the same, then the recovery",
    "mix-ce": "three tenths replayed, base's words learned there; no recovery",
    "mix-ce-then": "the same, then the recovery",
}


def figures(row: dict[str, Any], columns: tuple[str, ...] = SHARES) -> list[float]:
    """Return the figures of a run's end: distance, those of two columns, short questions, length, ends."""
    end = "recovered" if "recovered" in row["closeness"]["written"] else "tuned"
    two = [row[key]["value"] for key in ("recovery", "domain_retention")] if columns == SHARES else []
    if columns == SCORES:
        two = [100 * row["suites"][suite][end] for suite in ("instructions_quick", "handbook_quick")]
    near = row["closeness"]["distance"][end]["value"]
    return [near, *two, 100 * row["suites"]["neighbours_quick"][end], *written_by(row, end)]


def cells_of(figures_of_seeds: list[list[float]], columns: tuple[str, ...] = SHARES) -> list[str]:
    """Return a cell for each figure: its mean over the seeds, with an interval."""
    digits = [2, *(DIGITS[column] for column in columns), 1, 0, 0]
    values = zip(*figures_of_seeds, strict=True)
    return [of_seeds([*of_one], places) for of_one, places in zip(values, digits, strict=True)]


def starts() -> str:
    """Return what recoveries from other starts, by other authors, reach."""
    return reached_by(read("start")["rows"], STARTS)


def replayed() -> str:
    """Return what a fine-tune with replayed rows reaches, alone and before the recovery."""
    rows = read("replay")["rows"]
    seeds = {row["seed"] for row in rows}
    plain = [row for row in read("start")["rows"] if row["seed"] in seeds]
    return reached_by(plain + rows, REPLAYED, SCORES)


def reached_by(
    rows_of_arms: list[dict[str, Any]], names: dict[str, str], columns: tuple[str, ...] = SHARES
) -> str:
    """Return the figures of named arms: means over the seeds of each."""
    found = [row for row in rows_of_arms if row["arm"] in names]
    table = []
    for arm, words in names.items():
        rows = [figures(row, columns) for row in found if row["arm"] == arm]
        if rows:
            table.append([words, str(len(rows)), *cells_of(rows, columns)])
    lengths, ends = zip(*[written_by(row, "base") for row in found], strict=True)
    writing = [f"tokens, base {fmean(lengths):.0f}", f"answers that end, %, base {fmean(ends):.0f}"]
    head = ["recovery", "seeds", "distance, nats", *columns, "`neighbours_quick`, %", *writing]
    return rows_of(head, unbroken(table, 1))


def start_pairs() -> str:
    """Return how far two arms of benchmarks/start.yaml lie apart, on the same prompts and seeds."""
    found = {(row["arm"], row["seed"]): row for row in read("start")["rows"]}
    pairs = {
        "half - none": ("half", "off"),
        "all - none": ("on", "off"),
        "half - all": ("half", "on"),
        "half - its start alone": ("half", "start-alone"),
        "half - the default before": ("half", "before"),
    }
    table = []
    for words, (one, other) in pairs.items():
        seeds = [seed for arm, seed in found if arm == one and (other, seed) in found]
        differences = []
        for seed in seeds:
            ours, theirs = (compared(found[arm, seed]) for arm in (one, other))
            differences.append([a - b for a, b in zip(ours, theirs, strict=True)])
        table.append([words, str(len(seeds)), *cells_of(differences)])
    gaps = ("tokens, gap to base", "ends, gap to base, points")
    head = ["who writes", "seeds", "distance, nats", *SHARES, "`neighbours_quick`, %", *gaps]
    return rows_of(head, unbroken(table, 1))


def compared(row: dict[str, Any]) -> list[float]:
    """Return a run's figures, of length and ends how far they lie from base's."""
    *shares, length, ends = figures(row)
    base_length, base_ends = written_by(row, "base")
    return [*shares, abs(length - base_length), abs(ends - base_ends)]


def reached() -> str:
    """Return what the default recovery reaches, beside its rivals without training: means over the seeds."""
    found = read("start")["rows"]
    alone = [row for row in found if row["arm"] == "start-alone"]
    measured = {row["seed"] for row in alone}
    half = [row for row in found if row["arm"] == "half" and row["seed"] in measured]
    models = {
        "base": (half, "base"),
        "tuned": (half, "tuned"),
        "tuned at partial strength": (alone, "recovered"),
        "**recovered**": (half, "recovered"),
    }
    table = []
    for name, (rows, state) in models.items():
        near = fmean(row["closeness"]["distance"][state]["value"] for row in rows)
        skill, domain = (
            fmean(scores(rows, suite, state)) for suite in ("instructions_quick", "handbook_quick")
        )
        table.append([name, f"{skill:.0f} %", f"{domain:.0f} %", f"{near:.2f}"])
    columns = [
        f"model, {seeds_of(len(half))}",
        "instructions followed",
        "handbook known",
        "distance to base, nats",
    ]
    return rows_of(columns, table)


def written_by(row: dict[str, Any], state: str) -> tuple[float, float]:
    """Return the mean length in tokens of a state's sampled answers, and the share that ends in percent."""
    written = row["closeness"]["written"][state]
    return written["length"], 100 * written["ended"]


def families() -> str:
    """Return what the second model scored on each data set, with the time and memory of its whole run."""
    found = read("gemma")
    table = []
    for row in found["rows"] if found else ():
        suites = {suite["role"]: (name, suite) for name, suite in row["suites"].items()}
        cells = []
        for role in ("retention", "control", "domain"):
            name, suite = suites[role]
            scores = " / ".join(f"{100 * suite[s]:.1f}" for s in ("base", "tuned", "recovered"))
            cells.append(f"`{name}`, n = {suite['n']}<br>{scores}")
        ratios = [row[key] for key in ("recovery", "closeness", "domain_retention")]
        cells += ["none" if not one or one["value"] is None else ratio(one) for one in ratios]
        written = row["closeness"]["written"]
        cells.append(" / ".join(f"{written[s]['length']:.0f}" for s in ("base", "tuned", "recovered")))
        cells.append(" / ".join(f"{100 * written[s]['ended']:.0f}" for s in ("base", "tuned", "recovered")))
        cells.append(f"{row['seconds'] / 60:.0f} min, {row['peak_memory_bytes'] / 2**30:.1f} GiB")
        table.append([row["arm"], *cells])
    columns = ["data, 1 seed", "retention, %", "control, %", "domain, %", "R", "C", "D"]
    columns += ["tokens", "answers that end, %", "whole run"]
    return rows_of(columns, table) if table else NOT_MEASURED


def last_state(row: dict[str, Any], suite: str) -> str:
    """Return the state that an arm ends with: without a recovery, what its fine-tune made."""
    return "recovered" if "recovered" in row["suites"][suite] else "tuned"


def shares_of(
    row: dict[str, Any], state: str, cured: dict[str, Any], retention: str, domain: str
) -> tuple[float, float, float]:
    """Return R, C and D of a state, counted from the plain fine-tune of the same seed."""
    (skill, plain_skill), (learned, plain) = (
        (row["suites"][name], cured["suites"][name]) for name in (retention, domain)
    )
    lost, begun = max(plain_skill["tuned"], skill["floor"]), max(learned["base"], learned["floor"])
    near = row["closeness"]["distance"][state]["value"]
    far = cured["closeness"]["distance"]["tuned"]["value"]
    return (
        (skill[state] - lost) / (skill["base"] - lost),
        1 - near / min(far, row["closeness"]["floor"]),
        (learned[state] - begun) / (plain["tuned"] - begun),
    )


def scores(rows: list[dict[str, Any]], suite: str, state: str) -> list[float]:
    return [100 * row["suites"][suite][state] for row in rows]
