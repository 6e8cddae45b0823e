"""One model's decoding step: slabs of keys and values, prefill, the draw, and CUDA graphs of all of it.

A small model's decoding step launches dozens of kernels a layer, and launching takes longer than computing.
A CUDA graph launches a whole step at once, if it reads and writes the same addresses each time. So slabs,
positions and draws are in permanent buffers; the number of rows and columns comes from a few buckets, and
tokens reach the host only every few steps.

Without graphs a step has exactly the rows and columns that it needs. In both cases it is that of
`opdcl.model.llama`; for other families it is the model's own forward pass, so every one whose layers
attend fully or in windows is served.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from opdcl.model.architecture import architecture
from opdcl.model.forward import for_attention
from opdcl.model.llama import LlamaStep, decodes_as_llama

# With graphs, steps between two looks at the tokens: each look waits for the device.
STEPS = 8

# With graphs, columns are rounded up to a multiple of this: fewer graphs, at the price of reading some unused
# columns.
COLUMNS = 128

# Without graphs, rows are dropped once a fifth of them is finished: copying the rest then costs less than
# decoding the finished ones.
COMPACT_BELOW = 0.8

# Most prompts that run through the model together, and how many tokens of padding cost as much as another
# pass: on a CPU it reads the weights again, on a GPU it is launched, which takes longer than computing.
PREFILL, GRAPH_PREFILL = (32, 32), (128, 4096)

# Stands for the position of padding: no token comes after it, so none sees it.
PADDING = 2**30

# Tokens per block of the cumulative sum from which a draw is made.
DRAW_BLOCK = 256


@dataclass(frozen=True)
class Layout:
    """Rows of a batch, column by column: shared prefix, left padding, the row's own tail, completion."""

    prefix: Sequence[int]
    tails: Sequence[Sequence[int]]

    @property
    def width(self) -> int:
        """How many columns the longest tail takes."""
        return max(len(tail) for tail in self.tails)

    @property
    def end(self) -> int:
        """The column at which the completions start."""
        return len(self.prefix) + self.width

    def positions(self, columns: int) -> torch.Tensor:
        """Return the position of each column's token in its sequence, or PADDING, `(B, columns)`."""
        column_C, start = torch.arange(columns), len(self.prefix)
        padding_B1 = torch.tensor([[self.width - len(tail)] for tail in self.tails])
        shifted_BC = column_C - padding_B1
        return torch.where(column_C < start, column_C, torch.where(shifted_BC < start, PADDING, shifted_BC))


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values in `(rows, heads, capacity, dim)` slabs at permanent addresses.

    A step uses the first `rows` and `columns`, and writes to the column that `column_1` holds.
    """

    is_sliding = False

    def __init__(self, all_rows: int, capacity: int, column_1: torch.Tensor):
        super().__init__()
        self.all_rows, self.capacity, self.column_1 = all_rows, capacity, column_1
        self.rows, self.columns = all_rows, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._slab(key_states), self._slab(value_states)
        self.is_initialized = True

    def _slab(self, states: torch.Tensor) -> torch.Tensor:
        # Columns that hold nothing yet are masked, but masked NaN is still NaN.
        return states.new_zeros(self.all_rows, states.shape[1], self.capacity, states.shape[-1])

    def fill(self, keys: torch.Tensor, values: torch.Tensor, rows: slice, prefix: int, end: int) -> None:
        """Copy a prefix to the left of `rows`, and what follows it so that it ends at column `end`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        tail = keys.shape[2] - prefix
        for slab, states in ((self.keys, keys), (self.values, values)):
            slab[rows, :, :prefix] = states[:, :, :prefix]
            slab[rows, :, end - tail : end] = states[:, :, prefix:]

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = self.keys[: self.rows], self.values[: self.rows]
        keys.index_copy_(2, self.column_1, key_states)
        values.index_copy_(2, self.column_1, value_states)
        return keys[:, :, : self.columns], values[:, :, : self.columns]

    def keep(self, rows: torch.Tensor, filled: int) -> None:
        """Move the given rows to the front, in place; only the first `filled` columns hold anything."""
        for slab in (self.keys[:, :, :filled], self.values[:, :, :filled]):
            slab[: len(rows)] = slab[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0

    def get_seq_length(self) -> int:
        return self.columns - 1

    def get_max_length(self) -> int:
        return self.capacity


class Decoder:
    """The permanent buffers of one model, for `rows` sequences of `capacity` tokens, and its graphs.

    With `in_buckets`, rows and columns of a step are rounded up, so that few graphs serve all batches; on
    another device than a GPU these steps run without a graph.

    R, C and S are rows, all columns and the columns of a step; T counts the steps of a batch.
    """

    def __init__(self, model, rows: int, capacity: int, temperature: float, in_buckets: bool):
        self.rows, self.capacity, self.temperature = rows, capacity, temperature
        self.in_buckets = in_buckets
        self.steps_per_look = STEPS if in_buckets else 1
        # In 16 bits the CPU's fast kernels need two rows, so a finished one stays with the last.
        self.min_rows = 2 if model.dtype.itemsize == 2 and not in_buckets else 1
        with torch.device(model.device):
            self.token_R = torch.zeros(rows, dtype=torch.long)
            self.position_R = torch.zeros(rows, dtype=torch.long)
            self.column_1 = torch.zeros(1, dtype=torch.long)
            self.step_1 = torch.zeros(1, dtype=torch.long)
            self.key_RC = torch.full((rows, capacity), PADDING)
            self.uniform_RT = torch.zeros(rows, capacity)
            self.tokens_RT = torch.zeros(rows, capacity, dtype=torch.long)
            self.logprobs_RT = torch.zeros(rows, capacity)
        layers = architecture(model.config).layers
        self.cache = Cache(layers=[SlabLayer(rows, capacity, self.column_1) for _ in range(layers)])
        # Without a reference to the model itself, whose end is also the buffers'.
        self.llama_step = LlamaStep(model) if decodes_as_llama(model) else None
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.stream: torch.cuda.Stream | None = None
        self.addresses: tuple[int, ...] = ()

    def fits(self, model, rows: int, capacity: int, temperature: float) -> bool:
        """Return whether the buffers and graphs serve a batch; graphs need the weights where they were."""
        enough = rows <= self.rows and capacity <= self.capacity and temperature == self.temperature
        # With an adapter it is another one.
        same_step = decodes_as_llama(model) == (self.llama_step is not None)
        return enough and same_step and self.addresses == _addresses(model)

    @property
    def size(self) -> int:
        """Return the bytes of all slabs."""
        return sum(2 * layer.keys.nbytes for layer in self.cache.layers if layer.is_initialized)

    def start(self, model, layout: Layout, uniform_BT: torch.Tensor | None) -> None:
        """Fill the slabs with a batch's prompts, and draw the first token of each row."""
        self.addresses = _addresses(model)
        rows = len(layout.tails)
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()
        logits_BV = prefill(model, self.cache, layout, *(GRAPH_PREFILL if self.in_buckets else PREFILL))
        # A bucket's spare rows see column 0: over no column at all, attention is NaN.
        self.key_RC.zero_()
        self.position_R.zero_()
        self.key_RC[:rows] = layout.positions(self.capacity).to(self.key_RC.device)
        self.position_R[:rows] = self.key_RC[:rows, layout.end - 1]
        if uniform_BT is not None:
            self.uniform_RT[:rows, : uniform_BT.shape[1]] = uniform_BT.to(self.uniform_RT.device)
        self.column_1.fill_(layout.end)
        self.step_1.zero_()
        self._store(logits_BV, rows)

    def _store(self, logits_RV: torch.Tensor, rows: int) -> None:
        """Draw a token per row, and make it the next step's input; everything stays on the device."""
        uniform_R = self.uniform_RT[:rows].index_select(1, self.step_1)[:, 0] if self.temperature else None
        token_R, logprob_R = draw(logits_RV, self.temperature, uniform_R)
        self.token_R[:rows] = token_R
        self.tokens_RT[:rows].index_copy_(1, self.step_1, token_R[:, None])
        if logprob_R is not None:
            self.logprobs_RT[:rows].index_copy_(1, self.step_1, logprob_R[:, None])
        self.position_R[:rows] += 1
        self.step_1 += 1

    def drawn(self, rows: int, start: int, end: int) -> Iterator[tuple[list[int], list[float]]]:
        """Return the tokens of steps `start` to `end`, and their log-probabilities unless greedy."""
        tokens_TR = self.tokens_RT[:rows, start:end].T
        logprobs_TR = self.logprobs_RT[:rows, start:end].T
        return zip(tokens_TR.tolist(), logprobs_TR.tolist(), strict=True)

    def step(self, model, rows: int, columns: int) -> None:
        """Run one step: nothing in it waits for the device or depends on a value."""
        for layer in self.cache.layers:
            layer.rows, layer.columns = rows, columns
        key_RS = self.key_RC[:rows, :columns]
        run = self.llama_step or partial(plain_step, model)
        logits_RV = run(self.token_R[:rows], self.position_R[:rows], key_RS, self.cache)
        self._store(logits_RV, rows)
        self.column_1 += 1

    def run(self, model, count: int, rows: int, columns: int) -> None:
        """Run `count` steps of `rows`; the last step fills the last of `columns`."""
        if self.in_buckets:
            rows, columns = bucket(rows), min(-(-columns // COLUMNS) * COLUMNS, self.capacity)
        step: Callable[[], object] = partial(self.step, model, rows, columns)
        if self.in_buckets and model.device.type == "cuda":
            step = (self.graphs.get((rows, columns)) or self._capture(model, rows, columns)).replay
        for _ in range(count):
            step()

    def _capture(self, model, rows: int, columns: int) -> torch.cuda.CUDAGraph:
        """Record a step as a graph. A warm-up run lets libraries allocate first; its effects are undone."""
        state = (self.token_R, self.position_R, self.column_1, self.step_1)
        saved = [tensor.clone() for tensor in state]
        # Streams belong to a device, and a graph captured on another one's would be empty.
        with torch.cuda.device(model.device):
            self.stream = self.stream or torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step(model, rows, columns)
            torch.cuda.current_stream().wait_stream(self.stream)
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            # Other threads may use the device meanwhile, as a process group's watchdog does.
            with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
                self.step(model, rows, columns)
        self.graphs[rows, columns] = graph
        return graph

    def rows_for(self, running: int, rows: int) -> int:
        """Return with how many of `rows` to go on when `running` are not finished."""
        if self.in_buckets:
            return running if bucket(running) < bucket(rows) else rows
        needed = max(running, self.min_rows)
        return needed if needed < COMPACT_BELOW * rows else rows

    def keep(self, indices: list[int], filled: int) -> None:
        """Move the given rows to the front; the others are forgotten."""
        rows_K = torch.tensor(indices, device=self.token_R.device)
        for layer in self.cache.layers:
            layer.keep(rows_K, filled)
        for buffer in (self.token_R, self.position_R, self.key_RC, self.uniform_RT):
            buffer[: len(indices)] = buffer[rows_K]


def cheapest_batches(widths: Sequence[int], max_rows: int, weights: float) -> list[slice]:
    """Cut sequences, sorted by width, into the batches that cost least, of a decoding step or a pass.

    Each batch reads the weights once, which costs `weights` tokens, and for each sequence as many tokens as
    its widest has. So a few long prompts run separately as soon as padding the others costs more than that.
    """
    # By number of sequences: the least cost of cutting them, and the start of their last batch.
    costs, starts = [0.0], [0]
    for end, width in enumerate(widths, 1):
        cost, start = min(
            (costs[start] + weights + (end - start) * width, start)
            for start in range(max(0, end - max_rows), end)
        )
        costs.append(cost)
        starts.append(start)
    parts: list[slice] = []
    end = len(widths)
    while end:
        parts.append(slice(starts[end], end))
        end = starts[end]
    return parts[::-1]


def attention_mask(model, query_BQ: torch.Tensor, key_BS: torch.Tensor) -> torch.Tensor | dict:
    """Return which cached tokens each query sees, `(B, 1, Q, S)`; by kind of layer if a model has several.

    Args:
        model: The model whose layers attend fully or in sliding windows.
        query_BQ: The position of each query, or PADDING, which sees everything and so is never NaN.
        key_BS: The position of each column's token, or PADDING.
    """
    query_B1Q1, key_B11S = query_BQ[:, None, :, None], key_BS[:, None, None]
    visible = key_B11S <= query_B1Q1
    shape = architecture(model.config)
    if shape.window is None:
        return for_attention(model, visible)
    near = for_attention(model, visible & (key_B11S > query_B1Q1 - shape.window))
    if shape.kinds == {"sliding_attention"}:
        return near
    return {"full_attention": for_attention(model, visible), "sliding_attention": near}


def plain_step(model, token_B, position_B, key_BS, cache) -> torch.Tensor:
    """Run one token per row through the model's own forward pass; arguments as for `LlamaStep`."""
    return model(
        input_ids=token_B[:, None],
        attention_mask=attention_mask(model, position_B[:, None], key_BS),
        position_ids=position_B[:, None],
        past_key_values=cache,
    ).logits[:, -1]


def prefill(model, slabs: Cache, layout: Layout, most_rows: int, pass_tokens: int) -> torch.Tensor:
    """Fill the slabs with all prompts, which end at `layout.end`; return next-token logits `(B, V)`.

    The prefix runs once. Tails, the shortest first, run a few rows at a time, and each of these batches is
    only as wide as its longest tail: one long prompt would otherwise pad all the others.
    """
    device, prefix = model.device, len(layout.prefix)
    shared = _prefix_cache(model, layout.prefix)
    logits = []
    for part in cheapest_batches([len(tail) for tail in layout.tails], most_rows, pass_tokens):
        batch = Layout(layout.prefix, layout.tails[part])
        rows = len(batch.tails)
        ids_BW = torch.zeros(rows, batch.width, dtype=torch.long)
        for row, tail in enumerate(batch.tails):
            ids_BW[row, batch.width - len(tail) :] = torch.tensor(tail)
        cache = copy.deepcopy(shared)
        cache.batch_repeat_interleave(rows)
        key_BC = batch.positions(batch.end).to(device)
        position_BW = key_BC[:, prefix:]
        output = model(
            input_ids=ids_BW.to(device),
            attention_mask=attention_mask(model, position_BW, key_BC),
            position_ids=position_BW.masked_fill(position_BW == PADDING, 0),
            past_key_values=cache,
            # As an index tensor: the copy that it makes avoids one copy of the output head per row.
            logits_to_keep=torch.tensor([batch.width - 1], device=device),
        )
        logits.append(output.logits[:, -1])
        for slab, layer in zip(slabs.layers, cache.layers, strict=True):
            slab.fill(layer.keys, layer.values, part, prefix, layout.end)
    return torch.cat(logits)


def _prefix_cache(model, prefix: Sequence[int]) -> DynamicCache:
    """Return the keys and values of the prefix that all prompts share, in one row; it may be empty."""
    cache = DynamicCache()
    if not prefix:
        return cache
    position_1P = torch.arange(len(prefix), device=model.device)[None]
    full = architecture(model.config).full_attention  # transformers' own mask then needs no memory
    model.base_model(
        input_ids=torch.tensor([list(prefix)], device=model.device),
        attention_mask=None if full else attention_mask(model, position_1P, position_1P),
        position_ids=position_1P,
        past_key_values=cache,
    )
    return cache


def draw(logits_BV: torch.Tensor, temperature: float, uniform_B: torch.Tensor | None):
    """Draw a token per row by inverting the cumulative distribution; return ids and logprobs, `(B,)`.

    Without uniform numbers the most likely token is taken, and its log-probability is not computed.
    """
    if uniform_B is None:
        return logits_BV.argmax(-1), None
    rows, vocabulary = logits_BV.shape
    # Only the block that contains the draw is summed token by token.
    padded = math.ceil(vocabulary / DRAW_BLOCK) * DRAW_BLOCK
    scaled_BV = logits_BV.new_full((rows, padded), -torch.inf, dtype=torch.float32)
    scaled_BV[:, :vocabulary] = logits_BV
    if temperature != 1:
        scaled_BV /= temperature
    scaled_BV -= scaled_BV.amax(-1, keepdim=True)
    # Unnormalized probabilities; the draw is scaled by their total instead.
    weight_BNW = scaled_BV.exp().view(rows, -1, DRAW_BLOCK)
    block_BN = weight_BNW.sum(-1)
    cumulative_BN = block_BN.cumsum(-1)
    total_B1 = cumulative_BN[:, -1:]
    # Rounding must not move a draw to a block, or to a token of its block, that has no probability.
    draw_B1 = uniform_B[:, None].clamp(max=1 - 1e-6) * total_B1
    # NaN of a broken model is in no block: the last token is drawn, with NaN as its log-probability.
    block_B1 = torch.searchsorted(cumulative_BN, draw_B1, right=True).clamp_(max=cumulative_BN.shape[-1] - 1)
    inside_BW = weight_BNW[torch.arange(rows, device=logits_BV.device), block_B1[:, 0]].cumsum(-1)
    rest_B1 = draw_B1 - (cumulative_BN - block_BN).gather(-1, block_B1)
    rest_B1 = torch.minimum(rest_B1.clamp_(min=0), inside_BW[:, -1:] * (1 - 1e-6))
    token_B1 = block_B1 * DRAW_BLOCK + torch.searchsorted(inside_BW, rest_B1, right=True)
    token_B1.clamp_(max=vocabulary - 1)
    return token_B1[:, 0], (scaled_BV.gather(-1, token_B1) - total_B1.log())[:, 0]


def bucket(rows: int) -> int:
    """Return the number of rows that a step of `rows` sequences runs with: 2^k or 3 * 2^k."""
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 and power > 2 else power


def _addresses(model) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())
