"""Measure a state of the backbone with lm-eval: same resident weights, same sampler, per-answer records.

    opdcl eval runs/mine
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.tasks import TaskManager

from opdcl import processes
from opdcl.config import EvalConfig
from opdcl.data import load_rows, render
from opdcl.distill.backbone import Backbone, State
from opdcl.distill.rollouts import Rollout, sample
from opdcl.distill.teachers import reach_own_model
from opdcl.errors import UsageError
from opdcl.load import package_folder
from opdcl.punkt import ensure_punkt
from opdcl.rundir import RunDir, read_jsonl, write_atomic, write_json
from opdcl.training import StageReport, peak_memory, reset_peak_memory

CONSTANT_ANSWER = "I am happy to help. Please tell me more about what you need."


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

    def __init__(self, backbone: Backbone, state: State, config: EvalConfig, partial: Path, report: StageReport, adapter: Path | None = None):
        super().__init__()
        self.adapter = adapter
        self.backbone, self.state_name, self.config, self.partial, self.report = backbone, state, config, partial, report
        self.tokens = 0

    @property
    def tokenizer_name(self) -> str:
        return self.backbone.tokenizer.name_or_path

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.backbone.tokenizer.chat_template or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render(self.backbone.tokenizer, chat_history, add_generation_prompt, tokenize=False)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Answer all requests greedily, cutting each answer at its task's stop strings."""
        encode = self.backbone.tokenizer
        prompts = [encode(r.args[0], add_special_tokens=False)["input_ids"] for r in requests]
        answers = {row["request"]: row for row in read_jsonl(self.partial)}
        # Written back, so that what follows is not appended to a line that a crash cut off.
        write_atomic(self.partial, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in answers.values()))
        # Long prompts last and together; a batch is the unit that survives an interrupt.
        order = [i for i in sorted(range(len(requests)), key=lambda i: len(prompts[i])) if i not in answers]
        room = self.backbone.causal_lm.config.max_position_embeddings
        with self._writer() as write:
            size = self.config.batch_size * processes.count()
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                longest = min(int(requests[batch[0]].args[1].get("max_gen_toks", 256)), self.config.max_new_tokens or 1 << 30)
                if len(prompts[batch[-1]]) + longest > room:
                    raise UsageError(f"a prompt of {len(prompts[batch[-1]])} tokens leaves no room in a context of {room}",
                                     "set eval.max_new_tokens, or leave the suite out")  # fmt: skip
                began = len(answers)
                rollouts = write([prompts[i] for i in batch], longest, _counter(self.report, began, len(requests)))
                with open(self.partial, "a", encoding="utf-8") as file:
                    for i, rollout in zip(batch, rollouts, strict=True):
                        text = encode.decode(rollout.completion_ids, skip_special_tokens=True)
                        answers[i] = {"request": i, "text": text, "tokens": len(rollout.completion_ids)}
                        file.write(json.dumps(answers[i], ensure_ascii=False) + "\n")
        self.tokens += sum(row["tokens"] for row in answers.values())
        self.lengths = [answers[i]["tokens"] for i in range(len(requests))]
        return [cut_at(answers[i]["text"], requests[i].args[1].get("until") or []) for i in range(len(requests))]

    @contextlib.contextmanager
    def _writer(self) -> Iterator[Callable[[list[list[int]], int, Callable[[list[Rollout]], None]], list[Rollout]]]:
        """Yield what completes prompts greedily: this process, or a server that has loaded the adapter."""
        eos_ids = self.backbone.eos_ids
        if self.config.server:
            server = reach_own_model(self.config.server, self.backbone, self.report.note)
            try:
                with server.adapter(self.adapter) if self.adapter else contextlib.nullcontext(None) as name:
                    yield lambda prompts, longest, count: processes.by_first(
                        lambda: server.write(prompts, longest, eos_ids, temperature=0, model=name, on_finished=count)
                    )
            finally:
                server.close()
        else:
            with self.backbone.merged(self.state_name) as model:
                yield lambda prompts, longest, count: sample(
                    model, prompts, max_new_tokens=longest, eos_ids=eos_ids, temperature=0, batch_size=self.config.batch_size,
                    engine=self.config.sampler, on_finished=count,
                )  # fmt: skip

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        raise UsageError("suites that compare log-likelihoods are not supported yet", "choose a generative task")

    loglikelihood_rolling = loglikelihood


