"""The rows of a fine-tune as token ids, and which of these are learned.

Rows that cannot be learned, or are too long, are refused, left out or cut.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from opdcl.config.finetune import REPLAYED_TOKENS, FinetuneConfig
from opdcl.data.chat import (
    control_tokens,
    encode_prompt,
    find_control,
    has_thought,
    markup,
    render,
    render_whole,
    same_length,
    text_ids,
)
from opdcl.data.formats import BadRow, Row, did_you_mean
from opdcl.data.messages import Message
from opdcl.data.rows import Tell, check_prompts, telling
from opdcl.errors import UsageError
from opdcl.words import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What opens a thought -> what ends one without words, where a prompt opens it: Qwen3, DeepSeek R1; Gemma 4.
EMPTY_THOUGHTS = {"<think>": "\n</think>\n\n", "<|channel>thought": "<channel|>"}


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a fine-tune that hold something to learn, and what is known of the others.

    `count` is the number of all rows. `notes` tell of rows without an answer, `errors` are the messages on
    those that cannot be used.
    """

    usable: list[Row]
    count: int
    notes: list[str]
    errors: list[str]


@dataclass(frozen=True)
class EncodedRow:
    """A row as the sequences that teach it.

    If it is not `whole`, no prompt leads to some of its answers. If it is `trimmed`, the chat template leaves
    out the blanks that its answer begins with.
    """

    row: Row
    sequences: list[Example]
    whole: bool = True
    trimmed: bool = False

    @property
    def size(self) -> int:
        """The tokens of its longest sequence, or of all pieces of a plain text."""
        lengths = [example.length for example in self.sequences]
        return max(lengths) if self.row.text is None else sum(lengths)

    def cut(self, limit: int) -> EncodedRow:
        """Return the row with the first `limit` tokens of its sequences, without those that teach nothing."""
        cut = [Example(example.ids[:limit], example.learned[:limit]) for example in self.sequences]
        # A prompt that fills a sequence leaves nothing to learn.
        return replace(self, sequences=[example for example in cut if any(example.learned)])


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


def with_answers(rows: list[Row], config: FinetuneConfig, bad: Sequence[BadRow] = ()) -> TrainingRows:
    """Return the rows that have something to learn, of those that can be used and the `bad` ones.

    Raises:
        UsageError: Some are bad or have no answer and `bad_rows` is `refuse`, or none is left.
    """
    errors = [row.message for row in bad]
    if bad and config.bad_rows == "refuse":
        raise UsageError(errors[0], f"{bad[0].hint}; --set finetune.bad_rows=skip leaves such rows out")
    if not rows:
        message = f"{config.data} has no row that can be used; the first: {errors[0]}"
        raise UsageError(message, bad[0].hint)
    usable = [row for row in rows if row.text is not None or row.answer or row.reply]
    empty = [row for row in rows if row.text is None and not (row.answer or row.reply)]
    notes = _noted([row.where for row in empty], "have", "no answer to learn", "; left out")
    if empty and (config.bad_rows == "refuse" or not usable):
        hint = f"{did_you_mean(empty[0].columns)}fine-tune rows need completion, answer or text"
        skip = "--set finetune.bad_rows=skip leaves these rows out"
        raise UsageError(notes[0].removesuffix("; left out"), f"{hint}; {skip}")
    return TrainingRows(usable, len(rows) + len(bad), notes, errors)


