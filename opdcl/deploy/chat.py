"""Ask the states of a run the same questions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import Row
from opdcl.errors import UsageError
from opdcl.model.load_backbone import accept_adapter, load_backbone
from opdcl.sampling.sample import sample
from opdcl.words import Prompt, Rollout


class Chat:
    """The loaded base with one or two adapters, which may belong to a tuned model beside it."""

    def __init__(
        self,
        base: ModelConfig,
        adapters: dict[str, Path],
        tuned: ModelConfig | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.0,
    ):
        self.backbone, self.name = load_backbone(base, tuned), base.id
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        # The backbone holds two adapters, under these names; a single adapter must be `student`.
        names = ("student",) if len(adapters) == 1 else ("tuned", "student")
        self.slots = {"base": "base", **dict(zip(adapters, names, strict=False))}
        for state, adapter in adapters.items():
            accept_adapter(self.backbone, adapter, self.slots[state])
        if adapters:
            self.backbone.peft.set_adapter("student")

    def answers(
        self,
        prompt: str,
        system: str | None,
        on_answer: Callable[[str, Callable[[], str]], None],
        stopped: Callable[[], bool] = bool,
    ) -> tuple[dict[str, str], list[str]]:
        """Return the answer of `base` and each adapter by state, and which of them are cut at the limit.

        `on_answer` gets each state, and a function that returns what it has written so far. Once `stopped`
        returns True, nothing more is written.

        Raises:
            UsageError: The prompt has bytes that are not UTF-8.
        """
        for text in (prompt, system or ""):
            _refuse_broken(text)
        messages = [{"role": "system", "content": system}] if system else []
        row = Row([*messages, {"role": "user", "content": prompt}], None, None, "prompt")
        longest_prompt = self.backbone.context_length - self.max_new_tokens
        ids = encode_prompt(row, self.backbone.tokenizer, longest_prompt)
        options: Any = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        options |= {"eos_ids": self.backbone.eos_ids, "stopped": stopped}
        texts, cut = {}, []
        for state, slot in self.slots.items():
            if stopped():
                break
            rollout = Rollout(Prompt(ids))  # the sampler appends to it
            on_answer(state, partial(self._text, rollout))
            with self.backbone.merged(slot) as model:
                sample(model, [rollout], **options)
            texts[state] = self._text(rollout)
            if len(rollout.completion_ids) == self.max_new_tokens and not rollout.finished:
                cut.append(state)
        return texts, cut

    def _text(self, rollout: Rollout) -> str:
        text = self.backbone.tokenizer.decode(list(rollout.completion_ids), skip_special_tokens=True)
        return str(text).strip()


def _refuse_broken(text: str) -> None:
    """Refuse a text with bytes that were not UTF-8, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        shown = text.encode(errors="replace").decode()[:60]
        hint = "convert it: iconv -f ISO-8859-1 -t UTF-8"
        raise UsageError(f"the prompt is not UTF-8: {shown!r}", hint) from fault
