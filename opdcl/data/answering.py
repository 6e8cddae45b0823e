"""How a task of lm-eval has its answers written: read as lm-eval itself reads it, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opdcl.errors import UsageError

READ = ("until", "do_sample", "temperature", "max_gen_toks")
# Options that we do not support, with the values that turn them off. Greedy decoding ignores some of them.
TURNED_OFF: dict[str, tuple[float | None, ...]] = {
    "num_beams": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
}
ONLY_DRAWS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Answering:
    """How answers are written: the texts that end one, its most tokens, and the temperature; 0 is greedy."""

    stops: list[str]
    max_tokens: int
    temperature: float


def answering_of(options: Mapping[str, Any] | None, suite: str | None = None) -> Answering:
    """Return how a task has its answers written.

    Args:
        options: The task's `generation_kwargs`.
        suite: Its name, for the error.

    Raises:
        UsageError: lm-eval cannot read the options, or we cannot do what one of them asks for.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    who = f"suite {suite!r}" if suite else "a suite"
    hint = "correct generation_kwargs in the task, or choose another task"
    try:
        read = normalize_gen_kwargs(dict(options or {}))
    except (TypeError, ValueError) as fault:
        raise UsageError(f"{who} has generation_kwargs that lm-eval cannot read: {fault}", hint) from fault
    stops, is_drawn, limit = read["until"], read["do_sample"], read["max_gen_toks"]
    temperature = float(read.get("temperature") or 0)
    if not all(stop and isinstance(stop, str) for stop in stops):
        raise UsageError(f"{who} has until: {stops}, of which one is empty or no text", hint)
    if not isinstance(is_drawn, bool):
        raise UsageError(f"{who} has do_sample: {is_drawn!r}, which is neither true nor false", hint)
    if limit < 1:
        raise UsageError(f"{who} has max_gen_toks: {limit}, which leaves no room for an answer", hint)
    if is_drawn and not 0 < temperature < float("inf"):
        raise UsageError(f"{who} samples at temperature {temperature:g}, which lm-eval cannot", hint)
    for key, value in read.items():
        is_off = value in TURNED_OFF.get(key, ()) or (key in ONLY_DRAWS and not is_drawn)
        if key not in READ and not is_off:
            doing = "samples" if is_drawn else "decodes"
            raise UsageError(f"{who} {doing} with {key}: {value}, which is not supported", hint)
    return Answering(stops, limit, temperature if is_drawn else 0.0)
