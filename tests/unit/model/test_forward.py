"""The training forward pass: only what it has to compute."""

import math

import torch

from opdcl.model.forward import answer_ids, answer_states
from opdcl.words import Example


def test_the_prefix_of_all_rows_runs_once_up_to_the_first_graded_position(loaded):
    shared = [1, 520, 3690, *range(300, 330)]
    rows = [Example.of([*shared, 40 + i, 41], [*range(60, 62 + i)]) for i in range(3)]
    shapes = []
    embedding = loaded.causal_lm.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    try:
        with torch.no_grad():
            states = answer_states(loaded.causal_lm, rows)
    finally:
        hook.remove()
    assert sum(math.prod(shape) for shape in shapes) == len(shared) + 3 * 2 + 2 + 3 + 4
    assert len(states) == len(answer_ids(rows, states.device)) == 2 + 3 + 4


def test_eager_attention_hides_the_same_tokens(loaded):
    rows = [Example.of([1, 520, 3690, 40, 41, 42], [*range(43, 50 + i)]) for i in range(3)]
    config = loaded.causal_lm.config
    with torch.no_grad():
        expected = answer_states(loaded.causal_lm, rows)
        config._attn_implementation, before = "eager", config._attn_implementation
        try:
            states = answer_states(loaded.causal_lm, rows)
        finally:
            config._attn_implementation = before
    assert torch.allclose(states, expected, atol=1e-3)
