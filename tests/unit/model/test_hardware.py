"""Parts of a pass side by side: the same numbers as in one piece, and no thread setting left behind."""

from __future__ import annotations

import pytest
import torch

from opdcl.model import forward
from opdcl.model.forward import answer_states
from opdcl.model.hardware import run_in_threads
from opdcl.words import Example

PREFIX = [1, 520, 3690, 198, 60]


@pytest.fixture
def cores():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rows(lengths=(9, 3, 12, 5, 7, 3, 4)):
    """Return rows of these many tokens after the prefix; answers begin at the fourth-last."""
    tokens = torch.Generator().manual_seed(3)
    draws = [torch.randint(300, 4000, (n,), generator=tokens).tolist() for n in lengths]
    return [Example.of(PREFIX + ids[:-3], ids[-3:]) for ids in draws]


def test_tasks_run_with_their_share_of_the_cores_in_order(cores):
    cores(4)
    tasks = [lambda i=i: (i, torch.get_num_threads()) for i in (1, 2)]
    assert run_in_threads(tasks) == [(1, 2), (2, 2)]
    assert torch.get_num_threads() == 4
    assert run_in_threads([torch.get_num_threads]) == [4]


def test_tasks_inherit_grad_mode_and_autocast(cores):
    cores(2)
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = run_in_threads([lambda: weight @ weight] * 2)
    assert [(x.dtype, x.requires_grad) for x in found] == [(torch.bfloat16, False)] * 2
    found = run_in_threads([lambda: weight @ weight] * 2)
    assert [(x.dtype, x.requires_grad) for x in found] == [(torch.float32, True)] * 2


def test_a_fault_is_raised_after_all_have_ended(cores):
    cores(2)
    done = []

    def fault():
        raise MemoryError

    with pytest.raises(MemoryError):
        run_in_threads([fault, lambda: done.append(1)])
    assert done == [1]


@pytest.mark.parametrize("count", [2, 3])
def test_parts_give_the_states_and_gradients_of_one_piece(backbone, tuned, cores, monkeypatch, count):
    model, parts = backbone.causal_lm, []
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    plain = answer_states(model, rows())
    direction = torch.linspace(-1, 1, plain.numel()).view(plain.shape)
    expected = torch.autograd.grad((plain * direction).sum(), weights)
    cut = forward._cut
    monkeypatch.setattr(forward, "PART_TOKENS", 1)
    monkeypatch.setattr(forward, "_cut", lambda *inputs: parts.append(cut(*inputs)) or parts[-1])
    monkeypatch.setattr(forward, "_shared_length", lambda rows: min(2, len(rows) - 1))
    cores(count)
    states = answer_states(model, rows())
    assert sorted(row for part in parts[0] for row in part) == [*range(7)]
    assert len(parts[0]) == count
    torch.testing.assert_close(states, plain, rtol=1e-4, atol=1e-4)
    for grad, reference in zip(
        torch.autograd.grad((states * direction).sum(), weights), expected, strict=True
    ):
        torch.testing.assert_close(grad, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max()))
    with torch.no_grad():
        again = answer_states(model, rows())
    assert not again.requires_grad
    torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-4)


def test_rows_stay_together_where_threads_would_change_the_result(backbone, cores):
    cores(2)
    long = rows([200] * 4)
    assert forward._part_count(backbone.causal_lm, long) == 2
    assert forward._part_count(backbone.causal_lm, rows()) == 1  # too few tokens
    backbone.causal_lm.train()
    assert forward._part_count(backbone.causal_lm, long) == 2
    backbone.causal_lm.model.layers[0].mlp.dropout = torch.nn.Dropout(0.1)
    assert forward._part_count(backbone.causal_lm, long) == 1


def test_parts_cost_about_the_same():
    cut = forward._cut(rows([100, 10, 10, 10, 10, 10, 10, 10, 10, 10]), 2)
    assert cut[0] == [0]
    assert sorted(cut[1]) == [*range(1, 10)]
    assert [len(part) for part in forward._cut(rows([8] * 9), 3)] == [3, 3, 3]
