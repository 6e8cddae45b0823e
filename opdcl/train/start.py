"""Where the student starts: the tuned adapter, without what it does to inputs that general prompts excite.

A LoRA layer adds s B A x to its output. Let C_d be the second moments of its inputs x where tuned answers
domain prompts, and C_g those where base reads general prompts. Then

    A' = A C_d (C_d + mu C_g)^-1

is the least-squares compromise between "as tuned on the domain's inputs" and "as base on general inputs".
It is RegMean's merge of base and tuned (arXiv 2212.09849), kept as an adapter of the same rank. It takes one
forward pass over some texts and one solve a layer, and no gradient.

An adapter that this cannot change is scaled down towards base instead (arXiv 2109.01903, 2212.04089). From
tuned itself, most steps of a short recovery only leave the place where every answer is a domain answer; from
base, the domain has to be learned anew.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.model.backbone import Backbone, State
from opdcl.model.forward import common_prefix
from opdcl.model.lora import adapter_weights
from opdcl.train.learner import Learner, micro_batches
from opdcl.train.loop import StageReport, counted
from opdcl.words import StreamName

# Weights of the general prompts, mu, that are measured for a start, from tuned towards base.
WEIGHTS_OF_GENERAL = (0.03, 0.1, 0.3, 1.0, 3.0)

# Scales of an adapter that cannot be projected; closer together where answers change most.
SCALES = (0.65, 0.5, 0.4, 0.3, 0.2, 0.1)

# Bytes of moments that are held at once; where a model has more, the texts are read once for each part of it.
MOMENTS = 2**32

# How much smaller the mixed moments of two different inputs are taken than measured, as in RegMean: some
# hundred texts excite few directions. It also keeps the solve exact where a few inputs are huge.
SHRUNK = 1e-3

# Share of the mean moment that an input counts with at least.
TINY = 1e-9

# Nats per token below which a KL is noise and a share of it says nothing.
KL_NOISE = 1e-3

# Held-out KL of each stream in nats per token.
StreamKl = Mapping[StreamName, float]


class Start(NamedTuple):
    """Where the student starts: a place between tuned and base."""

    alpha: float = 1.0
    """The scale of the tuned adapter."""
    mu: float | None = None
    """The weight of the general prompts, if the adapter was projected."""
    measured: Mapping[float, StreamKl] = {}
    """The held-out KL at each place that was tried, by scale or mu."""

    @property
    def is_tuned(self) -> bool:
        return self.alpha == 1 and self.mu is None

    def row(self) -> dict[str, Any]:
        """Return the place and what was tried, for metrics.jsonl."""
        return {"place": str(self), **self._asdict()}

    def __str__(self) -> str:
        if self.mu is not None:
            return f"the tuned adapter, projected (mu {self.mu:g})"
        return "tuned" if self.alpha == 1 else f"the tuned adapter times {self.alpha:g}"


class Ends(NamedTuple):
    """The held-out KL of the models between which a start lies, of each stream that has held-out prompts."""

    tuned: StreamKl
    base: StreamKl

    def lost(self, kl: StreamKl) -> float:
        """Return the share of what was forgotten that is still lost, plus the share of the domain that is.

        Tuned and base have 1 each, unless rows of a stream name the other's teacher. Shares, because a fact
        is lost in one token and costs many nats there, while a habit costs a little in each of a hundred.
        """
        return kl["general"] / self.tuned["general"] + kl["domain"] / self.base["domain"]


def put_at_start(
    config: RecoverConfig,
    learner: Learner,
    ends: Ends,
    measure: Callable[[str], StreamKl],
    texts: Callable[[], tuple[list[list[int]], list[list[int]]]],
    report: StageReport,
) -> Start:
    """Put the student where it starts, at tuned or between tuned and base; return that place.

    Args:
        config: Its `start` names the place, or lets it be chosen.
        learner: The student, which is as tuned left it.
        ends: The held-out KL of tuned and of base.
        measure: Returns the student's held-out KL; it takes the name of what is measured.
        texts: Returns the ids of some general prompts, and of what tuned writes to some domain prompts.
        report: Shows how far it is, and says why the adapter is scaled where it would be projected.
    """
    backbone = learner.backbone
    if config.start != "auto":
        backbone.shrink(config.start)
        return Start(config.start)
    if len(ends.tuned) < 2 or not lies_between(config, learner):
        return Start()
    if min(ends.tuned["general"], ends.base["domain"]) < KL_NOISE:  # nothing was forgotten, or learned
        return Start()

    if reason := unfit_for_projection(backbone):
        report.note(f"the start scales the adapter in place of projecting it: {reason}")

        def measure_scaled(alpha: float) -> StreamKl:
            with backbone.scaled(alpha):
                return measure(f"trying the start {alpha:g}")

        scale, measured = choose(SCALES, measure_scaled, ends)
        backbone.shrink(scale or 1.0)
        return Start(scale or 1.0, None, measured)

    compute = partial(project, backbone, *texts(), int(config.micro_batch_tokens), report)
    # Workers with a sharded base run in step. All take the first one's result: with another rounding, each
    # would train an adapter of its own.
    own = compute() if parallel.sharded() else None
    projected = parallel.on_first_worker(lambda: own or compute())
    factors = [adapter_weights(layer, "student")[0] for layer in backbone.adapted_layers("student")]
    projected[0.0] = [factor.detach().clone() for factor in factors]

    def put(mu: float) -> None:
        for factor, new in zip(factors, projected[mu], strict=True):
            factor.data.copy_(new)

    def measure_projected(mu: float) -> StreamKl:
        put(mu)
        return measure(f"trying the start {mu:g}")

    weight, measured = choose(WEIGHTS_OF_GENERAL, measure_projected, ends)
    put(weight or 0.0)
    return Start(1.0, weight, measured)


def lies_between(config: RecoverConfig, learner: Learner) -> bool:
    """Return whether the student's place lies between the two teachers, so that a start can be chosen.

    It does if base scores the general stream and tuned the domain, no row names another teacher than these
    two, both streams have steps, there are no contexts and no reward, and the adapter stands on base itself.
    """
    if learner.backbone.base_lm is not None or config.reward or config.method == "general":
        return False
    if not set().union(*learner.teachers.values()) <= {"", "base", "tuned"}:
        return False
    general, domain = config.teacher_of("general"), config.teacher_of("domain")
    bare = general.context is None and domain.context is None
    return bare and general.kind == "base" and domain.kind == "tuned"


def unfit_for_projection(backbone: Backbone) -> str:
    """Return why the student's adapter cannot be projected, or ""."""
    for layer in backbone.adapted_layers("student"):
        if not isinstance(layer, Linear):
            return "it adapts the stacked weights of experts, or embeddings"
        if len(adapter_weights(layer, "student")) > 2:
            return "DoRA's norms belong to the adapter as it is"
    return ""


