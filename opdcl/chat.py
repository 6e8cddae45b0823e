"""Use what a run made: talk to its states side by side, or export one as a plain model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opdcl.config import Workflow
from opdcl.data import Row, encode_prompt
from opdcl.distill.backbone import Backbone
from opdcl.distill.rollouts import sample
from opdcl.errors import UsageError
from opdcl.rundir import STAGE_OF, RunDir, folder_appears_whole, read_json
from opdcl.training import StageReport


def answers(run: RunDir, prompts: Iterable[str], max_new_tokens: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each prompt with the greedy answer of every state that the run has."""
    backbone = _backbone(run)
    adapters = run.adapters()
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
        ids = encode_prompt(row, backbone.tokenizer, backbone.causal_lm.config.max_position_embeddings - max_new_tokens)
        said = {}
        for state, seat in {"base": "base", **seats}.items():
            with backbone.merged(seat) as model:
                (rollout,) = sample(model, [ids], max_new_tokens=max_new_tokens, eos_ids=backbone.eos_ids, temperature=0)
            said[state] = backbone.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True).strip()
        yield prompt, said


def export(run: RunDir, state: str, to: Path, report: StageReport) -> dict[str, Any]:
    """Write base + adapter as a safetensors model with its tokenizer."""
    if state not in STAGE_OF:
        raise UsageError(f"state {state!r} cannot be exported", "--state tuned or --state recovered")
    if to.exists():
        raise UsageError(f"{to} exists", "choose a new folder with -o")
    folder = run.adapters().get(state)
    if folder is None:
        raise UsageError(f"{run.path} has no {state} adapter", f"opdcl {STAGE_OF[state]} makes it")
    backbone = _backbone(run)
    report.note("merging")
    merged = backbone.load_adapter(folder, "student").merge_and_unload()
    merged.config.use_cache = True
    with folder_appears_whole(to) as temporary:
        merged.save_pretrained(temporary)
        backbone.tokenizer.save_pretrained(temporary)
    return {"state": state, "path": str(to), "adapter": str(folder)}


def _backbone(run: RunDir) -> Backbone:
    return Backbone.load(Workflow.model_validate(read_json(run.config)["workflow"]).model)
