"""Measure a state of the backbone with lm-eval: same resident weights, same sampler, per-answer records.

opdcl eval runs/mine
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch.nn.functional import pad

from opdcl import parallel
from opdcl.config.evaluate import EvalConfig
from opdcl.data.chat import request_ids
from opdcl.data.scoring import score_documents
from opdcl.data.stock_tasks import answering_of
from opdcl.data.suites import Grade, Suite, cut_at, quiet_lm_eval
from opdcl.errors import UsageError
from opdcl.measure import relevance
from opdcl.measure.ask import (
    SECOND_SEED,
    SEED,
    AnswerCache,
    Asking,
    Decode,
    Question,
    Stored,
    ask,
    reset_peak_memory,
    reuse_samples,
    store,
)
from opdcl.rundir.hashes import Identity
from opdcl.train.answer_cache import CompletionCache
from opdcl.train.external_teachers import reach_own_model
from opdcl.train.loop import counter
from opdcl.train.teachers import Teacher
from opdcl.words import Prompt, Rollout

# Memory for the logits of one batch of log-likelihoods, which are kept for every position, in bytes.
LOGIT_BYTES = 2**30
# The logit of a token that a model lacks: no probability, and a number that JSON has.
UNLIKELY = -1e5

# The texts of a request -> their log-likelihood, and whether they are the greedy continuation.
Likelihood = tuple[tuple[str, str], tuple[float, bool]]


def write_answers(asking: Asking, requests: Sequence[Instance], seed: int = SEED) -> list[Stored]:
    """Return the answers to requests of lm-eval, each cut at the stop strings of its task.

    `key` is a hash of all that an answer depends on, and `ended` says whether it came to its end before its
    token limit. `seed` is that of answers that are drawn.
    """
    config, backbone, origin = asking.config, asking.backbone, _provenance(asking)
    options = [answering_of(request.args[1]) for request in requests]
    (temperature,) = {one.temperature for one in options}
    drawn = [temperature, seed] if temperature else []
    questions = []
    for request, asked in zip(requests, options, strict=True):
        prompt = request_ids(request, backbone.tokenizer)
        limit = max_answer_tokens(config, asked.max_tokens, len(prompt), backbone.context_length)
        # Finished samples keep what a stop string has left of an answer.
        key = Identity([origin, prompt, limit, asked.stops, *drawn]).key
        questions.append(Question(Prompt(prompt), limit, key))
    batch_size = None if temperature else int(config.batch_size) * parallel.worker_count()
    with _decoder(asking, temperature) as decode:
        found = ask(asking, questions, decode, batch_size, seed)
    answers = []
    for question, asked, answer in zip(questions, options, found, strict=True):
        response = cut_at(answer["response"], asked.stops)
        # A stop string ends an answer too.
        ended = answer["ended"] or response != answer["response"]
        answers.append(answer | {"response": response, "ended": ended, "key": question.key})
    return answers


def _provenance(asking: Asking) -> str:
    """Return a hash of what makes an answer to a suite, apart from the question."""
    # Wherever it is. It had a model in an earlier version, whose answers are kept.
    server = {"model": None} if asking.config.server else None
    return asking.provenance([asking.config.batch_size, server])


@contextlib.contextmanager
def _decoder(asking: Asking, temperature: float) -> Iterator[Decode]:
    """Yield a function that completes prompts, here or on a server with the adapter."""
    config, backbone = asking.config, asking.backbone
    if not config.server:
        cache, model = CompletionCache(backbone), Teacher(backbone, asking.state)
        yield partial(cache.complete, model, temperature=temperature, batch_size=int(config.batch_size))
        return
    with contextlib.ExitStack() as stack:
        server = reach_own_model(config.server.url, backbone, asking.report.note)
        stack.callback(server.close)
        name = stack.enter_context(server.adapter(asking.adapter)) if asking.adapter else None

        def decode_there(prompts, on_finished, max_new_tokens, seed) -> list[Rollout]:
            complete = partial(server.complete, prompts, max_new_tokens, backbone.eos_ids, temperature, seed)
            return parallel.on_first_worker(partial(complete, model=name, on_finished=on_finished))

        yield decode_there


def compare_likelihoods(asking: Asking, requests: Sequence[Instance]) -> list[list[tuple[float, bool]]]:
    """Return the log-likelihood of each continuation, and whether it is the greedy one, by document.

    lm-eval's `HFLM` computes them.
    """
    backbone, origin = asking.backbone, _provenance(asking)

    def key_of(texts: tuple[str, str]) -> str:
        return Identity([origin, "loglikelihood", *texts]).key

    by_key = {key_of(request.args): request for request in requests}
    kept = AnswerCache(asking.file, by_key)
    count = counter(asking.report.progress, len(by_key), len(kept.rows))

    def keep(batch: list[Likelihood]) -> None:
        kept.add({key_of(texts): {"answer": found} for texts, found in batch})
        count(batch)

    missing = [key for key in by_key if key not in kept.rows]
    with backbone.merged(asking.state) as model:
        lm = _BatchwiseHFLM(model, backbone.tokenizer, _rows_at_once(asking, requests), keep)
        share = parallel.my_share([by_key[key] for key in missing])
        computed = parallel.gather_shares(lm.loglikelihood(share, disable_tqdm=True))
        lm.finish_batch()
    found = {key: tuple(row["answer"]) for key, row in kept.rows.items()}
    found |= zip(missing, computed, strict=True)
    by_document = defaultdict(list)
    for request in requests:
        by_document[request.doc_id].append(found[key_of(request.args)])
    return [*by_document.values()]


def _rows_at_once(asking: Asking, requests: Sequence[Instance]) -> int:
    """Return the batch size at which the logits of the longest request fit into `LOGIT_BYTES`."""
    longest = max(("".join(request.args) for request in requests), key=len)
    head_VH = asking.backbone.head_VH
    # HFLM holds them twice: before and after the softmax.
    row = 2 * len(asking.backbone.tokenizer(longest)["input_ids"]) * len(head_VH) * head_VH.element_size()
    return max(1, min(int(asking.config.batch_size), LOGIT_BYTES // row))


class _BatchwiseHFLM(HFLM):
    """lm-eval's `HFLM` on a model in memory; `keep` receives the answers of each finished batch."""

    def __init__(self, model, tokenizer, batch_size: int, keep: Callable[[list], None]):
        super().__init__(model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
        self._keep = keep
        self._batch: list[Likelihood] = []
        self.cache_hook = self  # HFLM reports each answer to it

    def add_partial(self, kind: str, texts: tuple[str, str], answer: tuple[float, bool]) -> None:
        self._batch.append((texts, answer))

    def finish_batch(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._keep(batch)

    def _model_call(self, *args, **kwargs):
        self.finish_batch()
        logits_BTV = super()._model_call(*args, **kwargs)
        # Base gives no probability to tokens that only a tuned model has.
        lacking = len(self.tokenizer) - logits_BTV.shape[-1]
        return pad(logits_BTV, (0, lacking), value=UNLIKELY) if lacking > 0 else logits_BTV


def max_answer_tokens(
    config: EvalConfig, suite_limit: int, length: int, room: int, place: Callable[[], str] | None = None
) -> int:
    """Return the maximum length of an answer, in tokens, to a prompt of `length` in a context of `room`.

    Raises:
        UsageError: Both together exceed the context; `place` returns where the prompt is.
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


def evaluate(asking: Asking, suite: Suite) -> Stored:
    """Measure a state on a suite; write samples and result, and return the result."""
    started = time.perf_counter()
    reset_peak_memory()
    reuse_samples(asking.file, asking.run.eval_samples(asking.name, asking.suite))
    grade = partial(relevance.grade, relevance.Reader(asking.backbone, asking.report), suite)
    samples = _answered(suite, asking, grade)
    metric = suite.metrics[0]
    if asking.name == "base" and suite.generative and suite.answering.temperature:
        second = replace(asking, suite=f"{suite.name}.second")
        for row, again in zip(samples, _answered(suite, second, grade, SECOND_SEED), strict=True):
            row["again"] = again["scores"][metric]
        second.file.unlink()
    responses = [row["response"] for row in samples]
    floors = suite.floors(len(samples), responses, grade)
    means = {name: suite.means(scores) for name, scores in floors.items()}
    best = max(means, key=lambda name: means[name][metric])
    for row, scores in zip(samples, floors[best], strict=True):
        row["floor"] = scores[metric]
    metrics = suite.means([row["scores"] for row in samples])
    return store(asking, samples, metrics, means, started)


def _answered(suite: Suite, asking: Asking, grade: Grade, seed: int = SEED) -> list[Stored]:
    """Let a state answer a suite; return the stored records, in the order of the documents.

    Only written answers have `tokens`, `ended` and `key`, and only those that base may read a `gain`: by how
    much their likelihood gains from the prompt. `cluster` says which fact or person a prompt is about, and
    `group` which kind of prompt it is.
    """
    quiet_lm_eval()
    requests = suite.requests(asking.config.limit, asking.backbone.tokenizer)
    docs = suite.documents(asking.config.limit)
    written: list[Stored] = []
    if suite.generative:
        written = write_answers(asking, requests, seed)
        texts = [answer["response"] for answer in written]
        answers, scores = [[text] for text in texts], grade(docs, texts)
    else:
        answers = compare_likelihoods(asking, requests)
        scores = score_documents(suite.task, docs, answers)
    samples = []
    for number, (doc, own, found) in enumerate(zip(docs, answers, scores, strict=True)):
        row = {"doc_id": number, **suite.record(doc, own)}
        row["scores"] = {metric: found[metric] for metric in suite.metrics}
        if suite.generative:
            row |= {name: written[number][name] for name in ("tokens", "ended", "key")}
        for name in ("cluster", "group"):
            if doc.get(name):
                row[name] = doc[name]
        if suite.content or suite.ordered:
            row["gain"] = found.get("gain")
        samples.append(row)
    return samples
