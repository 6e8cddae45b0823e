"""The general prompts of a recovery: from one source, or from several in the shares that were named.

A file that is named alone is taken as it is. The shipped prompts are drawn group by group.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle, islice
from typing import NamedTuple

from opdcl.config.recover import RecoverConfig
from opdcl.data.rows import Row, check_prompts
from opdcl.distill.schedule import plan_steps

SHIPPED = "everyday"

# Group of shipped prompts -> its share of those that are drawn. A third are short facts: a fine-tune on
# questions and answers damages them most, and they come back last.
GROUPS = {"fact": 3.08 / 9} | dict.fromkeys(
    ("constraints", "list", "open", "long", "text", "conversation", "code", "doubtful"), 0.74 / 9
)

Read = Callable[..., list[Row]]


class _Part(NamedTuple):
    """A source, or a group of the shipped prompts. Without `held_out`, some of `train` are held out."""

    share: float
    train: list[Row]
    held_out: list[Row] | None = None


def read_mixture(
    config: RecoverConfig, read_rows: Read, has_domain: bool
) -> tuple[list[Row], list[Row] | None]:
    """Read the general prompts of a recovery.

    Returns: The rows to train on, and those held out; None if these are yet to be split off.

    Raises:
        UsageError: A row is malformed.
    """
    sources = config.general_sources()
    parts = [part for source, share in sources.items() for part in _parts(source, share, read_rows)]
    if not parts:
        return [], None
    if len(parts) == 1:
        return parts[0].train, None
    steps = plan_steps(config, 1, int(has_domain and config.method != "general"))
    drawn = sum(len(step.prompts) for step in steps if step.stream == "general")
    train: list[Row] = []
    held_out: list[Row] = []
    for number, part in enumerate(parts):
        # At least one each, so that a small part is trained and measured.
        count, aside = (max(1, round(part.share * n)) for n in (drawn, config.validation_prompts))
        ours, others = _draw(part, count, aside, config.seed + number)
        train += ours
        held_out += others
    return train, held_out


def _parts(source: str, share: float, read_rows: Read) -> list[_Part]:
    """Return what is drawn from a source: the shipped prompts group by group, another source as a whole."""
    rows = check_prompts(read_rows(source))
    if source != SHIPPED:
        return [_Part(share, rows)]
    held_out = check_prompts(read_rows(source, "validation"))
    return [
        _Part(share * of_group, _of_group(rows, group), _of_group(held_out, group))
        for group, of_group in GROUPS.items()
    ]


def _of_group(rows: list[Row], group: str) -> list[Row]:
    return [row for row in rows if row.group == group]


def _draw(part: _Part, count: int, aside: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return `count` rows to train on, repeated if there are fewer, and up to `aside` others to hold out."""
    train, held_out = [*part.train], part.held_out
    random.Random(seed).shuffle(train)
    if held_out is None:
        aside = min(aside, len(train) // 2)
        train, held_out = train[aside:], train[:aside]
        # A file may hold a prompt several times, and what is measured must not be practised.
        measured = {row.key() for row in held_out}
        train = [row for row in train if row.key() not in measured]
        if not train:  # they are all the same: like a single prompt, it is practised
            train, held_out = held_out, []
    return [*islice(cycle(train), count)], held_out[:aside]
