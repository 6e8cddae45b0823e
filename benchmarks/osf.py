"""Learn the quickstart's rows by orthogonal subspace fine-tuning (OSF) of PEFT, and write a LoRA adapter.

    python benchmarks/osf.py --rate 1e-4 --seed 1 --adapter osf       # minutes on a CPU
    opdcl eval osf -o runs/osf-0.0001-1 --retention instructions_quick --domain handbook_quick --limit 60 \
        --set eval.max_new_tokens=96 --set eval.closeness=requests

OSF (arXiv 2504.07097) takes each weight apart by its singular values, freezes the larger half, and learns the
smaller half, whose gradients it keeps orthogonal to the frozen one. The change has at most twice the rank of
what it learned, so an adapter holds it exactly.

Registered before any run: the rows, their order, steps and schedule are those of the plain fine-tune with
this seed; the rates are 1e-4 and 3e-4 (which has not run). It is a way to forget less if, at a rate that
learns the handbook as far as the plain fine-tune does (interval of the difference), it is nearer to base than
replay of 256 answers (equal.yaml).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from peft import LoraConfig, OSFConfig, get_peft_model
from peft.tuners.osf.layer import OSFLayer
from safetensors.torch import save_file

from opdcl.config.model import ModelConfig
from opdcl.data.examples import encode_row
from opdcl.data.rows import load_rows
from opdcl.model.accept import load_backbone
from opdcl.model.lora import adaptable
from opdcl.train.finetune import lay_out
from opdcl.train.loop import LONGEST_GRADIENT, Schedule
from opdcl.words import Example

EPOCHS, BATCH, WARM_UP = 4, 16, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapter", type=Path, required=True, help="the folder that is written")
    options = parser.parse_args()
    backbone = load_backbone(ModelConfig(id="smollm2-135m"))
    facts = load_rows("handbook/quick")
    rows = [e for row in facts for e in encode_row(row, backbone.tokenizer, 1024).sequences]
    steps = -(-len(rows) * EPOCHS // BATCH)
    torch.manual_seed(options.seed)
    layers = adaptable(backbone.causal_lm)
    model = get_peft_model(backbone.causal_lm, OSFConfig(target_modules=layers))
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    print(f"{len(rows)} rows, {steps} steps, {sum(w.numel() for w in learned) / 1e6:.0f}M learned weights")
    optimizer = torch.optim.AdamW(learned, lr=options.rate, weight_decay=0)
    schedule = Schedule(steps, WARM_UP, "cosine")
    began = time.perf_counter()
    for step, batch in enumerate(lay_out(rows, BATCH, steps, options.seed)):
        optimizer.param_groups[0]["lr"] = options.rate * schedule.share(step)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, LONGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step + 1}/{steps}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    save_as_lora(model, layers, options.adapter)


def loss_of(model: torch.nn.Module, batch: list[Example]) -> torch.Tensor:
    """Return the mean cross-entropy of a batch's learned tokens."""
    longest = max(len(example.ids) for example in batch)
    ids, labels, mask = (torch.full((len(batch), longest), fill) for fill in (0, -100, 0))
    for i, example in enumerate(batch):
        row, length = torch.tensor(example.ids), len(example.ids)
        ids[i, :length], mask[i, :length] = row, 1
        labels[i, :length] = row.where(torch.tensor(example.learned, dtype=torch.bool), -100)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def save_as_lora(model: torch.nn.Module, layers: list[str], out: Path) -> None:
    """Write each layer's change, U S V now less U S V at the beginning, as the two factors of an adapter."""
    factors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, OSFLayer):
            now = layer.osf_svd_params["default"]
            first = [getattr(layer, f"_osf_{part}_low_init")["default"] for part in "USV"]
            factors[f"{name}.lora_A.weight"] = torch.cat([now["V_low"], first[2]])
            factors[f"{name}.lora_B.weight"] = torch.cat(
                [now["U_low"] * now["S_low"], -first[0] * first[1]], 1
            )
    rank = max(min(factor.shape) for factor in factors.values())
    for name, factor in factors.items():  # of one rank: what narrow layers lack is 0
        missing = rank - factor.shape["lora_B" in name]
        padding = (0, missing) if "lora_B" in name else (0, 0, 0, missing)
        factors[name] = torch.nn.functional.pad(factor.detach(), padding).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(factors, out / "adapter_model.safetensors")
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers, task_type="CAUSAL_LM")
    config.base_model_name_or_path = "smollm2-135m"
    config.save_pretrained(out)


if __name__ == "__main__":
    main()
