"""Measure how near a state's answers are to base's, token by token, at temperature 1.

Base and the state answer the same prompts. Then both models give their distributions at every token:

    forward   KL(base, state) on base's answers: what base says and the state would not
    reverse   KL(state, base) on the state's own answers: what the state says and base would not

Of a conversation, each turn has a distance; each model answers it after its own earlier answers. One that ran
into its limit stands there as it is, so that all states are asked the same turns.

Each is the mean over the tokens of an answer. The larger one is the state's distance from base on this
prompt, in nats per token: a model that always says the same is far away in the reverse direction alone.
Base's answers are sampled once per run; its own distance is the noise of 16-bit arithmetic. The floor is the
distance of a model that answers another prompt as base would: base's style without the content.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from opdcl import parallel
from opdcl.config.evaluate import CLOSENESS
from opdcl.data.formats import Row
from opdcl.data.prompts import encode_asked
from opdcl.data.suites import mean_score
from opdcl.errors import OpdclError, UsageError
from opdcl.measure.ask import (
    SEED,
    AnswerStates,
    Asking,
    Question,
    Stored,
    ask,
    message,
    read_states,
    reset_peak_memory,
    store,
)
from opdcl.model.backbone import Backbone, State
from opdcl.model.distributions import HiddenStates, rows_at_once, shared_rows
from opdcl.rundir.files import RESTORE, read_jsonl
from opdcl.train.answer_cache import CompletionCache
from opdcl.train.loop import StageReport, counted
from opdcl.train.losses import chunks, forward_kl, reverse_kl
from opdcl.train.teachers import Teacher
from opdcl.words import Example, Rollout


def measure_closeness(asking: Asking, asked: Sequence[Row]) -> Stored:
    """Measure a state's distance from base; write samples and result, and return the result.

    Base is measured first: the other states need its answers.
    """
    started = time.perf_counter()
    reset_peak_memory()
    config, backbone, run, report = asking.config, asking.backbone, asking.run, asking.report
    limit = config.closeness_tokens
    room = backbone.context_length - limit
    encoded = encode_asked(asked, backbone.tokenizer, room, limit)
    if left_out := len(asked) - len(encoded):
        reason = "the context is too short, or the chat template rewrites earlier answers"
        report.note(f"{left_out} shipped conversations are left out: {reason}")
    asked, prompts = [row for row, _ in encoded], [prompt for _, prompt in encoded]
    # All first turns, then all second ones: an answer's draws depend on its place.
    turns = sorted((turn, i) for i, prompt in enumerate(prompts) for turn in range(prompt.turns))
    of_base: list[Example] = []
    if asking.adapter:
        base_file = run.eval_samples("base", CLOSENESS)
        answers = read_jsonl(base_file)
        if len(answers) != len(turns):
            raise UsageError(f"{base_file} lacks answers of base", RESTORE)
        known = dict(zip(turns, answers, strict=True))
        for turn, i in turns:
            prompt = prompts[i].after([message(known[earlier, i]) for earlier in range(turn)])
            of_base.append(Example.of(prompt.ids, known[turn, i]["completion_ids"]))
        read = partial(_state_rows, backbone, report, of_base)
    else:
        others = [prompts[paired_prompt(i, len(prompts))].ids for _, i in turns]
        read = partial(_base_rows, backbone, report, others)

    model = Teacher(backbone, asking.state)
    decode = partial(CompletionCache(backbone).complete, model, batch_size=int(config.batch_size))
    texts_read = [example.ids for example in of_base]
    origin = asking.provenance([config.batch_size, limit, [*map(vars, prompts)], texts_read])
    # By number: a prompt that comes twice has two answers.
    questions = []
    for turn, i in turns:
        *before, key = (f"{origin} {i} {number}" for number in range(turn + 1))
        questions.append(Question(prompts[i], limit, key, tuple(before)))
    rows = ask(asking, questions, decode, batch_size=None, seed=SEED, read=read)
    samples = _samples(asked, turns, rows, is_base=not asking.adapter)
    scores = [sample["scores"] for sample in samples]
    metrics = {name: mean_score([one[name] for one in scores]) for name in scores[0]}
    return store(asking, samples, metrics, floor={}, started=started)


def _base_rows(
    backbone: Backbone, report: StageReport, others: list[list[int]], numbers: list[int], own: list[Rollout]
) -> list[Stored]:
    """Compare base with itself a little off, on its answers, and with itself after the prompts `others`."""
    texts = [Example.of(rollout.prompt_ids, rollout.completion_ids) for rollout in own]
    after_others = [Example.of(others[i], r.completion_ids) for i, r in zip(numbers, own, strict=True)]
    count = counted(report, "both models read answers", 3 * len(others), 3 * numbers[0])
    with backbone.merged("base") as model:
        states = read_states(model, texts, count)
        states_after_others = read_states(model, after_others, count)
        with _jitter(model):
            states_a_little_off = read_states(model, texts, count)
    noise = _divergences(backbone, "base", states, states_a_little_off)
    unrelated = _divergences(backbone, "base", states, states_after_others)
    rows = []
    for rollout, pair, (_, reverse) in zip(own, noise, unrelated, strict=True):
        rows.append(_row(rollout, pair, pair) | {"unrelated": reverse})
    return rows


def _state_rows(
    backbone: Backbone,
    report: StageReport,
    texts_of_base: list[Example],
    numbers: list[int],
    own: list[Rollout],
) -> list[Stored]:
    """Compare a state with base, on its answers and on base's."""
    texts = [[rollout.to_example() for rollout in own], [texts_of_base[i] for i in numbers]]
    count = counted(report, "both models read answers", 4 * len(texts_of_base), 4 * numbers[0])
    with backbone.merged("student") as model:
        states = [read_states(model, each, count) for each in texts]
    with backbone.merged("base") as model:
        base_states = [read_states(model, each, count) for each in texts]
    on_own, on_base = map(partial(_divergences, backbone, "student"), states, base_states)
    return [_row(*each) for each in zip(own, on_own, on_base, strict=True)]


