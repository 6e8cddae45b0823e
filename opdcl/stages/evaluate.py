"""Measure a state of the backbone with lm-eval: same resident weights, same sampler, per-answer records.

opdcl eval runs/mine
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.models.huggingface import HFLM
from torch.nn.functional import pad

from opdcl import parallel
from opdcl.config.evaluate import EvalConfig
from opdcl.data.answering import answering_of
from opdcl.data.chat import answer_text, render_request, request_ids
from opdcl.data.suites import FEWSHOT_SEED, Judge, Suite, cut_at, quiet_lm_eval
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone, State
from opdcl.rundir.identity import Identity
from opdcl.rundir.layout import RunDir
from opdcl.stages import content
from opdcl.stages.answers import (
    SECOND_SEED,
    SEED,
    Decode,
    KeptRows,
    Question,
    answer,
    keep_earlier,
    made_by,
    partial_file,
    resident,
    store,
)
from opdcl.train.cost import reset_peak_memory
from opdcl.train.teachers_elsewhere import reach_own_model
from opdcl.training import StageReport
from opdcl.types import Rollout

# Memory for the logits of one batch of log-likelihoods, which are kept for every position, in bytes.
LOGIT_BYTES = 2**30
# The logit of a token that a model lacks: no probability, and a number that JSON has.
UNLIKELY = -1e5

# The texts of a request -> their log-likelihood, and whether they are the greedy continuation.
Likelihood = tuple[tuple[str, str], tuple[float, bool]]


class BackboneLM(LM):
    """lm-eval's view of the backbone: of its student if `adapter` holds that on disk, else of base.

    `partial` keeps what is computed, batch by batch. `seed` is that of answers that are drawn.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: Path | None,
        config: EvalConfig,
        partial: Path,
        report: StageReport,
        seed: int = SEED,
    ):
        super().__init__()
        self.seed = seed
        self.backbone, self.adapter = backbone, adapter
        self.config, self.partial, self.report = config, partial, report
        self.state: State = "student" if adapter else "base"
        self.keys: list[str] = []
        self.lengths: list[int] = []
        self.ended: list[bool] = []
        # Wherever it is. It had a model in an earlier version, whose answers are kept.
        server = {"model": None} if config.server else None
        self._made_by = made_by(backbone, adapter, [config.batch_size, server])

    @property
    def tokenizer_name(self) -> str:
        return self.backbone.tokenizer.name_or_path

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render_request(self.backbone.tokenizer, chat_history, add_generation_prompt)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Answer all requests as their task says; cut each answer at its task's stop strings."""
        (temperature,) = {answering_of(request.args[1]).temperature for request in requests}
        questions = [self._question(request, temperature) for request in requests]
        self.keys = [question.key for question in questions]
        kept = KeptRows(self.partial, self.keys)
        if kept.rows:
            self.report.note(f"{len(kept.rows)} answers are kept from before")
        batch_size = None if temperature else int(self.config.batch_size) * parallel.worker_count()
        with self._decoder(temperature) as decode:
            answer(questions, kept, decode, self._rows, self.report, batch_size, self.seed)
        texts = []
        self.lengths, self.ended = [], []
        for question in questions:
            row = kept.rows[question.key]
            text = cut_at(row["text"], question.stops)
            texts.append(text)
            self.lengths.append(row["tokens"])
            # A stop string ends an answer too.
            self.ended.append(row["ended"] or text != row["text"])
        return texts

    def _question(self, request: Any, temperature: float) -> Question:
        prompt, asked = request_ids(request, self.backbone.tokenizer), answering_of(request.args[1])
        limit = max_answer_tokens(self.config, asked.max_tokens, len(prompt), self.backbone.context_length)
        drawn = [temperature, self.seed] if temperature else []
        # Finished samples keep what a stop string has left of an answer.
        key = self._key(prompt, limit, asked.stops, *drawn)
        return Question(prompt, limit, key, asked.stops)

    def _rows(self, numbers: list[int], rollouts: list[Rollout]) -> list[dict[str, Any]]:
        rows = []
        for rollout in rollouts:
            text = answer_text(self.backbone.tokenizer, rollout.prompt_ids, rollout.completion_ids)
            rows.append({"text": text, "tokens": len(rollout.completion_ids), "ended": rollout.finished})
        return rows

    def _key(self, *question: Any) -> str:
        """Return a hash of all that an answer depends on."""
        return Identity([self._made_by, *question]).key

    @contextlib.contextmanager
    def _decoder(self, temperature: float) -> Iterator[Decode]:
        """Yield a function that completes prompts, here or on a server with the adapter."""
        config, eos_ids = self.config, self.backbone.eos_ids
        if not config.server:
            with resident(self.backbone, self.state, int(config.batch_size), temperature) as decode:
                yield decode
            return
        with contextlib.ExitStack() as stack:
            server = reach_own_model(config.server.url, self.backbone, self.report.note)
            stack.callback(server.close)
            name = stack.enter_context(server.adapter(self.adapter)) if self.adapter else None

            def decode_there(prompts, max_tokens, seed, on_finished) -> list[Rollout]:
                return parallel.on_first_worker(
                    lambda: server.complete(
                        prompts, max_tokens, eos_ids, temperature, seed, model=name, on_finished=on_finished
                    )
                )

            yield decode_there

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one, by `HFLM`."""
        by_key = {self._key("loglikelihood", *request.args): request for request in requests}
        kept = KeptRows(self.partial, by_key)
        done = len(kept.rows)

        def keep(batch: list[Likelihood]) -> None:
            nonlocal done
            kept.add({self._key("loglikelihood", *texts): {"answer": found} for texts, found in batch})
            done = min(len(by_key), done + len(batch) * parallel.worker_count())
            self.report.progress(done, len(by_key))

        missing = [key for key in by_key if key not in kept.rows]
        with self.backbone.merged(self.state) as model:
            lm = _BatchwiseHFLM(model, self.backbone.tokenizer, self._rows_at_once(requests), keep)
            share = parallel.my_share([by_key[key] for key in missing])
            computed = parallel.gather_shares(lm.loglikelihood(share, disable_tqdm=True))
            lm.finish_batch()
        found = {key: tuple(row["answer"]) for key, row in kept.rows.items()}
        found |= zip(missing, computed, strict=True)
        return [found[self._key("loglikelihood", *request.args)] for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise UsageError("suites that measure perplexity are not supported", "choose another task")

    def _rows_at_once(self, requests) -> int:
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
        self._batch: list[Likelihood] = []
        self.cache_hook = self  # HFLM tells it each answer

    def add_partial(self, kind: str, texts: tuple[str, str], answer: tuple[float, bool]) -> None:
        self._batch.append((texts, answer))

    def finish_batch(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._keep(batch)

    def _model_call(self, *args, **kwargs):
        self.finish_batch()
        logits_BTV = super()._model_call(*args, **kwargs)
        # Base gives no probability to the tokens that a tuned model has besides.
        lacking = len(self.tokenizer) - logits_BTV.shape[-1]
        return pad(logits_BTV, (0, lacking), value=UNLIKELY) if lacking > 0 else logits_BTV


def max_answer_tokens(
    config: EvalConfig, suite_limit: int, length: int, room: int, place: Callable[[], str] | None = None
) -> int:
    """Return the maximum length of an answer, in tokens, to a prompt of `length` in a context of `room`.

    Raises:
        UsageError: Both together exceed the context; `place` tells where the prompt stands.
    """
    limit = min(suite_limit, config.max_new_tokens or suite_limit) + config.thought_tokens
    if length + limit > room:
        message = f"a prompt of {length} tokens and an answer of {limit} exceed the context of {room}"
        left = room - length - config.thought_tokens
        hint = "shorten the prompt or take it out, or choose a base model with a longer context"
        if left > 0:
            hint = f"set eval.max_new_tokens to {left} or less, or shorten the prompt"
        raise UsageError(f"{place()}: {message}" if place else message, hint)
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
    partial = partial_file(run, state, suite.name)
    keep_earlier(partial, run.eval_samples(state, suite.name))
    samples = _answered(suite, BackboneLM(backbone, adapter, config, partial, report))
    if state == "base" and suite.generative and suite.answering.temperature:
        second_file = partial_file(run, state, f"{suite.name}.second")
        second = BackboneLM(backbone, adapter, config, second_file, report, SECOND_SEED)
        drawn_again = _answered(suite, second)
        _read_by_base(suite, drawn_again, backbone)
        for row, again in zip(samples, drawn_again, strict=True):
            row["again"] = again["scores"][suite.metrics[0]]
        second_file.unlink()
    judge = _read_by_base(suite, samples, backbone)
    floor = _add_floors(suite, len(samples), samples, judge, backbone.known_fingerprint())
    metrics = suite.means([row["scores"] for row in samples])
    return store(run, record, state, suite.name, samples, metrics, floor, started)


def _answered(suite: Suite, lm: BackboneLM) -> list[dict[str, Any]]:
    """Let a model answer a suite; return the samples, scored by the suite's rules."""
    quiet_lm_eval()
    # Unseeded, lm-eval would draw other few-shot examples for each state.
    suite.task.set_fewshot_seed(FEWSHOT_SEED)
    # `simple_evaluate` would collect the environment after each call, which takes longer than a small suite.
    limit = lm.config.limit
    results = lm_evaluate(lm, suite.loaded, limit=limit, log_samples=True, bootstrap_iters=0, **suite.asking)
    (sampled,) = results["samples"].values()
    return _samples(suite, sampled, lm)


