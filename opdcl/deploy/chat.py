"""Talk to what a run made: its states side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opdcl.data.chat import encode_prompt
from opdcl.data.rows import Row
from opdcl.model.adapters import find_states
from opdcl.model.backbone import Backbone
from opdcl.sampling.sample import sample


def answers(place: str, prompts: Iterable[str], max_new_tokens: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each prompt with the greedy answer of base and of every state that a run has, or of one adapter."""
    base, adapters = find_states(place)
    backbone = Backbone.load(base)
    # `tuned` and `student` are the backbone's two seats for adapters.
    seats = dict(zip(adapters, ("tuned", "student"), strict=False))
    if "student" not in seats.values() and adapters:
        seats = dict.fromkeys(adapters, "student")
    for state, seat in seats.items():
        backbone.load_adapter(adapters[state], seat)
    if "student" in seats.values():
        backbone.peft.set_adapter("student")
    for prompt in prompts:
        row = Row([{"role": "user", "content": prompt}], None, None, "prompt")
        ids = encode_prompt(
            row, backbone.tokenizer, backbone.causal_lm.config.max_position_embeddings - max_new_tokens
        )
        said = {}
        for state, seat in {"base": "base", **seats}.items():
            with backbone.merged(seat) as model:
                (rollout,) = sample(
                    model, [ids], max_new_tokens=max_new_tokens, eos_ids=backbone.eos_ids, temperature=0
                )
            said[state] = backbone.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True).strip()
        yield prompt, said