def _divergences(
    backbone: Backbone, state: State, states: AnswerStates, base_states: AnswerStates
) -> list[tuple[float, float]]:
    """Return each text's mean forward and reverse KL per token."""
    head_VH, base_head_VH = backbone.head_of(state), backbone.head_of("base")
    found = []
    for i in sorted(states):
        student, base = HiddenStates(states[i], head_VH), HiddenStates(base_states[i], base_head_VH)
        forward, reverse = both_divergences(student, base)
        found.append((float(forward.double().mean()), float(reverse.double().mean())))
    return parallel.gather_shares(found)


def _row(rollout: Rollout, on_own: tuple[float, float], on_base: tuple[float, float]) -> Stored:
    """Return an answer's ids and scores, from both divergences on it and on base's answer."""
    scores = {
        "distance": max(on_base[0], on_own[1]),
        "forward": on_base[0],
        "reverse": on_own[1],
        "forward_own": on_own[0],
        "reverse_base": on_base[1],
    }
    if not all(map(math.isfinite, scores.values())):
        hint = "the base model or the adapter holds NaN: opdcl verify RUN, or restore the model"
        raise OpdclError("the distance to base is not finite", hint)
    # Rounding can make the divergence of equal models slightly negative.
    scores = {name: max(value, 0.0) for name, value in scores.items()}
    return {"scores": scores, "completion_ids": rollout.completion_ids}


def _samples(
    asked: Sequence[Row], turns: list[tuple[int, int]], rows: list[Stored], is_base: bool
) -> list[Stored]:
    """Return the stored records; only base's have the ids of answers, which other states are graded on."""
    samples = []
    for number, ((turn, i), row) in enumerate(zip(turns, rows, strict=True)):
        prompt = asked[i]
        until = len(prompt.prompt) - prompt.later_turns + turn
        sample = {"doc_id": number, "prompt": replace(prompt, prompt=prompt.prompt[:until]).shown(), **row}
        if not is_base:
            del sample["completion_ids"]
        elif len(asked) > 1:
            sample["floor"] = max(row["unrelated"], rows[paired_prompt(i, len(asked))]["unrelated"])
        sample.pop("unrelated", None)
        if prompt.later_turns:
            sample |= {"turn": turn + 1, "cluster": f"conversation {i}"}
        for name in ("cluster", "group"):
            if getattr(prompt, name):
                sample[name] = getattr(prompt, name)
        samples.append(sample)
    return samples


def paired_prompt(number: int, total: int) -> int:
    """Return the number of another prompt: half of all further on, where those of one text are far away.

    The prompts form pairs. So base's answer to one, read after the other, gives the forward direction of the
    one and the reverse direction of the other.
    """
    return (number + total // 2) % total


@contextlib.contextmanager
def _jitter(model: Any) -> Iterator[None]:
    """Change half of the input embeddings' dimensions by one digit of bfloat16 in the block.

    What the model computes then differs as between a run in 32 bits and one in 16, or between two
    kernels in 16: every later rounding falls differently.
    """

    embeddings = model.get_input_embeddings()
    embed = embeddings.forward

    def change(ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = embed(ids)
        generator = torch.Generator().manual_seed(SEED)
        chosen = torch.rand(embedded.shape[-1], generator=generator) < 0.5
        return embedded * (1 + torch.finfo(torch.bfloat16).eps * chosen.to(embedded))

    embeddings.forward = change  # as a hook, it would keep the model from the pass without padding
    try:
        yield
    finally:
        del embeddings.forward


@torch.no_grad()
def both_divergences(student: HiddenStates, teacher: HiddenStates) -> tuple[torch.Tensor, torch.Tensor]:
    """Return forward KL(teacher, student) and reverse KL(student, teacher) per position, both `(N,)`."""
    rows = shared_rows(student.head_VH, teacher)
    forward, reverse = [], []
    for part in chunks(student.states_NH):
        log_p, log_q = student.log_probs(part, rows), teacher.log_probs(part, rows)
        block = rows_at_once(log_p)
        for p, q in zip(log_p.split(block), log_q.split(block), strict=True):
            forward.append(forward_kl(p, q))
            reverse.append(reverse_kl(p, q))
    return torch.cat(forward), torch.cat(reverse)
