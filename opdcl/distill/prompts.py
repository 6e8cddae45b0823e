"""The data of a recovery: rows, read once; token ids per stream, with each prompt's teacher and context."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import BUILT_IN
from opdcl.data.chat import encode_prompt
from opdcl.data.examples import learned_turns
from opdcl.data.rows import Row, check_prompts, is_shipped, load_rows
from opdcl.distill.mixture import read_mixture
from opdcl.distill.reward import load_reward_task, reward_rows
from opdcl.distill.schedule import STREAMS, Stream
from opdcl.errors import UsageError
from opdcl.sampling.rollout import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RecoverySource:
    """What a recovery reads: checked rows by stream, and the lm-eval task behind `recover.reward`, if any.

    `held_out` holds the rows of streams whose data has a validation split of its own.
    """

    rows: dict[Stream, list[Row]]
    held_out: dict[Stream, list[Row]]
    reward_task: Any | None = None


@dataclass(frozen=True)
class Prompts:
    """One stream's prompts, to train on and held out."""

    train: list[Prompt]
    held_out: list[Prompt]


def read_recovery_source(
    config: RecoverConfig,
    read_rows: Callable[..., list[Row]] = load_rows,
    load_suite: Callable[[str], Any] = load_reward_task,
) -> RecoverySource:
    """Read and check all rows of a recovery.

    `read_rows` returns the rows of a source and, optionally, split; `load_suite` the lm-eval task of a suite.

    Raises:
        UsageError: A row is malformed, names an unknown teacher, or lacks the answer for its context.
    """
    rows: dict[Stream, list[Row]] = {stream: [] for stream in STREAMS}
    held_out: dict[Stream, list[Row]] = {}
    if config.domain:
        rows["domain"] = check_prompts(read_rows(config.domain))
    for name, teacher in config.teachers.items():
        if teacher.prompts:
            own = check_prompts(read_rows(teacher.prompts))
            rows["domain"] = rows["domain"] + [replace(row, teacher=name) for row in own]
    rows["general"], others = read_mixture(config, read_rows, bool(rows["domain"]))
    if others is not None:
        held_out["general"] = others
    for stream in STREAMS:
        for row in rows[stream]:
            _check_teacher(config, stream, row)
    if config.given_answers:
        for row in rows["general"] + held_out.get("general", []):
            if not row.answer:
                hint = (
                    "give every general row one: `completion` beside `prompt`, or `answer` beside `question`"
                )
                raise UsageError(f"{row.where} has no answer to learn from", hint)
    if not config.reward:
        return RecoverySource(rows, held_out)
    task = load_suite(config.reward.suite)
    rows["general"] = reward_rows(config.reward, task)
    return RecoverySource(rows, held_out, task)


def _check_teacher(config: RecoverConfig, stream: Stream, row: Row) -> None:
    known = [*BUILT_IN, *config.teachers]
    if row.teacher and row.teacher not in known:
        hint = f"define it in recover.teachers, or name one of {', '.join(known)}"
        raise UsageError(f"{row.where} names an unknown teacher {row.teacher!r}", hint)
    context = config.teacher_of(stream, row.teacher).context
    if row.teacher and "{feedback}" in (context or ""):
        raise UsageError(f"{row.where} names the teacher of a reward's answers", "name another teacher")
    if not row.answer and context is not None:
        hint = "give every row of that teacher an answer"
        raise UsageError(f"{row.where} has no answer for its teacher's context", hint)


def encode_stream(
    config: RecoverConfig,
    source: RecoverySource,
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
) -> Prompts:
    """Encode a stream's prompts, and split off the held-out ones; `context_length` is the model's, in tokens.

    Raises:
        UsageError: A prompt leaves no room for an answer, or there is only one prompt.
    """
    room = context_length - config.limit(stream)

    def encode(rows: list[Row]) -> list[Prompt]:
        prompts: list[Prompt] = []
        for row in rows:
            # Shipped prompts without room are left out: a user cannot shorten them.
            limit = sys.maxsize if is_shipped(row) else room
            ids = encode_prompt(row, tokenizer, limit)
            if len(ids) > room:
                continue
            context = config.teacher_of(stream, row.teacher).context
            shown = None
            if context is not None and row.answer:
                shown = encode_prompt(row.with_context(context, row.answer), tokenizer, limit)
            answer = None
            if stream == "general" and config.given_answers:
                answer = _own_answer(row, tokenizer)
            prompts.append(Prompt(ids, row.teacher, shown, number=len(prompts), answer=answer))
        return prompts

    prompts = encode(source.rows[stream])
    if stream not in source.held_out:
        return _split(prompts, stream, config.validation_prompts)
    held_out = encode(source.held_out[stream])
    return Prompts(prompts, [held_out[i] for i in _spread(len(held_out), config.validation_prompts)])


def question_of(
    prompt: Prompt, source: RecoverySource, stream: Stream, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of a held-out prompt, for people."""
    for row in source.held_out.get(stream, source.rows[stream]):
        if encode_prompt(row, tokenizer, sys.maxsize) == prompt.ids:
            return row.shown()
    return ""


def _own_answer(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of a row's answer, with the token that ends it, as a fine-tune would learn them."""
    turn = learned_turns(row, tokenizer)[-1]
    if turn is None:
        message = f"{row.where}: with this chat template no prompt leads to its answer"
        raise UsageError(
            message, "leave the row out, or name another template: --set model.chat_template=FILE"
        )
    return turn.answer


def _spread(size: int, count: int) -> list[int]:
    """Return `count` indices below `size` at equal distances, or all of them."""
    return sorted({i * size // count for i in range(count)})


def _split(prompts: list[Prompt], stream: Stream, count: int) -> Prompts:
    """Return the prompts to train on and at most `count` held-out ones."""
    if len(prompts) == 1:
        message = f"the {stream} stream has one prompt; recovery needs some to sample on and some to hold out"
        raise UsageError(message, "add prompts")
    # Evenly spread, so that all topics of a file sorted by topic are held out.
    count = min(count, len(prompts) // 2)
    measured = [prompts[i] for i in _spread(len(prompts), count)]
    if stream == "domain":  # it is practised as a whole: what is not practised is not protected
        return Prompts(prompts, measured)
    # A file may hold a prompt several times, and what is measured must not be practised.
    asked = {tuple(prompt.ids) for prompt in measured}
    train = [prompt for prompt in prompts if tuple(prompt.ids) not in asked]
    if prompts and not train:
        raise UsageError(f"the prompts of the {stream} stream are all the same", "add other prompts")
    return Prompts(train, measured)
