"""Sample completions from the resident model, for recovery and for evaluation alike, through one of three engines.

| engine | what it is | when |
| --- | --- | --- |
| `slab` | our own loop (`opdcl.distill.slab`) | every layer is plain full attention |
| `generate` | transformers' `generate` | any other model: sliding windows, state-space layers |
| `continuous` | transformers' continuous batching, with CUDA graphs | asked for by name |
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from opdcl import parallel
from opdcl.errors import OpdclError
from opdcl.model.forward import has_plain_attention, key_width
from opdcl.sampling import decode
from opdcl.sampling.rollout import Engine, Request, Rollout

# Tokens per page of the continuous engine's cache.
PAGE = 256


def weights_in_tokens(model) -> float:
    """Return the number of the model's weights over that of keys and values in a cached token; infinite without attention."""
    config = model.config.get_text_config()
    cached = 2 * config.num_hidden_layers * key_width(config)
    return sum(p.numel() for p in model.parameters()) / cached if cached else math.inf


def sample(
    model,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 96,
    engine: Engine | Literal["auto"] = "auto",
    on_finished: Callable[[list[Rollout]], None] | None = None,
    unfinished: Sequence[Rollout] = (),
    max_unfinished: int = 0,
) -> list[Rollout]:
    """Sample one completion per prompt, in the order of `prompts`; each process samples its share.

    What an earlier call has left unfinished may be gone on with: `unfinished`, which comes first in the result. So the last, long
    completions of a batch need not be waited for one token at a time (partial rollouts, arXiv 2501.12599).

    Args:
        model: A causal language model.
        prompts: Token ids of each prompt, at least one id each.
        max_new_tokens: Longest completion, in tokens.
        eos_ids: Every id that ends a completion.
        temperature: Softmax temperature; 0 is greedy decoding.
        seed: The same seed, prompts and engine give the same completions; under `slab` whatever the batch, and however
            many processes share them.
        batch_size: Sequences decoded together, at most: see `cut`.
        engine: Which loop decodes.
        on_finished: Called with the completions that have ended since the last call.
        unfinished: Completions to go on with.
        max_unfinished: How many of a batch may be returned unfinished, where much would be left to do for them; of the engines `slab` does.
    """
    rollouts = [*unfinished, *(Rollout(list(p)) for p in prompts)]
    mine = parallel.my_share(rollouts)
    chosen = pick_engine(model)[0] if engine == "auto" else engine
    weights = weights_in_tokens(model)
    request = Request(
        max_new_tokens,
        eos_ids,
        temperature,
        seed,
        batch_size + len(unfinished),
        on_finished,
        len(rollouts),
        weights,
        max_unfinished,
    )
    if mine:
        {"slab": decode.decode, "generate": _generate, "continuous": _continuous}[chosen](
            model, mine, request
        )
    return parallel.gather_shares(mine)


def pick_engine(model) -> tuple[Engine, str]:
    """Return the engine for a model, and why."""
    if has_plain_attention(model.config):
        return "slab", "every layer is full attention: slab decoding, finished sequences leave the batch"
    return "generate", "some layers are not full attention, which only transformers' own cache serves"


class _KeepLogprobs(LogitsProcessor):
    """Note the log-probability of each drawn token, without keeping the logits of every position."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.columns: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids, scores):
        if self._last is not None:
            self.note(input_ids[:, -1])
        scaled = scores.float() / self.temperature
        self._last = scaled.log_softmax(-1)
        return scaled

    def note(self, token_B: torch.Tensor) -> None:
        self.columns.append(self._last.gather(-1, token_B[:, None])[:, 0])


@torch.no_grad()
def _generate(model, rollouts: list[Rollout], request: Request) -> None:
    """Transformers' `generate` on left-padded batches."""
    pad = request.eos_ids[0] if request.eos_ids else 0
    config = _generation_config(model, request, temperature=1.0)  # the processor below divides by it
    with _own_randomness(model, request.seed):
        for rows in request.batches(rollouts):
            batch = [rollouts[i] for i in rows]
            width = max(len(r.prompt_ids) for r in batch)
            ids = [[pad] * (width - len(r.prompt_ids)) + r.prompt_ids for r in batch]
            mask = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch]
            kept = _KeepLogprobs(request.temperature) if request.temperature else None
            tokens_BT = model.generate(
                torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([kept] if kept else []),
            )[:, width:]
            if kept:
                kept.note(tokens_BT[:, -1])
                logprobs = torch.stack(kept.columns, 1).tolist()
            for row, (rollout, tokens) in enumerate(zip(batch, tokens_BT.tolist(), strict=True)):
                _store(rollout, tokens, logprobs[row] if kept else [], request)
            if request.on_finished:
                request.on_finished(batch)


@torch.no_grad()
def _continuous(model, rollouts: list[Rollout], request: Request) -> None:
    """Transformers' continuous batching: sequences join and leave a running batch over a paged cache."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    attention = model.config._attn_implementation
    config = _generation_config(model, request, request.temperature or 1.0)
    running = min(len(rollouts), request.batch_size)
    pages = math.ceil((max(len(r.prompt_ids) for r in rollouts) + request.max_new_tokens) / PAGE)
    batching = ContinuousBatchingConfig(
        # Left to itself it takes nine tenths of the memory, and training needs some too.
        page_size=PAGE,
        num_blocks=running * pages,
        max_batch_tokens=max(running, PAGE),
        max_requests_per_batch=running,
        seed=request.seed + parallel.rank(),
        return_logprobs=bool(request.temperature),
    )
    try:
        with _own_randomness(model, request.seed):
            found = model.generate_batch(
                [r.prompt_ids for r in rollouts],
                generation_config=config,
                continuous_batching_config=batching,
                warmup=model.device.type == "cuda",
            )
    finally:
        # It switches the model to its paged attention; training and grading need the plain one.
        model.set_attn_implementation(attention)
    if len(found) < len(rollouts) or any(result.error for result in found.values()):
        raise OpdclError("continuous batching lost a sequence", "set sampler: slab or sampler: generate")
    for rollout, result in zip(rollouts, found.values(), strict=True):
        _store(rollout, list(result.generated_tokens), list(result.logprobs or []), request)
    if request.on_finished:
        request.on_finished(rollouts)


@contextlib.contextmanager
def _own_randomness(model, seed: int) -> Iterator[None]:
    """Draw from generators seeded for the purpose, and leave the trainer's as they were."""
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed + parallel.rank())
        yield


def _generation_config(model, request: Request, temperature: float) -> GenerationConfig:
    """Return plain sampling, or greedy decoding, free of the checkpoint's own defaults."""
    eos_ids = list(request.eos_ids)
    return GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        do_sample=bool(request.temperature),
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=eos_ids or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
        bos_token_id=model.generation_config.bos_token_id,
    )


def _store(rollout: Rollout, tokens: list[int], logprobs: list[float], request: Request) -> None:
    """Cut what was generated after its first end of sequence, and store it."""
    eos_ids = set(request.eos_ids)
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos_ids), None)
    rollout.finished = end is not None
    rollout.completion_ids = tokens[:end]
    rollout.logprobs = logprobs[:end]
