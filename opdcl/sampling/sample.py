"""Sample completions from the resident model, for recovery and evaluation, with one of three engines.

| engine | what it is | when |
| --- | --- | --- |
| `graph` | opdcl's own loop on CUDA graphs (`opdcl.sampling.decoder`) | on CUDA, every layer attends |
| `slab` | the same loop without graphs | every layer attends, fully or in a sliding window |
| `generate` | transformers' `generate` | any other model: state-space layers |

opdcl's loop is made for large batches of short sequences. It is faster than `generate` for three reasons:
keys and values go into preallocated slabs (no concatenation per token), finished sequences leave the batch,
and the prefix that all prompts share (a system prompt, for example) is computed once. On a GPU, each step is
one graph.

Its randomness is one uniform number per sequence and token, drawn in advance, so a sequence's samples depend
neither on its neighbours in the batch nor on when they finish.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.forward import common_prefix
from opdcl.model.hardware import is_out_of_memory, release
from opdcl.model.quantized import is_quantized
from opdcl.sampling.decoder import COLUMNS, Decoder, Layout, bucket, cheapest_batches
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

# With graphs: slabs above this share of the device's memory are not kept between calls.
KEPT_SHARE = 0.1

# Model -> its buffers and graphs.
_KEPT: weakref.WeakKeyDictionary[torch.nn.Module, Decoder] = weakref.WeakKeyDictionary()

# Model -> whether its graphs agreed with its plain forward pass.
_GRAPHS_AGREE: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def weights_in_tokens(model) -> float:
    """Return how many cached tokens are as large as the model's weights; infinite without attention."""
    shape = architecture(model.config)
    cached = 2 * shape.layers * shape.key_width
    return sum(p.numel() for p in model.parameters()) / cached if cached else math.inf


