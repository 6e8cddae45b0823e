"""One resident model with several adapter states, without a second copy of the weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opdcl import parallel
from opdcl.config.finetune import LoraSection
from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.fused_lora import fuse
from opdcl.model.load import eos_ids, load_base

# `base`, `tuned`, `student`, or the name of a teacher that has an adapter of its own.
State = str


class Backbone:
    """The base model with the trainable adapter `student`, and during recovery `tuned` and the teachers'.

    The base weights are never written. `merged` puts base + adapter into storage of its own: merging and
    unmerging in place would drift the base by rounding, and the base is the teacher.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.causal_lm, self.tokenizer, self.eos_ids = model, tokenizer, eos_ids(model, tokenizer)
        self.peft: PeftModel | None = None
        self.sums: dict[int, torch.Tensor] | None = None
        """`merged` keeps its sums here, at the same addresses, if this is not None: CUDA graphs need it."""

    @classmethod
    def load(cls, config: ModelConfig) -> Backbone:
        """Load the base model without an adapter."""
        # cuBLAS reads this when it is first used.
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)
        # cuDNN's attention makes a plan for each new shape, and nearly every step has one.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return cls(*load_base(config))

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    @property
    def context_length(self) -> int:
        """The longest sequence that the model was made for, in tokens."""
        return int(self.causal_lm.config.max_position_embeddings)

    @property
    def head_VH(self) -> torch.Tensor:
        """The output embedding that turns hidden states into logits."""
        return self.causal_lm.get_output_embeddings().weight

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
        """Attach an adapter from disk as `state`.

        Raises:
            UsageError: The adapter does not fit the base model.
        """
        options = {"adapter_name": state, "is_trainable": trainable}
        try:
            if self.peft is None:
                self.peft = PeftModel.from_pretrained(self.causal_lm, str(folder), **options)
            else:
                self.peft.load_adapter(str(folder), **options)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            message = f"adapter {folder} does not fit the base model: {str(error)[:300]}"
            raise UsageError(message, "use the base model that the adapter was trained on") from error
        fuse(self.causal_lm)
        return self.peft

    def drop_adapters(self) -> None:
        """Remove all adapters and keep the base."""
        if self.peft is not None:
            self.causal_lm = self.peft.unload()
            self.peft = None
            self.sums = None if self.sums is None else {}

    def fingerprint(self) -> str:
        """Return the SHA-256 of the base weights' bits, which proves that training did not change them."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.causal_lm.named_parameters()):
            if "lora_" not in name:
                weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                bits = weight.detach().cpu().contiguous().view(torch.uint8)
                digest.update(bits.flatten().numpy().data)
        return digest.hexdigest()

    def adapted_layers(self, name: State | None = None) -> list[BaseTunerLayer]:
        """Return every layer that carries any adapter, or the adapter `name`."""
        layers = [m for m in self.causal_lm.modules() if isinstance(m, BaseTunerLayer)]
        return [m for m in layers if name is None or name in m.lora_A]

    @contextlib.contextmanager
    def state(self, name: State) -> Iterator[PreTrainedModel]:
        """Run the model as `name` inside the block; afterwards it is the trainable student again."""
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
    def scaled(self, alpha: float) -> Iterator[None]:
        """Scale the student adapter's contribution by `alpha` inside the block: 0 is base, 1 the adapter."""
        layers = self.adapted_layers("student")
        saved = [layer.scaling["student"] for layer in layers]
        for layer in layers:
            layer.scaling["student"] *= alpha
        try:
            yield
        finally:
            for layer, scaling in zip(layers, saved, strict=True):
                layer.scaling["student"] = scaling

    def shrink(self, alpha: float) -> None:
        """Scale the student adapter's contribution by `alpha` permanently."""
        with torch.no_grad():
            for layer in self.adapted_layers("student"):
                layer.lora_B["student"].weight.mul_(alpha)

    def adapter_norm(self, state: State) -> float:
        """Return the L2 norm of all weights of an adapter."""
        parts = [part for layer in self.adapted_layers(state) for part in (layer.lora_A, layer.lora_B)]
        return float(torch.stack([part[state].weight.detach().float().norm() for part in parts]).norm())

    @contextlib.contextmanager
    def merged(self, name: State) -> Iterator[PreTrainedModel]:
        """Run the model as `name` with the adapter folded into the weights, which makes sampling faster.

        The sums have storage of their own; the base's is swapped out and back, never written.
        """
        layers = [] if name == "base" else self.adapted_layers(name)
        saved = []
        with parallel.unsharded(self.causal_lm):
            try:
                for layer in layers:
                    weight = layer.get_base_layer().weight
                    saved.append((weight, weight.data))
                    with torch.no_grad():
                        merged = weight.data.float() + layer.get_delta_weight(name).float()
                        if self.sums is None:
                            weight.data = merged.to(weight.dtype)
                        else:
                            place = self.sums.setdefault(len(saved), torch.empty_like(weight.data))
                            weight.data = place.copy_(merged)
                with self.state("base") as model:
                    yield model
            finally:
                for weight, original in saved:
                    weight.data = original