def evaluate(config: EvalConfig, backbone: Backbone, state: State, shown: str, suite: str, role: str,
             run: RunDir, model: dict[str, Any], report: StageReport, adapter: Path | None = None) -> EvalResult:  # fmt: skip
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
    _quiet()
    # Not simple_evaluate: it collects the whole environment after each call, which takes longer than a small suite.
    results = lm_evaluate(lm, loaded, apply_chat_template=True, log_samples=True, bootstrap_iters=0,
                          limit=config.limit)  # fmt: skip
    metrics = list(task.aggregation())
    rows = sorted(next(iter(results["samples"].values())), key=lambda s: s["doc_id"])
    samples = [
        {"doc_id": row["doc_id"], "prompt": task.doc_to_text(row["doc"]), "response": row["filtered_resps"][0],
         "target": row["target"] or None, "scores": {m: row[m] for m in metrics}, "tokens": tokens}
        for row, tokens in zip(rows, lm.lengths, strict=True)
    ]  # fmt: skip
    means = {m: _mean([s["scores"][m] for s in samples]) for m in metrics}
    write_atomic(run.eval_samples(shown, suite), "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples))
    write_json(run.eval_result(shown, suite), {
        "state": shown, "suite": suite, "role": role, "metric": metrics[0], "n": len(samples), "metrics": means,
        "floor": floors(task, [row["doc"] for row in rows], metrics), "model": model | ({"decoded": "on a server"} if config.server else {}),
        "cost": {"seconds": round(time.perf_counter() - started, 1), "tokens": lm.tokens, "peak_memory_bytes": peak_memory()},
    })  # fmt: skip
    partial.unlink(missing_ok=True)
    return EvalResult(shown, suite, metrics[0], means, len(samples))


def floors(task, docs: list[dict], metrics: list[str]) -> dict[str, dict[str, float]]:
    """Score answers that show no skill: none at all, always the same one, and the prompt handed back."""
    answers = {
        "empty": lambda doc: "",
        "constant": lambda doc: CONSTANT_ANSWER,
        "copy": lambda doc: task.doc_to_text(doc),
    }
    scored = {name: [task.process_results(doc, [answer(doc)]) for doc in docs] for name, answer in answers.items()}
    return {name: {m: _mean([s[m] for s in scores]) for m in metrics} for name, scores in scored.items()}


def load_task(suite: str, config: EvalConfig) -> dict[str, Any]:
    """Return what lm-eval runs for a suite, its one task included: shipped, stock, or made from a file of questions."""
    ensure_punkt()
    _quiet()
    shipped = {p.stem for p in package_folder("evals").glob("*/*.yaml")}
    if suite in shipped:
        manager = TaskManager(include_path=str(package_folder("evals")), include_defaults=False)
        wanted: str | dict = suite
    elif suite in config.data and suite != "ifeval":
        manager = TaskManager(include_defaults=False)
        wanted = _question_task(suite, config.data[suite], config.max_new_tokens or 96)
    else:
        manager = TaskManager()
        if suite not in manager.all_tasks:
            raise UsageError(f"unknown suite {suite!r}", f"shipped: {', '.join(sorted(shipped))}; or any task of lm-eval")
        wanted = {"task": suite, "custom_dataset": _jsonl_dataset(config.data[suite])} if suite in config.data else suite
    try:
        loaded = manager.load([wanted])
    except (OSError, ConnectionError) as fault:
        raise UsageError(f"the data of suite {suite!r} cannot be had: {str(fault)[:200]}",
                         f"name a local copy: --data {suite}=PATH; or, while online, opdcl fetch WORKFLOW") from fault  # fmt: skip
    if len(loaded["tasks"]) != 1:
        raise UsageError(f"suite {suite!r} is a group of {len(loaded['tasks'])} tasks", "name its tasks one by one")
    return loaded


def _jsonl_dataset(path: str):
    """Return a loader of a local IFEval file, giving each row only the arguments that it sets."""
    def load(**kwargs):
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        return {"train": datasets.Dataset.from_list(rows)}

    return load


def _question_task(name: str, path: str, longest: int) -> dict[str, Any]:
    """Describe a closed-book task over a file of questions and answers; headline: token F1."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("handbook_utils", package_folder("evals") / "handbook" / "utils.py")
    scoring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scoring)

    def load(**kwargs):
        rows = load_rows(path)
        if missing := next((r for r in rows if r.answer is None or not r.prompt), None):
            raise UsageError(f"{missing.where} has no question and answer", "a domain suite needs both")
        return {"test": datasets.Dataset.from_list([{"question": r.prompt[-1]["content"], "answers": [r.answer]} for r in rows])}

    return {
        "task": name, "custom_dataset": load, "output_type": "generate_until", "test_split": "test", "num_fewshot": 0,
        "doc_to_text": "question", "doc_to_target": "{{answers[0]}}", "process_results": scoring.process_results,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": longest},
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("token_f1", "exact_match", "contains")],
    }  # fmt: skip


def _mean(values: list) -> float:
    flat = [float(x) for v in values for x in (v if isinstance(v, list) else [v])]
    return round(sum(flat) / len(flat), 6)


def cut_at(text: str, stops: list[str]) -> str:
    """Return the text up to the first of the stop strings."""
    ends = [text.find(s) for s in stops if s and s in text]
    return text[: min(ends)] if ends else text


def _counter(report: StageReport, began: int, total: int):
    done = began

    def count(finished: list[Rollout]) -> None:
        nonlocal done
        done += len(finished)
        report.progress(done, total)

    return count


def _quiet() -> None:
    """lm-eval logs its own progress at warning level; the stage's line says it already."""
    for name in ("lm_eval", "lm-eval", "evaluator"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
