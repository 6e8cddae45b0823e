"""The sampler: greedy decoding, per-sequence randomness, stops and log-probabilities."""

import itertools
import math

import pytest
import torch
from unit.sampling.test_graph import build

from opdcl.config.model import LoraSection
from opdcl.model.forward import answer_states
from opdcl.model.llama import decodes_as_llama
from opdcl.sampling.decoder import DRAW_BLOCK, PREFILL, cheapest_batches, draw
from opdcl.sampling.sample import pick_engine, sample
from opdcl.words import Example, Prompt

TAILS = [[198], [198, 88, 99, 77], [33], [5, 6]]
PROMPTS = [Prompt([1, 520, 3690, *tail]) for tail in TAILS]


@pytest.mark.parametrize("engine", ["slab", "generate"])
def test_greedy_equals_generate(backbone, engine):
    model = backbone.causal_lm
    for rollout in sample(model, PROMPTS, max_new_tokens=12, eos_ids=[2], temperature=0, engine=engine):
        expected = model.generate(
            torch.tensor([rollout.prompt_ids]), max_new_tokens=12, do_sample=False, use_cache=True
        )
        assert rollout.completion_ids == expected[0, len(rollout.prompt_ids) :].tolist()


def test_prompts_of_many_lengths_in_several_prefill_batches_of_little_padding(backbone):
    model = backbone.causal_lm.double()
    tails = [range(300, 301 + (7 * i) % 23) for i in range(PREFILL[0] + 9)]
    tails[0] = range(300, 420)
    prompts, sizes = [Prompt([1, 520, 3690, 198, *tail]) for tail in tails], []
    model.register_forward_pre_hook(lambda m, a, k: sizes.append(k["input_ids"].numel()), with_kwargs=True)
    rollouts = sample(model, prompts, max_new_tokens=3, eos_ids=[2], temperature=0)
    assert sum(sizes) < 1.5 * sum(map(len, tails))
    for rollout in rollouts:
        expected = model.generate(torch.tensor([rollout.prompt_ids]), max_new_tokens=3, do_sample=False)
        assert rollout.completion_ids == expected[0, len(rollout.prompt_ids) :].tolist()


def test_an_unmerged_adapter_uses_the_plain_step(backbone):
    backbone.new_adapter(LoraSection(r=2), seed=0)
    assert not decodes_as_llama(backbone.causal_lm)
    with backbone.merged("student") as merged:
        assert decodes_as_llama(merged)


def cost(widths, parts, weights):
    return sum(weights + (part.stop - part.start) * widths[part.stop - 1] for part in parts)


@pytest.mark.parametrize(("most", "weights"), [(3, 5), (4, 30), (9, 100), (9, 0), (9, float("inf"))])
def test_no_other_batches_would_read_less(most, weights):
    widths = sorted([12, 12, 13, 15, 16, 40, 41, 90, 400])
    parts = cheapest_batches(widths, most, weights)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(9))
    assert max(part.stop - part.start for part in parts) <= most
    bounds = [[0, *(i for i in range(1, 9) if mask >> i & 1), 9] for mask in range(0, 512, 2)]
    candidates = [[slice(a, b) for a, b in itertools.pairwise(ends)] for ends in bounds]
    assert cost(widths, parts, weights) == min(
        cost(widths, other, weights) for other in candidates if all(p.stop - p.start <= most for p in other)
    )


def test_a_few_long_prompts_run_separately_from_short_ones():
    assert cheapest_batches([80] * 40 + [4000] * 2, 96, 11_700) == [slice(0, 40), slice(40, 42)]
    assert cheapest_batches([80] * 40 + [200] * 2, 96, 11_700) == [slice(0, 42)]


def test_samples_do_not_depend_on_the_batch(backbone):
    # In fp32, rounding that depends on the batch occasionally changes a draw.
    model = backbone.causal_lm.double()
    alone = sample(model, PROMPTS, max_new_tokens=10, eos_ids=[2], seed=3, batch_size=1)
    together = sample(model, PROMPTS, max_new_tokens=10, eos_ids=[2], seed=3, batch_size=4)
    other = sample(model, PROMPTS, max_new_tokens=10, eos_ids=[2], seed=4, batch_size=4)
    assert [r.completion_ids for r in alone] == [r.completion_ids for r in together]
    assert [r.completion_ids for r in alone] != [r.completion_ids for r in other]


def assert_logprobs(model, rollout, temperature):
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    with torch.no_grad():
        logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
    start = len(rollout.prompt_ids) - 1
    expected = [float(logprobs[start + i, token]) for i, token in enumerate(rollout.completion_ids)]
    torch.testing.assert_close(torch.tensor(rollout.logprobs), torch.tensor(expected), atol=1e-3, rtol=1e-3)


def test_a_finished_sequence_does_not_change_the_others(backbone):
    free = sample(backbone.causal_lm, PROMPTS, max_new_tokens=12, eos_ids=[], seed=5)
    assert all(len(r.completion_ids) == 12 and not r.finished for r in free)
    # The first row's third token now ends a sequence; rows without it must not change.
    stop = free[0].completion_ids[2]
    stopped = sample(backbone.causal_lm, PROMPTS, max_new_tokens=12, eos_ids=[stop], seed=5)
    assert stopped[0].finished
    assert stopped[0].completion_ids == free[0].completion_ids[: free[0].completion_ids.index(stop) + 1]
    for before, after in zip(free, stopped, strict=True):
        assert after.completion_ids == before.completion_ids[: len(after.completion_ids)]


@pytest.fixture
def ids_seen(backbone):
    """The shape of the token ids of each pass through the model, in order."""
    shapes = []
    embedding = backbone.causal_lm.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    yield shapes
    hook.remove()


