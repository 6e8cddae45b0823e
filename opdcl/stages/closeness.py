"""Measure how near a state's answers are to base's, token by token, at temperature 1.

Base and the state answer the same prompts. Then both models give their distributions at every token:

    forward   KL(base, state) on base's answers: what base says and the state would not
    reverse   KL(state, base) on the state's own answers: what the state says and base would not

Each is the mean over the tokens of an answer. The larger one is the state's distance from base on this
prompt, in nats per token: a model that always says the same is far away in the reverse direction alone.
Base's answers are sampled once per run; its own distance is the noise of 16-bit arithmetic. The floor is the
distance of a model that answers another prompt as base would: base's style without the content.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opdcl import parallel
from opdcl.config.evaluate import CLOSENESS, EvalConfig
from opdcl.data.chat import answer_text, encode_prompt
from opdcl.data.rows import Row
from opdcl.distill.grading import micro_batches
from opdcl.distill.losses import both_divergences
from opdcl.distill.teachers import sequence
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates
from opdcl.model.forward import answer_states
from opdcl.rundir.files import RESTORE, read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import adapter_hash, hash_value
from opdcl.rundir.layout import RunDir
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.sampling.sample import sample
from opdcl.training import StageReport, peak_memory, reset_peak_memory

# Prompts that are answered, graded and stored together. Always the same ones: a resumed measurement must draw
# the same numbers. All states draw the same, so that a model that is base gives base's answers.
CHUNK, SEED = 100, 39

# Tokens of a forward pass; padding counts.
MICRO_BATCH, CUDA_MICRO_BATCH = 2048, 8192

# Base's answers to each chunk, by its first prompt, with base's states of them: later states need both.
BASE_READ: WeakKeyDictionary[Backbone, dict[int, tuple[list[Rollout], dict[int, torch.Tensor]]]] = (
    WeakKeyDictionary()
)


class _Measurement:
    """One state's answers and distances; `base_rows` are base's stored answers, unless the state is base."""

    def __init__(
        self,
        config: EvalConfig,
        backbone: Backbone,
        prompts: list[list[int]],
        base_rows: list[dict[str, Any]],
        report: StageReport,
    ):
        self.config, self.backbone, self.report = config, backbone, report
        self.prompts, self.base_rows = prompts, base_rows
        self.state = "student" if base_rows else "base"

    def rows(self, partial: Path, adapter: Path | None) -> list[dict[str, Any]]:
        """Return the answers to all prompts with their distances.

        `partial` keeps finished chunks. Each row is stored under a hash of all that it depends on, so that an
        interrupt loses one chunk at most and no row of another model is reused.
        """
        config, backbone = self.config, self.backbone
        made_of = {
            "models": [backbone.known_fingerprint(), adapter_hash(adapter) if adapter else None],
            "dtype": str(backbone.causal_lm.dtype),
            "eos_ids": backbone.eos_ids,
            "decoding": [config.batch_size, config.closeness_tokens],
            "texts": [self.prompts, [row["completion_ids"] for row in self.base_rows]],
        }
        made_by = hash_value(made_of)
        keys = [f"{made_by} {i}" for i in range(len(self.prompts))]
        found = {row.pop("key"): row for row in read_jsonl(partial) if row.get("key") in {*keys}}
        for start in range(0, len(keys), CHUNK):
            chunk = keys[start : start + CHUNK]
            if not all(key in found for key in chunk):
                prompts = [*map(Prompt, self.prompts[start : start + CHUNK])]
                found |= zip(chunk, self._chunk(start, prompts), strict=True)
                write_atomic(partial, _lines({"key": key} | row for key, row in found.items()))
        return [found[key] for key in keys]

    def _chunk(self, start: int, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Answer and grade the prompts from number `start` on."""
        backbone, config, limit = self.backbone, self.config, self.config.closeness_tokens
        answered = start

        def count(finished: list[Rollout]) -> None:
            nonlocal answered
            answered += len(finished)
            self.report.progress(answered, len(self.prompts))

        with backbone.merged(self.state) as model:
            own = sample(
                model,
                prompts,
                max_new_tokens=limit,
                eos_ids=backbone.eos_ids,
                seed=SEED + start,
                batch_size=int(config.batch_size),
                on_finished=count,
            )
            ids = [row["completion_ids"] for row in self.base_rows[start : start + len(prompts)]]
            given = [Rollout(p, answer) for p, answer in zip(prompts, ids, strict=True)] if ids else []
            states = _hidden_states(model, own + given)
            unrelated = {} if ids else _hidden_states(model, self._after_others(own, start))
        texts, kept = BASE_READ.setdefault(backbone, {}).get(start, ([], {}))
        known = kept if texts == given else {}
        # Base is compared with itself: once as it is, and once a little off.
        with backbone.merged("base") as model, contextlib.nullcontext() if ids else _jitter(model):
            base_states = _hidden_states(model, own if known else own + given)
        if not ids and parallel.worker_count() == 1:  # later states are compared on these texts
            BASE_READ[backbone][start] = [Rollout(r.prompt, r.completion_ids) for r in own], states
        base_states = {**base_states, **{len(own) + i: state for i, state in known.items()}}
        divergences = self._divergences(states, base_states)
        of_own, of_base = divergences[: len(own)], divergences[len(own) :] or divergences
        rows = [self._row(*row) for row in zip(own, of_own, of_base, strict=True)]
        for row, (_, reverse) in zip(rows, [] if ids else self._divergences(states, unrelated), strict=False):
            row["unrelated"] = reverse
        return rows

    def _after_others(self, own: list[Rollout], start: int) -> list[Rollout]:
        """Return base's answers, each after the prompt of another one."""
        numbers = [other(i, len(self.prompts)) for i in range(start, start + len(own))]
        pairs = zip(numbers, own, strict=True)
        return [Rollout(Prompt(self.prompts[i]), rollout.completion_ids) for i, rollout in pairs]

    def _divergences(
        self, states: dict[int, torch.Tensor], base_states: dict[int, torch.Tensor]
    ) -> list[tuple[float, float]]:
        """Return each text's mean forward and reverse KL per token."""
        heads = self.backbone.head_of(self.state), self.backbone.head_of("base")
        found = []
        for i in sorted(states):
            pair = zip((states[i], base_states[i]), heads, strict=True)
            forward, reverse = both_divergences(*(HiddenStates(x_NH, head_VH) for x_NH, head_VH in pair))
            found.append((float(forward.double().mean()), float(reverse.double().mean())))
        return parallel.gather_shares(found)

    def _row(self, rollout: Rollout, own: tuple[float, float], base: tuple[float, float]) -> dict[str, Any]:
        scores = {"distance": max(base[0], own[1]), "forward": base[0], "reverse": own[1]}
        scores |= {"forward_own": own[0], "reverse_base": base[1]}
        if not all(map(math.isfinite, scores.values())):
            hint = "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model"
            raise OpdclError("the distance to base is not finite", hint)
        # Rounding can make the divergence of equal models slightly negative.
        scores = {name: max(value, 0.0) for name, value in scores.items()}
        text = answer_text(self.backbone.tokenizer, rollout.prompt_ids, rollout.completion_ids)
        row = {"response": text, "tokens": len(rollout.completion_ids), "ended": rollout.finished}
        return row | {"scores": scores, "completion_ids": rollout.completion_ids}


