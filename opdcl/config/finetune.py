"""Settings of the fine-tune."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opdcl.config.model import LoraSection
from opdcl.config.section import Auto, BatchSize, Positive, Rate, Section, Seed

# The share of the steps, the first ones, in which the learning rate rises.
WARM_UP = 0.05

# The longest answer that is replayed, in tokens.
REPLAYED_TOKENS = 128


class ReplaySection(Section):
    """Replay: general prompts with answers of at most 128 tokens. At each of these the student learns base's
    whole distribution."""

    unused = (("most prompts", lambda s: s.share == 0, "unless replay.share is above 0"),)
    former = {"author": ("base", "base writes all answers; a recovery grades what the student writes")}

    share: Annotated[float, Field(ge=0, le=0.99)] = 0.7
    """Share of all rows that are replayed; 0: none. They come on top of the domain's rows: with 0.7 there are
    a little more than three times as many steps, and base writes seven answers for three of your rows."""
    most: Positive = 2000
    """Limit of the replayed rows, if the share asks for more: base writes an answer for each."""
    prompts: str = Field(default="everyday", min_length=1)
    """General prompts: `everyday` (shipped), a file, or a Hub dataset."""


SELF_DISTILLATION_IS_GONE = "a fine-tune imitates the rows' answers; by self-distillation it taught nothing"
SELF_DISTILLED = {
    "max_new_tokens": 64,
    "context": "{prompt}\n\nA good answer would be: {answer}\n\nAnswer in your own words.",
}


class FinetuneConfig(Section):
    """Fine-tune of a LoRA adapter on the domain: only answer tokens count in the loss."""

    former = {
        "method": ("sft", SELF_DISTILLATION_IS_GONE),
        "self_distill": (SELF_DISTILLED, SELF_DISTILLATION_IS_GONE),
        "schedule": ("cosine", "the learning rate always falls on a cosine"),
        "warmup": (WARM_UP, "the learning rate always rises in the first 5 % of the steps"),
        "weight_decay": (
            0.0,
            "a lower learning_rate or fewer epochs keep the adapter small, and so does replay",
        ),
    }

    data: str = Field(min_length=1)
    """`handbook` (shipped), a JSONL, CSV or Parquet file, a folder of such files or of documents, or a Hub
    dataset: `owner/name@revision`."""
    lora: LoraSection = LoraSection()
    """Shape of the adapter."""
    learning_rate: Rate | Auto = "auto"
    """Peak learning rate. It rises in the first 5 % of the steps, and falls to zero on a cosine. `auto`:
    1e-3 * (576 / hidden size)^0.781 * 2 / (alpha / r), that is 1e-3 for the embedded model and 2.2e-4 at
    hidden size 4096. Tested at 576 only; the exponent is the former one of tinker-cookbook for Llama models,
    cautious for others."""
    epochs: Annotated[float, Field(gt=0, le=10_000)] = 5
    """Passes over the data."""
    batch_size: BatchSize | Auto = "auto"
    """Rows per optimizer step. `auto`: 16."""
    max_length: Positive = 1024
    """Maximum row length in tokens. Plain text is split into pieces of this size; for longer rows see
    `long_rows`."""
    long_rows: Literal["refuse", "skip", "cut"] = "refuse"
    """What to do with rows over `max_length`. `refuse`: stop before training and say how many there are.
    `skip`: leave them out. `cut`: keep their first `max_length` tokens; the end of the answer is lost."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with rows that cannot be learned: malformed, refused by the chat template, or without an
    answer. `refuse`: stop before training. `skip`: leave them out and say how many there are."""
    replay: ReplaySection = ReplaySection()
    """Mix general rows into the fine-tune."""
    save_steps: Positive = 50
    """Optimizer steps between checkpoints."""
    seed: Seed = 0
    """Seed of the row order and of the adapter's initialization."""

    @property
    def replays(self) -> bool:
        """Whether general rows are among the domain's."""
        return self.replay.share > 0

    def replayed_by_share(self, count: int) -> int:
        """Return how many rows or steps `replay.share` asks for beside this many of the domain."""
        share = self.replay.share
        return round(count * share / (1 - share)) if self.replays else 0

    def replayed(self, rows: int) -> int:
        """Return how many rows are replayed beside this many of the domain."""
        return min(self.replayed_by_share(rows), self.replay.most)
