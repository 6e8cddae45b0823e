"""The prompts of a recovery, stream by stream: which of them are held out, who grades them, what that teacher is shown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import Row, load_prompts
from opdcl.distill.schedule import Stream
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from opdcl.distill.teachers import Contexts
    from opdcl.model.backbone import Backbone


STREAMS: tuple[Stream, ...] = ("general", "domain")


@dataclass(frozen=True)
class Prompts:
    """Token ids of one stream's prompts; by these ids also what is known of single prompts.

    `routes` names the teacher of those that have one of their own, `contexts` holds per name what that teacher sees in
    their place. The stream's own teacher has the name "".
    """

    train: list[list[int]]
    held_out: list[list[int]]
    routes: dict[tuple[int, ...], str] = field(default_factory=dict)
    contexts: dict[str, Contexts] = field(default_factory=dict)


def teacher_section(config: RecoverConfig, stream: Stream, name: str) -> TeacherSection:
    """Return the configuration of a named teacher, or of the stream's own."""
    if name:
        return config.teachers[name]
    return config.general_teacher if stream == "general" else config.domain_teacher


def stream_rows(config: RecoverConfig, stream: Stream) -> list[Row]:
    """Load a stream's rows: those of its source, and for the domain those that single teachers bring along.

    Raises:
        UsageError: A row names a teacher that there is not, or its teacher is to be shown an answer that it has not.
    """
    source = config.source(stream)
    rows = load_prompts(source) if source else []
    if stream == "general" and config.reward:
        from opdcl.distill.reward import reward_rows

        rows = reward_rows(config.reward)
    if stream == "domain":
        for name, teacher in config.teachers.items():
            rows += (
                [replace(row, teacher=name) for row in load_prompts(teacher.prompts)]
                if teacher.prompts
                else []
            )
    for row in rows:
        if row.teacher and row.teacher not in config.teachers:
            known = (
                f"recover.teachers has {', '.join(config.teachers)}"
                if config.teachers
                else "recover.teachers names them"
            )
            raise UsageError(f"{row.where}: no teacher {row.teacher!r}", known)
        rewarded = stream == "general" and config.reward  # whose answers are still to be written
        if (
            row.answer is None
            and not rewarded
            and teacher_section(config, stream, row.teacher).context is not None
        ):
            raise UsageError(
                f"{row.where}: no answer that the context of its teacher could show",
                "give every row an answer",
            )
    return rows


def encode_stream(config: RecoverConfig, stream: Stream, backbone: Backbone) -> Prompts:
    """Load and encode a stream's prompts, and split off those that progress is measured on."""
    rows = stream_rows(config, stream)
    length = (config.domain_max_new_tokens if stream == "domain" else None) or config.max_new_tokens
    room = backbone.causal_lm.config.max_position_embeddings - length
    ids = [encode_prompt(row, backbone.tokenizer, room) for row in rows]
    found = Prompts(*_split(config, stream, ids, room, backbone))
    teacher_of: dict[tuple[int, ...], str] = {}
    for row, prompt in zip(rows, map(tuple, ids), strict=True):
        if teacher_of.setdefault(prompt, row.teacher) != row.teacher:
            raise UsageError(
                f"{row.where}: the same prompt has another teacher above", "name one teacher per prompt"
            )
        if row.teacher:
            found.routes[prompt] = row.teacher
        context = teacher_section(config, stream, row.teacher).context
        if context is not None and row.answer is not None:
            shown = encode_prompt(row.with_context(context, row.answer), backbone.tokenizer, room)
            found.contexts.setdefault(row.teacher, {}).setdefault(prompt, shown)
    return found


def _split(
    config: RecoverConfig, stream: Stream, ids: list[list[int]], room: int, backbone: Backbone
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts to train on and those held out."""
    count = config.validation_prompts
    if config.source(stream) == "everyday":
        kept = [
            encode_prompt(row, backbone.tokenizer, room) for row in load_prompts("everyday", "validation")
        ]
        return ids, kept[:: max(1, len(kept) // count)][:count]
    if len(ids) == 1:
        raise UsageError(
            f"the {stream} stream has one prompt; recovery needs some to sample on and some to hold out",
            "add prompts",
        )
    # Evenly spread, so that a file sorted by topic is held out from all of its topics.
    count = min(count, len(ids) // 2)
    held = sorted({i * len(ids) // count for i in range(count)})
    # A domain is held whole in the guard: what is not practised is not protected.
    train = ids if stream == "domain" else [p for i, p in enumerate(ids) if i not in held]
    return train, [ids[i] for i in held]