def read_examples(
    rows: TrainingRows,
    config: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    replay: Sequence[Row] = (),
    tell: Tell | None = None,
) -> Examples:
    """Encode the rows of a fine-tune and its prompts to replay; treat long rows as `long_rows` says.

    `tell` is told every few seconds how many rows are encoded.

    Raises:
        UsageError: A row is too long and `long_rows` is `refuse`, the chat template refuses a row and
            `bad_rows` is `refuse`, or no row is left.
    """
    encoded: list[EncodedRow] = []
    errors = [*rows.errors]
    for row in telling(rows.usable, f"of {rows.count:,} rows, encoded", tell):
        try:
            encoded.append(encode_row(row, tokenizer, config.max_length))
        except UsageError as fault:
            if config.bad_rows == "refuse":
                raise
            errors.append(fault.message)
    fitting, on_long = _fit(encoded, config)
    used = [one for one in fitting if one.sequences]
    left_out = _noted(errors, "cannot", "be used", "; left out")
    notes = left_out + rows.notes + on_long + _notes_on(encoded, used, tokenizer)
    if not used:
        reason = f"{config.data} has no row to learn from: {'; '.join(notes)}"
        raise UsageError(reason, "raise finetune.max_length")
    examples = [example for one in used for example in one.sequences]
    if (replayed := config.replayed(len(examples))) < config.replayed_by_share(len(examples)):
        share = replayed / (replayed + len(examples))
        found = f"{replayed:,} rows are replayed, {100 * share:.0f} % of all"
        notes.append(f"{found}: finetune.replay.most allows no more")
    longest = max(encoded, key=lambda one: one.size)
    prompts = _replayed(replay, config.max_length, tokenizer, notes)
    return Examples([one.row for one in used], notes, examples, (longest.size, longest.row.where), prompts)


def _fit(encoded: list[EncodedRow], config: FinetuneConfig) -> tuple[list[EncodedRow], list[str]]:
    """Return the rows after `long_rows`, and a note on those over the limit, if there are any."""
    limit = config.max_length
    # Pieces of a plain text never exceed it.
    long = [one for one in encoded if one.row.text is None and one.size > limit]
    found = _noted([f"{one.row.where} with {one.size}" for one in long], "are", f"longer than {limit} tokens")
    if not long:
        return encoded, []
    if config.long_rows == "refuse":
        most = max(one.size for one in long)
        hint = f"raise finetune.max_length (the longest row has {most} tokens), or --set finetune.long_rows="
        raise UsageError(found[0], f"{hint}skip, which leaves these rows out, or =cut, which shortens them")
    if config.long_rows == "skip":
        short = [one for one in encoded if one.row.text is not None or one.size <= limit]
        return short, [f"{found[0]}; left out"]
    lost = sum(not one.cut(limit).sequences for one in long)
    left_out = f", {lost} left out because no answer remained" if lost else ""
    return [one.cut(limit) for one in encoded], [f"{found[0]}; cut{left_out}"]


