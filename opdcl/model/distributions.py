"""What a teacher thinks of the next token at each graded position: its whole distribution, or what a server tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

import torch

# Mass that a server's rounding may leave for all tokens it did not name.
SMALLEST_TAIL = 1e-9


class TeacherDistribution(Protocol):
    """A distribution over the vocabulary for each of N positions."""

    def log_probs(self, part: slice, rows: int, temperature: float) -> torch.Tensor:
        """Return log-probabilities of the first `rows` tokens of the vocabulary at some positions, `(n, rows)` in fp32."""
        ...

    def entropy(self, part: slice, log_q: torch.Tensor) -> torch.Tensor:
        """Return the entropy at some positions, given `log_probs` of these, `(n,)` in nats."""
        ...

    def kl(self, part: slice, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """Return KL(p, q) of a student's log-distributions to this one at some positions, `(n,)` in nats."""
        ...

    def split(self, lengths: Sequence[int]) -> list[Self]:
        """Return the opinion sequence by sequence."""
        ...


@dataclass(frozen=True)
class HiddenStates:
    """The whole distribution, as last hidden states `(N, H)` and the output embedding `(V, H)` that turns them into logits."""

    states_NH: torch.Tensor
    head_VH: torch.Tensor

    @torch.no_grad()
    def log_probs(self, part: slice, rows: int, temperature: float) -> torch.Tensor:
        head_VH = self.head_VH[:rows]
        logits = (self.states_NH[part].to(head_VH.dtype) @ head_VH.T).float()
        for block in logits.split(rows_at_once(logits)):
            block.copy_(torch.log_softmax(block / temperature, -1))
        return logits

    def entropy(self, part: slice, log_q: torch.Tensor) -> torch.Tensor:
        return -(log_q.exp() * log_q).sum(-1)

    def kl(self, part: slice, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def split(self, lengths: Sequence[int]) -> list[HiddenStates]:
        return [HiddenStates(states_NH, self.head_VH) for states_NH in self.states_NH.split(list(lengths))]


@dataclass(frozen=True)
class TopTokens:
    """The K likeliest tokens of each position and the token that stands there: ids and log-probabilities, `(N, K)` and `(N,)`.

    What is left of the mass is spread evenly over all other tokens. So what a loss says of the token itself is exact, and of
    the k likeliest and the rest together for k up to K. Entropy and KL are the least that they can be: no other token is
    likelier than the K-th, and all others count as one.
    """

    token_N: torch.Tensor
    logprob_N: torch.Tensor
    top_NK: torch.Tensor
    top_logprob_NK: torch.Tensor

    def log_probs(self, part: slice, rows: int, temperature: float) -> torch.Tensor:
        if temperature != 1:
            raise ValueError("what is known of a distribution's likeliest tokens holds at temperature 1 only")
        top, top_logprob, token, logprob = (
            self.top_NK[part],
            self.top_logprob_NK[part],
            self.token_N[part],
            self.logprob_N[part],
        )
        among = (top == token[:, None]).any(1)
        named = top_logprob.exp().sum(1) + torch.where(among, 0.0, logprob.exp())
        count = rows - top.shape[1] - (~among).long()
        tail = ((1 - named).clamp(min=SMALLEST_TAIL) / count.clamp(min=1)).log()
        found = tail[:, None].expand(-1, rows).scatter(1, top, top_logprob)
        return found.scatter(1, token[:, None], logprob[:, None])

    def entropy(self, part: slice, log_q: torch.Tensor) -> torch.Tensor:
        top = self.top_logprob_NK[part]
        return -(top.exp() * top).sum(1) - (1 - top.exp().sum(1)).clamp(min=0) * top[:, -1]

    def kl(self, part: slice, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        p, q = log_p.exp().gather(1, self.top_NK[part]), self.top_logprob_NK[part].exp()
        named = (p * (log_p.gather(1, self.top_NK[part]) - self.top_logprob_NK[part])).sum(1)
        rest_p, rest_q = ((1 - x.sum(1)).clamp(min=SMALLEST_TAIL) for x in (p, q))
        return named + rest_p * (rest_p / rest_q).log()

    def split(self, lengths: Sequence[int]) -> list[TopTokens]:
        columns = (getattr(self, field.name).split(list(lengths)) for field in fields(self))
        return [TopTokens(*parts) for parts in zip(*columns, strict=True)]

    def to(self, device: torch.device) -> TopTokens:
        return TopTokens(*(getattr(self, field.name).to(device) for field in fields(self)))


def rows_at_once(logits_NV: torch.Tensor) -> int:
    """Return how many positions to work on at once: on a processor, so few that they stay in its cache between operations."""
    return 8 if logits_NV.device.type == "cpu" else max(1, len(logits_NV))


def shared_rows(weight_VH: torch.Tensor, teacher: TeacherDistribution) -> int:
    """Return how many rows of the vocabulary stand for something: larger models of a family pad it to more."""
    return min(len(weight_VH), len(teacher.head_VH)) if isinstance(teacher, HiddenStates) else len(weight_VH)


def join(opinions: Sequence[TeacherDistribution]) -> TeacherDistribution:
    """Return the opinions of one teacher on several sequences as one."""
    first = opinions[0]
    if isinstance(first, HiddenStates):
        return HiddenStates(torch.cat([o.states_NH for o in opinions]), first.head_VH)
    return TopTokens(*(torch.cat([getattr(o, field.name) for o in opinions]) for field in fields(TopTokens)))
