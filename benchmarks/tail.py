"""How many requests does an adapter still answer in the domain's manner? Its first tokens tell.

    python benchmarks/tail.py ADAPTER [ADAPTER ...]       # minutes on a CPU

Base and each adapter answer 300 requests that no training saw, at temperature 1 and with the same seed, 24
tokens at most. An answer is short if it ends within 8 tokens, and far if it is more than 1 nat per token from
base. A model that answers everything else as base does has as many of both as base itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import head, parser_of, store

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import load_rows
from opdcl.model.accept import load_backbone
from opdcl.model.backbone import Backbone
from opdcl.results.status import DOMAIN_STYLE
from opdcl.train.learner import Learner
from opdcl.train.teachers import Teacher
from opdcl.words import Loss, Prompt

REQUESTS, TOKENS, SHORT, SEED = 300, 24, 8, 11


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("adapters", nargs="+", type=Path)
    parser.add_argument("--base", default="smollm2-135m", help="the model that the adapters stand on")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args()
    backbone = load_backbone(ModelConfig(id=options.base))
    rows = load_rows("everyday", "validation")[: options.requests]
    prompts = [Prompt(encode_prompt(row, backbone.tokenizer, backbone.context_length)) for row in rows]
    measured = {"base": measure(backbone, prompts, None)}
    for adapter in options.adapters:
        measured[str(adapter)] = measure(backbone, prompts, adapter)
    for name, found in measured.items():
        print(
            f"{name}: {found['short']} of {found['n']} short, {found['far']} far, {found['median']:.3f} nats"
        )
    store(options.out, head() | {"tokens": TOKENS, "seed": SEED, "models": measured})


def measure(backbone: Backbone, prompts: list[Prompt], adapter: Path | None) -> dict[str, Any]:
    """Let base, or an adapter, answer; return counts and each answer's length and distance to base."""
    backbone.drop_adapters()
    if adapter:
        backbone.load_adapter(adapter, "student")
    writer, base = Teacher(backbone, "student" if adapter else "base"), Teacher(backbone, "base")
    rollouts = writer.complete(prompts, max_new_tokens=TOKENS, seed=SEED)
    nats = [0.0] * len(rollouts)
    if adapter:
        learner = Learner(backbone, {}, "TOKENS", 2048)
        for i, rollout in enumerate(rollouts):
            sums = learner.measure(learner.score([rollout], Loss(), {"": base}))
            nats[i] = round(sums["kl"] / sums["tokens"], 4)
    lengths = [len(r.completion_ids) for r in rollouts]
    return {
        "n": len(rollouts),
        "short": sum(r.finished and len(r.completion_ids) <= SHORT for r in rollouts),
        "far": sum(value > DOMAIN_STYLE for value in nats),
        "median": sorted(nats)[len(nats) // 2],
        "lengths": lengths,
        "nats": nats,
    }


if __name__ == "__main__":
    main()
