"""The student's optimizer, and the checkpoints from which a recovery resumes bit for bit. No pickles."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from opdcl.config.recover import RecoverConfig
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.lora import adapter_weights
from opdcl.rundir.files import folder_appears_whole, read_json, write_json
from opdcl.rundir.layout import StageDir
from opdcl.train.stage import CHECKPOINTS, LONGEST_GRADIENT, Schedule, refuse_changed_base, seal_with_records

# Share of the steps, the first ones, in which the learning rate rises.
RISING_SHARE = 0.1

# What AdamW keeps of each weight.
OF_EACH_WEIGHT = ("step", "exp_avg", "exp_avg_sq")


class StudentOptimizer:
    """AdamW (arXiv 1711.05101) on the student's adapter, whose learning rate follows a schedule.

    A period's steps, of both streams, change the weights together. Near the start their gradients are
    opposed: a step of one stream alone undoes what the other has, and the next ones are spent on the repair.
    """

    def __init__(self, backbone: Backbone, config: RecoverConfig):
        self.schedule = Schedule(config.steps, RISING_SHARE, "linear")
        self.peak = float(config.learning_rate)
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
            hint = "remove that folder: the run resumes from the checkpoint before it, or starts over"
            raise UsageError(f"another version of opdcl wrote {folder}", hint)
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
