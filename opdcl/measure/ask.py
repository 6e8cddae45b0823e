"""Ask a state, keep its answers, and read answers again: for suites and closeness alike.

Answers are kept as JSON lines, batch by batch, each under a hash of all that it depends on. So an interrupt
loses one batch at most, and only an answer to the same question, made in the same way, is reused.
"""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opdcl import parallel
from opdcl.config.evaluate import EvalConfig
from opdcl.data.chat import answer_text
from opdcl.model.backbone import Backbone, State
from opdcl.model.forward import answer_states
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import Identity, adapter_hash
from opdcl.rundir.layout import RunDir
from opdcl.train.learner import micro_batches
from opdcl.train.loop import StageReport, counter
from opdcl.words import Example, Prompt, Rollout

# The number of prompts whose answers are drawn together, in the order of the questions. A sample depends on a
# prompt's place among them, so the number is fixed: batch size and interrupts change nothing. All states use
# the same random numbers, so that a model that is base gives base's answers.
SAMPLING_BATCH, SEED = 100, 39
# The seed of base's second answers to a suite that is sampled.
SECOND_SEED = 1_000_039
# Tokens of a forward pass that reads answers; padding counts.
MICRO_BATCH, CUDA_MICRO_BATCH = 2048, 8192

Stored = dict[str, Any]

# AnswerStates before the tokens of each answer of this worker's share, `(N, H)`, by the answer's number.
AnswerStates = dict[int, torch.Tensor]

# Prompts, callback for finished completions, `max_new_tokens`, `seed` -> completions.
Decode = Callable[..., list[Rollout]]

# Numbers of questions, their completions -> what is kept of each in addition to its text.
ReadMore = Callable[[list[int], list[Rollout]], list[Stored]]


@dataclass(frozen=True)
class Asking:
    """A state of a run, which one suite asks: base, or the backbone's student, whose adapter lies on disk."""

    config: EvalConfig
    backbone: Backbone
    run: RunDir
    name: str
    """The state's name on disk: `base`, `tuned` or `recovered`."""
    suite: str
    report: StageReport
    adapter: Path | None = None
    """The adapter, which the backbone holds as its student; None for base."""
    record: Stored = field(default_factory=dict)
    """Further fields of the result, such as `role`, `model` and `fingerprint`."""

    @property
    def state(self) -> State:
        return "student" if self.adapter else "base"

    @property
    def file(self) -> Path:
        """The file that keeps what is computed, batch by batch, until the suite is finished."""
        return partial_file(self.run, self.name, self.suite)

    def provenance(self, decoding: list[Any]) -> str:
        """Return a hash of what makes an answer, apart from the question."""
        backbone = self.backbone
        parts = {
            "base": backbone.known_fingerprint(),
            "adapter": adapter_hash(self.adapter) if self.adapter else None,
            "dtype": str(backbone.causal_lm.dtype),
            "eos_ids": backbone.eos_ids,
            "decoding": decoding,
        }
        return Identity(parts).key


def partial_file(run: RunDir, state: str, suite: str) -> Path:
    """Return the file of the rows that are kept until a suite is finished."""
    return run.evals / state / f".{suite}.partial.jsonl"


@dataclass(frozen=True)
class Question:
    """What a state is asked; questions of one key have one answer."""

    prompt: Prompt
    limit: int
    """The maximum length of its answer, in tokens."""
    key: str
    before: tuple[str, ...] = ()
    """The keys of the earlier turns of its conversation, which `prompt` begins."""

    def asked(self, rows: dict[str, Stored]) -> Prompt:
        """Return its prompt after the answers to the earlier turns, as `rows` keep them."""
        return self.prompt.after([message(rows[key]) for key in self.before])


def message(row: Stored) -> list[int]:
    """Return a kept answer without the id that ends it; one that was cut off stands as it is."""
    ids: list[int] = row["completion_ids"]
    return ids[:-1] if row["ended"] else ids


class AnswerCache:
    """Rows by key, which are kept in a file as well."""

    def __init__(self, file: Path, keys: Iterable[str]):
        wanted = set(keys)
        self.file = file
        self.rows: dict[str, Stored] = {}
        for row in read_jsonl(file):
            key = row.pop("key", None)
            if key in wanted:
                if "text" in row:  # as earlier versions call it
                    row["response"] = row.pop("text")
                self.rows[key] = row
        # Rewritten first, so that new rows do not follow a line that a crash cut off.
        write_atomic(file, _lines(self.rows))

    def add(self, rows: dict[str, Stored]) -> None:
        self.rows |= rows
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(_lines(rows))


