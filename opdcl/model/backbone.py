"""The resident model in its adapter states, on one set of weights; beside a tuned model, base is a second."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opdcl import parallel
from opdcl.config.model import LoraSection
from opdcl.errors import OpdclError
from opdcl.model.architecture import eos_ids
from opdcl.model.lora import (
    adapter_weights,
    base_weight,
    fuse,
    lora_config,
    merged_weight,
    scale,
    stored_config,
)
from opdcl.model.quantized import is_quantized, quantized_layers

# `base`, `tuned`, `student`, or the name of a teacher that has an adapter of its own; `bare` is without any.
State = str


class Backbone:
    """The base model with the trainable adapter `student`, and during recovery `tuned` and the teachers'.

    The base weights are never written. `merged` puts base + adapter into storage of its own: merging and
    unmerging in place would drift the base by rounding, and the base is the teacher.

    The adapters may belong to a model that was tuned as a whole. Then `base_lm` is its base, a second module
    tree: weights exchanged within one tree, between a forward and its backward pass, would spoil gradients.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        base_lm: PreTrainedModel | None = None,
    ):
        # cuDNN's attention makes a plan for each new shape, and nearly every step has one.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.causal_lm, self.tokenizer, self.base_lm = model, tokenizer, base_lm
        self.eos_ids = eos_ids((base_lm or model).generation_config, tokenizer)
        self.peft: PeftModel | None = None
        self._known: tuple[tuple[int, ...], str] | None = None  # the last checksum and fingerprint
        self.merged_weights: list[torch.Tensor] | None = None
        """`merged` keeps its sums here, at the same addresses, if this is not None: CUDA graphs need it."""

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    @property
    def context_length(self) -> int:
        """The longest sequence that the model was made for, in tokens."""
        return int(self.causal_lm.config.get_text_config().max_position_embeddings)

    @property
    def head_VH(self) -> torch.Tensor:
        """The output embedding that turns the student's hidden states into logits."""
        return self.causal_lm.get_output_embeddings().weight

    def head_of(self, state: State) -> torch.Tensor:
        """Return the output embedding of a state, `(V, H)`: base has its own beside a tuned model."""
        model = self.base_lm if state == "base" and self.base_lm else self.causal_lm
        return model.get_output_embeddings().weight

    def new_adapter(self, lora: LoraSection, seed: int) -> PeftModel:
        """Attach a freshly initialised `student` adapter, which changes nothing yet."""
        torch.manual_seed(seed)
        self.drop_adapters()
        config = lora_config(lora, self.causal_lm)
        self.peft = get_peft_model(self.causal_lm, config, adapter_name="student")
        fuse(self.causal_lm)
        return self.peft

    def load_adapter(self, folder: Path, state: State, trainable: bool = False) -> PeftModel:
        """Attach an adapter from disk as `state`, which this program has made or accepted (`load_backbone`).

        Raises:
            OpdclError: Some of its weights have no place, or another shape; PEFT would leave them out.
        """
        found = self.attach(folder, state, trainable)
        if names := [*found.missing_keys, *found.unexpected_keys]:
            raise OpdclError(f"adapter {folder} does not fit the base model, by {names[0]}", "make it again")
        return self.peft

    def attach(self, folder: Path, state: State, trainable: bool = False) -> Any:
        """Attach what fits of an adapter as `state`; return PEFT's report of what does not.

        For weights that it calls missing or unexpected, PEFT keeps an untrained adapter.
        """
        config = stored_config(folder)
        options: dict[str, Any] = {"is_trainable": trainable, "ignore_mismatched_sizes": True}
        if self.peft is None:
            model = self.causal_lm
            self.peft = PeftModel.from_pretrained(model, str(folder), state, config=config, **options)
        elif state not in self.peft.peft_config:
            config.inference_mode = not trainable
            self.peft.add_adapter(state, config)
            if trainable:
                self.peft.set_requires_grad(state)
        # Only this returns the names that do not match.
        found = self.peft.load_adapter(str(folder), state, **options)
        fuse(self.causal_lm)
        return found

    def drop_adapters(self) -> None:
        """Remove all adapters and keep the base."""
        if self.peft is not None:
            self.causal_lm = self.peft.unload()
            self.peft = None
            self.merged_weights = None if self.merged_weights is None else []

    def fingerprint(self) -> str:
        """Return the SHA-256 of all frozen weights' bits, which proves that training did not change them."""
        self._known = self.checksum(), _digest(self._frozen_weights())
        return self._known[1]

    def base_fingerprint(self) -> str:
        """Return the fingerprint of base alone, also if a tuned model is loaded beside it."""
        return _digest(_frozen(self.base_lm)) if self.base_lm else self.known_fingerprint()

    def adapter_fingerprint(self, state: State) -> str:
        """Return the SHA-256 of a state's adapter, weights and scales; that of nothing if it has none."""
        digest = hashlib.sha256()
        for layer in self.adapted_layers(state):
            digest.update(repr(layer.scaling[state]).encode())
            for weight in adapter_weights(layer, state):
                digest.update(_hashable(weight))
        return digest.hexdigest()

    def known_fingerprint(self) -> str:
        """Return `fingerprint`, computed anew only if it never was, or if the weights have changed since."""
        checksum, known = self._known or ((), "")
        if parallel.any_worker(not known or checksum != self.checksum()):
            return self.fingerprint()
        return known

    def checksum(self) -> tuple[int, ...]:
        """Return the sum of each frozen weight's bits, read as integers; this worker's part of a shard.

        It stays on the device; on a CPU it takes a seventh of a fingerprint's time. Only a change that leaves
        a sum as it was, such as an exchange of values within a weight, escapes it.
        """
        sums = []
        for weight in self._frozen_weights():
            bits = _bytes(weight.to_local() if isinstance(weight, DTensor) else weight)
            words = len(bits) // 8 * 8
            sums += [bits[:words].view(torch.int64).sum(), bits[words:].sum()]
        return tuple(torch.stack(sums).tolist())  # one wait for the device

    def _frozen_weights(self) -> Iterator[torch.Tensor]:
        """Yield all weights that training must not change, in the order of their names."""
        for model in filter(None, (self.causal_lm, self.base_lm)):
            yield from _frozen(model)

    def adapted_layers(self, name: State | None = None) -> list[BaseTunerLayer]:
        """Return every layer that carries any adapter, or the adapter `name`."""
        layers = [m for m in self.causal_lm.modules() if isinstance(m, BaseTunerLayer)]
        return [m for m in layers if name is None or name in m.lora_A]

    @contextlib.contextmanager
    def state(self, name: State) -> Iterator[PreTrainedModel]:
        """Run the model as `name` inside the block; afterwards it is the trainable student again."""
        if name == "base":
            if self.base_lm:
                yield self.base_lm
                return
            name = "bare"
        if name == "student" or self.peft is None:
            yield self.causal_lm
            return
        layers = self.adapted_layers()
        for layer in layers:
            if name == "bare":
                layer.enable_adapters(False)
            else:
                layer.set_adapter(name, inference_mode=True)
        try:
            yield self.causal_lm
        finally:
            for layer in layers:
                if name == "bare":
                    layer.enable_adapters(True)
                else:
                    layer.set_adapter("student")

    @contextlib.contextmanager
    def scaled(self, alpha: float) -> Iterator[None]:
        """Scale the student adapter's contribution by `alpha` inside the block: 0 is base, 1 the adapter."""
        if alpha == 0 and self.base_lm:
            student, self.causal_lm = self.causal_lm, self.base_lm
            try:
                yield
            finally:
                self.causal_lm = student
            return
        weights = self._weights_of("student")
        saved = [weight.data.clone() for weight in weights]
        self.shrink(alpha)
        try:
            yield
        finally:
            for weight, original in zip(weights, saved, strict=True):
                weight.data = original

    def shrink(self, alpha: float, state: State = "student") -> None:
        """Scale an adapter's contribution by `alpha` permanently."""
        for layer in self.adapted_layers(state):
            scale(layer, state, alpha)

    def adapter_norm(self, state: State) -> float:
        """Return the L2 norm of all weights of an adapter."""
        norms = torch._foreach_norm([weight.detach().float() for weight in self._weights_of(state)])
        return float(torch.stack(norms).norm())

    def _weights_of(self, state: State) -> list[torch.nn.Parameter]:
        """Return all weights of an adapter, layer by layer."""
        return [weight for layer in self.adapted_layers(state) for weight in adapter_weights(layer, state)]

    @contextlib.contextmanager
    def merged(self, name: State) -> Iterator[PreTrainedModel]:
        """Run the model as `name` with the adapter folded into the weights, which makes sampling faster.

        The sums have storage of their own; the base's is swapped out and back, never written. On a quantized
        base nothing is merged: quantizing the sum again would round the adapter away.
        """
        if name == "base" and self.base_lm:
            with parallel.unsharded(self.base_lm):
                yield self.base_lm
            return
        if is_quantized(self.causal_lm):
            with self.state(name) as model:
                yield model
            return
        # Permanent sums hold every layer that any adapter changes, so graphs read the same addresses in every
        # state, base included.
        layers = self.adapted_layers(None if self.merged_weights is not None else name)
        saved = []
        with parallel.unsharded(self.causal_lm):
            places = self._merged_storage(layers)
            try:
                for layer in layers:
                    weight = base_weight(layer)
                    saved.append((weight, weight.data))
                    with torch.no_grad():
                        merged = merged_weight(layer, name) if name in layer.lora_A else weight.data
                        weight.data = merged if places is None else places[len(saved) - 1].copy_(merged)
                with self.state("bare") as model:
                    yield model
            finally:
                for weight, original in saved:
                    weight.data = original

    def _merged_storage(self, layers: list[BaseTunerLayer]) -> list[torch.Tensor] | None:
        """Return where the layers' sums are kept: one behind the other, so that some can be read as one."""
        if self.merged_weights is not None and len(self.merged_weights) != len(layers):
            weights = [base_weight(layer).data for layer in layers]
            whole = weights[0].new_empty(sum(weight.numel() for weight in weights))
            parts = whole.split([weight.numel() for weight in weights])
            self.merged_weights = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        return self.merged_weights


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().contiguous().flatten().view(torch.uint8)


def _frozen(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Yield a model's weights without those of adapters, in the order of their names."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, layer in quantized_layers(model).items():  # the scales are no parameters
        weights |= {f"{name}.{key}": value for key, value in layer.state_dict().items()}
    yield from (weight for name, weight in sorted(weights.items()) if "lora_" not in name)


def _digest(weights: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of weights' bits."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(_hashable(weight))
    return digest.hexdigest()


def _hashable(weight: torch.Tensor) -> memoryview:
    """Return a copy of a weight's bits; of the whole weight if this worker has a shard of it.

    A copy, because numpy takes hold of the storage that it is shown, which FSDP then cannot free.
    """
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return _bytes(whole).to("cpu", copy=True).numpy().data