def _notes_on(
    encoded: list[EncodedRow], used: list[EncodedRow], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return notes on what is not learned of the rows, and on what a model does not read as their text."""
    unasked = [one.row.where for one in encoded if not one.whole]
    control = control_tokens(tokenizer)
    held = [(one.row.where, find_control(one.row, control)) for one in used]
    places = [f"{where} with {', '.join(tokens)}" for where, tokens in held if tokens]
    trimmed = [one.row.where for one in encoded if one.trimmed]
    unled = ": with this chat template no prompt leads to them"
    structure = ": the model reads them as the end of a turn or the like, not as text"
    blanks = ": the chat template takes them off, and an indent with them"
    return [
        *_noted(unasked, "have", "answers that are not learned", unled),
        *_noted(places, "hold", "control tokens in the text", structure),
        *_noted(trimmed, "have", "an answer without the blanks that it begins with", blanks),
    ]


def _replayed(
    replay: Sequence[Row], limit: int, tokenizer: PreTrainedTokenizerBase, notes: list[str]
) -> list[list[int]]:
    """Return the token ids of the prompts to replay that leave room for an answer; note how many do not."""
    prompts = [encode_prompt(row, tokenizer, sys.maxsize) for row in check_prompts(list(replay))]
    fitting = [prompt for prompt in prompts if len(prompt) <= limit - REPLAYED_TOKENS]
    if len(fitting) < len(prompts):
        most = max(map(len, prompts)) + REPLAYED_TOKENS
        found = (
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts to replay leave no room for an answer"
        )
        if not fitting:
            hint = f"raise finetune.max_length to {most}, or --set finetune.replay.share=0"
            raise UsageError(f"finetune.max_length is {limit}: {found}", hint)
        notes.append(f"{found}; left out: all fit with finetune.max_length={most}")
    return fitting


def _noted(found: Sequence[str], verb: str, rest: str, so: str = "") -> list[str]:
    """Return a note on rows: how many there are, the first of what was found, and what follows."""
    if not found:
        return []
    singular = {"have": "has", "are": "is", "hold": "holds"}
    count = f"1 row {singular.get(verb, verb)}" if len(found) == 1 else f"{len(found)} rows {verb}"
    return [f"{count} {rest} (first: {found[0]}){so}"]


def encode_row(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> EncodedRow:
    """Encode a training row: each assistant turn once, or plain text in pieces of `max_length` tokens.

    Turns share one sequence as long as the template writes them as they were answered. One that it rewrites
    later is learned in a sequence of its own. Sequences of turns may have any length.

    Raises:
        UsageError: Nothing of the row can be learned, or the template leaves out something it would teach.
    """
    if row.text is not None:
        return EncodedRow(row, encode_text(row.text, tokenizer, max_length))
    turns = learned_turns(row, tokenizer)
    sequences = in_sequences(turns)
    return EncodedRow(row, sequences, None not in turns, _loses_blanks(row, sequences[0], tokenizer))


def _loses_blanks(row: Row, example: Example, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether the last answer begins with a blank that the chat template does not write."""
    answer = (row.answer or "").rstrip()
    if not answer[:1].isspace():
        return False
    learned = [i for i, is_learned in zip(example.ids, example.learned, strict=True) if is_learned]
    return answer not in tokenizer.decode(learned)


@dataclass(frozen=True)
class Turn:
    """An assistant turn, and what of it is learned.

    `prompt` holds the very ids that ask for it in use, `answer` its own ids up to the end of the turn, and
    `learned` has a flag for each of them. `words` of them come before what ends the turn.
    """

    prompt: list[int]
    answer: list[int]
    learned: list[bool]
    words: int


def learned_turns(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[Turn | None]:
    """Return the assistant turns of a conversation in order, None for one that no prompt leads to.

    Raises:
        UsageError: No prompt leads to any, the template leaves out something, or an answer ends itself.
    """
    messages = [*row.prompt, {"role": "assistant", "content": row.answer or "", **row.reply}]
    turns: list[Turn | None] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not index:  # nothing is asked before the first message
            turns.append(None)
            continue
        said = messages[: index + 1]
        turns.append(_turn(row, tokenizer, said, render_whole(row, tokenizer, said)))
    if not any(turns):
        hint = "name a template that writes answers as its prompts open them: --set model.chat_template=FILE"
        if any(map(has_thought, messages)):
            hint = "thinking is off unless: --set model.chat_template_kwargs.enable_thinking=true"
        raise UsageError(f"{row.where}: with this chat template no prompt leads to its answer", hint)
    return turns


def in_sequences(turns: list[Turn | None]) -> list[Example]:
    """Return the sequences that teach the turns of a row: that of the last turn, then the others in order.

    A turn is learned in the sequence of a later one if that begins with the same prompt and answer. The
    markup that ends it may differ: gpt-oss ends earlier answers with another token, which is not learned.
    """
    sequences: list[Example] = []
    for turn in filter(None, reversed(turns)):
        begin, ids = len(turn.prompt), turn.prompt + turn.answer
        for other in sequences:
            same = same_length(ids, other.ids)
            if same >= begin + turn.words:
                other.learned[begin:same] = turn.learned[: same - begin]
                break
        else:
            sequences.append(Example(ids, [False] * begin + turn.learned))
    last, *others = sequences
    return [last, *reversed(others)]


def _turn(row: Row, tokenizer: PreTrainedTokenizerBase, messages: list[Message], written: str) -> Turn | None:
    """Return the last of the messages as it is learned, or None if no prompt leads to it.

    `written` is the text of all messages.
    """
    asked = render(tokenizer, messages[:-1], True, row)
    prompt, whole = text_ids(tokenizer, asked), text_ids(tokenizer, written)
    answer = whole[len(prompt) :]
    if whole[: len(prompt)] != prompt:
        text = _text_after(asked, written, has_thought(messages[-1]))
        answer = _ids_after(prompt, text, tokenizer) if text else []
    if not answer:
        return None
    control = markup(tokenizer)
    words = _words(answer, control, tokenizer)
    ends = [i for i in answer[words:] if i in control]
    _refuse_second_end(row, tokenizer, messages[-1], ends)
    # Sampling stops at the end of the turn, so line breaks that the template adds to it are never written,
    # even where the end of the text follows (Phi 3). Between a call and the end of the turn, some are.
    while ends and answer[-1] not in control:
        answer.pop()
    learned = [True] * len(answer)
    if "tool_calls" not in messages[-1]:
        learned[words:] = [i in control for i in answer[words:]]
    return Turn(prompt, answer, learned, words)


def _words(answer: list[int], control: frozenset[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many ids of an answer come before the control tokens, and blanks among them, that end it."""
    words = len(answer)
    while words and (answer[words - 1] in control or not tokenizer.decode(answer[words - 1 : words]).strip()):
        words -= 1
    # Blanks before the first control token are the answer's own.
    while words < len(answer) and answer[words] not in control:
        words += 1
    return words


def _ids_after(prompt: list[int], answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of an answer's text that read well after those of its prompt; none if there are none.

    They are needed where those of the prompt do not begin the conversation. Either a token spans the end of
    the prompt and the beginning of the answer, or the prompt opens a thought that the template does not write
    before an answer: then the thought is empty.
    """
    before_it = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    # Also behind a token that no text joins, since some tokenizers put a blank before the first word.
    for before in ("", tokenizer.eos_token or ""):
        ids = text_ids(tokenizer, before + answer)
        if before:
            del ids[0]
        if tokenizer.decode(prompt + ids, clean_up_tokenization_spaces=False) == before_it + answer:
            return ids
    return []


def _text_after(prompt: str, written: str, thinks: bool) -> str:
    """Return what follows a prompt in a conversation that is `written` with its answer, or "" if it does not.

    `thinks` says whether the answer comes with a thought.
    """
    if written.startswith(prompt):
        return written[len(prompt) :]
    for opening, empty in EMPTY_THOUGHTS.items():
        begin, end = re.escape(opening), re.escape(empty.strip())
        opened = re.search(rf"{begin}\s*\Z", prompt)
        ended = re.search(rf"({begin}\s*)?{end}\s*\Z", prompt)
        thought = opened or ended
        if thought is None or not written.startswith(prompt[: thought.start()]):
            continue
        answer = written[thought.start() :]
        if opened and answer.startswith(opening):  # with other blanks than in the prompt
            return answer.removeprefix(opening).lstrip()
        if opened and not thinks:
            return empty + answer
        if ended and not thinks:
            return re.sub(rf"\A({begin}\s*)?{end}\s*", "", answer)
    return ""


def _refuse_second_end(
    row: Row, tokenizer: PreTrainedTokenizerBase, message: Message, ends: list[int]
) -> None:
    """Refuse an answer whose text ends the turn itself; `ends` are all tokens that end it."""
    content = message["content"].rstrip()
    texts = [tokenizer.eos_token]
    for token in {i for i in ends if ends.count(i) > 1}:
        added = tokenizer.added_tokens_decoder[token]
        # Not </ul> and the like, which are ordinary tokens in some vocabularies.
        if added.special:
            texts.append(added.content)
    for end in texts:
        if end and content.endswith(end):
            found = f"{row.where}: an answer ends with {end}, and the chat template ends it once more"
            raise UsageError(found, f"remove {end} from the answers of the file")


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Example]:
    """Encode plain text as pieces, the last of which ends with the end of the sequence.

    Where the tokenizer begins every text with a token of its own, so does each piece: the model never reads a
    sequence without it. That token is not learned.
    """
    ids = text_ids(tokenizer, text)
    begins = tokenizer("finis")["input_ids"][:1] == [tokenizer.bos_token_id]
    start = [tokenizer.bos_token_id] if begins else []
    if start and ids[:1] == start:
        del ids[0]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    size = max(1, max_length - len(start))
    encoded = []
    for begin in range(0, len(ids), size):
        piece = ids[begin : begin + size]
        if len(piece) > 1:
            encoded.append(Example.of(start, piece))
    return encoded
