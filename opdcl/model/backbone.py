"""One resident model, many adapter states: `base`, `tuned` and `student` without a second copy of the weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opdcl import parallel
from opdcl.config.finetune import LoraSection
from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.fused_lora import fuse
from opdcl.model.load import base_fingerprint, eos_ids, load_base

# `base`, `tuned`, `student`, or the name of a teacher whose adapter lies beside these.
State = str


class Backbone:
    """The base model with a trainable adapter `student` and, during recovery, others beside it: `tuned`, and those of
    teachers that have one of their own.

    The base weights are never written. `merged` puts base + adapter into storage of its own, because merging and
    unmerging in place drifts the base by rounding, and the base is the teacher.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.causal_lm = model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids(model, tokenizer)
        self.peft: PeftModel | None = None

    @classmethod
    def load(cls, config: ModelConfig) -> Backbone:
        """Load the base model without an adapter."""
        # Read by cuBLAS when it is first used.
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)
        return cls(*load_base(config))

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    def new_adapter(self, lora: LoraSection, seed: int) -> PeftModel:
        """Attach a freshly initialised `student` adapter, which changes nothing yet."""
        torch.manual_seed(seed)
        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        )
        self.drop_adapters()
        self.peft = get_peft_model(self.causal_lm, config, adapter_name="student")
        fuse(self.causal_lm)
        return self.peft

    def load_adapter(self, folder: Path, state: State, trainable: bool = False) -> PeftModel:
        """Attach an adapter from disk as `state`."""
        try:
            if self.peft is None:
                self.peft = PeftModel.from_pretrained(
                    self.causal_lm, str(folder), adapter_name=state, is_trainable=trainable
                )
            else:
                self.peft.load_adapter(str(folder), adapter_name=state, is_trainable=trainable)
        except (OSError, ValueError, RuntimeError, KeyError) as fault:
            raise UsageError(
                f"adapter {folder} does not fit the base model: {str(fault)[:300]}",
                "use the base model that the adapter was trained on",
            ) from fault
        fuse(self.causal_lm)
        return self.peft

    def drop_adapters(self) -> None:
        """Take all adapters off, leaving the base alone."""
        if self.peft is not None:
            self.causal_lm = self.peft.unload()
            self.peft = None

    def fingerprint(self) -> str:
        """Return the hash of the base weights, to show that training left them alone."""
        return base_fingerprint(self.causal_lm)

    def adapted_layers(self, name: State | None = None) -> list[BaseTunerLayer]:
        """Return every layer that carries an adapter, or one that carries this adapter."""
        layers = [m for m in self.causal_lm.modules() if isinstance(m, BaseTunerLayer)]
        return [m for m in layers if name is None or name in m.lora_A]

    @contextlib.contextmanager
    def state(self, name: State) -> Iterator[PreTrainedModel]:
        """Run the model as `name` inside the block; outside it is the student, trainable as before."""
        if name == "student" or self.peft is None:
            yield self.causal_lm
            return
        layers = self.adapted_layers()
        for layer in layers:
            if name == "base":
                layer.enable_adapters(False)
            else:
                layer.set_adapter(name, inference_mode=True)
        try:
            yield self.causal_lm
        finally:
            for layer in layers:
                if name == "base":
                    layer.enable_adapters(True)
                else:
                    layer.set_adapter("student")

    @contextlib.contextmanager
    def scaled(self, alpha: float, tilt: float = 0.0) -> Iterator[None]:
        """Run the student with what its adapter adds times `alpha` inside the block: 0 is base, 1 the adapter.

        With a `tilt` the factor rises in a line with depth, from alpha (1 - tilt) at the first layer to alpha (1 + tilt)
        at the last.
        """
        layers = self.adapted_layers("student")
        saved = [layer.scaling["student"] for layer in layers]
        for layer, factor in zip(layers, self._factors(alpha, tilt), strict=True):
            layer.scaling["student"] *= factor
        try:
            yield
        finally:
            for layer, scaling in zip(layers, saved, strict=True):
                layer.scaling["student"] = scaling

    def adapter_norm(self, state: State) -> float:
        """Return the norm of all weights of an adapter."""
        weights = [
            w
            for layer in self.adapted_layers(state)
            for w in (layer.lora_A[state].weight, layer.lora_B[state].weight)
        ]
        return float(torch.stack([w.detach().float().norm() for w in weights]).norm())

    def shrink(self, alpha: float, tilt: float = 0.0) -> None:
        """Scale what the student's adapter adds to the base as `scaled` does, for good."""
        with torch.no_grad():
            for layer, factor in zip(self.adapted_layers("student"), self._factors(alpha, tilt), strict=True):
                layer.lora_B["student"].weight.mul_(factor)

    def _factors(self, alpha: float, tilt: float) -> list[float]:
        """Return the factor of each layer of the student's adapter, in the order of `adapted_layers`."""
        mine = set(self.adapted_layers("student"))
        # The first number in a module's path is that of its decoder layer.
        numbers = [
            int(re.search(r"\.(\d+)\.", name)[1]) for name, m in self.causal_lm.named_modules() if m in mine
        ]
        last = max(1, *numbers)
        return [alpha * (1 + tilt * (2 * n / last - 1)) for n in numbers]

    @contextlib.contextmanager
    def merged(self, name: State) -> Iterator[PreTrainedModel]:
        """Run the model as `name` with the adapter folded into the weights: faster, where many tokens are sampled.

        The sums live in storage of their own for the duration of the block; the base's storage is swapped out and
        back in, never written.
        """
        with parallel.unsharded(self.causal_lm), self._folded(name), self.state("base") as model:
            yield model

    @contextlib.contextmanager
    def _folded(self, name: State) -> Iterator[None]:
        if name == "base" or self.peft is None:
            yield
            return
        saved = []
        with torch.no_grad():
            for layer in self.adapted_layers(name):
                weight = layer.get_base_layer().weight
                saved.append((weight, weight.data))
                delta = layer.get_delta_weight(name)
                weight.data = (weight.data.float() + delta.float()).to(weight.dtype)
        try:
            yield
        finally:
            for weight, original in saved:
                weight.data = original
