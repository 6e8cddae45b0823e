"""The data of a recovery: rows, read once; token ids per stream, with each prompt's teacher and context.

General prompts come from one source, or from several in given shares. A single file is used whole. The
shipped prompts are drawn group by group. With a reward, the documents of a suite are the prompts, asked word
for word as an evaluation asks them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from opdcl.config.recover import PROMPTS_OF_START, RecoverConfig, RewardSection
from opdcl.config.teacher import BUILT_IN
from opdcl.data.chat import encode_prompt, render
from opdcl.data.examples import learned_turns
from opdcl.data.formats import PACKED_ROW, Row
from opdcl.data.messages import THOUGHT, THOUGHTS, Message
from opdcl.data.rows import check_prompts, is_shipped, load_rows
from opdcl.errors import UsageError
from opdcl.words import STREAMS, Prompt, Prompts, StreamName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_reward_task(suite: str) -> Any:
    """Return the lm-eval task of a suite."""
    from opdcl.data.suites import load_suite

    return load_suite(suite).task


def reward_rows(config: RewardSection, task: Any) -> list[Row]:
    """Return a task's documents as prompts, word for word as an evaluation asks them.

    Raises:
        UsageError: The task is not generative, has no such metric or a metric where less is better, begins
            the answer itself, or asks the same twice.
    """
    from opdcl.data.suites import FEWSHOT_SEED  # it loads `datasets`

    _check_task(config, task)
    task.set_fewshot_seed(FEWSHOT_SEED)
    rows: list[Row] = []
    number_of: dict[str, int] = {}
    for number, doc in enumerate(task.eval_docs):
        conversation = task.fewshot_context(
            doc,
            task.config.num_fewshot or 0,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            chat_template=lambda messages, **_: json.dumps(messages),
            gen_prefix=task.doc_to_prefix(doc),
        )
        row = Row(json.loads(conversation), None, None, f"{config.suite} document {number}")
        if PACKED_ROW in doc:
            row = Row.unpacked(doc[PACKED_ROW])
        if row.prompt[-1]["role"] == "assistant":
            message = f"recover.reward.suite: {config.suite} begins the answer itself"
            raise UsageError(message, "choose a suite that only asks")
        if (first := number_of.setdefault(row.key(), number)) != number:
            message = f"recover.reward.suite: documents {first} and {number} of {config.suite} ask the same"
            raise UsageError(message, "keep one of them: an answer must have one score")
        rows.append(row)
    return rows


def count_short_of_room(
    config: RecoverConfig, rows: list[Row], tokenizer: PreTrainedTokenizerBase, room: int
) -> int:
    """Return how many prompts have too little room for the longest demonstration in a context of `room`.

    Raises:
        UsageError: No prompt has room for any.
    """
    context, longest = config.teacher_of("general").context, config.max_new_tokens
    if not (config.reward and context):
        return 0
    left = []
    for row in rows:
        shown = encode_prompt(row.with_context(context, ""), tokenizer, sys.maxsize)
        left.append(room - len(shown) - longest)  # the graded completion also takes context
    if max(left) <= 0:
        message = f"the context of recover.general_teacher leaves no room for an answer within {room} tokens"
        raise UsageError(message, "shorten it, or lower recover.max_new_tokens")
    return sum(one < longest for one in left)


def _check_task(config: RewardSection, task: Any) -> None:
    metrics = f"it has {', '.join(task.aggregation())}"
    if task.OUTPUT_TYPE != "generate_until":
        message = f"recover.reward.suite: {config.suite} has no answers to write"
        raise UsageError(message, "choose a generative suite")
    if config.metric and config.metric not in task.aggregation():
        raise UsageError(f"recover.reward.metric: {config.suite} has no score {config.metric!r}", metrics)
    metric = metric_of(config, task)
    if not task.higher_is_better().get(metric, True):
        raise UsageError(f"recover.reward.metric: less {metric} is better, so it is no reward", metrics)


def metric_of(config: RewardSection, task: Any) -> str:
    """Return the score of a suite that is the reward: the named one, or its first."""
    return config.metric or next(iter(task.aggregation()))


SHIPPED = "everyday"

# Group of shipped prompts -> its share of those that are drawn. A third are short facts: a fine-tune on
# questions and answers damages them most, and they come back last.
GROUPS = {"fact": 3.08 / 9} | dict.fromkeys(
    ("constraints", "list", "open", "long", "text", "conversation", "code", "doubtful"), 0.74 / 9
)

ReadRows = Callable[..., list[Row]]


@dataclass(frozen=True)
class RecoverySource:
    """What a recovery reads: checked rows by stream, and the lm-eval task behind `recover.reward`, if any.

    `held_out` holds the rows of streams whose data has a validation split of its own.
    """

    rows: dict[StreamName, list[Row]]
    held_out: dict[StreamName, list[Row]]
    reward_task: Any | None = None


class _Part(NamedTuple):
    """A source, or a group of the shipped prompts. Without `held_out`, some of `train` are held out."""

    share: float
    train: list[Row]
    held_out: list[Row] | None = None


def read_recovery_source(
    config: RecoverConfig,
    read_rows: ReadRows = load_rows,
    load_suite: Callable[[str], Any] = load_reward_task,
) -> RecoverySource:
    """Read and check all rows of a recovery.

    `read_rows` returns the rows of a source and, optionally, split; `load_suite` the lm-eval task of a suite.

    Raises:
        UsageError: A row is malformed, names an unknown teacher, or lacks the answer for its context.
    """
    rows: dict[StreamName, list[Row]] = {stream: [] for stream in STREAMS}
    held_out: dict[StreamName, list[Row]] = {}
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
        hint = "give every general row one: `completion` beside `prompt`, or `answer` beside `question`"
        for row in rows["general"] + held_out.get("general", []):
            if not row.answer:
                raise UsageError(f"{row.where} has no answer to learn from", hint)
    if not config.reward:
        return RecoverySource(rows, held_out)
    task = load_suite(config.reward.suite)
    rows["general"] = reward_rows(config.reward, task)
    return RecoverySource(rows, held_out, task)


def read_mixture(
    config: RecoverConfig, read_rows: ReadRows, has_domain: bool
) -> tuple[list[Row], list[Row] | None]:
    """Read the general prompts of a recovery.

    Returns: The rows to train on, and those held out; None if these are yet to be split off.

    Raises:
        UsageError: A row is malformed.
    """
    sources = config.general_sources()
    parts = [part for source, share in sources.items() for part in _parts(source, share, read_rows)]
    if not parts:
        return [], None
    if len(parts) == 1:
        return parts[0].train, None
    drawn = prompts_drawn(config, has_domain)
    train: list[Row] = []
    held_out: list[Row] = []
    for number, part in enumerate(parts):
        # At least one each, so that a small part is trained and measured.
        count, aside = (max(1, round(part.share * n)) for n in (drawn, config.validation_prompts))
        ours, others = _draw(part, count, aside, config.seed + number)
        train += ours
        held_out += others
    return train, held_out


def prompts_drawn(config: RecoverConfig, has_domain: bool) -> int:
    """Return how many general prompts the schedule of a recovery draws, or its start if that is all."""
    if not config.steps:
        return PROMPTS_OF_START["general"]
    alternates = has_domain and config.method != "general"
    of_domain = config.steps // (config.general_per_domain + 1) if alternates else 0
    return (config.steps - of_domain) * config.completions("general")


def _parts(source: str, share: float, read_rows: ReadRows) -> list[_Part]:
    """Return what is drawn from a source: the shipped prompts group by group, another source as a whole."""
    rows = check_prompts(read_rows(source))
    if source != SHIPPED:
        return [_Part(share, rows)]
    held_out = check_prompts(read_rows(source, "validation"))
    return [
        _Part(share * of_group, _of_group(rows, group), _of_group(held_out, group))
        for group, of_group in GROUPS.items()
    ]


def _of_group(rows: list[Row], group: str) -> list[Row]:
    return [row for row in rows if row.group == group]


def _draw(part: _Part, count: int, aside: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return `count` rows to train on, repeated if there are fewer, and up to `aside` others to hold out."""
    train, held_out = [*part.train], part.held_out
    random.Random(seed).shuffle(train)
    if held_out is None:
        aside = min(aside, len(train) // 2)
        train, held_out = train[aside:], train[:aside]
        # A file may hold a prompt several times, and what is measured must not be practised.
        measured = {row.key() for row in held_out}
        train = [row for row in train if row.key() not in measured]
        if not train:  # they are all the same: like a single prompt, it is practised
            train, held_out = held_out, []
    return [*islice(cycle(train), count)], held_out[:aside]


def _check_teacher(config: RecoverConfig, stream: StreamName, row: Row) -> None:
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


def encode_prompts(
    config: RecoverConfig, source: RecoverySource, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> dict[StreamName, Prompts]:
    """Encode the prompts of all streams, as `encode_stream`."""
    return {stream: encode_stream(config, source, stream, tokenizer, context_length) for stream in STREAMS}


def encode_stream(
    config: RecoverConfig,
    source: RecoverySource,
    stream: StreamName,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
) -> Prompts:
    """Encode a stream's prompts, and split off the held-out ones; `context_length` is the model's, in tokens.

    Raises:
        UsageError: A prompt leaves no room for an answer, or there is none to hold out.
    """
    encode = partial(_encode, config, stream, tokenizer, context_length)
    train, measured_rows = encode(source.rows[stream]), source.rows[stream]
    if stream in source.held_out:
        measured_rows = source.held_out[stream]
        measured = encode(measured_rows)
        if not measured:
            message = f"no prompt of the {stream} stream can be held out: each of its sources has only one"
            raise UsageError(message, "add prompts")
        held_out = [measured[i] for i in _spread(len(measured), config.validation_prompts)]
    else:
        train, held_out = _split(train, stream, config.validation_prompts)
    return Prompts(train, held_out, tuple(measured_rows[one.number].shown() for one in held_out))


def _encode(
    config: RecoverConfig,
    stream: StreamName,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    rows: list[Row],
) -> list[Prompt]:
    """Return rows as prompts. Shipped ones without room are left out: a user cannot shorten them."""
    longest = config.limit(stream)
    room = context_length - longest
    prompts: list[Prompt] = []
    for number, row in enumerate(rows):
        limit = sys.maxsize if is_shipped(row) else room
        if config.reward and stream == "general":
            prompt = Prompt(encode_prompt(row, tokenizer, limit))
        else:
            prompt = encode_turns(row, tokenizer, limit, longest)
        if len(prompt.ids) > room:
            continue
        context = config.teacher_of(stream, row.teacher).context
        shown = None
        if context is not None and row.answer:
            shown = encode_prompt(row.with_context(context, row.answer), tokenizer, limit)
        answer = None
        if stream == "general" and config.given_answers:
            answer = _own_answer(row, tokenizer)
        prompts.append(replace(prompt, teacher=row.teacher, context=shown, number=number, answer=answer))
    if rows and not prompts:
        message = f"no prompt of the {stream} stream leaves room for an answer of {longest} tokens"
        hint = "lower recover.max_new_tokens, or name shorter prompts of your own"
        raise UsageError(f"{message} in the context of {context_length}", hint)
    return prompts


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


def _split(prompts: list[Prompt], stream: StreamName, count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and at most `count` held-out ones."""
    if len(prompts) == 1:
        message = f"the {stream} stream has one prompt; recovery needs some to sample on and some to hold out"
        raise UsageError(message, "add prompts")
    # Evenly spread, so that all topics of a file sorted by topic are held out.
    count = min(count, len(prompts) // 2)
    measured = [prompts[i] for i in _spread(len(prompts), count)]
    if stream == "domain":  # it is practised as a whole: what is not practised is not protected
        return prompts, measured
    # A file may hold a prompt several times, and what is measured must not be practised.
    asked = {tuple(prompt.ids) for prompt in measured}
    train = [prompt for prompt in prompts if tuple(prompt.ids) not in asked]
    if prompts and not train:
        raise UsageError(f"the prompts of the {stream} stream are all the same", "add other prompts")
    return train, measured


# -- Conversations of several turns, whose earlier answers are the model's own. What stands around these is
# the chat template's: it is found by giving the template an answer that can be found again.

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
