"""Write a model that was fine-tuned as a whole as an adapter for its base, and say what that loses.

opdcl export my-tuned-model --base its-base --format adapter -o my-adapter
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import load_prompts
from opdcl.deploy.gguf import answer
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates
from opdcl.model.extract import (
    Change,
    linear_changes,
    needed_rank,
    other_changes,
    relative_error,
    write_extract,
)
from opdcl.model.forward import answer_states
from opdcl.model.load import load_base, load_model
from opdcl.model.tensors import shown_shape
from opdcl.stages.closeness import both_divergences
from opdcl.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from opdcl.training import StageReport

# Without a given rank: the largest accepted norm of what is left out, as a share of the whole change. A model
# that was merged in bfloat16 has lost some 0.1 to rounding already.
BOUND = 0.2
LARGEST_RANK = 256

# Held-out prompts on which the adapter is compared with the tuned model, and the tokens of an answer.
PROMPTS, TOKENS = 8, 48


def extract(
    base: ModelConfig, tuned: ModelConfig, rank: int | None, name: str, target: Path, report: StageReport
) -> dict[str, Any]:
    """Write what distinguishes two models as an adapter for the first, which the adapter calls `name`.

    Return its `rank`, its `relative_error` in all and by kind of layer (`kinds`), what is `left_out`, and the
    `distance` of tuned to base and to the adapter. Without a given `rank` the smallest is taken that keeps
    the error at or below `BOUND`.

    Raises:
        UsageError: The models are not alike, or differ in more than linear layers, or by too high a rank.
    """
    base_lm, tokenizer = load_base(base, as_stored=True)
    tuned_lm = load_model(tuned, as_stored=True)
    refuse_other_shapes(base.id, base_lm, tuned.id, tuned_lm)
    others = other_changes(base_lm, tuned_lm)
    if others and rank is None:
        problem = f"{tuned.id} is not {base.id} with an adapter: it has other {in_words(others)}"
        raise UsageError(problem, ways_out(base, tuned, "--rank N leaves these out"))
    most = rank or min(LARGEST_RANK, base_lm.config.get_text_config().hidden_size // 4)
    report.note(f"decomposing the changes of {tuned.id}")
    changes = linear_changes(base_lm, tuned_lm, most, report.progress)
    if not changes:
        raise UsageError(f"no linear layer of {tuned.id} differs from that of {base.id}", "check both names")
    rank = rank or needed_rank(changes, BOUND)
    if rank > most:
        problem = (
            f"{tuned.id} is too far from {base.id} with an adapter: an error of {BOUND} takes rank {rank}"
        )
        loss = f"--rank {most} leaves {100 * relative_error(changes, most):.0f} % of the change out"
        raise UsageError(problem, ways_out(base, tuned, loss))
    write_extract(changes, rank, name, target)
    if others:
        report.note(f"warning: left out are other {in_words(others)}")
    report.note("comparing it with the whole model")
    backbone = Backbone(base_lm, tokenizer)
    backbone.load_adapter(target, "student")
    return {
        "rank": rank,
        "relative_error": relative_error(changes, rank),
        "kinds": errors_by_kind(changes, rank),
        "left_out": others,
        "distance": distances(tuned_lm, backbone),
    }


def ways_out(base: ModelConfig, tuned: ModelConfig, loss: str) -> str:
    """Return the hint for a model that no adapter of a low rank is."""
    both = f"opdcl recover {tuned.id} --base {base.id} repairs it as it is, with both models in memory"
    return f"{both}; {loss}, and says what that costs"


def refuse_other_shapes(base: str, base_lm: PreTrainedModel, tuned: str, tuned_lm: PreTrainedModel) -> None:
    """Refuse two models of which one has a weight that the other has not, or in another shape."""
    ours, theirs = shapes(base_lm), shapes(tuned_lm)
    for name in sorted({*ours, *theirs}):
        needed, found = ours.get(name, "missing"), theirs.get(name, "missing")
        if needed != found:
            problem = f"{tuned} has another shape than {base}: {name} is {found}, there {needed}"
            raise UsageError(problem, "--base names the model that it was fine-tuned from")


def shapes(model: PreTrainedModel) -> dict[str, str]:
    """Return the sizes of a model's weights as text, tied ones included."""
    weights = model.named_parameters(remove_duplicate=False)
    return {name: shown_shape(weight.shape) for name, weight in weights}


def in_words(others: dict[str, float]) -> str:
    """Say which tensors have changed, by kind, with the largest relative change of each."""
    by_kind: dict[str, list[float]] = {}
    for name, change in others.items():
        kind = ".".join(name.split(".")[-2:])
        by_kind.setdefault(kind, []).append(change)
    return ", ".join(f"{kind} ({len(c)}, by up to {max(c):.2%})" for kind, c in by_kind.items())


def errors_by_kind(changes: Sequence[Change], rank: int) -> dict[str, float]:
    """Return kind of layer -> relative error of this rank."""
    by_kind: dict[str, list[Change]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    return {kind: relative_error(of_kind, rank) for kind, of_kind in sorted(by_kind.items())}


def distances(tuned_lm: PreTrainedModel, backbone: Backbone) -> dict[str, float]:
    """Return KL(tuned, base) and KL(tuned, adapter) in nats per token, on tuned's own answers.

    The prompts are held-out everyday ones.
    """
    rows = load_prompts("everyday", "validation")[:PROMPTS]
    texts = []
    for row in rows:
        prompt = encode_prompt(row, backbone.tokenizer, backbone.context_length - TOKENS)
        texts.append(Example.of(prompt, answer(tuned_lm, prompt, TOKENS)[len(prompt) :]))
    found = {}
    with torch.no_grad():
        tuned = HiddenStates(answer_states(tuned_lm, texts), tuned_lm.get_output_embeddings().weight)
        for name, state in (("base", "base"), ("adapter", "student")):
            with backbone.state(state) as model:
                other = HiddenStates(answer_states(model, texts), backbone.head_of(state))
            kl_N, _ = both_divergences(other, tuned)
            found[name] = max(float(kl_N.mean()), 0.0)
    return found | {"tokens": len(tuned.states_NH)}
