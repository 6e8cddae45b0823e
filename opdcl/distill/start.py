"""The student before its first step: close to base on general texts, close to tuned on the domain's.

The fine-tune changed a linear layer by s B A. B stays, and A becomes the A' with the least

    E_domain |B (A' - A) x|^2 + mu E_general |B A' x|^2,   which is   A' = A Cd (Cd + mu Cg)^-1

where Cd is the mean of x x^T over the layer's inputs x as tuned reads domain answers, and Cg the same as base
reads general answers. This is RegMean (arXiv 2212.09849) of tuned and of base, whose change is zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.distill.grading import micro_batches
from opdcl.distill.rollout_queue import RolloutQueue
from opdcl.distill.schedule import STREAMS, Stream
from opdcl.distill.teachers import sequence
from opdcl.distill.work import TEXTS
from opdcl.model.backbone import Backbone, State
from opdcl.model.forward import answer_states
from opdcl.model.lora import parts
from opdcl.sampling.rollout import Rollout

# Keeps the matrices invertible: this part of their mean eigenvalue is added to Cd.
RIDGE = 1e-4

# Bytes that the matrices of one pass over the texts may take: 135M needs one pass, 1.7B 4, 8B about 18.
MEMORY = 4 * 2**30

# Layers that read the same input, such as the projections to queries, keys and values.
SameInput = list[Any]


def solve_start(config: RecoverConfig, backbone: Backbone, queue: RolloutQueue) -> tuple[int, int]:
    """Move the student to its start; return how many layers have moved, and how many could not.

    It stays where tuned is without general or domain texts, and where the general teacher is not base.
    """
    # Beside a whole tuned model the adapter is new: it changes nothing yet.
    if not config.start_weight or not config.can_solve_start or backbone.base_lm:
        return 0, 0
    texts = {stream: queue.teacher_texts(stream, TEXTS[stream]) for stream in STREAMS}
    if not all(texts.values()):
        return 0, 0
    layers = backbone.adapted_layers("student")
    plain = [layer for layer in layers if is_plain(layer)]
    if plain:
        with backbone.costs.timed("solve", sum(text.length for t in texts.values() for text in t)):
            move(backbone, plain, texts, config.start_weight, int(config.micro_batch_tokens))
    return len(plain), len(layers) - len(plain)


def is_plain(layer: BaseTunerLayer) -> bool:
    """Return whether a layer adds s B A x: no stacked experts, no row norms of DoRA."""
    return not isinstance(layer, ParamWrapper) and len(parts(layer, "student")) == 2


@torch.no_grad()
def move(
    backbone: Backbone,
    layers: list[Any],
    texts: dict[Stream, list[Rollout]],
    weight: float,
    batch_tokens: int,
) -> None:
    """Give the student's `layers` their A'. Every worker reads all texts; worker 0 solves."""
    for group in _passes(_by_input(backbone, layers, texts["domain"][0])):
        # The state `tuned` does not change, so later groups see the inputs of tuned, not of the new student.
        domain_moments = moments(backbone, "tuned", group, texts["domain"], batch_tokens)
        general_moments = moments(backbone, "base", group, texts["general"], batch_tokens)
        for same_input, cd_KK, cg_KK in zip(group, domain_moments, general_moments, strict=True):
            factors = [parts(layer, "student")[0] for layer in same_input]
            solve = partial(solution, torch.cat(list(factors)), cd_KK, cg_KK, weight)
            solved_RK = parallel.on_first_worker(solve)
            for a_RK, new_RK in zip(factors, solved_RK.split([len(a) for a in factors]), strict=True):
                a_RK.copy_(new_RK)


def copy_tuned(backbone: Backbone) -> None:
    """Put the student back to where tuned is."""
    for layer in backbone.adapted_layers("student"):
        parts(layer, "student")[0].data.copy_(parts(layer, "tuned")[0])


def solution(a_RK: torch.Tensor, cd_KK: torch.Tensor, cg_KK: torch.Tensor, weight: float) -> torch.Tensor:
    """Return A Cd (Cd + weight Cg)^-1 in fp64 on the host; Cd includes a small ridge."""
    cd_KK, cg_KK = cd_KK.double(), cg_KK.double().mul_(weight)
    mean = (cd_KK.trace() + cg_KK.trace()) / len(cd_KK)
    cd_KK.diagonal().add_(RIDGE * mean.clamp(min=torch.finfo(torch.float32).tiny))
    right_RK = a_RK.double() @ cd_KK
    return torch.cholesky_solve(right_RK.T, torch.linalg.cholesky(cg_KK.add_(cd_KK))).T.cpu()


def moments(
    backbone: Backbone, state: State, group: list[SameInput], texts: list[Rollout], batch_tokens: int
) -> list[torch.Tensor]:
    """Return the mean of x x^T per input, `(K, K)`, where `state` predicts the tokens of answers."""
    width = [parts(same_input[0], "student")[0].shape[1] for same_input in group]
    sums = [torch.zeros(k, k, device=backbone.device) for k in width]
    batch: list[Rollout] = []

    def add(i, layer, inputs):
        x_BTK = inputs[0].view(len(batch), -1, width[i])
        spans = [(len(text.prompt_ids) - 1, text.length - 1) for text in batch]
        x_MK = torch.cat([x_TK[a:b] for x_TK, (a, b) in zip(x_BTK, spans, strict=True)]).float()
        sums[i].addmm_(x_MK.T, x_MK)

    with _watched([same_input[0] for same_input in group], add), backbone.state(state) as model:
        for indices in micro_batches({i: text.length for i, text in enumerate(texts)}, batch_tokens):
            batch = [texts[i] for i in indices]
            _read(model, batch)
    tokens = sum(len(text.completion_ids) for text in texts)
    return [sum_KK.div_(tokens) for sum_KK in sums]


def _by_input(backbone: Backbone, layers: list[Any], text: Rollout) -> list[SameInput]:
    """Return the layers that read one tensor together, in the order in which they run."""
    read: dict[int, tuple[torch.Tensor, SameInput]] = {}

    def note(i, layer, inputs):
        # The tensor is kept, so that no other one takes its id.
        read.setdefault(id(inputs[0]), (inputs[0], []))[1].append(layer)

    with _watched(layers, note), backbone.state("tuned") as model:
        _read(model, [text])
    return [same_input for _, same_input in read.values()]


def _read(model: Any, texts: list[Rollout]) -> None:
    """Run the model on texts, padded and whole, so that every layer is called with `(B, T, K)`."""
    answer_states(model, [sequence(text.prompt_ids, text.completion_ids) for text in texts], False)


@contextlib.contextmanager
def _watched(layers: list[Any], look: Callable[..., None]) -> Iterator[None]:
    """Call `look` with a layer's index, itself and its inputs whenever it runs in the block."""
    hooks = [layer.register_forward_pre_hook(partial(look, i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _passes(inputs: list[SameInput]) -> Iterator[list[SameInput]]:
    """Cut the inputs into groups whose matrices fit into `MEMORY`; one input alone always makes a group."""
    group: list[SameInput] = []
    used = 0
    for same_input in inputs:
        k = parts(same_input[0], "student")[0].shape[1]
        size = 2 * 4 * k * k
        if group and used + size > MEMORY:
            yield group
            group, used = [], 0
        group.append(same_input)
        used += size
    yield group