def measure_closeness(
    config: EvalConfig,
    asked: Sequence[Row],
    backbone: Backbone,
    state: str,
    run: RunDir,
    record: dict[str, Any],
    report: StageReport,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Measure one state's distance from base; write samples and result, and return the result.

    Base is measured first: the other states need its answers. The arguments are those of `evaluate`.
    """
    started = time.perf_counter()
    reset_peak_memory()
    room = backbone.context_length - config.closeness_tokens
    prompts = [encode_prompt(row, backbone.tokenizer, room) for row in asked]
    base_rows = read_jsonl(run.eval_samples("base", CLOSENESS)) if adapter else []
    if adapter and len(base_rows) != len(prompts):
        raise UsageError(f"{run.eval_samples('base', CLOSENESS)} lacks answers of base", RESTORE)
    measured = _Measurement(config, backbone, prompts, base_rows, report)
    partial = run.evals / state / f".{CLOSENESS}.partial.jsonl"
    rows = measured.rows(partial, adapter)
    unrelated = [row.pop("unrelated", None) for row in rows]
    if state == "base" and len(rows) > 1:
        for i, row in enumerate(rows):
            row["floor"] = max(unrelated[i], unrelated[other(i, len(rows))])
    samples = [_sample(i, *pair, state) for i, pair in enumerate(zip(asked, rows, strict=True))]
    write_atomic(run.eval_samples(state, CLOSENESS), _lines(samples))
    result = record | {
        "state": state,
        "suite": CLOSENESS,
        "metric": "distance",
        "n": len(samples),
        "metrics": _means([row["scores"] for row in samples]),
        "floor": {},
        "cost": {
            "seconds": round(time.perf_counter() - started, 1),
            "tokens": sum(row["tokens"] for row in samples),
            "peak_memory_bytes": peak_memory(),
        },
    }
    write_json(run.eval_result(state, CLOSENESS), result)
    partial.unlink()
    return result


def _sample(number: int, asked: Row, row: dict[str, Any], state: str) -> dict[str, Any]:
    """Return a stored record; only base's has the ids of its answer, which other states are graded on."""
    about = {key: getattr(asked, key) for key in ("cluster", "group") if getattr(asked, key)}
    kept = {key: value for key, value in row.items() if state == "base" or key != "completion_ids"}
    return {"doc_id": number, "prompt": asked.shown(), **kept, **about}


def other(number: int, total: int) -> int:
    """Return the number of another prompt: half of all further on, where those of one text are far away.

    The prompts form pairs. So base's answer to one, read after the other, gives the forward direction of the
    one and the reverse direction of the other.
    """
    return (number + total // 2) % total


@torch.no_grad()
def _hidden_states(model: Any, texts: list[Rollout]) -> dict[int, torch.Tensor]:
    """Return the states before the tokens of each answer of this worker's share, `(N, H)`, by number."""
    tokens = CUDA_MICRO_BATCH if torch.cuda.is_available() else MICRO_BATCH
    own = parallel.my_share(range(len(texts)))
    found: dict[int, torch.Tensor] = {}
    for batch in micro_batches({i: texts[i].length for i in own}, tokens):
        sequences = [sequence(texts[i].prompt_ids, texts[i].completion_ids) for i in batch]
        lengths = [len(texts[i].completion_ids) for i in batch]
        found |= zip(batch, answer_states(model, sequences).split(lengths), strict=True)
    return found


@contextlib.contextmanager
def _jitter(model: Any) -> Iterator[None]:
    """Change half of the input embeddings' dimensions by one digit of bfloat16 in the block.

    What the model computes is then off as it is between a run in 32 bits and one in 16, or between two
    kernels in 16: every later rounding falls differently.
    """

    def change(module: Any, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED)
        chosen = torch.rand(embedded.shape[-1], generator=generator) < 0.5
        return embedded * (1 + torch.finfo(torch.bfloat16).eps * chosen.to(embedded))

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _means(scores: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(sum(s[name] for s in scores) / len(scores), 6) for name in scores[0]}


def _lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