def _read_by_base(suite: Suite, samples: list[dict[str, Any]], backbone: Backbone) -> Judge | None:
    """Let base read the samples that the rules pass, where the suite wants it."""
    judge = content.judge(backbone, suite)
    if judge:
        _read(judge, suite.documents(len(samples)), samples)
    return judge


def _read(judge: Judge, docs: list[dict], samples: list[dict[str, Any]]) -> None:
    """Fail the samples that are not about their prompts; keep how much base's likelihood gained by them."""
    scores = judge(docs, [row["response"] for row in samples], [row["scores"] for row in samples])
    for row, read in zip(samples, scores, strict=True):
        row["gain"] = read.pop("gain", None)
        row["scores"] = read


def _add_floors(
    suite: Suite, limit: int | None, samples: list[dict[str, Any]], judge: Judge | None, judged_by: str
) -> dict[str, Any]:
    """Add each prompt's score of the best content-free answer to `samples`; return the means of all."""
    floors = suite.floors(limit, [row["response"] for row in samples], judge, judged_by)
    means = {name: suite.means(scores) for name, scores in floors.items()}
    metric = suite.metrics[0]
    best = max(means, key=lambda name: means[name][metric])
    for row, scores in zip(samples, floors[best], strict=True):
        row["floor"] = scores[metric]
    return means


def _samples(suite: Suite, rows: list[dict[str, Any]], lm: BackboneLM) -> list[dict[str, Any]]:
    """Return the stored records of lm-eval's samples, in the order of the documents.

    A task with several filters, which pick the answer out of a response, is scored by its first one.
    Only written answers have `tokens`, `ended` and `key`, a hash of all that the answer depends on.
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
            sample |= {"tokens": lm.lengths[number], "ended": lm.ended[number], "key": lm.keys[number]}
        for key in ("cluster", "group"):
            if row["doc"].get(key):
                sample[key] = row["doc"][key]
        samples.append(sample)
    return samples