def test_finished_sequences_leave_the_batch(backbone, ids_seen):
    prompts = [Prompt([1, 520, 3690, 198, 40 + i]) for i in range(24)]
    ends = list(range(0, backbone.causal_lm.config.vocab_size, 8))
    rollouts = sample(backbone.causal_lm, prompts, max_new_tokens=40, eos_ids=ends, seed=3)
    steps = [shape[0] for shape in ids_seen if len(shape) == 1]
    running = [sum(len(r.completion_ids) > step for r in rollouts) for step in range(1, len(steps) + 1)]
    assert running[-1] < 6
    assert all(count <= rows < 1.5 * count for rows, count in zip(steps, running, strict=True))


def test_the_prefix_of_all_prompts_runs_through_the_model_once(backbone, ids_seen):
    shared = [1, 520, 3690, *range(300, 330)]
    prompts = [Prompt([*shared, 40 + i, *range(50, 50 + i)]) for i in range(4)]
    sample(backbone.causal_lm, prompts, max_new_tokens=1, eos_ids=[2], temperature=0)
    assert sum(math.prod(shape) for shape in ids_seen) == len(shared) + 4 * 4


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_draws_follow_a_distribution_over_many_blocks(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3 * DRAW_BLOCK + 5, generator=generator) * 4
    uniform = torch.linspace(0, 1, 100_001)[:-1] + 5e-6
    tokens, logprobs = draw(logits.expand(len(uniform), -1), temperature, uniform)
    expected = (logits[0] / temperature).log_softmax(-1)
    # Evenly spaced draws hit each token in proportion to its probability, except for one at either edge.
    share = torch.bincount(tokens, minlength=logits.shape[1]) / len(uniform)
    torch.testing.assert_close(share, expected.exp(), atol=3e-5, rtol=0)
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-4, rtol=0)


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((4, 2 * DRAW_BLOCK + 3), -torch.inf)
    logits[:, 7] = logits[:, DRAW_BLOCK + 1] = 0
    tokens, _ = draw(logits, 1.0, torch.tensor([0.0, 0.4999999, 0.5, 1.0]))
    assert tokens.tolist() == [7, 7, DRAW_BLOCK + 1, DRAW_BLOCK + 1]
    assert int(draw(torch.zeros(1, 5), 1.0, torch.tensor([1.0]))[0]) <= 4


def test_rounding_never_draws_a_token_without_probability():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 8 * DRAW_BLOCK, generator=generator) * 3
    logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
    # Draws at block edges, where the sums before and within a block may differ in the last bit.
    upto = logits.softmax(-1).view(len(logits), 8, -1).sum(-1).cumsum(-1)
    for block in range(8):
        _, logprobs = draw(logits, 1.0, upto[:, block])
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("engine", ["slab", "generate"])
def test_a_stopped_engine_returns_what_it_has(backbone, engine):
    options = {"max_new_tokens": 12, "eos_ids": [], "temperature": 0, "engine": engine}
    [whole] = sample(backbone.causal_lm, PROMPTS[:1], **options)
    asked = itertools.count()
    [part] = sample(backbone.causal_lm, PROMPTS[:1], **options, stopped=lambda: next(asked) >= 4)
    assert part.completion_ids == whole.completion_ids[:5]
    assert not part.finished


def test_generate_stops_and_returns_logprobs(backbone):
    options = {"max_new_tokens": 8, "temperature": 0.8, "seed": 1, "engine": "generate"}
    free = sample(backbone.causal_lm, PROMPTS, eos_ids=[], **options)
    assert all(len(r.completion_ids) == len(r.logprobs) == 8 and not r.finished for r in free)
    stop = free[0].completion_ids[2]
    for rollout in sample(backbone.causal_lm, PROMPTS, eos_ids=[stop], **options):
        assert rollout.finished == (rollout.completion_ids[-1] == stop)
        assert stop not in rollout.completion_ids[:-1]
        assert_logprobs(backbone.causal_lm, rollout, 0.8)


def test_the_seed_determines_the_samples_of_generate(backbone):
    state = torch.get_rng_state()
    options = {"max_new_tokens": 8, "eos_ids": [2], "engine": "generate"}
    drawn = [sample(backbone.causal_lm, PROMPTS, seed=seed, **options) for seed in (1, 1, 2)]
    first, again, other = ([rollout.completion_ids for rollout in rollouts] for rollouts in drawn)
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)  # training uses the global generator


def test_the_engine_follows_the_model(backbone):
    assert pick_engine(backbone.causal_lm) == "slab"
    backbone.causal_lm.config.layer_types = ["full_attention", "sliding_attention"]
    assert pick_engine(backbone.causal_lm) == "slab"
    backbone.causal_lm.config.layer_types = ["full_attention", "linear_attention"]
    assert pick_engine(backbone.causal_lm) == "generate"


def test_states_of_a_sliding_window_model_equal_its_own_forward():
    model = build("Mistral", torch.float32, num_hidden_layers=2, sliding_window=3)
    rows = [Example.of([1, 5, 9, 20 + i], [7, 8, *range(30, 31 + i)]) for i in range(3)]
    with torch.no_grad():
        states = answer_states(model, rows)
        whole = [model.base_model(torch.tensor([row.ids])).last_hidden_state[0, 3:-1] for row in rows]
    torch.testing.assert_close(states, torch.cat(whole), atol=1e-5, rtol=1e-4)


def test_nan_logits_draw_a_valid_token_with_a_nan_logprob():
    logits = torch.zeros(2, DRAW_BLOCK + 3)
    logits[0, 5] = torch.nan
    tokens, logprobs = draw(logits, 1.0, torch.tensor([0.5, 0.5]))
    assert 0 <= int(tokens[0]) < logits.shape[1]
    assert logprobs[0].isnan()
    assert logprobs[1].isfinite()