@dataclass(frozen=True)
class Request:
    """What an engine has to fulfil, apart from the prompts; see `sample` for fields without a docstring."""

    max_new_tokens: int
    eos_ids: Sequence[int]
    batch_size: int
    total: int
    """Number of rollouts in all processes."""
    weights: float
    """How many cached tokens a decoding step reads in the time that it takes to read the model's weights."""
    temperature: float = 1.0
    seed: int = 0
    on_finished: Callable[[list[Rollout]], None] | None = None
    stopped: Callable[[], bool] = bool  # which returns False

    def batches(self, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Yield the indices of rollouts that run together, the shortest first."""
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].length)
        widths = [rollouts[i].length + self.max_new_tokens for i in order]
        for part in cheapest_batches(widths, self.batch_size, self.weights):
            yield order[part]


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


def decode(model, rollouts: list[Rollout], request: Request, graphs: bool) -> None:
    """Complete the rollouts in place; every layer of `model` must attend, fully or in a window.

    Args:
        model: A causal language model.
        rollouts: This worker's share.
        request: What they have in common.
        graphs: Decode on CUDA graphs.
    """
    uniform_NT = None
    if request.temperature:
        # Drawn for all workers, so that a sequence gets the same numbers on any of them.
        generator = torch.Generator().manual_seed(request.seed)
        uniform_NT = torch.rand(request.total, request.max_new_tokens, generator=generator)
        uniform_NT = uniform_NT[parallel.rank() :: parallel.worker_count()]
    # At least one id of each prompt stays outside the shared prefix.
    prefix = common_prefix([r.prompt_ids[:-1] for r in rollouts]) if len(rollouts) > 1 else []
    waiting = deque(request.batches(rollouts))
    while waiting:
        indices = waiting.popleft()
        batch = [rollouts[i] for i in indices]
        layout = Layout(prefix, [r.prompt_ids[len(prefix) :] for r in batch])
        uniform_BT = None if uniform_NT is None else uniform_NT[indices]
        try:
            _decode_batch(model, batch, layout, request, uniform_BT, graphs)
            continue
        except BaseException as fault:
            _KEPT.pop(model, None)  # its state is unknown, and a smaller batch needs smaller buffers
            # Workers with a sharded base run in step, so none may start over alone.
            if not is_out_of_memory(fault) or len(batch) == 1 or parallel.sharded():
                raise
        for rollout in batch:
            rollout.completion_ids, rollout.logprobs, rollout.finished = [], [], False
        release()
        half = len(indices) // 2
        logger.warning("out of memory while sampling: %d sequences at once instead of %d", half, len(indices))
        waiting.extendleft([indices[half:], indices[:half]])
    if graphs and model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
        if _KEPT[model].size > KEPT_SHARE * memory:
            del _KEPT[model]


def _decoder(model, layout: Layout, request: Request, graphs: bool) -> Decoder:
    """Return buffers for a batch: with graphs those kept, unless they are too small or the weights moved."""
    rows, capacity = len(layout.tails), layout.end + request.max_new_tokens
    if not graphs:
        return Decoder(model, rows, capacity, request.temperature, in_buckets=False)
    kept = _KEPT.get(model)
    if kept and kept.fits(model, rows, capacity, request.temperature):
        return kept
    rows, capacity = bucket(rows), -(-capacity // COLUMNS) * COLUMNS
    if kept:
        rows, capacity = max(rows, kept.rows), max(capacity, kept.capacity)
        del _KEPT[model], kept  # before the new ones take memory
    _KEPT[model] = Decoder(model, rows, capacity, request.temperature, in_buckets=True)
    return _KEPT[model]


@torch.no_grad()
def _decode_batch(
    model,
    batch: list[Rollout],
    layout: Layout,
    request: Request,
    uniform_BT: torch.Tensor | None,
    graphs: bool,
) -> None:
    """Complete a batch in place."""
    decoder = _decoder(model, layout, request, graphs)
    decoder.start(model, layout, uniform_BT)
    done, seen, drawn = [False] * len(batch), 0, 1
    while True:
        for tokens, logprobs in decoder.drawn(len(batch), seen, drawn):
            _append(batch, done, tokens, logprobs, request)
        running = done.count(False)
        if not running or request.stopped():
            return
        rows, filled = decoder.rows_for(running, len(batch)), layout.end + drawn - 1
        if rows < len(batch):
            indices = sorted(range(len(batch)), key=done.__getitem__)[:rows]
            decoder.keep(indices, filled)
            batch, done = [batch[row] for row in indices], [done[row] for row in indices]
        count = min(decoder.steps_per_look, request.max_new_tokens - drawn)
        decoder.run(model, count, len(batch), filled + count)
        seen, drawn = drawn, drawn + count


def _append(
    batch: list[Rollout], done: list[bool], tokens: list[int], logprobs: list[float], request: Request
) -> None:
    """Append a drawn token to each row that is not done, and report the completions that have ended."""
    ended = []
    for row, (rollout, token) in enumerate(zip(batch, tokens, strict=True)):
        if done[row]:
            continue
        rollout.completion_ids.append(token)
        if request.temperature:
            rollout.logprobs.append(logprobs[row])
        rollout.finished = token in request.eos_ids
        done[row] = rollout.finished or len(rollout.completion_ids) == request.max_new_tokens
        if done[row]:
            ended.append(rollout)
    if request.on_finished and ended:
        request.on_finished(ended)


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
    eos_ids, greedy = list(request.eos_ids), not request.temperature
    config = GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        do_sample=not greedy,
        temperature=1.0,  # the recorder divides by the request's
        top_k=0,
        top_p=1.0,
        eos_token_id=eos_ids or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
    )
    # The generators of the trainer stay as they are.
    own_generators = torch.random.fork_rng([model.device] if model.device.type == "cuda" else [])
    with own_generators, without_checkpoint_defaults(model):
        torch.manual_seed(request.seed + parallel.rank())
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
                logits_processor=LogitsProcessorList([] if greedy else [recorder]),
                stopping_criteria=[
                    lambda ids, _: torch.full(ids.shape[:1], request.stopped(), device=ids.device)
                ],
            )[:, width:]
            logprobs_BT = tokens_BT[:, :0] if greedy else recorder.logprobs(tokens_BT[:, -1])
            for rollout, tokens, logprobs in zip(
                batch, tokens_BT.tolist(), logprobs_BT.tolist(), strict=True
            ):
                ends = [place for place, token in enumerate(tokens, 1) if token in eos_ids]
                rollout.finished = bool(ends)
                until = ends[0] if ends else None  # what follows is padding
                rollout.completion_ids, rollout.logprobs = tokens[:until], logprobs[:until]
            if request.on_finished:
                request.on_finished(batch)


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
