"""Checkpoints of both trainings, and the student's optimizer: a recovery resumes bit for bit. No pickles."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from opdcl import parallel
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.lora import adapter_weights
from opdcl.rundir.files import folder_appears_whole, read_json, write_atomic, write_json
from opdcl.rundir.hashes import SEAL, damage, seal
from opdcl.rundir.stage import StageDir
from opdcl.train.loop import LONGEST_GRADIENT, Schedule, StageReport

# The folder of a checkpoint that holds copies of metrics, samples and the best adapter so far.
RECORDS = "records"

# The number of checkpoints that a stage keeps: if the last one is damaged, the one before it is there.
CHECKPOINTS = 2

# Share of the steps, the first ones, in which the learning rate rises.
RISING_SHARE = 0.1

# What AdamW keeps of each weight.
OF_EACH_WEIGHT = ("step", "exp_avg", "exp_avg_sq")


class StudentOptimizer:
    """AdamW (arXiv 1711.05101) on the student's adapter, whose learning rate follows a schedule.

    A period's steps, of both streams, change the weights together. Near the start their gradients are
    opposed: a step of one stream alone undoes what the other has, and the next ones are spent on the repair.
    """

    def __init__(self, backbone: Backbone, steps: int, peak: float):
        """Plan the rate of all steps; `peak` is the highest."""
        self.schedule, self.peak = Schedule(steps, RISING_SHARE, "linear"), peak
        self.steps = 0
        self.weights = {n: weight for n, weight in backbone.peft.named_parameters() if weight.requires_grad}
        self.adamw = torch.optim.AdamW(self.weights.values(), lr=self.peak, weight_decay=0.0, fused=True)
        self.gradients: dict[str, torch.Tensor] = {}
        """The sum over the period's steps so far, each bounded."""

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.peak * self.schedule.share(self.steps)

    def add(self) -> float:
        """Add a step's gradients, bounded, to those of its period; return the norm that they had before."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), LONGEST_GRADIENT)
        for name, weight in self.weights.items():
            if weight.grad is not None:
                before = self.gradients.get(name)
                self.gradients[name] = weight.grad if before is None else before + weight.grad
        self.adamw.zero_grad(set_to_none=True)
        return float(norm)

    def end_step(self, ends_period: bool) -> None:
        """Count a step; at the end of a period, change the weights by what its steps have added."""
        if ends_period and self.gradients:
            for name, weight in self.weights.items():
                weight.grad = self.gradients.get(name)
            for group in self.adamw.param_groups:
                group["lr"] = self.rate
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
            self.gradients = {}
        self.steps += 1

    def halve_rate(self) -> None:
        """Halve the learning rate of all steps to come."""
        self.peak /= 2

    def save(self, folder: Path) -> None:
        tensors = {f"gradient/{name}": gradient for name, gradient in self.gradients.items()}
        for name, weight in self.weights.items():
            for moment in OF_EACH_WEIGHT:
                if weight in self.adamw.state:
                    tensors[f"{moment}/{name}"] = self.adamw.state[weight][moment]
        save_file(tensors, folder / "optimizer.safetensors")
        write_json(folder / "optimizer.json", {"steps": self.steps, "peak": self.peak})

    def restore(self, folder: Path) -> None:
        tensors = load_file(folder / "optimizer.safetensors")
        for name, weight in self.weights.items():
            if f"gradient/{name}" in tensors:
                self.gradients[name] = tensors[f"gradient/{name}"].to(weight.device)
            for moment in OF_EACH_WEIGHT:
                if f"{moment}/{name}" in tensors:
                    kept = tensors[f"{moment}/{name}"]
                    self.adamw.state[weight][moment] = kept if moment == "step" else kept.to(weight.device)
        counts = read_json(folder / "optimizer.json")
        self.steps, self.peak = counts["steps"], counts["peak"]


class Resumable(Protocol):
    """A part of a recovery that changes as it goes on."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class Checkpoints:
    """Saves and restores what a recovery changes: adapters, its parts, records."""

    def __init__(self, backbone: Backbone, states: Sequence[str], parts: Sequence[Resumable], out: StageDir):
        """Keep these adapter states of the backbone, and what the parts write of themselves."""
        self.backbone, self.states, self.parts, self.out = backbone, states, parts, out
        self._base = backbone.checksum()

    def save(self, step: int) -> None:
        """Write the checkpoint of a step, whole or not at all, and remove all but the last ones.

        Raises:
            OpdclError: The base weights have changed, or workers hold different adapters.
        """
        refuse_changed_base(self.backbone, self._base, step)
        with folder_appears_whole(self.out.trainer / f"checkpoint-{step}") as folder:
            save_file(self._adapters(), folder / "adapters.safetensors")
            for part in self.parts:
                part.save(folder)
            seal_with_records(self.out, folder)
        for old in self.out.checkpoints()[CHECKPOINTS:]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote.

        Raises:
            UsageError: Another version of opdcl wrote it, in another format.
        """
        if not (folder / "adapters.safetensors").exists():
            raise another_version(folder)
        saved = load_file(folder / "adapters.safetensors")
        with torch.no_grad():
            for name, weight in self._adapters().items():
                weight.copy_(saved[name])
        for part in self.parts:
            part.restore(folder)

    def _adapters(self) -> dict[str, torch.Tensor]:
        """Return the adapters' weights by state, layer and part."""
        tensors = {}
        for state in self.states:
            for number, layer in enumerate(self.backbone.adapted_layers(state)):
                for part, weight in enumerate(adapter_weights(layer, state)):
                    tensors[f"{state}/{number}/{part}"] = weight.detach()
        return tensors


