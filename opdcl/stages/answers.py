"""Questions that a state answers, and answers that outlive an interrupt, for suites and closeness alike.

Rows are kept as JSON lines, batch by batch, each under a hash of all that it depends on. So an interrupt
loses one batch at most, and only an answer to the same question, made in the same way, is reused.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opdcl.model.backbone import Backbone, State
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import adapter_hash
from opdcl.rundir.identity import Identity
from opdcl.rundir.layout import RunDir
from opdcl.sampling.sample import sample
from opdcl.train.cost import peak_memory
from opdcl.training import StageReport
from opdcl.types import Prompt, Rollout

# The number of prompts whose answers are drawn together, in the order of the questions. A sample depends on a
# prompt's place among them, so the number is fixed: batch size and interrupts change nothing. All states use
# the same random numbers, so that a model that is base gives base's answers.
DRAWN_TOGETHER, SEED = 100, 39
# The seed of base's second answers to a suite that is sampled.
SECOND_SEED = 1_000_039

Row = dict[str, Any]

# Prompts, maximum tokens of each completion, seed, callback for finished completions -> completions.
Decode = Callable[[list[Prompt], int, int, Callable[[list[Rollout]], None]], list[Rollout]]


@dataclass(frozen=True)
class Question:
    """What a state is asked; questions of one key have one answer."""

    prompt: list[int]
    limit: int
    """The maximum length of its answer, in tokens."""
    key: str
    stops: list[str] = field(default_factory=list)
    """Texts that end its answer."""


class KeptRows:
    """Rows by key, which are kept in a file as well."""

    def __init__(self, file: Path, keys: Iterable[str]):
        wanted = set(keys)
        self.file = file
        self.rows: dict[str, Row] = {}
        for row in read_jsonl(file):
            key = row.pop("key", None)
            if key in wanted:
                self.rows[key] = row
        # Rewritten first, so that new rows do not follow a line that a crash cut off.
        write_atomic(file, _lines(self.rows))

    def add(self, rows: dict[str, Row]) -> None:
        self.rows |= rows
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(_lines(rows))


def keep_earlier(file: Path, samples: Path) -> None:
    """Add the answers of finished samples to the kept rows.

    So a suite that scores otherwise than before, or asks more, needs no answer again.
    """
    earlier = []
    for row in read_jsonl(samples):
        if row.get("key"):
            text, tokens, ended = row["response"], row["tokens"], row["ended"]
            earlier.append({"key": row["key"], "text": text, "tokens": tokens, "ended": ended})
    if earlier:
        write_atomic(file, json_lines([*read_jsonl(file), *earlier]))


def _lines(rows: dict[str, Row]) -> str:
    return json_lines({"key": key} | row for key, row in rows.items())


def json_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def made_by(backbone: Backbone, adapter: Path | None, decoding: list[Any]) -> str:
    """Return a hash of what makes an answer, apart from the question."""
    parts = {
        "base": backbone.known_fingerprint(),
        "adapter": adapter_hash(adapter) if adapter else None,
        "dtype": str(backbone.causal_lm.dtype),
        "eos_ids": backbone.eos_ids,
        "decoding": decoding,
    }
    return Identity(parts).key


def answer(
    questions: Sequence[Question],
    kept: KeptRows,
    decode: Decode,
    rows_of: Callable[[list[int], list[Rollout]], list[Row]],
    report: StageReport,
    batch_size: int | None,
    seed: int = SEED,
) -> None:
    """Answer all questions without a row in `kept`.

    Args:
        questions: What is asked.
        kept: Receives a row for each key.
        decode: Completes prompts.
        rows_of: Returns the rows of questions, given by number, from their completions.
        report: Receives the number of answers.
        batch_size: How many answers are decoded together; None if they are drawn, `DRAWN_TOGETHER`.
        seed: Of the draws.
    """
    for batch in _batches(questions, kept.rows, batch_size):
        prompts = [Prompt(questions[i].prompt) for i in batch]
        progress = counter(report, len(kept.rows), len(questions))
        rollouts = decode(prompts, questions[batch[0]].limit, seed + batch[0], progress)
        rows = rows_of(batch, rollouts)
        kept.add({questions[i].key: row for i, row in zip(batch, rows, strict=True)})


def _batches(questions: Sequence[Question], answered: dict[str, Row], size: int | None) -> list[list[int]]:
    """Return the numbers of the questions to be answered, in batches; those of one key are answered once.

    Batches of drawn answers are always the same, so one that is half answered is drawn again.
    """
    numbers = list({question.key: i for i, question in enumerate(questions)}.values())
    if size is None:
        batches = _cut(questions, numbers, DRAWN_TOGETHER)
        return [batch for batch in batches if any(questions[i].key not in answered for i in batch)]
    missing = [i for i in numbers if questions[i].key not in answered]
    missing.sort(key=lambda i: len(questions[i].prompt))  # prompts of similar length share a batch
    return _cut(questions, missing, size)


def _cut(questions: Sequence[Question], numbers: list[int], size: int) -> list[list[int]]:
    """Cut numbers of questions into batches of one token limit."""
    batches = []
    for limit in sorted({questions[i].limit for i in numbers}):
        alike = [i for i in numbers if questions[i].limit == limit]
        batches += [alike[start : start + size] for start in range(0, len(alike), size)]
    return batches


def counter(report: StageReport, done: int, total: int) -> Callable[[list[Rollout]], None]:
    """Return a callback that counts finished rollouts on top of `done`."""

    def count(finished: list[Rollout]) -> None:
        nonlocal done
        done += len(finished)
        report.progress(done, total)

    return count


@contextlib.contextmanager
def resident(backbone: Backbone, state: State, batch_size: int, temperature: float) -> Iterator[Decode]:
    """Yield a function that completes prompts with the resident model."""
    with backbone.merged(state) as model:

        def decode(prompts, max_tokens, seed, on_finished):
            return sample(
                model,
                prompts,
                max_new_tokens=max_tokens,
                eos_ids=backbone.eos_ids,
                temperature=temperature,
                seed=seed,
                batch_size=batch_size,
                on_finished=on_finished,
            )

        yield decode


def store(
    run: RunDir,
    record: Row,
    state: str,
    suite: str,
    samples: list[Row],
    metrics: dict[str, float],
    floor: Row,
    started: float,
) -> Row:
    """Write the samples and the result of one state on one suite, and return the result.

    Args:
        run: The run directory.
        record: Further fields of the result.
        state: `base`, `tuned` or `recovered`.
        suite: The suite's name.
        samples: One row for each prompt.
        metrics: The means of all scores, the suite's own metric first.
        floor: The means of answers without content.
        started: When it started, by `time.perf_counter`.
    """
    write_atomic(run.eval_samples(state, suite), json_lines(samples))
    result = record | {
        "state": state,
        "suite": suite,
        "metric": next(iter(metrics)),
        "n": len(samples),
        "metrics": metrics,
        "floor": floor,
        "cost": {
            "seconds": round(time.perf_counter() - started, 1),
            "tokens": sum(row.get("tokens", 0) for row in samples),
            "peak_memory_bytes": peak_memory(),
        },
    }
    write_json(run.eval_result(state, suite), result)
    partial_file(run, state, suite).unlink()
    return result


def partial_file(run: RunDir, state: str, suite: str) -> Path:
    """Return the file of the rows that are kept until a suite is finished."""
    return run.evals / state / f".{suite}.partial.jsonl"
