"""The rows of a fine-tune; those that cannot be learned or are too long are refused, left out or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opdcl.config.finetune import REPLAYED_TOKENS, FinetuneConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.control import control_tokens, find_control
from opdcl.data.formats import did_you_mean
from opdcl.data.learned import Example, encode_example
from opdcl.data.rows import Row, check_prompts
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Examples:
    """The rows that a fine-tune uses, their token ids (several sequences for a long text), and remarks.

    `replay` holds the token ids of the prompts that base answers for replay.
    """

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    encoded: list[Example] = field(default_factory=list)
    longest: tuple[int, str] = (0, "")
    """Tokens and place of the longest row, before anything is cut."""
    replay: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a fine-tune that hold something to learn, and what is known of the others.

    `count` is the number of all rows. `notes` tell of rows without an answer, `errors` of rows that cannot be
    read.
    """

    usable: list[Row]
    count: int
    notes: list[str]
    errors: Sequence[UsageError] = ()


def with_answers(rows: list[Row], config: FinetuneConfig, errors: Sequence[UsageError] = ()) -> TrainingRows:
    """Return the rows that have something to learn; `errors` are those of rows that cannot be read.

    Raises:
        UsageError: Some have no answer and `bad_rows` is `refuse`, or none has one.
    """
    usable: list[Row] = []
    empty: list[Row] = []
    for row in rows:
        has_answer = row.text is not None or row.answer or row.reply
        (usable if has_answer else empty).append(row)
    count = len(rows) + len(errors)
    if not empty:
        return TrainingRows(rows, count, [], errors)
    found = _counted([row.where for row in empty], "have", "no answer to learn")
    if config.bad_rows == "refuse" or not usable:
        hint = f"{did_you_mean(empty[0].columns)}fine-tune rows need completion, answer or text"
        raise UsageError(found, f"{hint}; --set finetune.bad_rows=skip leaves these rows out")
    return TrainingRows(usable, count, [f"{found}; left out"], errors)


def bad_rows(errors: Sequence[UsageError]) -> list[str]:
    """Return a note on rows that are left out because of an error of their own; none without any."""
    if not errors:
        return []
    found = _counted([error.message for error in errors], "cannot", "be used")
    return [f"{found}; left out"]


def read_examples(
    rows: TrainingRows, config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, replay: Sequence[Row] = ()
) -> Examples:
    """Encode the rows of a fine-tune and its prompts to replay; treat long rows as `long_rows` says.

    Raises:
        UsageError: A row is too long and `long_rows` is `refuse`, the chat template refuses a row and
            `bad_rows` is `refuse`, or no row is left.
    """
    limit = config.max_length
    used: list[Row] = []
    encoded: list[Example] = []
    long: list[tuple[int, str]] = []
    errors, unasked = [*rows.errors], []
    longest, cut_to_nothing = (0, ""), 0
    for row in rows.usable:
        try:
            examples, whole = encode_example(row, tokenizer, limit)
        except UsageError as fault:
            if config.bad_rows == "refuse":
                raise
            errors.append(fault)
            continue
        if not whole:
            unasked.append(row.where)
        lengths = [len(example.ids) for example in examples]
        size = max(lengths) if row.text is None else sum(lengths)
        longest = max(longest, (size, row.where), key=lambda pair: pair[0])
        if row.text is None and size > limit:
            long.append((size, row.where))
            examples = _cut(examples, limit) if config.long_rows == "cut" else []
            cut_to_nothing += not examples
        if examples:
            used.append(row)
            encoded += examples
    notes = bad_rows(errors) + rows.notes + _long_rows(long, cut_to_nothing, config)
    if unasked:
        found = _counted(unasked, "have", "answers that are not learned")
        notes.append(f"{found}: with this chat template no prompt leads to them")
    notes += _control_notes(used, tokenizer)
    if not encoded:
        reasons = "; ".join(notes)
        raise UsageError(f"{config.data} has no row to learn from: {reasons}", "raise finetune.max_length")
    room = limit - REPLAYED_TOKENS
    prompts = [encode_prompt(row, tokenizer, room) for row in check_prompts(list(replay))]
    return Examples(used, notes, encoded, longest, prompts)


def _cut(examples: list[Example], limit: int) -> list[Example]:
    """Return the beginnings of sequences; a prompt that fills one leaves nothing to learn of it."""
    cut = [Example(example.ids[:limit], example.learned[:limit]) for example in examples]
    return [example for example in cut if any(example.learned)]


def _control_notes(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a note on rows whose text holds tokens that the model reads as structure."""
    control = control_tokens(tokenizer)
    held = []
    for row in rows:
        token = find_control(row, control)
        if token:
            held.append(f"{row.where} with {token}")
    if not held:
        return []
    found = _counted(held, "hold", "control tokens in the text")
    return [f"{found}: the model reads them as the end of a turn or the like, not as text"]


def _long_rows(long: list[tuple[int, str]], cut_to_nothing: int, config: FinetuneConfig) -> list[str]:
    """Return the note on rows over the limit, if any; raise a UsageError if they are refused."""
    if not long:
        return []
    places = [f"{where} with {size}" for size, where in long]
    found = _counted(places, "are", f"longer than {config.max_length} tokens")
    if config.long_rows == "refuse":
        most = max(size for size, _ in long)
        hint = f"raise finetune.max_length (the longest row has {most} tokens), or --set finetune.long_rows="
        raise UsageError(found, f"{hint}skip, which leaves these rows out, or =cut, which shortens them")
    if config.long_rows == "skip":
        return [f"{found}; left out"]
    whole = f", {cut_to_nothing} left out because no answer remained" if cut_to_nothing else ""
    return [f"{found}; cut{whole}"]


def _counted(found: Sequence[str], verb: str, rest: str) -> str:
    """Return a clause on rows: how many there are, and the first of what was found."""
    singular = {"have": "has", "are": "is", "hold": "holds"}
    count = f"1 row {singular.get(verb, verb)}" if len(found) == 1 else f"{len(found)} rows {verb}"
    return f"{count} {rest} (first: {found[0]})"
