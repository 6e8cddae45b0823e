"""Turn rows into token ids through the model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from opdcl.data.formats import Message, Row
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Encoded:
    """Token ids of a training row and, per id, whether it is part of an answer."""

    input_ids: list[int]
    completion_mask: list[int]


def encode_prompt(row: Row, tokenizer: PreTrainedTokenizerBase, room: int) -> list[int]:
    """Return the ids of a prompt up to where the answer begins; raise a UsageError if they exceed `room`."""
    ids = _template(tokenizer, row.prompt, generation=True)
    if len(ids) > room:
        message = f"{row.where}: the prompt has {len(ids)} tokens, and the context leaves room for {room}"
        raise UsageError(message, "shorten the prompt, or lower max_new_tokens")
    return ids


def encode_example(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Encoded]:
    """Encode a training row as one sequence of any length; plain text as pieces of `max_length` tokens."""
    if row.text is not None:
        ids = [*tokenizer(row.text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        pieces = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
        return [Encoded(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1]
    messages = [*row.prompt, {"role": "assistant", "content": row.answer or ""}]
    ids = _template(tokenizer, messages)
    mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = _template(tokenizer, messages[:turn], generation=True)
            end = len(_template(tokenizer, messages[: turn + 1]))
            # Some templates rewrite earlier turns; a turn is learned only where its prompt stayed the same.
            if ids[: len(start)] == start:
                mask[len(start) : end] = [1] * (end - len(start))
    # What a template adds after the end of the turn, such as a line break, is never sampled: not learned.
    while mask[-1] and ids[-1] != tokenizer.eos_token_id and tokenizer.eos_token_id in ids[len(ids) - 4 :]:
        ids.pop()
        mask.pop()
    return [Encoded(ids, mask)]


@dataclass(frozen=True)
class UserTurn:
    """Where a user's first words stand in a chat template: the ids before them, and the id that ends them."""

    opening: list[int]
    end: int
    markup: set[int]
    """All ids that are no text."""


def user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """Return what surrounds a user's first words in the chat template.

    Raises:
        UsageError: Nothing in the template stands before the user's words, or no id of its own behind them.
    """
    marker = "finis"
    text = render(tokenizer, [{"role": "user", "content": marker}], True, tokenize=False)
    before, _, after = text.partition(marker)
    # Some vocabularies list runs of blanks beside their markup.
    markup = {i for token, i in tokenizer.get_added_vocab().items() if token.strip(" \t\n\u2581")}
    end = next((i for i in tokenizer(after, add_special_tokens=False)["input_ids"] if i in markup), None)
    if end is None or not before.replace(tokenizer.bos_token or "", "").strip():
        message = "the chat template has no markup around a user turn, so base cannot write one"
        raise UsageError(message, "--prompts everyday takes the shipped prompts; or name a file of prompts")
    # Not the ids of `before` itself: its last blank may be part of the first word's token.
    starts = [tokenizer(before + word, add_special_tokens=False)["input_ids"] for word in (marker, "Why")]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*starts, strict=False))
    return UserTurn([i for i, _ in same], end, markup)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], generation: bool, tokenize: bool
) -> Any:
    """Apply the chat template, in the same way for training, sampling and evaluation.

    Thinking is switched off where a template has that switch: base would spend its tokens on thoughts that
    the fine-tune's rows do not have, and the two would not be comparable.
    """
    options = {"tokenize": tokenize, "return_dict": tokenize, "enable_thinking": False}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **options)


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], generation: bool = False
) -> list[int]:
    return list(render(tokenizer, messages, generation, tokenize=True)["input_ids"])
