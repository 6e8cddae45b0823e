"""Measure a state of the backbone with lm-eval: same resident weights, same sampler, per-answer records.

opdcl eval runs/mine
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.models.huggingface import HFLM

from opdcl import parallel
from opdcl.config.evaluate import EvalConfig
from opdcl.config.workflow import PLACE
from opdcl.data.chat import answer_text, render, request_ids
from opdcl.data.suites import Judge, Suite, cut_at, quiet_lm_eval
from opdcl.distill.make_teacher import reach_own_model
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.hashes import adapter_hash, hash_value
from opdcl.rundir.layout import RunDir
from opdcl.sampling.rollout import Prompt, Rollout
from opdcl.sampling.sample import sample
from opdcl.stages import content
from opdcl.training import StageReport, peak_memory, reset_peak_memory

# Memory for the logits of one batch of log-likelihoods, which are kept for every position, in bytes.
LOGIT_BYTES = 2**30

# The number of prompts whose answers are sampled together, in the order of the documents. A sample depends
# on a prompt's place among them, so the number is fixed: batch size and interrupts change nothing. All states
# use the same random numbers.
DRAWN_TOGETHER, SEED = 100, 39

# What a sampler may cut off, and opdcl's does not, with the values that cut nothing off.
UNCUT: dict[str, tuple[float | None, ...]] = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}

# Prompts, maximum tokens of each completion, seed, callback for finished completions -> completions.
Decode = Callable[[list[Prompt], int, int, Callable[[list[Rollout]], None]], list[Rollout]]


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
                "base": backbone.known_fingerprint(),
                "adapter": adapter_hash(adapter) if adapter else None,
                "dtype": str(backbone.causal_lm.dtype),
                "eos_ids": backbone.eos_ids,
                "decoding": [config.batch_size, server],
            }
        )

    @property
    def tokenizer_name(self) -> str:
        return self.backbone.tokenizer.name_or_path

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render(self.backbone.tokenizer, chat_history, add_generation_prompt, tokenize=False)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Answer all requests as their task says; cut each answer at its task's stop strings."""
        tokenizer = self.backbone.tokenizer
        prompts = [request_ids(request, tokenizer) for request in requests]
        limits = [self._max_tokens(r, len(p)) for r, p in zip(requests, prompts, strict=True)]
        (temperature,) = {temperature_of(request.args[1]) for request in requests}
        drawn = [temperature, SEED] if temperature else []
        keys = [self._key(prompt, limit, *drawn) for prompt, limit in zip(prompts, limits, strict=True)]
        answers = self._earlier(keys)
        lengths = [len(prompt) for prompt in prompts]
        batches = self._open_batches(keys, limits, lengths, {*answers}, bool(temperature))
        with self._decoder(temperature) as decode:
            for batch in batches:
                progress = _progress(self.report, len(answers), len(requests))
                rollouts = decode(
                    [Prompt(prompts[i]) for i in batch], limits[batch[0]], SEED + batch[0], progress
                )
                texts = [answer_text(tokenizer, r.prompt_ids, r.completion_ids) for r in rollouts]
                rows: list[dict[str, Any]] = [
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

    def _open_batches(
        self, keys: list[str], limits: list[int], lengths: list[int], answered: set[str], drawn: bool
    ) -> list[list[int]]:
        """Return the prompts to be answered, in batches; a prompt that occurs twice is answered once."""
        rows = [*{key: i for i, key in enumerate(keys)}.values()]
        if drawn:
            batches = _batches(rows, limits, [0] * len(keys), DRAWN_TOGETHER)
            return [batch for batch in batches if not {keys[i] for i in batch} <= answered]
        missing = [i for i in rows if keys[i] not in answered]
        return [*_batches(missing, limits, lengths, self.config.batch_size * parallel.worker_count())]

    def _key(self, *question: Any) -> str:
        """Return a hash of all that an answer depends on."""
        return hash_value([self._made_by, *question])

    def _earlier(self, keys: list[str]) -> dict[str, dict[str, Any]]:
        """Return the answers that an interrupted evaluation has left, by key."""
        answers = {row["key"]: row for row in read_jsonl(self.partial) if row.get("key") in {*keys}}
        # Rewritten first, so that new answers do not follow a line that a crash cut off.
        write_atomic(self.partial, _lines(answers.values()))
        return answers

    def _max_tokens(self, request, length: int) -> int:
        """Return the maximum length of an answer, in tokens."""
        suite_limit = int(request.args[1].get("max_gen_toks", 256))
        return max_answer_tokens(self.config, suite_limit, length, self.backbone.context_length)

    @contextlib.contextmanager
    def _decoder(self, temperature: float) -> Iterator[Decode]:
        """Yield a function that completes prompts, here or on a server with the adapter."""
        eos_ids, config = self.backbone.eos_ids, self.config
        if not config.server:
            options: Any = {"eos_ids": eos_ids, "temperature": temperature, "batch_size": config.batch_size}
            with self.backbone.merged("student" if self.adapter else "base") as model:
                yield lambda prompts, max_tokens, seed, progress: sample(
                    model, prompts, max_new_tokens=max_tokens, seed=seed, on_finished=progress, **options
                )
            return
        with contextlib.ExitStack() as stack:
            server = reach_own_model(config.server, self.backbone, self.report.note)
            stack.callback(server.close)
            name = stack.enter_context(server.adapter(self.adapter)) if self.adapter else None
            yield lambda prompts, max_tokens, seed, progress: parallel.on_first_worker(
                lambda: server.complete(
                    prompts, max_tokens, eos_ids, temperature, seed, model=name, on_finished=progress
                )
            )

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one, by `HFLM`."""
        keys = [self._key("loglikelihood", *request.args) for request in requests]
        answers = self._earlier(keys)
        done, total = len(answers), len({*keys})

        def keep(batch: list[tuple[tuple[str, str], tuple[float, bool]]]) -> None:
            nonlocal done
            rows: list[dict[str, Any]] = [
                {"key": self._key("loglikelihood", *texts), "answer": answer} for texts, answer in batch
            ]
            with open(self.partial, "a", encoding="utf-8") as file:
                file.write(_lines(rows))
            done = min(total, done + len(rows) * parallel.worker_count())
            self.report.progress(done, total)

        missing = {k: request for k, request in zip(keys, requests, strict=True) if k not in answers}
        with self.backbone.merged("student" if self.adapter else "base") as model:
            lm = _BatchwiseHFLM(model, self.backbone.tokenizer, self._rows(requests), keep)
            computed = lm.loglikelihood(parallel.my_share([*missing.values()]), disable_tqdm=True)
            lm.finish_batch()
        shares = zip(missing, parallel.gather_shares(computed), strict=True)
        answers |= {key: {"answer": answer} for key, answer in shares}
        return [tuple(answers[key]["answer"]) for key in keys]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise UsageError("suites that measure perplexity are not supported", "choose another task")

    def _rows(self, requests) -> int:
        """Return the batch size at which the logits of the longest request fit into `LOGIT_BYTES`."""
        longest = max(("".join(request.args) for request in requests), key=len)
        head_VH = self.backbone.head_VH
        # HFLM holds them twice: before and after the softmax.
        row = 2 * len(self.backbone.tokenizer(longest)["input_ids"]) * len(head_VH) * head_VH.element_size()
        return max(1, min(int(self.config.batch_size), LOGIT_BYTES // row))


class _BatchwiseHFLM(HFLM):
    """lm-eval's `HFLM` on a model in memory; `keep` receives the answers of each finished batch."""

    def __init__(self, model, tokenizer, batch_size: int, keep: Callable[[list], None]):
        super().__init__(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
        self._keep = keep
        self._batch: list[tuple[tuple[str, str], tuple[float, bool]]] = []
        self.cache_hook = self  # HFLM tells it each answer

    def add_partial(self, kind: str, texts: tuple[str, str], answer: tuple[float, bool]) -> None:
        self._batch.append((texts, answer))

    def finish_batch(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._keep(batch)

    def _model_call(self, *args, **kwargs):
        self.finish_batch()
        return super()._model_call(*args, **kwargs)


def temperature_of(options: Mapping[str, Any]) -> float:
    """Return the temperature at which a task has its answers sampled; 0 is greedy decoding.

    Args:
        options: The task's `generation_kwargs`.

    Raises:
        UsageError: It cuts off unlikely tokens, which the sampler does not.
    """
    if not options.get("do_sample"):
        return 0.0
    if cut := [f"{key}: {options[key]}" for key in UNCUT if options.get(key) not in UNCUT[key]]:
        message = f"a suite that samples with {', '.join(cut)} is not supported"
        raise UsageError(message, "choose a task that sets a temperature only")
    return float(options.get("temperature", 1.0))


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
    suite.task.set_fewshot_seed(suite.fewshot_seed)
    # `simple_evaluate` would collect the environment after each call, which takes longer than a small suite.
    options: Any = {"apply_chat_template": suite.generative, "limit": config.limit}
    results = lm_evaluate(lm, suite.loaded, log_samples=True, bootstrap_iters=0, **options)
    (sampled,) = results["samples"].values()
    samples = _samples(suite, sampled, lm)
    judge = content.judge(backbone, suite) if suite.content else None
    if judge:
        _read(judge, suite.documents(config.limit), samples)
    floor = _add_floors(suite, config.limit, samples, judge)
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
    partial.unlink()
    return result


def _read(judge: Judge, docs: list[dict], samples: list[dict[str, Any]]) -> None:
    """Fail the samples that are not about their prompts; keep how much base's likelihood gained by them."""
    scores = judge(docs, [row["response"] for row in samples], [row["scores"] for row in samples])
    for row, read in zip(samples, scores, strict=True):
        row["gain"] = read.pop("gain", None)
        row["scores"] = read


def _add_floors(
    suite: Suite, limit: int | None, samples: list[dict[str, Any]], judge: Judge | None
) -> dict[str, Any]:
    """Add each prompt's score of the best content-free answer to `samples`; return the means of all."""
    floors = suite.floors(limit, [row["response"] for row in samples], judge)
    means = {name: suite.means(scores) for name, scores in floors.items()}
    metric = suite.metrics[0]
    best = max(means, key=lambda name: means[name][metric])
    for row, scores in zip(samples, floors[best], strict=True):
        row["floor"] = scores[metric]
    return means


def _samples(suite: Suite, rows: list[dict[str, Any]], lm: BackboneLM) -> list[dict[str, Any]]:
    """Return the stored records of lm-eval's samples, in the order of the documents.

    A task with several filters, which pick the answer out of a response, is scored by its first one.
    Only written answers have `tokens` and `ended`.
    `ended` says whether the answer came to its end before its token limit, `cluster` which fact or person the
    prompt is about, and `group` which kind of prompt it is.
    """
    first = [row for row in rows if row["filter"] == rows[0]["filter"]]
    first.sort(key=lambda row: row["doc_id"])
    samples = []
    for number, row in enumerate(first):
        sample = {"doc_id": row["doc_id"], **suite.record(row)}
        sample["scores"] = {metric: row[metric] for metric in suite.metrics}
        if lm.lengths:
            sample |= {"tokens": lm.lengths[number], "ended": lm.ended[number]}
        for key in ("cluster", "group"):
            if row["doc"].get(key):
                sample[key] = row["doc"][key]
        samples.append(sample)
    return samples


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