def choose(
    places: Sequence[float], measure: Callable[[float], StreamKl], ends: Ends
) -> tuple[float | None, dict[float, StreamKl]]:
    """Return the place at which least is lost of both streams, None for tuned itself, and the KL at each.

    `measure` returns the held-out KL at one of them.
    """
    kl = {place: measure(place) for place in places}
    best = min(places, key=lambda place: ends.lost(kl[place]))
    return best if ends.lost(kl[best]) < ends.lost(ends.tuned) else None, kl


# For each adapted layer the A of a LoRA adapter, `(R, K)`.
Factors = list[torch.Tensor]


@torch.no_grad()
def project(
    backbone: Backbone, general: list[list[int]], domain: list[list[int]], tokens: int, report: StageReport
) -> dict[float, Factors]:
    """Return the student's A without what general prompts excite, by the weight of these, mu.

    Args:
        backbone: The base with the adapters `student` and `tuned`, which are equal.
        general: The ids of general prompts.
        domain: The ids of domain prompts with tuned's answers.
        tokens: The most tokens of a forward pass, padding included.
        report: Shows how many texts were read.
    """
    # What opens both kinds of text, above all the chat template, must stay as base has it: a layer that
    # treats it as tuned does treats general requests as tuned does.
    known = sorted(general)
    shared = [shared_opening(ids, known) for ids in domain]
    of_base, of_tuned = [(ids, 0) for ids in general], [*zip(domain, shared, strict=True)]
    in_parts = [*parts(backbone.adapted_layers("student"))]
    count = counted(report, "reading texts for the start", len(in_parts) * len(of_base + of_tuned))
    projected: dict[float, Factors] = {mu: [] for mu in WEIGHTS_OF_GENERAL}
    for layers in in_parts:
        of_general = input_moments(backbone, "base", layers, of_base, tokens, count)
        of_domain = input_moments(backbone, "tuned", layers, of_tuned, tokens, count)
        measured = zip(layers, of_general, of_domain, strict=True)
        for alike in itertools.groupby(measured, key=lambda of: id(of[1])):
            of_layers = [*alike[1]]  # those that read the same inputs are solved together
            factors: Factors = [adapter_weights(layer, "student")[0] for layer, *_ in of_layers]
            _, general_KK, domain_KK = of_layers[0]
            for mu, new_RK in project_factor(torch.cat(factors), domain_KK, general_KK).items():
                projected[mu] += new_RK.split([len(factor) for factor in factors])
    return projected


