"""What both training stages share: trainer arguments, metrics, checkpoints on interrupt, saved adapters."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback

from opdcl import parallel
from opdcl.config.finetune import FinetuneConfig
from opdcl.config.optimizer import OptimizerSection
from opdcl.config.recover import RecoverConfig
from opdcl.errors import Interrupted, OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.costs import Work
from opdcl.rundir.files import folder_appears_whole, write_atomic
from opdcl.rundir.hashes import SEAL, damage, seal
from opdcl.rundir.layout import StageDir
from opdcl.rundir.records import read_metrics
from opdcl.signals import ending

# Steps after which the time left is shown.
FIRST_STEPS = 3

# The folder of a checkpoint that holds copies of metrics, samples and the best adapter so far.
RECORDS = "records"

# Of the trainers' logs, what a step's row in metrics.jsonl leaves out or replaces.
UNLOGGED = ("epoch", "tokens", "entropy", "num_tokens", "mean_token_accuracy")


@dataclass(frozen=True)
class Schedule:
    """A stage's own schedule of the learning rate, which the settings of the optimizer replace."""

    shape: str
    warm_up: float
    """Share of all steps, the first ones, in which the rate rises."""
    decay: float | None = None
    """Share of all steps, the last ones, in which a rate that was held falls to zero on a line."""

    def arguments(self, steps: int, optimizer: OptimizerSection) -> dict[str, Any]:
        """Return the schedule as arguments of a trainer."""
        warm_up = self.warm_up if optimizer.warmup is None else optimizer.warmup
        arguments: dict[str, Any] = {"warmup_steps": math.ceil(steps * warm_up)}
        if optimizer.schedule == "constant":
            arguments["lr_scheduler_type"] = "constant_with_warmup"
        elif optimizer.schedule != "auto":
            arguments["lr_scheduler_type"] = optimizer.schedule
        else:
            arguments["lr_scheduler_type"] = self.shape
            if self.decay:
                falling = math.ceil(steps * self.decay)
                arguments["lr_scheduler_kwargs"] = {"num_decay_steps": falling, "decay_type": "linear"}
        return arguments


FINETUNE_SCHEDULE = Schedule("cosine", 0.05)
# A rate that falls from the first tenth on spends half of it where the student is far from base.
RECOVER_SCHEDULE = Schedule("warmup_stable_decay", 0.1, decay=0.25)


class StageReport(Protocol):
    """Receives a stage's progress; `opdcl.console` prints it."""

    def progress(self, done: int, total: int, left: float | None = None, **values: float | str) -> None: ...

    def note(self, text: str) -> None: ...


class StageWork(Protocol):
    """Knows how much work the steps of a stage are."""

    def portion(self, step: int, tokens: float) -> tuple[str, float]:
        """Return kind and amount of a step's work, given the tokens that it logs."""

    def left(self, step: int) -> Work | None:
        """Return the work after a step; None if it is not known."""


def trainer_arguments(
    config: FinetuneConfig | RecoverConfig,
    schedule: Schedule,
    backbone: Backbone,
    out: StageDir,
    steps: int,
    **stage: Any,
) -> dict[str, Any]:
    """Return the arguments of a stage's trainer: the shared ones, then the stage's own."""
    optimizer = config.optimizer
    shared = {
        "output_dir": str(out.trainer),
        # bf16 is autocast, needed where a bf16 base meets its fp32 adapter.
        "bf16": backbone.causal_lm.dtype == torch.bfloat16,
        "use_cpu": backbone.device.type == "cpu",
        # It would recompute without the shared prefix's cache; micro_batch_tokens bounds memory instead.
        "gradient_checkpointing": False,
        "max_steps": steps,
        "learning_rate": config.learning_rate,
        **schedule.arguments(steps, optimizer),
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "seed": config.seed,
        "train_sampling_strategy": "sequential",  # the order of steps is planned beforehand
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": config.save_steps,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": backbone.device.type == "cuda",
    }
    return {**shared, **stage}


