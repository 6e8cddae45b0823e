"""Turn rows into token ids through the model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opdcl.data.rows import Message, Row
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