def project_factor(
    a_RK: torch.Tensor, domain_KK: torch.Tensor, general_KK: torch.Tensor
) -> dict[float, torch.Tensor]:
    """Return A C_d (C_d + mu C_g)^-1 for each weight mu, in A's precision; see the head of this file."""
    domain_KK, general_KK = shrunk(domain_KK), shrunk(general_KK)
    wanted_KR = domain_KK @ a_RK.double().T
    found = {}
    for mu in WEIGHTS_OF_GENERAL:
        both_KK = domain_KK + mu * general_KK
        both_KK.diagonal().clamp_(min=TINY * float(both_KK.diagonal().mean()))  # inputs that are always 0
        solved_KR = torch.cholesky_solve(wanted_KR, torch.linalg.cholesky(both_KK))
        found[mu] = solved_KR.T.to(a_RK.dtype).contiguous()
    return found


def shrunk(moments_KK: torch.Tensor) -> torch.Tensor:
    """Return moments in double precision, with those of two different inputs made smaller by `SHRUNK`."""
    shrunk_KK = (1 - SHRUNK) * moments_KK.double()
    shrunk_KK.diagonal().copy_(moments_KK.diagonal())
    return shrunk_KK


def shared_opening(ids: list[int], known: list[list[int]]) -> int:
    """Return how many of the first ids, all but one at most, also open one of the `known` texts, sorted."""
    at = bisect(known, ids)  # no other text shares more than its neighbours in the order
    shared = [len(common_prefix([ids, other])) for other in known[max(at - 1, 0) : at + 1]]
    return min(max(shared, default=0), len(ids) - 1)


def parts(layers: list[BaseTunerLayer]) -> Iterator[list[BaseTunerLayer]]:
    """Yield the layers in parts whose moments, those of both streams, take at most `MOMENTS` bytes."""
    part: list[BaseTunerLayer] = []
    size = 0
    for layer in layers:
        own = 2 * 4 * layer.in_features**2
        size += own
        if part and size > MOMENTS:
            yield part
            part, size = [], own
        part.append(layer)
    yield part


def input_moments(
    backbone: Backbone,
    state: State,
    layers: Sequence[BaseTunerLayer],
    texts: Sequence[tuple[list[int], int]],
    tokens: int,
    count: Callable[[Sequence[int]], None],
) -> list[torch.Tensor]:
    """Return the second moments of each layer's inputs, `(K, K)` in float32: the mean over texts of x x^T.

    A text is its ids, and how many of them are skipped at its head. Every text counts the same, and within it
    every other id. `tokens` bounds a forward pass, padding included. `count` takes the texts of each pass.
    """
    moments = [torch.zeros(layer.in_features, layer.in_features, device=backbone.device) for layer in layers]
    seen: list[torch.Tensor | None] = [None, None]  # the latest input and its moments
    counted_M = weight_M1 = torch.empty(0)  # the tokens of a pass that count, and the roots of their weights

    def add(place: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0] is seen[0]:  # the projections of one attention, or of one feed-forward, share theirs
                moments[place] = seen[1]
                return
            x_MK = inputs[0].flatten(0, -2)[counted_M].float() * weight_M1
            moments[place].addmm_(x_MK.T, x_MK)
            seen[:] = inputs[0], moments[place]

        return hook

    with contextlib.ExitStack() as stack:
        model = stack.enter_context(backbone.state(state))
        for place, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(add(place)).remove)
        lengths = {i: len(ids) for i, (ids, _) in enumerate(texts)}
        for batch in micro_batches(lengths, tokens):
            width = max(lengths[i] for i in batch)
            ids_BT, weight_BT = torch.zeros(len(batch), width).long(), torch.zeros(len(batch), width)
            for row, (ids, skipped) in enumerate(texts[i] for i in batch):
                ids_BT[row, : len(ids)] = torch.tensor(ids)
                weight_BT[row, skipped : len(ids)] = ((len(ids) - skipped) * len(texts)) ** -0.5
            counted_M = weight_BT.flatten().nonzero()[:, 0].to(backbone.device)
            weight_M1 = weight_BT.flatten()[:, None].to(backbone.device)[counted_M]
            mask_BT = torch.arange(width)[None] < torch.tensor([[lengths[i]] for i in batch])
            ids_BT, mask_BT = ids_BT.to(backbone.device), mask_BT.to(backbone.device)
            model.base_model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
            seen[:] = None, None
            count(batch)
    return moments
