"""Conversations of several turns, whose earlier answers are the model's own.

What stands around these answers is the chat template's. It is found by giving the template an answer that can
be found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opdcl.data.chat import encode_prompt, render
from opdcl.data.examples import learned_turns
from opdcl.data.formats import Row
from opdcl.data.messages import THOUGHT, THOUGHTS, Message
from opdcl.data.rows import is_shipped
from opdcl.errors import UsageError
from opdcl.words import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = {"role": "assistant", "content": "An answer of opdcl."}
THINKS = "A thought of opdcl."


def encode_turns(row: Row, tokenizer: PreTrainedTokenizerBase, room: int, longest: int) -> Prompt:
    """Return what a row asks: at once, or turn by turn, with the model's own answers in between.

    Raises:
        UsageError: With answers of `longest` tokens before it, a turn may exceed `room`; or the chat template
            does not write an earlier answer as the model has written it.
    """
    if not row.later_turns:
        return Prompt(encode_prompt(row, tokenizer, room))
    begin = len(row.prompt) - row.later_turns
    told = [message for asked in row.prompt[begin:] for message in (STAND_IN, asked)]
    turns = learned_turns(
        replace(row, prompt=row.prompt[:begin] + told, answer=STAND_IN["content"]), tokenizer
    )
    first = turns[0]
    parts = [_around(turn.prompt, first.answer[: first.words]) for turn in turns if turn and first]
    is_exact = [*map(len, parts)] == [*range(1, len(turns) + 1)]
    if not is_exact or _forgets_thoughts(row, row.prompt[:begin], tokenizer):
        message = f"{row.where}: the chat template rewrites earlier answers, which here are the model's own"
        raise UsageError(message, "write answers into the row, or --set model.chat_template=FILE")
    if (most := sum(map(len, parts[-1])) + row.later_turns * longest) > room:
        message = f"{row.where}: the last turn may have {most} tokens, and the context leaves room for {room}"
        raise UsageError(message, "shorten the turns, or lower max_new_tokens")
    return Prompt(parts[0][0], following=parts[1:])


def encode_asked(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, room: int, longest: int
) -> list[tuple[Row, Prompt]]:
    """Return rows with their prompts, as `encode_turns`, without shipped conversations that it refuses."""
    found = []
    for row in rows:
        try:
            found.append((row, encode_turns(row, tokenizer, room, longest)))
        except UsageError:  # a user can change neither the shipped rows nor the model's template
            if not (row.later_turns and is_shipped(row)):
                raise
    return found


def _around(ids: list[int], answer: list[int]) -> list[list[int]]:
    """Return the ids before, between and after the places of an answer."""
    parts, i = [[ids[0]]], 1
    while i < len(ids):
        if ids[i : i + len(answer)] == answer:
            parts.append([])
            i += len(answer)
        else:
            parts[-1].append(ids[i])
            i += 1
    return parts


def _forgets_thoughts(row: Row, opening: list[Message], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template leaves out the thought of an earlier answer, and lets the model think."""
    told = [*opening, STAND_IN | dict.fromkeys(THOUGHT, THINKS)]
    writes = THINKS in render(tokenizer, told, False, row)
    keeps = THINKS in render(tokenizer, [*told, opening[-1]], True, row)
    asks = render(tokenizer, opening, True, row).rstrip()
    return writes and not keeps and not asks.endswith(tuple(THOUGHTS.values()))
