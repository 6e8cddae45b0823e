"""A teacher's next-token distribution at N graded positions: complete, or a server's top tokens.

All kinds have the same methods, in which `part` selects n of the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

# Probability assumed for all unnamed tokens together where a server's rounding leaves none.
SMALLEST_TAIL = 1e-9


class Complete:
    """What complete distributions have in common."""

    def entropy(self, part: slice, log_q: torch.Tensor) -> torch.Tensor:
        """Return the entropy given the result of `log_probs`, `(n,)` in nats."""
        return -(log_q.exp() * log_q).sum(-1)

    def kl(self, part: slice, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """Return KL(p, q) from a student's log-distributions to this one, `(n,)` in nats."""
        return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class HiddenStates(Complete):
    """The complete distribution, as last hidden states `(N, H)` and the output embedding `(V, H)`."""

    states_NH: torch.Tensor
    head_VH: torch.Tensor

    @torch.no_grad()
    def log_probs(self, part: slice, rows: int) -> torch.Tensor:
        """Return log-probabilities of the vocabulary's first `rows` tokens, `(n, rows)` in fp32."""
        head_VH = self.head_VH[:rows]
        logits = (self.states_NH[part].to(head_VH.dtype) @ head_VH.T).float()
        for block in logits.split(rows_at_once(logits)):
            block.copy_(torch.log_softmax(block, -1))
        return logits

    def split(self, lengths: Sequence[int]) -> list[HiddenStates]:
        """Return one distribution per sequence."""
        return [HiddenStates(states_NH, self.head_VH) for states_NH in self.states_NH.split(list(lengths))]


@dataclass(frozen=True)
class LogProbs(Complete):
    """The complete distribution, as a server has sent it: log-probabilities, `(N, V)` in fp32."""

    log_q_NV: torch.Tensor

    def log_probs(self, part: slice, rows: int) -> torch.Tensor:
        return self.log_q_NV[part, :rows]

    def split(self, lengths: Sequence[int]) -> list[LogProbs]:
        return [LogProbs(log_q_NV) for log_q_NV in self.log_q_NV.split(list(lengths))]

    def to(self, device: torch.device) -> LogProbs:
        return LogProbs(self.log_q_NV.to(device))


class TopTokens(NamedTuple):
    """Ids and log-probabilities of each position's K most likely tokens and of its own token.

    The remaining mass is spread evenly over all other tokens. Losses of the token itself are therefore exact,
    and so are losses of the top k and the rest together, for k up to K. Entropy and KL are lower bounds: no
    other token is assumed more likely than the K-th, and all others count as one.
    """

    token_N: torch.Tensor
    logprob_N: torch.Tensor
    top_NK: torch.Tensor
    top_logprob_NK: torch.Tensor

    def log_probs(self, part: slice, rows: int) -> torch.Tensor:
        token, logprob, top, top_logprob = (column[part] for column in self)
        in_top = (top == token[:, None]).any(1)
        named_mass = top_logprob.exp().sum(1) + torch.where(in_top, 0.0, logprob.exp())
        unnamed = rows - top.shape[1] - (~in_top).long()
        tail = ((1 - named_mass).clamp(min=SMALLEST_TAIL) / unnamed.clamp(min=1)).log()
        log_q = tail[:, None].expand(-1, rows).scatter(1, top, top_logprob)
        return log_q.scatter(1, token[:, None], logprob[:, None])

    def entropy(self, part: slice, log_q: torch.Tensor) -> torch.Tensor:
        top = self.top_logprob_NK[part]
        return -(top.exp() * top).sum(1) - (1 - top.exp().sum(1)).clamp(min=0) * top[:, -1]

    def kl(self, part: slice, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        log_p, log_q = log_p.gather(1, self.top_NK[part]), self.top_logprob_NK[part]
        rest_p, rest_q = ((1 - x.exp().sum(1)).clamp(min=SMALLEST_TAIL) for x in (log_p, log_q))
        return (log_p.exp() * (log_p - log_q)).sum(1) + rest_p * (rest_p / rest_q).log()

    def split(self, lengths: Sequence[int]) -> list[TopTokens]:
        columns = [column.split(list(lengths)) for column in self]
        return [TopTokens(*parts) for parts in zip(*columns, strict=True)]

    def to(self, device: torch.device) -> TopTokens:
        return TopTokens(*(column.to(device) for column in self))


Served = LogProbs | TopTokens
TeacherDistribution = HiddenStates | Served
D = TypeVar("D", bound=TeacherDistribution)


def rows_at_once(logits_NV: torch.Tensor) -> int:
    """Return how many positions to process at once; on a CPU, as many as stay in its cache."""
    return 8 if logits_NV.device.type == "cpu" else max(1, len(logits_NV))


def shared_rows(weight_VH: torch.Tensor, teacher: TeacherDistribution) -> int:
    """Return how many rows of the vocabulary both models use: larger models of a family have more padding."""
    if isinstance(teacher, HiddenStates):
        return min(len(weight_VH), len(teacher.head_VH))
    if isinstance(teacher, LogProbs):
        return min(len(weight_VH), teacher.log_q_NV.shape[1])
    return len(weight_VH)


def join(distributions: Sequence[D]) -> D:
    """Concatenate one teacher's distributions for several sequences."""
    parts: Any = distributions
    if isinstance(parts[0], TopTokens):
        joined: Any = TopTokens(*map(torch.cat, zip(*parts, strict=True)))
    elif isinstance(parts[0], LogProbs):
        joined = LogProbs(torch.cat([part.log_q_NV for part in parts]))
    else:
        joined = HiddenStates(torch.cat([part.states_NH for part in parts]), parts[0].head_VH)
    return joined  # type: ignore[no-any-return]
