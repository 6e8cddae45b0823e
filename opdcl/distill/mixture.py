"""The general prompts of a recovery: from one source or several, with shipped ones of the kinds they lack.

A recovery brings back what its prompts ask for. So the shipped prompts are drawn kind by kind, and a file
that is named alone is topped up with shipped ones of the kinds that it has too few of. A list of sources is
taken as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from opdcl.config.recover import RecoverConfig
from opdcl.data.prompt_kinds import FOREIGN, KINDS, SHARES, count_kinds, lacking, prompt_kind
from opdcl.data.rows import Row, check_prompts
from opdcl.distill.schedule import plan_steps

SHIPPED, SELF = "everyday", "self"

# The smallest share of a file's own prompts once it is topped up.
OWN_SHARE = 0.5

# The maximum length, in tokens, and number of the prompts that base writes: later epochs repeat them.
LONGEST, MOST = 128, 1024

# Stands for a prompt that base has yet to write, at its greatest length.
PLACEHOLDER = Row([{"role": "user", "content": " ".join(["word"] * LONGEST)}], None, None, "a prompt of base")

Read = Callable[..., list[Row]]


@dataclass(frozen=True)
class Mixture:
    """General prompts to train on, those held out if they are chosen already, and the kinds added to them."""

    train: list[Row]
    held_out: list[Row] | None = None
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A part of a mixture: the rows that it is drawn from. Without `held_out`, some of `train` are."""

    share: float
    train: list[Row]
    held_out: list[Row] | None = None
    kind: str = ""

    def drawn(self, count: int, held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Return `count` rows to train on, repeated if there are fewer, and up to `held_out` others."""
        if self.train[0] is PLACEHOLDER:
            return [PLACEHOLDER] * count, [PLACEHOLDER] * held_out
        train, others = [*self.train], [*(self.held_out or [])]
        random.Random(seed).shuffle(train)
        if self.held_out is None:
            held_out = min(held_out, len(train) // 2)
            train, others = train[held_out:], train[:held_out]
            # A file may hold a prompt several times, and what is measured must not be practised.
            measured = {row.key() for row in others}
            train = [row for row in train if row.key() not in measured]
            if not train:  # they are all the same: like a single prompt, it is practised
                train, others = others, []
        return [*islice(cycle(train), count)], [*islice(others, held_out)]


def read_mixture(config: RecoverConfig, read_rows: Read, has_domain: bool) -> Mixture:
    """Read the general prompts of a recovery; those that base will write are placeholders.

    Raises:
        UsageError: A row is malformed.
    """
    sources = config.general_sources()
    if not sources:
        return Mixture([])
    if [*sources] == [SELF]:
        count = min(drawn_prompts(config, has_domain), MOST) + config.validation_prompts
        return Mixture([PLACEHOLDER] * count)
    parts = [part for source, share in sources.items() for part in _parts(share, source, read_rows)]
    added: list[_Part] = []
    # A teacher with a context is shown each prompt's answer, and shipped prompts have none.
    is_shown = config.teacher_of("general").context is not None
    if isinstance(config.general, str) and config.general != SHIPPED and not is_shown:
        shipped = _parts(1, SHIPPED, read_rows)
        parts, added = _topped_up(parts[0], shipped)
    if len(parts) + len(added) == 1:
        return Mixture(parts[0].train)
    rows = _mixed([*parts, *added], config, drawn_prompts(config, has_domain))
    return Mixture(*rows, tuple(part.kind for part in added))


def _parts(share: float, source: str, read_rows: Read) -> list[_Part]:
    """Return what is drawn from a source: the shipped prompts kind by kind, another source as a whole."""
    if source == SELF:
        return [_Part(share, [PLACEHOLDER])]
    rows = check_prompts(read_rows(source))
    if source != SHIPPED:
        return [_Part(share, rows)]
    held_out, parts = check_prompts(read_rows(source, "validation")), []
    evenly = (1 - sum(SHARES.values())) / len(SHARES)
    for kind, least in SHARES.items():
        train, others = ([row for row in part if prompt_kind(row) == kind] for part in (rows, held_out))
        parts.append(_Part(share * (least + evenly), train, others, kind))
    return [part for part in parts if part.train]


def _topped_up(own: _Part, shipped: Sequence[_Part]) -> tuple[list[_Part], list[_Part]]:
    """Return a file's prompts with a smaller share, and shipped ones of the kinds that they lack.

    With the file's own of that kind, a kind gets the share that it should have, unless that leaves the file
    less than `OWN_SHARE`.
    """
    counts = count_kinds(own.train)
    missing = lacking(counts)
    if not missing:
        return [own], []
    of_own = {kind: counts[kind] / len(own.train) for kind in missing}
    rest = (1 - sum(SHARES[kind] for kind in missing)) / (1 - sum(of_own.values()))
    rest = max(rest, OWN_SHARE)
    wanted = {kind: SHARES[kind] - rest * of_own[kind] for kind in missing}
    scale = (1 - rest) / sum(wanted.values())
    added = [replace(part, share=scale * wanted[part.kind]) for part in shipped if part.kind in missing]
    return [replace(own, share=rest)], added


def drawn_prompts(config: RecoverConfig, has_domain: bool) -> int:
    """Return how many general prompts the steps of a recovery draw."""
    steps = plan_steps(config, 1, int(has_domain and config.method != "general"))
    return sum(len(step.prompts) for step in steps if step.stream == "general")


def described(rows: Sequence[Row], added: Sequence[str]) -> list[str]:
    """Describe for the user of which kinds the general prompts are, what was added and what is missing."""
    if not (rows := [row for row in rows if row is not PLACEHOLDER]):
        return []
    counts = count_kinds(rows)
    shares = [f"{counts[kind] / len(rows):.0%} {name}" for kind, name in KINDS.items() if counts[kind]]
    notes = [f"kinds of general prompts: {', '.join(shares) or 'none that is known'}"]
    if counts[FOREIGN]:
        notes[0] += f"; {counts[FOREIGN] / len(rows):.0%} are not in English, whose kinds are not told apart"
    if added:
        notes.append(
            f"your prompts have too few of some kinds, and shipped ones were added: {_names(added)}; "
            "to leave them out, make recover.general a list, as in [FILE]"
        )
    if missing := [kind for kind in lacking(counts) if kind not in added]:
        notes.append(f"too few of the general prompts are {_names(missing)}: there, less may come back")
    return notes


def recorded(rows: Sequence[Row], added: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each kind's name and share of the prompts, whether it was added, and whether it is lacking."""
    counts = count_kinds(rows)
    missing = lacking(counts)
    names = KINDS | ({FOREIGN: "not in English"} if counts[FOREIGN] else {})
    return {
        kind: {
            "name": name,
            "share": round(counts[kind] / len(rows), 4) if rows else 0.0,
            "added": kind in added,
            "lacking": kind in missing,
        }
        for kind, name in names.items()
    }


def with_written(lists: Sequence[Sequence[Row]], written: Sequence[Row]) -> list[list[Row]]:
    """Return lists of rows with those that base has written in place of the placeholders, in order."""
    following = cycle(written)
    return [[next(following) if row is PLACEHOLDER else row for row in rows] for rows in lists]


def _mixed(parts: Sequence[_Part], config: RecoverConfig, drawn: int) -> tuple[list[Row], list[Row]]:
    """Return the prompts to train on, as many as are drawn, and the held-out ones, in the parts' shares."""
    train: list[Row] = []
    held_out: list[Row] = []
    for number, part in enumerate(parts):
        # At least one each, so that a small part is trained and measured.
        count, aside = (max(1, round(part.share * n)) for n in (drawn, config.validation_prompts))
        ours, others = part.drawn(count, aside, config.seed + number)
        train += ours
        held_out += others
    return train, held_out


def _names(kinds: Sequence[str]) -> str:
    return ", ".join(KINDS[kind] for kind in kinds)
