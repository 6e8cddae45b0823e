"""The tables that `benchmarks/records.py` writes into the pages, each made from a record in this folder."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from arm_tables import (
    DECIDED_PAIRS,
    REPLAY_PAIRS,
    SCORES,
    START_PAIRS,
    decided,
    families,
    pairs,
    reached,
    replayed,
)
from by_dose import ARMS, PAIRS, by_arm, paired
from one_seed import contradictions, rounds, systems
from page_cells import HERE, NOT_MEASURED, ratio, read, rows_of, seeds_of, unbroken

from opdcl.results.format import percent
from opdcl.results.status import STATES


def cheats() -> str:
    """Return what base, or on the domain tuned, and each cheat score on the shipped suites."""
    found = read("instructions")["suites"]
    rows = [["own answer", *(percent(suite["own"]["score"]) for suite in found.values())]]
    for name in dict.fromkeys(name for suite in found.values() for name in suite["cheats"]):
        scores = [suite["cheats"].get(name, {}).get("score") for suite in found.values()]
        rows.append([name, *("" if score is None else percent(score) for score in scores)])
    columns = [f"`{name}`, {suite['whose']}'s<br>n = {suite['n']}" for name, suite in found.items()]
    return rows_of(["answer", *columns], unbroken(rows, 1))


def closeness() -> str:
    """Return how far base, its adapters and models that cheat or are spoilt are from base."""
    found = read("closeness")
    if not found:
        return NOT_MEASURED
    rows = []
    for row in [{"case": "base"} | found["base"], *found["rows"]]:
        kls = [f"{row[name]['value']:.2f}" for name in ("forward", "reverse")]
        writing = [f"{row['length']['value']:.0f}", percent(row["ended"]["value"])]
        rows.append([row["case"], f"{row['distance']['value']:.2f}", *kls, *writing, ratio(row.get("C"))])
    columns = ["model", "distance", "forward KL", "reverse KL", "tokens", "ended", "C"]
    return rows_of(columns, unbroken(rows, 1))


def together() -> str:
    """Return what pilots of a recovery reached on held-out prompts, beside the start."""
    table = []
    for row in read("together").get("held_out", []):
        name = f"{row['how']}; {row['steps']} steps, {row['domain_rows']} rows, {row['rate']}; {row['seed']}"
        nats = [f"{row[key]:.2f}" for key in ("general_kl", "own_distance", "domain_kl")]
        table.append([name if row["rate"] else row["arm"], *nats, f"{row['own_length']:.0f}"])
    columns = ["recovery; seed", "KL on base's answers", "on its own", "KL to tuned, domain", "tokens"]
    return rows_of(columns, table) if table else NOT_MEASURED


def quotes() -> str:
    """Return the quoted prompts with the answers of the three models."""
    rows = []
    for found in read("quote").get("quotes", []):
        answers = [found[state]["text"] + ("" if found[state]["ended"] else " …") for state in STATES]
        texts = [" ".join(text.split()) for text in (found["prompt"], *answers)]
        rows.append([text.replace("|", "\\|").replace("<", "&lt;") for text in texts])
    return rows_of(["prompt", *STATES], rows, 4) if rows else NOT_MEASURED


def sizes() -> str:
    """Return memory and time by model: measured for the embedded model, by arithmetic for larger ones."""
    place, peak, time = quickstart_time()
    rows = [["SmolLM2-135M, embedded", place, peak, time, "measured"]]
    (step,) = on_a_gpu("step qwen3-8b opdcl 64")
    device = step["device"].removeprefix("NVIDIA ")
    row = next(row for row in read("sizes")["rows"] if (row["student"], row["gpus"]) == ("Qwen3-1.7B", 1))
    memory, time = f"{row['gib_per_gpu']:.0f} GiB", f"{row['seconds_per_step']:.1f} s a step of recovery"
    rows.append(["Qwen3-1.7B", "one H100", memory, time, "**untested**"])
    memory, time = (
        f"{step['peak_bytes'] / 2**30:.0f} GiB",
        f"{step['step']:.1f} s a step of recovery on an {device}",
    )
    rows.append(["Qwen3-8B's shape", "one H200, 141 GB", memory, time, "random weights, steps alone"])
    return rows_of(["model", "machine", "peak memory", "time", ""], rows, 5)


def how_large() -> str:
    """Return the memory and time of one step by model and GPUs, as the cost model has them."""
    rows = []
    for row in read("sizes")["rows"]:
        memory = f"{row['gib_per_gpu']:.0f}" + ", too large" * (not row["fits"])
        cells = [str(row["gpus"]), row["base"], row["sampling"], str(row["micro_batch_tokens"])]
        rows.append([row["student"], *cells, memory, f"{row['seconds_per_step']:.1f}"])
    return rows_of(
        ["student", "GPUs", "base", "sampling", "tokens per micro-batch", "GiB per GPU", "s/step"], rows
    )


def reliability() -> str:
    """Return what was broken on purpose, what happened, and what was lost."""
    parts = read("reliability").values()
    rows = [[row[key].replace("|", "/") for key in FAULT] for part in parts for row in part["rows"]]
    return rows_of(["fault", "how it was injected", "what happened", "what was lost"], rows, 4)


# The keys of a row of reliability.json.
FAULT = ("fault", "how", "outcome", "lost")

# What the arms of benchmarks/gpu.py measure, and beside it what others publish or TRL takes.
ON_A_GPU = {
    "decode qwen3-0.6b 64": ("decoding, Qwen3-0.6B, 64 answers", ""),
    "decode qwen3-8b 64": ("decoding, Qwen3-8B, 64 answers", "vLLM on an H100: 4,315 tokens/s"),
    "decode qwen3-8b 256": ("decoding, Qwen3-8B, 256 answers", "vLLM on an H100: 7,719 tokens/s"),
    "step qwen3-0.6b opdcl 64": ("a recovery step, Qwen3-0.6B", ""),
    "step qwen3-0.6b stock 64": ("the same by TRL's DistillationTrainer", "{:.1f} times the step above"),
    "step qwen3-8b opdcl 64": ("a recovery step, Qwen3-8B", ""),
    "quickstart": ("`opdcl run quickstart`, the whole command", ""),
}


def gpu() -> str:
    """Return what `benchmarks/gpu.py` measured, in the order of `ON_A_GPU`."""
    rows = []
    for arm, (words, beside) in ON_A_GPU.items():
        for row in on_a_gpu(arm):
            speed = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else ""
            memory = f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else ""
            above = f"{row['over_floor']:.1f}" if "over_floor" in row else ""
            time = f"{row['step'] * 1e3:.1f} ms" if row["step"] < 1 else f"{row['step']:.3g} s"
            # TRL's step and the opdcl step before it ran one after the other.
            beside = beside.format(row["step"] / on_a_gpu("step qwen3-0.6b opdcl 64")[-1]["step"])
            rows.append([words, time, speed, memory, above, beside])
    columns = ["what", "time", "tokens/s", "GB", "over the floor", "beside"]
    return rows_of(columns, unbroken(rows, 1))


def on_a_gpu(arm: str) -> list[dict[str, Any]]:
    lines = (HERE / "gpu.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["arm"] == arm]


def quickstart_time() -> tuple[str, str, str]:
    """Return where the quickstart was timed, the memory that it took, and how long it took."""
    row = read("quickstart_time")
    place = f"{row['threads']} thread{'s' * (row['threads'] > 1)} of {row['machine']}, {row['dtype']}"
    return place, f"{row['peak_memory_gib']} GiB", f"{row['seconds'] / 60:.0f} minutes, all stages"


def throughput(record: str = "throughput") -> str:
    parts = ("step", "sample", "teacher", "student", "backward")
    names = {
        "stock": "TRL `DistillationTrainer`, separate teacher, defaults (fp32 weights, bf16 autocast, "
        "checkpointing)",
        "stock-fp32": "TRL `DistillationTrainer`, separate teacher, its defaults without bf16 autocast",
        "stock-tuned": "the same, tuned: no checkpointing, cached generation, fastest precision",
    }
    arms = read(record)["arms"]
    rows = [
        [names.get(arm, arm)]
        + [f"{row[part]:.1f}" for part in parts]
        + [f"{row['completion_tokens']:,}", f"{100 * row['padding']:.0f} %", f"{row['peak_bytes'] / 1e9:.2f}"]
        + [f"{row['time_ratio']:.2f}", f"{row['time_per_token_ratio']:.2f}", f"{row['memory_ratio']:.2f}"]
        # A row that says "the same" follows the one that it means.
        for arm in (*names, "opdcl")
        if (row := arms.get(arm))
    ]
    columns = ["arm", "s/step", *parts[1:], "new tokens", "padding", "peak GB", "time", "per token", "memory"]
    return rows_of(columns, rows)


def growth(kind: str, label: str, header: str) -> str:
    found = read("scaling")
    rows = found["rows"][kind]
    fit = f"{found['linear'][kind]['r2']:.3f}" if kind in found["linear"] else ""
    cells = [
        ["s/step", *(f"{row['seconds']:.1f}" for row in rows), fit],
        ["peak GB", *(f"{row['peak_bytes'] / 1e9:.2f}" for row in rows), ""],
    ]
    return rows_of([header, *(str(row[label]) for row in rows), "R²"], cells)


def coverage() -> str:
    """Return how often the intervals of each kind contain the truth: the least and the most of all cells."""
    cells = read("coverage")["intervals"]
    seeds = sorted({cell["seeds"] for cell in cells})
    rows = [
        [
            kind,
            *(extent([c["coverage"] for c in cells if (c["kind"], c["seeds"]) == (kind, n)]) for n in seeds),
        ]
        for kind in dict.fromkeys(cell["kind"] for cell in cells)
    ]
    return rows_of(["estimate", *map(seeds_of, seeds)], rows)


def verdict_errors() -> str:
    """Return how often a verdict was *recovered*, by what is true."""
    cells = read("coverage")["verdicts"]
    seeds = sorted({cell["seeds"] for cell in cells})

    def shares(kind: str, n: int) -> str:
        values = [c["statuses"].get("recovered", 0.0) for c in cells if (c["kind"], c["seeds"]) == (kind, n)]
        return extent(values)

    kinds = [k for k in dict.fromkeys(cell["kind"] for cell in cells) if k.startswith("recovered")]
    return rows_of(
        ["truth", *map(seeds_of, seeds)], [[kind, *(shares(kind, n) for n in seeds)] for kind in kinds]
    )


def fractions() -> str:
    """Return how often the intervals of few fractions hold the truth, and how often a verdict is good."""
    cells = read("fractions")["fractions"]
    sizes = sorted({cell["prompts"] for cell in cells})

    def row(label: str, key: str, **where: Any) -> list[str]:
        chosen = [cell for cell in cells if all(cell[k] == v for k, v in where.items())]
        by_size = ([c[key] for c in chosen if c["prompts"] == n and c[key] is not None] for n in sizes)
        return [label, *(extent(shares) if shares else "none" for shares in by_size)]

    rows = [row(f"{kind}: holds the truth", "coverage", kind=kind) for kind in ("score", "R", "D")]
    for kind, verdict in (("R", "recovered"), ("D", "kept")):
        for truth in (0.85, 1.0):
            rows.append(
                row(f"true {kind} is {truth:g}: *{verdict}*", "good_verdicts", kind=kind, truth=truth)
            )
    return rows_of(["", *(f"{n} prompts" for n in sizes)], rows)


def extent(shares: list[float]) -> str:
    return f"{percent(min(shares)).removesuffix(' %')} to {percent(max(shares))}"


TABLES = {
    "reached": reached,
    "gemma": families,
    "gpu": gpu,
    "cheats": cheats,
    "start-pairs": lambda: pairs(["start"], START_PAIRS),
    "rounds": rounds,
    "systems": systems,
    "contradictions": contradictions,
    "decided": decided,
    "decided-pairs": lambda: pairs(["decided"], DECIDED_PAIRS, SCORES),
    **{record: partial(by_arm, record) for record in ARMS},
    "together": together,
    **{f"{record}-pairs": partial(paired, record) for record in PAIRS},
    "replay": replayed,
    "replay-pairs": lambda: pairs(["start", "replay"], REPLAY_PAIRS, SCORES),
    "closeness": closeness,
    "quotes": quotes,
    "sizes": sizes,
    "how-large": how_large,
    "reliability": reliability,
    "coverage": coverage,
    "fractions": fractions,
    "verdict-errors": verdict_errors,
    "throughput": throughput,
    "throughput-fp32": lambda: throughput("throughput-fp32"),
    "growth-rows": lambda: growth("batch", "prompts", "rows of 64 tokens"),
    "growth-length": lambda: growth("length", "length", "8 rows, tokens each"),
}
