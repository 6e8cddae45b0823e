"""All trainings of opdcl, each as its streams: the first table of docs/how-it-works.md has them."""

from __future__ import annotations

from collections.abc import Iterator

from opdcl.config.finetune import FinetuneConfig
from opdcl.config.recover import RecoverConfig, RewardSection
from opdcl.train.finetune import finetune_streams
from opdcl.words import Loss, Stream, StreamName

ROWS = "rows.jsonl"
ANSWERED = "answered.jsonl"

_given = RecoverConfig(domain=ROWS, general=[ANSWERED], given_answers=True)
_reward = RewardSection(suite="instructions_train")
_rewarded = RecoverConfig(domain=ROWS, reward=_reward, lmbda=1, keep="last")

TRAININGS: dict[str, dict[StreamName, Stream]] = {
    "fine-tune": finetune_streams(FinetuneConfig(data=ROWS)),
    "recovery": RecoverConfig(domain=ROWS).streams(),
    "recovery, `given_answers`": _given.streams(),
    "recovery with a reward": _rewarded.streams(),
}


def table() -> Iterator[str]:
    """Yield the lines of the trainings' table, in Markdown."""
    yield "| training | stream | prompts | who writes | who teaches | loss | share of the steps |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for training, streams in TRAININGS.items():
        for stream in streams.values():
            if stream.share:
                cells = [training, stream.name, f"`{stream.prompts}`", stream.author, stream.teacher or "-"]
                yield f"| {' | '.join([*cells, _described(stream.loss), f'{stream.share:.0%}'])} |"


def _described(loss: Loss) -> str:
    """Return a loss in words."""
    words = loss.kind.replace("_", " ").replace("kl", "KL")
    if loss.reverse:
        words += f", {loss.reverse:g} of it reverse where the student writes"
    if loss.reward_weight is not None:
        words = f"{loss.reward_weight:g} clipped gradient + {loss.teacher_weight:g} {words}"
    return words