def another_version(checkpoint: Path) -> UsageError:
    """Return the error that refuses a checkpoint in another format."""
    hint = "remove that folder: the run resumes from the checkpoint before it, or starts over"
    return UsageError(f"another version of opdcl wrote {checkpoint}", hint)


def last_checkpoint(out: StageDir, report: StageReport, steps: int) -> Path | None:
    """Return the checkpoint from which a stage resumes, and bring its records to the state of that time."""
    out.path.mkdir(parents=True, exist_ok=True)
    checkpoint = out.last_checkpoint()
    for folder in out.checkpoints():
        if folder == checkpoint:
            break
        if (folder / SEAL).exists():
            report.note(f"{folder.name} is damaged and ignored: {damage(folder)}")
        else:
            report.note(f"{folder.name} is incomplete and ignored")
            shutil.rmtree(folder, ignore_errors=True)
    _take_back_records(out, checkpoint)
    if checkpoint:
        report.note(f"resuming from step {step_of(checkpoint)} of {steps}")
    return checkpoint


def step_of(checkpoint: Path | None) -> int:
    """Return how many steps were done when a checkpoint was saved."""
    return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0


def refuse_changed_base(backbone: Backbone, checksum: tuple[int, ...], step: int) -> None:
    """Check before a checkpoint that base is as it was at first, and that all workers hold the same adapter.

    Raises:
        OpdclError: One of them is not so.
    """
    if parallel.any_worker(backbone.checksum() != checksum):
        message = f"the base weights changed before step {step}"
        raise OpdclError(message, "this is a defect of opdcl: please report it")
    parallel.check_same("adapters", backbone.adapter_norm("student"))


def seal_with_records(out: StageDir, checkpoint: Path) -> None:
    """Copy into a checkpoint what the rest of the stage depends on beside the weights, and seal it.

    The files themselves are neither flushed nor sealed before the stage ends: a power failure can cut them.
    """
    records = checkpoint / RECORDS
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    if out.metrics.exists():
        shutil.copy(out.metrics, records)
    if out.best.exists():
        shutil.copytree(out.best, records / out.best.name)
    seal(checkpoint)


def _take_back_records(out: StageDir, checkpoint: Path | None) -> None:
    """Bring the records of a stage to the state of the checkpoint from which it resumes, or of its start.

    Raises:
        UsageError: Another version of opdcl wrote the checkpoint.
    """
    if checkpoint and not (checkpoint / RECORDS).exists():
        raise another_version(checkpoint)
    records = checkpoint / RECORDS if checkpoint else None
    out.metrics.unlink(missing_ok=True)
    if records and (records / out.metrics.name).exists():
        write_atomic(out.metrics, (records / out.metrics.name).read_bytes())
    if records and (records / out.best.name).exists():
        with folder_appears_whole(out.best) as folder:
            shutil.copytree(records / out.best.name, folder, dirs_exist_ok=True)


def save_adapter(backbone: Backbone, folder: Path) -> None:
    """Write the student's adapter as a folder that `peft` loads, whole or not at all."""
    with folder_appears_whole(folder) as temporary:
        backbone.peft.save_pretrained(temporary, selected_adapters=["student"])
        # PEFT puts a named adapter into a folder of its name.
        for file in (temporary / "student").iterdir():
            file.rename(temporary / file.name)
        (temporary / "student").rmdir()
        (temporary / "README.md").unlink(missing_ok=True)
