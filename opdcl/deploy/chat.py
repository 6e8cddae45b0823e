"""Ask the states of a run the same questions, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opdcl.data.chat import encode_prompt
from opdcl.data.rows import Row
from opdcl.model.adapters import find_states
from opdcl.model.backbone import Backbone
from opdcl.sampling.sample import sample


def answers(source: str, prompts: Iterable[str], max_new_tokens: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each prompt with its greedy answers by state: `base` and each adapter of `source`."""
    base, adapters = find_states(source)
    backbone = Backbone.load(base)
    # The backbone holds two adapters, under these names; a single adapter must be `student`.
    slots = dict(zip(adapters, ("student",) if len(adapters) == 1 else ("tuned", "student"), strict=False))
    for state, slot in slots.items():
        backbone.load_adapter(adapters[state], slot)
    if slots:
        backbone.peft.set_adapter("student")
    longest_prompt = backbone.context_length - max_new_tokens
    for prompt in prompts:
        row = Row([{"role": "user", "content": prompt}], None, None, "prompt")
        ids = encode_prompt(row, backbone.tokenizer, longest_prompt)
        texts = {}
        for state, slot in {"base": "base", **slots}.items():
            with backbone.merged(slot) as model:
                (rollout,) = sample(
                    model, [ids], max_new_tokens=max_new_tokens, eos_ids=backbone.eos_ids, temperature=0
                )
            texts[state] = backbone.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True).strip()
        yield prompt, texts