def reuse_samples(file: Path, samples: Path) -> None:
    """Add the answers of finished samples to the kept rows.

    So a suite that scores otherwise than before, or asks more, needs no answer again.
    """
    earlier = []
    for row in read_jsonl(samples):
        if row.get("key"):
            earlier.append({name: row[name] for name in ("key", "response", "tokens", "ended")})
    if earlier:
        write_atomic(file, json_lines([*read_jsonl(file), *earlier]))


def _lines(rows: dict[str, Stored]) -> str:
    return json_lines({"key": key} | row for key, row in rows.items())


def json_lines(rows: Iterable[Stored]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def ask(
    asking: Asking,
    questions: Sequence[Question],
    decode: Decode,
    batch_size: int | None,
    seed: int,
    read: ReadMore | None = None,
) -> list[Stored]:
    """Return the answer to each question, as it is kept: its text, its length, and whether it ended.

    Args:
        asking: Who is asked; what its file keeps is not asked again.
        questions: What is asked.
        decode: Completes prompts.
        batch_size: How many answers are decoded together; None if they are drawn, `SAMPLING_BATCH`.
        seed: Of the draws.
        read: Returns what else is kept of completions.
    """
    kept = AnswerCache(asking.file, [question.key for question in questions])
    if kept.rows:
        asking.report.note(f"{len(kept.rows)} answers are kept from before")
    for batch in _batches(questions, kept.rows, batch_size):
        prompts = [questions[i].asked(kept.rows) for i in batch]
        progress = counter(asking.report.progress, len(questions), len(kept.rows))
        limit = questions[batch[0]].limit
        rollouts = decode(prompts, progress, max_new_tokens=limit, seed=seed + batch[0])
        more = read(batch, rollouts) if read else [{}] * len(batch)
        rows = {}
        for i, rollout, further in zip(batch, rollouts, more, strict=True):
            text = answer_text(asking.backbone.tokenizer, rollout.prompt_ids, rollout.completion_ids)
            generated = {"response": text, "tokens": len(rollout.completion_ids), "ended": rollout.finished}
            rows[questions[i].key] = generated | further
        kept.add(rows)
    return [kept.rows[question.key] for question in questions]


@torch.no_grad()
def read_states(
    model: Any, texts: Sequence[Example], count: Callable[[list[int]], None] | None = None
) -> AnswerStates:
    """Return the states before the tokens of each answer of this worker's share, `(N, H)`, by number.

    `count` receives the numbers of the answers that were read since its last call.
    """
    tokens = CUDA_MICRO_BATCH if model.device.type == "cuda" else MICRO_BATCH
    own = parallel.my_share(range(len(texts)))
    found: AnswerStates = {}
    for batch in micro_batches({i: texts[i].length for i in own}, tokens):
        states_NH = answer_states(model, [texts[i] for i in batch])
        found |= zip(batch, states_NH.split([texts[i].answer_length for i in batch]), strict=True)
        if count:
            count(batch)
    return found


def _batches(questions: Sequence[Question], answered: dict[str, Stored], size: int | None) -> list[list[int]]:
    """Return the numbers of the questions to be answered, in batches; those of one key are answered once.

    Batches of drawn answers are always the same, so one that is half answered is drawn again.
    """
    numbers = list({question.key: i for i, question in enumerate(questions)}.values())
    if size is None:
        batches = _cut(questions, numbers, SAMPLING_BATCH)
        return [batch for batch in batches if any(questions[i].key not in answered for i in batch)]
    missing = [i for i in numbers if questions[i].key not in answered]
    missing.sort(key=lambda i: len(questions[i].prompt.ids))  # prompts of similar length share a batch
    return _cut(questions, missing, size)


def _cut(questions: Sequence[Question], numbers: list[int], size: int) -> list[list[int]]:
    """Cut numbers of questions into batches of one turn and one token limit, the first turns first."""
    kinds = {i: (len(questions[i].before), questions[i].limit) for i in numbers}
    batches = []
    for kind in sorted({*kinds.values()}):
        alike = [i for i in numbers if kinds[i] == kind]
        batches += [alike[start : start + size] for start in range(0, len(alike), size)]
    return batches


def store(
    asking: Asking, samples: list[Stored], metrics: dict[str, float], floor: Stored, started: float
) -> Stored:
    """Write the samples and the result of one state on one suite, and return the result.

    Args:
        asking: The state and the suite.
        samples: One row for each prompt.
        metrics: The means of all scores, the suite's own metric first.
        floor: The means of answers without content.
        started: When it started, by `time.perf_counter`.
    """
    run, state, suite = asking.run, asking.name, asking.suite
    write_atomic(run.eval_samples(state, suite), json_lines(samples))
    result = asking.record | {
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
    asking.file.unlink()
    return result


def reset_peak_memory() -> None:
    """Start a new measurement of peak memory, where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return peak memory in bytes since `reset_peak_memory`: of the GPU, or else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
