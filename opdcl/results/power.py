"""What a run can show: about this adapter, from its prompts, and about the method, from prompts and seeds.

A report takes the spread of the answers from the answers. A plan has none and assumes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from opdcl.results import intervals, stats
from opdcl.results.status import NON_INFERIORITY_MARGIN

# What a plan assumes: the share of prompts on which recovered and base differ, if they are equally good; the
# standard deviation between training seeds; and the loss that R refers to.
DISAGREEMENT, SEED_SD, LOSS = 0.25, 0.018, 0.5

ASSUMED = f"if answers differ on {DISAGREEMENT:.0%} of prompts and seeds by {100 * SEED_SD:g} points"

# With fewer seeds than this there is hardly a spread to speak of.
FEWEST_SEEDS = 3


class Power(NamedTuple):
    """What is expected of an evaluation; shares of 1, not points."""

    prompts: int
    seeds: int
    detectable: float
    """The smallest true difference to base that is found four times in five."""
    half_width: float
    """Of the interval of recovered - base."""
    ratio_half_width: float
    """Of the interval of R."""
    recovered_shown: float
    """The probability that a model as good as base is shown to be recovered."""


def planned(prompts: int, seeds: int = 1) -> Power:
    """Return what to expect of so many prompts, and of so many training seeds if there are several."""
    parts = [(DISAGREEMENT / prompts, max(prompts - 1, 1))]
    if seeds > 1:
        parts.append((SEED_SD**2 / seeds, seeds - 1))
    half, found = intervals.half_width(parts), stats.found_four_times_in_five(parts)
    return Power(prompts, seeds, found, half, half / LOSS, stats.power_at_equality(parts))


def plan_rows(prompts: int, seeds: int = 1) -> list[list[str]]:
    """Return the two rows of a dry run that say what the run can show."""
    one, several = planned(prompts), planned(prompts, max(seeds, FEWEST_SEEDS))
    few = f"{seeds} seed{'s' * (seeds > 1)}: nothing; " if seeds < FEWEST_SEEDS else ""
    method = f"{few}{several.seeds} seeds: {_shown(several)}, ±{_from_seeds(several.seeds)} of it by seeds"
    rows = {"this adapter": f"{prompts:,} prompts: {_shown(one)}", "the method": f"{method}; {ASSUMED}"}
    return [["power", about, shown] for about, shown in rows.items()]


def _shown(power: Power) -> str:
    """Say what an evaluation finds four times in five, how well it knows R, and if it can show a recovery."""
    hardly = "hardly " if power.half_width > NON_INFERIORITY_MARGIN else ""
    return (
        f"finds {100 * power.detectable:.1f} points, knows R to ±{power.ratio_half_width:.2f}, {hardly}shows "
        f"a full recovery as recovered ({power.recovered_shown:.0%})"
    )


def _from_seeds(seeds: int) -> str:
    return f"{100 * intervals.half_width([(SEED_SD**2 / seeds, seeds - 1)]):.1f} points"


def notes(suite: str, prompts: int, summary: dict[str, Any]) -> list[str]:
    """Return the notes of a run's report on what it could show, from its summary."""
    margin, seeds = f"{100 * NON_INFERIORITY_MARGIN:g}", f"{FEWEST_SEEDS} seeds"
    about_the_method = (
        f"About the method, one training seed says nothing: {seeds} with a standard deviation of "
        f"{100 * SEED_SD:g} points leave ±{_from_seeds(FEWEST_SEEDS)}, whatever the number of prompts, where "
        f"“recovered” allows {margin}."
    )
    return [of_the_adapter(suite, prompts, [summary]), about_the_method]


def of_the_adapter(suite: str, prompts: int, summaries: Sequence[dict[str, Any]]) -> str:
    """Return the note on what single runs could show about their adapters."""
    smallest = _range([100 * s["tests"]["detectable_difference"] for s in summaries], "{:.1f}")
    power = _range([100 * s["non_inferiority"]["power"] for s in summaries], "{:.0f}")
    widths = [(r["high"] - r["low"]) / 2 for s in summaries if (r := s["recovery"])]
    ratio = f"R is known to ±{_range(widths, '{:.2f}')}, " if widths else ""
    return (
        f"{suite}, about this adapter: with {prompts} prompts a true difference of {smallest} points between "
        f"recovered and base is found four times in five, {ratio}and a model as good as base is shown to be "
        f"recovered in {power} % of repetitions."
    )


def of_the_arm(arm: dict[str, Any]) -> str:
    """Return the note on what several seeds could show about the method of an arm."""
    return (
        f"{arm['name']}, about the method: with {arm['seeds']} seeds a true difference of "
        f"{100 * arm['detectable_difference']:.1f} points between recovered and base is found four times in "
        f"five, and a method as good as base is shown to be recovered in "
        f"{100 * arm['non_inferiority']['power']:.0f} % of repetitions."
    )


def _range(values: Sequence[float], form: str) -> str:
    least, most = (form.format(value) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
