"""Sabotage a recovery of the embedded model in six ways; check that it halts before it does harm.

    python benchmarks/sabotage.py runs/quickstart/stages/01-finetune/adapter     # half an hour on one core

Harm is measured as the held-out KL, general and domain together, of the adapter that is left, compared with
tuned's own.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import head, parser_of, store

import opdcl.train.learner as learner
from opdcl.config.load import load
from opdcl.config.model import ModelConfig
from opdcl.console import Output
from opdcl.data.chat import check_turn_end
from opdcl.data.prompts import encode_prompts, read_recovery_source
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.model.load_backbone import load_backbone
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.losses import token_losses
from opdcl.train.recover import Provided, recover

Cost = Callable[[Backbone, torch.Tensor, torch.Tensor], torch.Tensor]
ANOTHER_TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def uniform_teacher(backbone: Backbone) -> None:
    backbone.causal_lm.model.norm.weight.data.zero_()  # makes all logits of every state equal


def another_template(backbone: Backbone) -> None:
    backbone.tokenizer.chat_template = ANOTHER_TEMPLATE


def broken_eos(backbone: Backbone) -> None:
    backbone.eos_ids = [0]  # <|endoftext|>, which ends documents but never an answer


@contextlib.contextmanager
def added_cost(
    cost: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], backbone: Backbone
) -> Iterator[None]:
    """Add a cost at every token, computed from the student's log-probabilities and the tokens."""

    def spoilt(student, teacher, tokens, loss):
        found = token_losses(student, teacher, tokens, loss)
        log_p = (student.states_NH @ student.head_VH.T).log_softmax(-1)
        return found._replace(loss=found.loss + 0.5 * cost(backbone, log_p, tokens.ids_N))

    with mock.patch.object(learner, "token_losses", spoilt):
        yield


def ending(backbone: Backbone, log_p: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """Return what makes it costly to end."""
    return log_p[:, backbone.eos_ids].logsumexp(-1)


def anything_new(backbone: Backbone, log_p: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """Return what makes every token costly but the one before it."""
    return -log_p.gather(-1, token_N.roll(1)[:, None])[:, 0]


CASES = {
    "none, the control": (None, {}),
    "a uniform teacher": (uniform_teacher, {}),
    "the chat template of another model": (another_template, {}),
    "an EOS list without the end-of-turn token": (broken_eos, {}),
    "a learning rate 30 times too high": (None, {"learning_rate": 9e-3}),
    "a reward for length": (partial(added_cost, ending), {}),
    "a reward for repetition": (partial(added_cost, anything_new), {}),
}


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("adapter", type=Path, help="adapter from a fine-tune on the handbook")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, help="fewer steps than the quickstart's")
    options = parser.parse_args()
    shorter = {"steps": options.steps} if options.steps else {}
    rows = []
    for name in options.cases:
        spoil, settings = CASES[name]
        rows.append({"sabotage": name, **case(options.adapter, spoil, settings | shorter)})
        print(json.dumps(rows[-1]), flush=True)
    store(options.out, head() | {"rows": rows})


def case(adapter: Path, spoil: Callable[[Backbone], Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Recover with one sabotage; return how it ends, and the held-out KL before and after."""
    given = {"domain": "handbook", "micro_batch_tokens": 2048} | settings
    config = load(["quickstart"])[0].recover.model_copy(update=given)
    backbone, started = load_backbone(ModelConfig()), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, ends, line = StageDir(Path(folder)), "it ran to its end", Output("quiet").stage("recover")
        try:
            with (spoil and spoil(backbone)) or contextlib.nullcontext():
                source = read_recovery_source(config)
                check_turn_end(backbone.tokenizer, backbone.eos_ids)  # as a run does beforehand
                prompts = encode_prompts(config, source, backbone.tokenizer, backbone.context_length)
                recover(config, prompts, backbone, adapter, out, line, Provided())
        except OpdclError as fault:
            ends = fault.message
        rows, kept = list(read_jsonl(out.metrics)), out.trainer / "best" / "validation.json"
        before = next((row["validation"] for row in rows if "validation" in row), None)
        return {
            "ends": ends.replace(folder, ""),
            "steps": sum("loss" in row for row in rows),
            "seconds": round(time.perf_counter() - started),
            "tuned_kl": before and before["general_kl"] + before["domain_kl"],
            "kept": read_json(kept) if kept.exists() else None,
            "health": [row["health"] for row in rows if "health" in row],
        }


if __name__ == "__main__":
    main()
