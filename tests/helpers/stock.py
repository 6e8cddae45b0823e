"""Rows of our own in the columns of lm-eval's tasks, and what lm-eval itself makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM

from opdcl.data.stock_tasks import stock_file

# A task of lm-eval -> two or more rows of its test data, and as many examples as its prompts show: first
# those whose answers are written (begun by the task; with stops that are texts, several, none; with examples
# as turns; with a system text), then those that cannot be scored here, then those of likelihoods.
STOCK: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def write_stock(folder: Path, name: str, **changes: Any) -> Path:
    """Write lm-eval's own task with the rows in `STOCK` as its data, and with `changes`; return its file."""
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in STOCK[name]))
    settings = load_yaml(stock_file(name), resolve_func=False)
    places = (settings.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot"))
    files = {split: str(rows) for split in places if split}
    own = {"include": str(stock_file(name)), "task": name, "dataset_path": "json", "dataset_name": None}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(own | {"dataset_kwargs": {"data_files": files}} | changes))
    return file


class Recorder(HFLM):
    """lm-eval's own model, which writes `most` tokens at most and records what it is asked to write."""

    def __init__(self, model: Any, tokenizer: Any, most: int):
        super().__init__(model, tokenizer=tokenizer, batch_size=1, max_length=100_000)
        self.most = most
        self.limits: set[int] = set()
        self.stops: set[tuple[str, ...]] = set()

    def _model_generate(self, context, max_length, stop, **options):
        limit = max_length - context.shape[1]
        self.limits.add(limit)
        self.stops.add(tuple(stop))
        return super()._model_generate(context, context.shape[1] + min(limit, self.most), stop, **options)


def run_by_lm_eval(model: Any, file: Path, chat: bool) -> dict[str, Any]:
    """Return what lm-eval's own command gives for a task's file, with or without the chat template."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model,
        tasks=[str(file)],
        # With its defaults, the manager would parse 14,000 files.
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
