"""Tokens that are no text: which a vocabulary has, and which rows hold them in their text."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from opdcl.data.formats import Row
from opdcl.data.messages import THOUGHT, split_thought

BLANKS = " \t\n\u2581"

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@lru_cache(maxsize=4)
def markup(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all tokens that are no text but were added to the vocabulary."""
    # Some vocabularies list runs of blanks beside their markup.
    added = tokenizer.get_added_vocab().items()
    return frozenset(i for token, i in added if token.strip(BLANKS))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return an expression for the tokens that a model reads as structure wherever a text holds them.

    They are the special ones, and other added ones that the chat template writes.
    """
    names = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template)
    names |= {token for token in tokenizer.get_added_vocab() if token in template}
    longest_first = sorted(filter(lambda name: name.strip(BLANKS), names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def find_control(row: Row, control: re.Pattern[str]) -> list[str]:
    """Return the control tokens in the texts of a row, each once; a thought's own marks are none."""
    answer = {"role": "assistant", "content": row.answer or "", **row.reply}
    found: list[str] = []
    for message in [*row.prompt, answer, {"role": "text", "content": row.text or ""}]:
        texts = [message["content"], message.get(THOUGHT[0], "")]
        if message["role"] == "assistant":
            thought, _, texts[0] = split_thought(message["content"])
            texts.append(thought or "")
        found += control.findall("\0".join(texts))
    return [*dict.fromkeys(found)]
