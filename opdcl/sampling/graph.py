"""Decoding on CUDA graphs: the loop of `decode` with shapes and addresses that do not change.

A small model's decoding step launches dozens of kernels a layer, and launching takes longer than computing.
A CUDA graph launches a whole step at once, if it reads and writes the same addresses each time. So slabs,
positions and draws lie in permanent buffers, the number of rows and columns comes from a few buckets, and
tokens reach the host only every few steps. The step is that of `opdcl.sampling.llama_step`. For other
families it is the model's own forward pass, so every one whose layers attend fully or in windows is served.

On another device the same step runs without a graph.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from opdcl.model.architecture import architecture
from opdcl.sampling.decode import WORTH_LEAVING, SlabLayer, append, decode_batches, draw, prefill
from opdcl.sampling.layout import PADDING, Layout
from opdcl.sampling.llama_step import LlamaStep, is_llama, plain_step

if TYPE_CHECKING:
    from opdcl.sampling.rollout import Request, Rollout

# Steps between two looks at the tokens: each look waits for the device.
STEPS = 8

# Columns are rounded up to a multiple of this: fewer graphs, at the price of reading some unused columns.
COLUMNS = 128

# Prompts that run through the model together: a GPU needs more than a CPU to be busy.
PREFILL_ROWS = 128

# Slabs above this share of the device's memory are not kept between calls.
KEPT_SHARE = 0.1


class StaticLayer(SlabLayer):
    """One layer's slabs at permanent addresses; a step writes to the column that `column_1` holds."""

    def __init__(self, rows: int, capacity: int, column_1: torch.Tensor):
        super().__init__(capacity)
        self.all_rows, self.column_1 = rows, column_1
        self.rows, self.columns = rows, 0
        """The bucket of the step: `columns` 0 stands for prefill, which fills the slabs by `copy_part`."""

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, rows: int) -> None:
        super()._allocate(key, value, self.all_rows)
        # Columns that hold nothing yet are masked, but masked NaN is still NaN.
        self.keys.zero_()
        self.values.zero_()

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = self.keys[: self.rows], self.values[: self.rows]
        keys.index_copy_(2, self.column_1, key_states)
        values.index_copy_(2, self.column_1, value_states)
        return keys[:, :, : self.columns], values[:, :, : self.columns]

    def keep(self, rows: torch.Tensor) -> None:
        """Move the given rows to the front, in place."""
        for slab in (self.keys, self.values):
            slab[: len(rows)] = slab[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0


class GraphDecoder:
    """The permanent buffers of one model, for `rows` sequences of `capacity` tokens, and its graphs.

    R, C and S are rows, all columns and the columns of a bucket; T counts the steps of a batch.
    """

    def __init__(self, model, rows: int, capacity: int, temperature: float):
        self.rows, self.capacity, self.temperature = rows, capacity, temperature
        device, long = model.device, torch.long
        self.token_R = torch.zeros(rows, dtype=long, device=device)
        self.position_R = torch.zeros(rows, dtype=long, device=device)
        self.column_1 = torch.zeros(1, dtype=long, device=device)
        self.step_1 = torch.zeros(1, dtype=long, device=device)
        self.key_RC = torch.full((rows, capacity), PADDING, device=device)
        self.uniform_RT = torch.zeros(rows, capacity, device=device)
        self.tokens_RT = torch.zeros(rows, capacity, dtype=long, device=device)
        self.logprobs_RT = torch.zeros(rows, capacity, device=device)
        layers = architecture(model.config).layers
        self.cache = Cache(layers=[StaticLayer(rows, capacity, self.column_1) for _ in range(layers)])
        # Without a reference to the model itself, whose end is also the buffers'.
        self.llama_step = LlamaStep(model) if is_llama(model) else None
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.stream: torch.cuda.Stream | None = None
        self.addresses: tuple[int, ...] = ()

    def fits(self, model, rows: int, capacity: int, temperature: float) -> bool:
        """Return whether the buffers and graphs serve a batch; graphs need the weights where they were."""
        enough = rows <= self.rows and capacity <= self.capacity and temperature == self.temperature
        same_step = is_llama(model) == (self.llama_step is not None)  # with an adapter it is another one
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
            layer.rows, layer.columns = self.rows, 0
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()
        logits_BV = prefill(model, self.cache, layout, PREFILL_ROWS)
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

    def step(self, model, rows: int, columns: int) -> None:
        """Run one step of a bucket: nothing in it waits for the device or depends on a value."""
        for layer in self.cache.layers:
            layer.rows, layer.columns = rows, columns
        key_RS = self.key_RC[:rows, :columns]
        run = self.llama_step or partial(plain_step, model)
        logits_RV = run(self.token_R[:rows], self.position_R[:rows], key_RS, self.cache)
        self._store(logits_RV, rows)
        self.column_1 += 1

    def run(self, model, count: int, rows: int, columns: int) -> None:
        """Run `count` steps of a bucket, as a graph where there is a GPU."""
        if model.device.type != "cuda":
            for _ in range(count):
                self.step(model, rows, columns)
            return
        graph = self.graphs.get((rows, columns)) or self._capture(model, rows, columns)
        for _ in range(count):
            graph.replay()

    def _capture(self, model, rows: int, columns: int) -> torch.cuda.CUDAGraph:
        """Record a step as a graph; what the run changed that lets libraries allocate first is undone."""
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

    def keep(self, indices: list[int]) -> None:
        """Move the given rows to the front; the others are forgotten."""
        rows_K = torch.tensor(indices, device=self.token_R.device)
        for layer in self.cache.layers:
            layer.keep(rows_K)
        for buffer in (self.token_R, self.position_R, self.key_RC, self.uniform_RT):
            buffer[: len(indices)] = buffer[rows_K]


_DECODERS: weakref.WeakKeyDictionary[torch.nn.Module, GraphDecoder] = weakref.WeakKeyDictionary()


def decode_with_graphs(model, rollouts: list[Rollout], request: Request) -> None:
    """Complete the rollouts in place; arguments as for `decode`, with the same draws."""
    try:
        decode_batches(partial(_decode_batch, model), rollouts, request)
    except BaseException:
        _DECODERS.pop(model, None)  # its state is unknown
        raise
    if model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
        if _DECODERS[model].size > KEPT_SHARE * memory:
            del _DECODERS[model]


@torch.no_grad()
def _decode_batch(
    model, batch: list[Rollout], layout: Layout, request: Request, max_unfinished: int, uniform_BT
) -> int:
    """Complete a batch in place; return how many of its rollouts were left unfinished.

    The buffers go if memory runs out, so that a smaller batch gets smaller ones.
    """
    decoder = _decoder(model, len(batch), layout.end + request.max_new_tokens, request.temperature)
    decoder.start(model, layout, uniform_BT)
    done, seen, drawn = [False] * len(batch), 0, 1
    while True:
        tokens = decoder.tokens_RT[: len(batch), seen:drawn].T.tolist()
        logprobs = decoder.logprobs_RT[: len(batch), seen:drawn].T.tolist() if request.temperature else []
        for i, row_tokens in enumerate(tokens):
            append(batch, done, row_tokens, logprobs[i] if logprobs else [], request)
        running, left = done.count(False), request.max_new_tokens - drawn
        if not running or (running <= max_unfinished and left > WORTH_LEAVING):
            return running
        if bucket(running) < bucket(len(batch)):
            indices = [row for row, ended in enumerate(done) if not ended]
            decoder.keep(indices)
            batch, done = [batch[row] for row in indices], [False] * running
        count = min(STEPS, left)
        columns = -(-(layout.end + drawn + count) // COLUMNS) * COLUMNS
        decoder.run(model, count, bucket(len(batch)), min(columns, decoder.capacity))
        seen, drawn = drawn, drawn + count


def _decoder(model, rows: int, capacity: int, temperature: float) -> GraphDecoder:
    """Return the model's buffers; new ones if they are too small or the weights have moved."""
    decoder = _DECODERS.get(model)
    if decoder is None or not decoder.fits(model, rows, capacity, temperature):
        old_rows, old_capacity = (decoder.rows, decoder.capacity) if decoder else (0, 0)
        _DECODERS.pop(model, None)
        capacity = max(old_capacity, -(-capacity // COLUMNS) * COLUMNS)
        decoder = _DECODERS[model] = GraphDecoder(model, max(old_rows, bucket(rows)), capacity, temperature)
    return decoder


def bucket(rows: int) -> int:
    """Return the number of rows that a step of `rows` sequences runs with: 2^k or 3 * 2^k."""
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 and power > 2 else power


def _addresses(model) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())
