"""Sample completions from the resident model, for recovery and evaluation, with one of three engines.

| engine | what it is | when |
| --- | --- | --- |
| `graph` | opdcl's own loop (`opdcl.sampling.decode`) on CUDA graphs | on CUDA, every layer attends |
| `slab` | the same loop without graphs | every layer attends, fully or in a sliding window |
| `generate` | transformers' `generate` | any other model: state-space layers |
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.quantized import is_quantized
from opdcl.sampling.decode import Request, decode
from opdcl.words import Prompt, Rollout

logger = logging.getLogger(__name__)

Engine = Literal["slab", "graph", "generate"]

# Sampler and forward pass disagree about a token where they differ about its probability by more than this
# factor.
MISMATCH_RATIO = 2

# Sequences at once: on a CPU, and the most on a GPU, where their keys and values take up to half of what is
# free.
CPU_ROWS = 96
MOST_ROWS = 512

# Tokens that show whether CUDA graphs work: a few replays.
CHECKED_TOKENS = 24

# Model -> whether its graphs agreed with its plain forward pass.
_GRAPHS_AGREE: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def weights_in_tokens(model) -> float:
    """Return how many cached tokens are as large as the model's weights; infinite without attention."""
    shape = architecture(model.config)
    cached = 2 * shape.layers * shape.key_width
    return sum(p.numel() for p in model.parameters()) / cached if cached else math.inf


def sample(
    model,
    prompts: Sequence[Prompt | Rollout],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
    engine: Engine | Literal["auto"] = "auto",
    on_finished: Callable[[list[Rollout]], None] | None = None,
    stopped: Callable[[], bool] = bool,
) -> list[Rollout]:
    """Sample one completion per prompt, in the order of `prompts`; each worker samples its share.

    The same seed, prompts and engine give the same completions; with `slab` and `graph` also for any batch
    size and any number of workers.

    Args:
        model: A causal language model.
        prompts: What to complete, at least one id each. In place of one, an empty rollout, which then grows.
        max_new_tokens: Longest completion, in tokens.
        eos_ids: Every id that ends a completion.
        temperature: Softmax temperature; 0 is greedy decoding.
        seed: Seed of the draws.
        batch_size: Maximum number of sequences decoded together (`cheapest_batches`). Default:
            `default_rows`.
        engine: The decoding loop.
        on_finished: Called with the completions that have ended since the last call.
        stopped: Asked again and again; once it returns True, all completions are returned as they are.
    """
    rollouts = [p if isinstance(p, Rollout) else Rollout(p) for p in prompts]
    own_rollouts = list(parallel.my_share(rollouts))
    if batch_size is None:
        batch_size = default_rows(model, max((r.length for r in rollouts), default=0) + max_new_tokens)
    total, weights = len(rollouts), weights_in_tokens(model)
    request = Request(
        max_new_tokens, eos_ids, batch_size, total, weights, temperature, seed, on_finished, stopped
    )
    if own_rollouts:
        if engine == "auto":
            engine = pick_engine(model)
            if engine == "graph" and not graphs_agree(model, [r.prompt for r in rollouts]):
                engine = "slab"
        if engine == "generate":
            _generate(model, own_rollouts, request)
        else:
            decode(model, own_rollouts, request, graphs=engine == "graph")
    return parallel.gather_shares(own_rollouts)


def pick_engine(model) -> Engine:
    """Return the engine for a model: on CUDA graphs, if they can be captured.

    Moving positions cannot, and a quantized model's own products have not been tried.
    """
    shape = architecture(model.config)
    if not shape.attention_only:
        return "generate"
    captures = model.device.type == "cuda" and not shape.moving_positions and not is_quantized(model)
    return "graph" if captures else "slab"


