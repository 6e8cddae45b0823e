"""Measure a state of the backbone with lm-eval: same resident weights, same sampler, per-answer records.

opdcl eval runs/mine
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate as lm_evaluate

from opdcl import parallel
from opdcl.config.evaluate import EvalConfig
from opdcl.config.workflow import PLACE
from opdcl.data.chat import answer_text, render
from opdcl.data.suites import Suite, cut_at, quiet_lm_eval
from opdcl.distill.make_teacher import reach_own_model
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import adapter_hash, hash_value
from opdcl.rundir.layout import RunDir
from opdcl.sampling.rollout import Rollout
from opdcl.sampling.sample import sample
from opdcl.training import StageReport, peak_memory, reset_peak_memory

# Prompts, maximum tokens of each completion, callback for finished completions -> completions.
Decode = Callable[[list[list[int]], int, Callable[[list[Rollout]], None]], list[Rollout]]


class BackboneLM(LM):
    """lm-eval's view of the backbone: of its student if `adapter` holds that on disk, else of base.

    `partial` keeps answers as JSON lines, batch by batch, so that an interrupt loses one batch at most. Each
    is stored under `_key`, so that only an answer to the same question, made in the same way, is reused.
    """

    def __init__(
        self, backbone: Backbone, adapter: Path | None, config: EvalConfig, partial: Path, report: StageReport
    ):
        super().__init__()
        self.backbone, self.adapter = backbone, adapter
        self.config, self.partial, self.report = config, partial, report
        self.lengths: list[int] = []
        self.ended: list[bool] = []
        server = config.server.model_dump(exclude=PLACE) if config.server else None
        self._made_by = hash_value(
            {
                "base": backbone.fingerprint(),
                "adapter": adapter_hash(adapter) if adapter else None,
                "dtype": str(backbone.causal_lm.dtype),
                "eos_ids": backbone.eos_ids,
                "decoding": [config.sampler, config.batch_size, server],
            }
        )

    @property
    def tokenizer_name(self) -> str:
        return self.backbone.tokenizer.name_or_path

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.backbone.tokenizer.chat_template or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render(self.backbone.tokenizer, chat_history, add_generation_prompt, tokenize=False)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Answer all requests greedily; cut each answer at its task's stop strings."""
        tokenizer = self.backbone.tokenizer
        prompts = [tokenizer(r.args[0], add_special_tokens=False)["input_ids"] for r in requests]
        limits = [self._max_tokens(r, len(p)) for r, p in zip(requests, prompts, strict=True)]
        keys = [self._key(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
        answers = {row["key"]: row for row in read_jsonl(self.partial) if row.get("key") in {*keys}}
        # Rewritten first, so that new answers do not follow a line that a crash cut off.
        write_atomic(self.partial, _lines(answers.values()))
        # A prompt that occurs twice is answered once.
        missing = list({key: i for i, key in enumerate(keys) if key not in answers}.values())
        size = self.config.batch_size * parallel.worker_count()
        with self._decoder() as decode:
            for batch in _batches(missing, limits, [len(p) for p in prompts], size):
                progress = _progress(self.report, len(answers), len(requests))
                rollouts = decode([prompts[i] for i in batch], limits[batch[0]], progress)
                texts = [answer_text(tokenizer, r.prompt_ids, r.completion_ids) for r in rollouts]
                rows = [
                    {"key": keys[i], "text": text, "tokens": len(r.completion_ids), "ended": r.finished}
                    for i, text, r in zip(batch, texts, rollouts, strict=True)
                ]
                answers |= {row["key"]: row for row in rows}
                with open(self.partial, "a", encoding="utf-8") as file:
                    file.write(_lines(rows))
        in_order = [answers[key] for key in keys]
        self.lengths = [row["tokens"] for row in in_order]
        stops = [request.args[1].get("until") or [] for request in requests]
        texts = [cut_at(row["text"], until) for row, until in zip(in_order, stops, strict=True)]
        # A stop string ends an answer too.
        self.ended = [row["ended"] or row["text"] != text for row, text in zip(in_order, texts, strict=True)]
        return texts

    def _key(self, prompt_ids: list[int], max_tokens: int) -> str:
        """Return a hash of all that an answer depends on."""
        return hash_value([self._made_by, prompt_ids, max_tokens])

    def _max_tokens(self, request, length: int) -> int:
        """Return the maximum length of an answer, in tokens."""
        suite_limit = int(request.args[1].get("max_gen_toks", 256))
        return max_answer_tokens(self.config, suite_limit, length, self.backbone.context_length)

    @contextlib.contextmanager
    def _decoder(self) -> Iterator[Decode]:
        """Yield a function that completes prompts greedily, here or on a server with the adapter."""
        eos_ids, config = self.backbone.eos_ids, self.config
        if not config.server:
            options: Any = {"eos_ids": eos_ids, "temperature": 0}
            options |= {"batch_size": config.batch_size, "engine": config.sampler}
            with self.backbone.merged("student" if self.adapter else "base") as model:
                yield lambda prompts, max_tokens, progress: sample(
                    model, prompts, max_new_tokens=max_tokens, on_finished=progress, **options
                )
            return
        with contextlib.ExitStack() as stack:
            server = reach_own_model(config.server, self.backbone, self.report.note)
            stack.callback(server.close)
            name = stack.enter_context(server.adapter(self.adapter)) if self.adapter else None
            yield lambda prompts, max_tokens, progress: parallel.on_first_worker(
                lambda: server.complete(
                    prompts, max_tokens, eos_ids, temperature=0, model=name, on_finished=progress
                )
            )

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        hint = "choose a generative task"
        raise UsageError("suites that compare log-likelihoods are not supported yet", hint)

    loglikelihood_rolling = loglikelihood


def max_answer_tokens(config: EvalConfig, suite_limit: int, length: int, room: int) -> int:
    """Return the maximum length of an answer, in tokens, to a prompt of `length` in a context of `room`.

    Raises:
        UsageError: Both together exceed the context.
    """
    limit = min(suite_limit, config.max_new_tokens or suite_limit) + config.thought_tokens
    if length + limit > room:
        message = f"a prompt of {length} tokens and an answer of {limit} exceed the context of {room}"
        raise UsageError(message, "set eval.max_new_tokens, or leave the suite out")
    return limit


def evaluate(
    config: EvalConfig,
    suite: Suite,
    backbone: Backbone,
    state: str,
    run: RunDir,
    record: dict[str, Any],
    report: StageReport,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Measure one state on one suite; write samples and result, and return the result.

    Args:
        state: `base`, `tuned` or `recovered`: the name on disk.
        record: Further fields of the result, such as `role`, `model` and `fingerprint`.
        adapter: The state's adapter on disk, which the backbone holds as its student; None for base.
    """
    started = time.perf_counter()
    reset_peak_memory()
    partial = run.evals / state / f".{suite.name}.partial.jsonl"
    lm = BackboneLM(backbone, adapter, config, partial, report)
    quiet_lm_eval()
    # Unseeded, lm-eval would draw other few-shot examples for each state.
    suite.task.set_fewshot_seed(0)
    # `simple_evaluate` would collect the environment after each call, which takes longer than a small suite.
    results = lm_evaluate(
        lm, suite.loaded, apply_chat_template=True, log_samples=True, bootstrap_iters=0, limit=config.limit
    )
    samples = _samples(suite, next(iter(results["samples"].values())), lm)
    floor = _add_floors(suite, config.limit, samples)
    write_atomic(run.eval_samples(state, suite.name), _lines(samples))
    result = record | {
        "state": state,
        "suite": suite.name,
        "metric": suite.metrics[0],
        "n": len(samples),
        "metrics": suite.means([row["scores"] for row in samples]),
        "floor": floor,
        "cost": {
            "seconds": round(time.perf_counter() - started, 1),
            "tokens": sum(lm.lengths),
            "peak_memory_bytes": peak_memory(),
        },
    }
    write_json(run.eval_result(state, suite.name), result)
    partial.unlink(missing_ok=True)
    return result


def _add_floors(suite: Suite, limit: int | None, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Add each prompt's score of the best content-free answer to `samples`; return the means of all."""
    floors = suite.floors(limit, [row["response"] for row in samples])
    means = {name: suite.means(scores) for name, scores in floors.items()}
    metric = suite.metrics[0]
    best = max(means, key=lambda name: means[name][metric])
    for row, scores in zip(samples, floors[best], strict=True):
        row["floor"] = scores[metric]
    return means


def _samples(suite: Suite, rows: list[dict[str, Any]], lm: BackboneLM) -> list[dict[str, Any]]:
    """Return the stored records of lm-eval's samples, in the order of the documents.

    A task with several filters, which pick the answer out of a response, is scored by its first one.
    `ended` says whether the answer came to its end before its token limit, `cluster` which fact or person the
    prompt is about, and `group` which kind of prompt it is.
    """
    in_order = sorted((r for r in rows if r["filter"] == rows[0]["filter"]), key=lambda row: row["doc_id"])
    return [
        {
            "doc_id": row["doc_id"],
            "prompt": suite.task.doc_to_text(row["doc"]),
            "response": row["resps"][0][0],
            "target": row["target"] or None,
            "scores": {m: row[m] for m in suite.metrics},
            "tokens": tokens,
            "ended": ended,
            **{key: row["doc"][key] for key in ("cluster", "group") if row["doc"].get(key)},
        }
        for row, tokens, ended in zip(in_order, lm.lengths, lm.ended, strict=True)
    ]


def _batches(rows: list[int], limits: list[int], lengths: list[int], size: int) -> Iterator[list[int]]:
    """Split rows into batches of one token limit, with prompts of similar length."""
    for limit in sorted({limits[i] for i in rows}):
        ordered = sorted((i for i in rows if limits[i] == limit), key=lambda i: lengths[i])
        yield from (ordered[start : start + size] for start in range(0, len(ordered), size))


def _lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _progress(report: StageReport, done: int, total: int) -> Callable[[list[Rollout]], None]:
    """Return a callback that counts finished rollouts on top of `done`."""

    def count(finished: list[Rollout]) -> None:
        nonlocal done
        done += len(finished)
        report.progress(done, total)

    return count
