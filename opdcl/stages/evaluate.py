"""Measure a state of the backbone with lm-eval: same resident weights, same sampler, per-answer records.

opdcl eval runs/mine
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate as lm_evaluate

from opdcl import parallel
from opdcl.config.evaluate import EvalConfig
from opdcl.data.chat import render
from opdcl.data.suites import cut_at, floors, load_task, mean_score, quiet_lm_eval
from opdcl.distill.make_teacher import reach_own_model
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone, State
from opdcl.rundir.files import read_jsonl, write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sampling.rollout import Rollout
from opdcl.sampling.sample import sample
from opdcl.training import StageReport, peak_memory, reset_peak_memory


@dataclass(frozen=True)
class EvalResult:
    """Scores of one state on one suite, as written to `evals/<state>/<suite>.json`."""

    state: str
    suite: str
    metric: str
    metrics: dict[str, float]
    n: int


class BackboneLM(LM):
    """lm-eval's view of one adapter state. Answers are kept on disk batch by batch, so an interrupt loses little."""

    def __init__(
        self,
        backbone: Backbone,
        state: State,
        config: EvalConfig,
        partial: Path,
        report: StageReport,
        adapter: Path | None = None,
    ):
        super().__init__()
        self.adapter = adapter
        self.backbone, self.state_name, self.config, self.partial, self.report = (
            backbone,
            state,
            config,
            partial,
            report,
        )
        self.tokens = 0

    @property
    def tokenizer_name(self) -> str:
        return self.backbone.tokenizer.name_or_path

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.backbone.tokenizer.chat_template or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render(self.backbone.tokenizer, chat_history, add_generation_prompt, tokenize=False)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Answer all requests greedily, cutting each answer at its task's stop strings."""
        encode = self.backbone.tokenizer
        prompts = [encode(r.args[0], add_special_tokens=False)["input_ids"] for r in requests]
        answers = {row["request"]: row for row in read_jsonl(self.partial)}
        # Written back, so that what follows is not appended to a line that a crash cut off.
        write_atomic(
            self.partial, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in answers.values())
        )
        # Long prompts last and together; a batch is the unit that survives an interrupt.
        order = [i for i in sorted(range(len(requests)), key=lambda i: len(prompts[i])) if i not in answers]
        room = self.backbone.causal_lm.config.max_position_embeddings
        with self._writer() as write:
            size = self.config.batch_size * parallel.count()
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                longest = min(
                    int(requests[batch[0]].args[1].get("max_gen_toks", 256)),
                    self.config.max_new_tokens or 1 << 30,
                )
                if len(prompts[batch[-1]]) + longest > room:
                    raise UsageError(
                        f"a prompt of {len(prompts[batch[-1]])} tokens leaves no room in a context of {room}",
                        "set eval.max_new_tokens, or leave the suite out",
                    )
                began = len(answers)
                rollouts = write(
                    [prompts[i] for i in batch], longest, _counter(self.report, began, len(requests))
                )
                with open(self.partial, "a", encoding="utf-8") as file:
                    for i, rollout in zip(batch, rollouts, strict=True):
                        text = encode.decode(rollout.completion_ids, skip_special_tokens=True)
                        answers[i] = {"request": i, "text": text, "tokens": len(rollout.completion_ids)}
                        file.write(json.dumps(answers[i], ensure_ascii=False) + "\n")
        self.tokens += sum(row["tokens"] for row in answers.values())
        self.lengths = [answers[i]["tokens"] for i in range(len(requests))]
        return [
            cut_at(answers[i]["text"], requests[i].args[1].get("until") or []) for i in range(len(requests))
        ]

    @contextlib.contextmanager
    def _writer(
        self,
    ) -> Iterator[Callable[[list[list[int]], int, Callable[[list[Rollout]], None]], list[Rollout]]]:
        """Yield what completes prompts greedily: this process, or a server that has loaded the adapter."""
        eos_ids = self.backbone.eos_ids
        if self.config.server:
            server = reach_own_model(self.config.server, self.backbone, self.report.note)
            try:
                with server.adapter(self.adapter) if self.adapter else contextlib.nullcontext(None) as name:
                    yield lambda prompts, longest, count: parallel.by_first(
                        lambda: server.complete(
                            prompts, longest, eos_ids, temperature=0, model=name, on_finished=count
                        )
                    )
            finally:
                server.close()
        else:
            with self.backbone.merged(self.state_name) as model:
                yield lambda prompts, longest, count: sample(
                    model,
                    prompts,
                    max_new_tokens=longest,
                    eos_ids=eos_ids,
                    temperature=0,
                    batch_size=self.config.batch_size,
                    engine=self.config.sampler,
                    on_finished=count,
                )

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        raise UsageError(
            "suites that compare log-likelihoods are not supported yet", "choose a generative task"
        )

    loglikelihood_rolling = loglikelihood


def evaluate(
    config: EvalConfig,
    backbone: Backbone,
    state: State,
    shown: str,
    suite: str,
    role: str,
    run: RunDir,
    model: dict[str, Any],
    report: StageReport,
    adapter: Path | None = None,
) -> EvalResult:
    """Measure one state on one suite and write its result and samples.

    Args:
        config: What is measured, and where it is decoded.
        backbone: The model.
        state: Which adapter of it.
        shown: The state's name on disk.
        suite: The suite.
        role: What it stands for.
        run: Where results are written.
        model: What the result says of the model.
        report: Where progress is told.
        adapter: The state's adapter on disk, for a server to load.
    """
    started = time.perf_counter()
    reset_peak_memory()
    loaded = load_task(suite, config)
    (task,) = loaded["tasks"].values()
    partial = run.evals / shown / f".{suite}.partial.jsonl"
    lm = BackboneLM(backbone, state, config, partial, report, adapter)
    quiet_lm_eval()
    # Not simple_evaluate: it collects the whole environment after each call, which takes longer than a small suite.
    results = lm_evaluate(
        lm, loaded, apply_chat_template=True, log_samples=True, bootstrap_iters=0, limit=config.limit
    )
    metrics = list(task.aggregation())
    rows = sorted(next(iter(results["samples"].values())), key=lambda s: s["doc_id"])
    samples = [
        {
            "doc_id": row["doc_id"],
            "prompt": task.doc_to_text(row["doc"]),
            "response": row["filtered_resps"][0],
            "target": row["target"] or None,
            "scores": {m: row[m] for m in metrics},
            "tokens": tokens,
        }
        for row, tokens in zip(rows, lm.lengths, strict=True)
    ]
    means = {m: mean_score([s["scores"][m] for s in samples]) for m in metrics}
    write_atomic(
        run.eval_samples(shown, suite), "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples)
    )
    write_json(
        run.eval_result(shown, suite),
        {
            "state": shown,
            "suite": suite,
            "role": role,
            "metric": metrics[0],
            "n": len(samples),
            "metrics": means,
            "floor": floors(task, [row["doc"] for row in rows], metrics),
            "model": model | ({"decoded": "on a server"} if config.server else {}),
            "cost": {
                "seconds": round(time.perf_counter() - started, 1),
                "tokens": lm.tokens,
                "peak_memory_bytes": peak_memory(),
            },
        },
    )
    partial.unlink(missing_ok=True)
    return EvalResult(shown, suite, metrics[0], means, len(samples))


def _counter(report: StageReport, began: int, total: int):
    done = began

    def count(finished: list[Rollout]) -> None:
        nonlocal done
        done += len(finished)
        report.progress(done, total)

    return count
