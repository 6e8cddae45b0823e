"""What both training stages share: trainer arguments, live metrics, checkpoints on interrupt, the saved adapter."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from opdcl import parallel
from opdcl.errors import Interrupted, OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import folder_appears_whole, read_jsonl, write_atomic
from opdcl.rundir.layout import StageDir
from opdcl.rundir.seals import damage, seal


class StageReport(Protocol):
    """Where a stage tells how far it is; `opdcl.output` shows it."""

    def progress(self, done: int, total: int, **values: float | str) -> None: ...

    def note(self, text: str) -> None: ...


def check_trainer_fields(arguments_class: type, stage: str, given: dict[str, Any]) -> None:
    """Refuse a `trainer:` key that the TRL class does not have, or that opdcl sets itself."""
    known = {f.name for f in dataclasses.fields(arguments_class)}
    # Checkpointing recomputes without the shared prefix's cache; micro_batch_tokens bounds memory instead.
    owned = {
        "output_dir",
        "max_steps",
        "num_train_epochs",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
    }
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise UsageError(
                f"unknown key {stage}.trainer.{key}: {arguments_class.__name__} has no such field",
                f"did you mean {near[0]}?" if near else "see TRL's documentation",
            )
        if key in owned:
            raise UsageError(f"{stage}.trainer.{key} is set by opdcl", f"use the fields of {stage} itself")


def trainer_arguments(
    arguments_class: type, stage: str, given: dict[str, Any], backbone: Backbone, out: StageDir
) -> dict:
    """Return the arguments that every stage hands to its TRL trainer."""
    check_trainer_fields(arguments_class, stage, given)
    half = backbone.causal_lm.dtype == torch.bfloat16
    return {
        "output_dir": str(out.trainer),
        # bf16 here is autocast, which is needed where a bf16 base meets its fp32 adapter.
        "bf16": half,
        "use_cpu": backbone.device.type == "cpu",
        "gradient_checkpointing": False,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": backbone.device.type == "cuda",
    }


def is_out_of_memory(fault: BaseException) -> bool:
    """Say whether a smaller batch would have spared us this: on CUDA, on the CPU, or in Python itself."""
    return isinstance(fault, torch.OutOfMemoryError | MemoryError) or any(
        x in str(fault) for x in ("can't allocate memory", "std::bad_alloc")
    )


def finite_or_skipped(trainer: Trainer, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss of a step whose gradient is ready; where any of it is not finite, drop the gradient and tell.

    Without gradients the optimizer leaves the weights alone, its moments included: as if the step had not been.

    Raises:
        OpdclError: It is the second such step.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if math.isfinite(float(loss)) and (
        not gradients or bool(torch.stack([g.isfinite().all() for g in gradients]).all())
    ):
        return loss
    model.zero_grad(set_to_none=True)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, StageCallback):
            callback.skip(trainer.state.global_step + 1)
    # Not NaN: the trainer adds losses up, and would never get rid of it.
    return torch.zeros_like(loss)


def save_adapter(backbone: Backbone, folder: Path) -> None:
    """Write the student's adapter as a folder that `peft` loads, whole or not at all."""
    with folder_appears_whole(folder) as temporary:
        backbone.peft.save_pretrained(temporary, selected_adapters=["student"])
        # PEFT puts a named adapter into a folder of its name.
        for file in (temporary / "student").iterdir():
            file.rename(temporary / file.name)
        (temporary / "student").rmdir()
        (temporary / "README.md").unlink(missing_ok=True)


class StageCallback(TrainerCallback):
    """Write metrics, show progress, and turn the first Ctrl-C into a checkpoint after the step at hand."""

    def __init__(self, report: StageReport, steps: int, backbone: Backbone | None = None):
        self.report = report
        self.backbone = backbone
        self.steps = steps
        self.tokens_per_step: int | None = None
        self.tokens = 0
        self._stop = False
        self._skipped: int | None = None
        self._metrics: Path | None = None
        self._step_started = 0.0

    def run(self, trainer: Trainer, out: StageDir) -> None:
        """Train from the last checkpoint to the end.

        Raises:
            Interrupted: A signal came; the checkpoint is saved.
        """
        out.path.mkdir(parents=True, exist_ok=True)
        self._metrics = out.metrics
        checkpoint = out.last_checkpoint()
        reached = int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0
        # What was logged beyond the checkpoint is about to be done again.
        kept = [row for row in read_jsonl(out.metrics) if checkpoint and row["step"] <= reached]
        write_atomic(out.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        self.tokens = sum(row.get("tokens", 0) for row in kept)
        for broken in out.checkpoints():
            if broken == checkpoint:
                break
            self.report.note(f"{broken.name} is damaged and left out: {damage(broken)}")
        if stopped := next((row["stopped"] for row in kept if "stopped" in row), None):
            self.report.note(f"had stopped at step {reached}: {stopped}")
            return
        if checkpoint:
            self.report.note(f"resuming from step {reached} of {self.steps}")
        self._base = self.backbone.fingerprint() if self.backbone else ""
        trainer.remove_callback(PrinterCallback)  # stdout is for results
        with self._signals():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if self._stop and trainer.state.global_step < self.steps:
            raise Interrupted(
                f"interrupted at step {trainer.state.global_step} of {self.steps}; checkpoint saved"
            )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def handle(number, frame):
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self.report.note("stopping after this step; press Ctrl-C again to leave at once")

        for number in previous:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row to `metrics.jsonl`."""
        with open(self._metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def skip(self, step: int) -> None:
        """Note that a step is left out because its loss or gradient is not finite; a second time ends the stage."""
        if self._skipped is not None:
            raise OpdclError(
                f"loss or gradient is not finite at step {step}, for the second time",
                "lower the learning rate; the same command goes on from the last checkpoint",
            )
        self._skipped = step
        self.write({"step": step, "skipped": "loss or gradient is not finite"})
        self.report.note(f"step {step}: loss or gradient is not finite; the step is skipped")

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self._stop = parallel.any_worker(self._stop)
        if self._stop:
            control.should_training_stop = True
            control.should_save = True

    def on_save(self, args, state, control, **kwargs):
        if self.backbone and self.backbone.fingerprint() != self._base:
            raise OpdclError(
                f"the base weights changed before step {state.global_step}",
                "this is a defect of opdcl: please report it",
            )
        if self.backbone:
            parallel.check_same("adapters", self.backbone.adapter_norm("student"))
        seal(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        # It would grow for ever, in memory and in every checkpoint; metrics.jsonl has it all.
        state.log_history.clear()
        if not logs or "loss" not in logs:
            return
        if self._skipped == state.global_step:
            return
        seconds = time.perf_counter() - self._step_started
        tokens = int(logs.get("tokens", self.tokens_per_step or 0))
        self.tokens += tokens
        names = (
            "loss",
            "kl",
            "stream",
            "mean_length",
            "truncated",
            "mismatch",
            "repetition",
            "adapter_norm",
            "reward",
            "reward_tied",
            "teacher_entropy",
            "student_entropy",
            "grad_norm",
            "learning_rate",
        )
        self.write(
            {
                "step": state.global_step,
                **{k: v for k, v in logs.items() if k in names or k.startswith("kl/")},
                "tokens": tokens,
                "seconds": round(seconds, 3),
            }
        )
        shown = {k: logs[k] for k in ("stream", "loss", "kl") if k in logs}
        self.report.progress(state.global_step, self.steps, **shown, tokens_per_s=tokens / max(seconds, 1e-9))


def reset_peak_memory() -> None:
    """Start a new measurement of peak memory, where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak memory in bytes since `reset_peak_memory`: of the GPU if there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