def default_rows(model, width: int) -> int:
    """Return how many sequences of up to `width` tokens to decode together."""
    if model.device.type != "cuda":
        return CPU_ROWS
    shape = architecture(model.config)
    row = 2 * shape.layers * shape.key_width * model.dtype.itemsize * width
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(1, min(MOST_ROWS, free // 2 // row))


@torch.no_grad()
def graphs_agree(model, prompts: Sequence[Prompt]) -> bool:
    """Return whether a model's CUDA graphs do what its forward pass does; checked once, on two prompts.

    Each token's log-probability must be that of the forward pass, up to the rounding that a recovery allows.
    """
    if model not in _GRAPHS_AGREE:
        rollouts = [*map(Rollout, prompts[:2])]
        request = Request(CHECKED_TOKENS, (), len(rollouts), len(rollouts), weights_in_tokens(model))
        reason = ""
        try:
            decode(model, rollouts, request, graphs=True)
            gap = max(_largest_gap(model, rollout) for rollout in rollouts)
            if not gap < math.log(MISMATCH_RATIO):
                reason = f"a token's log-probability is off by {gap:.2g} nats"
        except RuntimeError as fault:
            reason = str(fault).splitlines()[0]
        if reason:
            logger.warning("CUDA graphs do not work here (%s): the slower sampler `slab` is used", reason)
        _GRAPHS_AGREE[model] = not reason
    return _GRAPHS_AGREE[model]


def _largest_gap(model, rollout: Rollout) -> float:
    """Return how far the sampler's log-probability of any token is from the forward pass's, in nats."""
    ids_1T = torch.tensor([rollout.prompt_ids + rollout.completion_ids], device=model.device)
    log_TV = model(input_ids=ids_1T).logits[0, len(rollout.prompt_ids) - 1 : -1].float().log_softmax(-1)
    token_T = ids_1T[0, len(rollout.prompt_ids) :]
    plain_T = log_TV.gather(-1, token_T[:, None])[:, 0]
    return float((plain_T - plain_T.new_tensor(rollout.logprobs)).abs().max())


class _LogprobRecorder(LogitsProcessor):
    """Record the log-probability of each sampled token, without keeping the logits of every position."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.columns: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids, scores):
        self._record(input_ids[:, -1])
        scaled = scores.float() / self.temperature
        self._last = scaled.log_softmax(-1)
        return scaled

    def _record(self, token_B: torch.Tensor) -> None:
        if self._last is not None:
            self.columns.append(self._last.gather(-1, token_B[:, None])[:, 0])

    def logprobs(self, last_token_B: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of every token, `(B, T)`, the last one of each row included."""
        self._record(last_token_B)
        return torch.stack(self.columns, 1)


@torch.no_grad()
def _generate(model, rollouts: list[Rollout], request: Request) -> None:
    """Complete the rollouts with transformers' `generate` on left-padded batches."""
    config = _generation_config(request)
    with _seeded(model, request.seed), without_checkpoint_defaults(model):
        for indices in request.batches(rollouts):
            batch = [rollouts[i] for i in indices]
            width = max(len(rollout.prompt_ids) for rollout in batch)
            ids_BW = torch.full((len(batch), width), config.pad_token_id)
            mask_BW = torch.zeros_like(ids_BW)
            for row, rollout in enumerate(batch):
                start = width - len(rollout.prompt_ids)
                ids_BW[row, start:] = torch.tensor(rollout.prompt_ids)
                mask_BW[row, start:] = 1
            recorder = _LogprobRecorder(request.temperature)
            tokens_BT = model.generate(
                ids_BW.to(model.device),
                attention_mask=mask_BW.to(model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([recorder] if request.temperature else []),
                stopping_criteria=[
                    lambda ids, _: torch.full(ids.shape[:1], request.stopped(), device=ids.device)
                ],
            )[:, width:]
            logprobs_BT = recorder.logprobs(tokens_BT[:, -1]) if request.temperature else tokens_BT[:, :0]
            for row, rollout in enumerate(batch):
                _store(rollout, tokens_BT[row].tolist(), logprobs_BT[row].tolist(), request)
            if request.on_finished:
                request.on_finished(batch)


@contextlib.contextmanager
def _seeded(model, seed: int) -> Iterator[None]:
    """Sample from freshly seeded generators inside the block, and leave the trainer's unchanged."""
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed + parallel.rank())
        yield


@contextlib.contextmanager
def without_checkpoint_defaults(model) -> Iterator[None]:
    """Let `generate` use only the settings that it is given.

    For every field that a call leaves open, transformers takes the value in the checkpoint's
    generation_config.json: penalties, cut-offs and banned tokens would change the distribution.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _generation_config(request: Request) -> GenerationConfig:
    """Return plain sampling, or greedy decoding."""
    eos_ids = list(request.eos_ids)
    return GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        do_sample=bool(request.temperature),
        temperature=1.0,  # the recorder divides by the request's
        top_k=0,
        top_p=1.0,
        eos_token_id=eos_ids or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
    )


def _store(rollout: Rollout, tokens: list[int], logprobs: list[float], request: Request) -> None:
    """Store the generated tokens up to the first end of sequence."""
    for count, token in enumerate(tokens, 1):
        if token in request.eos_ids:
            rollout.finished = True
            tokens, logprobs = tokens[:count], logprobs[:count]
            break
    rollout.completion_ids, rollout.logprobs = tokens, logprobs