class StageTrainer(Trainer):
    """A trainer whose first step learns.

    The warm-up of transformers begins at a rate of zero, so the first step, the only one of a short stage,
    changes nothing. Here step i of a warm-up of n steps has i / n of the peak, counted from 1.
    """

    def create_scheduler(self, num_training_steps, optimizer=None):
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_new:
            _begin_above_zero(scheduler, self.args.get_warmup_steps(num_training_steps))
        return scheduler


def _begin_above_zero(scheduler: LambdaLR, warm_up: int) -> None:
    """Let each step of the warm-up have the rate of the next one, and its last step the peak."""

    def earlier(share: Callable[[int], float]) -> Callable[[int], float]:
        def of_step(step: int) -> float:
            if step + 1 == warm_up:
                return 1.0
            return share(step + 1 if step < warm_up else step)

        return of_step

    scheduler.lr_lambdas = [earlier(share) for share in scheduler.lr_lambdas]
    # The first step's rate is set already.
    shares = [share(scheduler.last_epoch) for share in scheduler.lr_lambdas]
    scheduler._last_lr = [rate * share for rate, share in zip(scheduler.base_lrs, shares, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


def finite_or_skipped(trainer: Trainer, model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return a step's loss once its gradient is there; skip the step if any of it is not finite.

    A skipped step has no gradients, so the optimizer changes neither the weights nor its moments.

    Raises:
        OpdclError: It is the second such step.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # NaN where any is NaN.
    largest = torch._foreach_norm(gradients, math.inf) if gradients else ()
    if bool(torch.stack([loss.detach(), *largest]).isfinite().all()):
        return loss
    model.zero_grad(set_to_none=True)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, StageCallback):
            callback.skip(trainer.state.global_step + 1)
    # Not NaN: the trainer sums losses up.
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


def _keep_records(out: StageDir, checkpoint: Path) -> None:
    """Copy into a checkpoint, which will be sealed, what the rest of the stage depends on beside the weights.

    The files themselves are neither flushed nor sealed before the stage ends: a power failure can cut them.
    """
    records = checkpoint / RECORDS
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    for file in (out.metrics, out.samples):
        if file.exists():
            shutil.copy(file, records)
    if out.best.exists():
        shutil.copytree(out.best, records / out.best.name)


def _take_back_records(out: StageDir, checkpoint: Path | None) -> None:
    """Bring the records of a stage to the state of the checkpoint from which it resumes, or of its start.

    Raises:
        UsageError: Another version of opdcl wrote the checkpoint.
    """
    records = checkpoint / RECORDS if checkpoint else None
    if records and not records.exists():
        hint = "remove that folder: the run resumes from the checkpoint before it, or starts over"
        raise UsageError(f"another version of opdcl wrote {checkpoint}", hint)
    for file in (out.metrics, out.samples):
        copy = records / file.name if records else None
        if copy and copy.exists():
            write_atomic(file, copy.read_bytes())
        else:
            file.unlink(missing_ok=True)
    if records and (records / out.best.name).exists():
        with folder_appears_whole(out.best) as folder:
            shutil.copytree(records / out.best.name, folder, dirs_exist_ok=True)


class StageCallback(TrainerCallback):
    """Write metrics, show progress, and turn the first Ctrl-C or SIGTERM into a checkpoint."""

    def __init__(self, report: StageReport, steps: int, backbone: Backbone | None = None):
        self.report, self.steps, self.backbone = report, steps, backbone
        self.tokens_per_step = 0  # of trainers that do not log their tokens
        self._stop = False
        self._skipped: int | None = None
        self._base: tuple[int, ...] = ()
        self._out: StageDir | None = None
        self._step_started = self._accounted = 0.0
        self.work: StageWork | None = None
        self._steps_timed = 0

    def run(self, trainer: Trainer, out: StageDir) -> None:
        """Train from the last checkpoint to the end.

        Raises:
            Interrupted: A signal came; the checkpoint is saved.
        """
        out.path.mkdir(parents=True, exist_ok=True)
        self._out = out
        checkpoint = out.last_checkpoint()
        reached = int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0
        for damaged in out.checkpoints():
            if damaged == checkpoint:
                break
            if (damaged / SEAL).exists():
                self.report.note(f"{damaged.name} is damaged and ignored: {damage(damaged)}")
            else:
                self.report.note(f"{damaged.name} is incomplete and ignored")
                shutil.rmtree(damaged, ignore_errors=True)
        _take_back_records(out, checkpoint)
        rows = read_metrics(out.metrics)
        if reason := next((row["stopped"] for row in rows if "stopped" in row), None):
            self.report.note(f"stopped early at step {reached}: {reason}")
            return
        if checkpoint:
            self.report.note(f"resuming from step {reached} of {self.steps}")
        if self.backbone:
            self._base = self.backbone.checksum()
        trainer.remove_callback(PrinterCallback)  # stdout is for results
        with self._signals():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.model.eval()  # whatever follows measures or samples, without dropout
        if self._stop:
            reached = trainer.state.global_step
            if reached >= self.steps:
                raise KeyboardInterrupt  # it came in the last step; the stages after this one must not start
            raise Interrupted(f"interrupted at step {reached} of {self.steps}; checkpoint saved")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in ending()}

        def handle(number, frame):
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True
            self.report.note("stopping after this step; press Ctrl-C again to stop at once")

        for number in previous:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row to `metrics.jsonl`."""
        assert self._out
        with open(self._out.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def skip(self, step: int) -> None:
        """Record a step skipped for a loss or gradient that is not finite; a second one ends the stage."""
        if self._skipped is not None:
            hint = "lower the learning rate; the same command resumes from the last checkpoint"
            raise OpdclError(f"loss or gradient is not finite at step {step}, for the second time", hint)
        self._skipped = step
        self.write({"step": step, "skipped": "loss or gradient is not finite"})
        self.report.note(f"step {step}: loss or gradient is not finite; the step is skipped")

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_started = time.perf_counter()
        self._accounted = self.backbone.costs.accounted if self.backbone else 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self._stop = parallel.any_worker(self._stop)
        if self._stop:
            control.should_training_stop = True
            control.should_save = True

    def on_save(self, args, state, control, **kwargs):
        if self.backbone:
            if parallel.any_worker(self.backbone.checksum() != self._base):
                message = f"the base weights changed before step {state.global_step}"
                raise OpdclError(message, "this is a defect of opdcl: please report it")
            parallel.check_same("adapters", self.backbone.adapter_norm("student"))
        assert self._out
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        _keep_records(self._out, checkpoint)
        seal(checkpoint)

    def on_log(self, args, state, control, logs=None, **kwargs):
        # It would grow without bound, in memory and in every checkpoint; metrics.jsonl has it all.
        state.log_history.clear()
        if not logs or "loss" not in logs or self._skipped == state.global_step:
            return
        seconds = time.perf_counter() - self._step_started
        tokens = int(logs.get("tokens", self.tokens_per_step))
        values = {k: v for k, v in logs.items() if k not in UNLOGGED}
        self.write({"step": state.global_step, **values, "tokens": tokens, "seconds": round(seconds, 3)})
        live = {k: logs[k] for k in ("stream", "author", "loss", "kl") if k in logs}
        if math.isclose(live["loss"], live.get("kl", math.nan), rel_tol=1e-3):
            del live["kl"]  # the loss is this divergence
        if (left := self._time_left(state.global_step, tokens, seconds)) is not None:
            live["left"] = left
        self.report.progress(state.global_step, self.steps, **live, tokens_per_s=tokens / max(seconds, 1e-9))

    def _time_left(self, step: int, tokens: int, seconds: float) -> float | None:
        """Record what a step cost without sampling and validations; return the seconds left, if known."""
        if not (self.work and self.backbone):
            return None
        costs = self.backbone.costs
        self._steps_timed += 1
        if self._steps_timed > 1:  # the first step also sets things up
            own = max(seconds - (costs.accounted - self._accounted), 0.0)
            costs.add(*self.work.portion(step, tokens), own)
        left = self.work.left(step) if self._steps_timed >= FIRST_STEPS else None
        return None if left is None else costs.seconds(left)


def reset_peak_memory() -> None:
    """Start a new measurement of peak memory, where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return peak memory in bytes since `reset_peak_memory`: of the GPU, or else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
