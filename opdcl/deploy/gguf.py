"""Write GGUF with llama.cpp's converter, and prove that it is the same model."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import load_prompts
from opdcl.deploy.ollama import modelfile
from opdcl.errors import EnvironmentFault, OpdclError, UsageError
from opdcl.model.load import load_base
from opdcl.rundir.files import write_atomic
from opdcl.sanitize import redact

if TYPE_CHECKING:
    import torch

    from opdcl.training import StageReport


SCRIPT = "convert_hf_to_gguf.py"

# Largest mean gap, in nats per token, between the log-probabilities of a GGUF file and of what it was made from: some ten
# times what benchmarks/exported.json shows for each type.
LARGEST_GAP = {"f32": 0.001, "f16": 0.01, "bf16": 0.1, "q8_0": 0.4}

PROOF_PROMPTS, PROOF_TOKENS = 4, 32


def find_converter(named: str | None) -> list[str]:
    """Return how to call llama.cpp's converter: the one that is named, that of `$LLAMA_CPP`, or the one on the path.

    Raises:
        EnvironmentFault: There is none.
    """
    checkout = os.environ.get("LLAMA_CPP")
    for place in filter(None, (named, checkout and os.path.join(checkout, SCRIPT))):
        file = Path(os.path.expanduser(place))
        file = file / SCRIPT if file.is_dir() else file
        if file.is_file():
            # Beside it lies the `gguf` package of its version, which it prefers; the rest it needs is what opdcl needs.
            return [sys.executable, str(file)]
        raise EnvironmentFault(f"there is no converter at {file}", GET_CONVERTER)
    if program := shutil.which(SCRIPT):
        return [program]  # one that is installed brings an environment of its own
    raise EnvironmentFault("GGUF is written by llama.cpp's converter, which is not here", GET_CONVERTER)


GET_CONVERTER = f"git clone --depth 1 https://github.com/ggml-org/llama.cpp, then --converter llama.cpp/{SCRIPT}, or LLAMA_CPP=llama.cpp"


def to_gguf(
    merged: Path, to: Path, command: list[str], outtype: str, check: bool, report: StageReport
) -> dict[str, Any]:
    """Convert a merged model to `model.gguf` with a Modelfile beside it; return their names and how far the two are apart."""
    from transformers import AutoTokenizer, GenerationConfig

    report.note(f"converting to {outtype}")
    target = to / "model.gguf"
    done = subprocess.run(
        [*command, str(merged), "--outfile", str(target), "--outtype", outtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not target.is_file():
        said = redact(
            next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        )
        raise OpdclError(
            f"the converter failed: {said[:300]}",
            "a newer llama.cpp may know this model; the merged one is had by --format merged",
        )
    tokenizer = AutoTokenizer.from_pretrained(merged)
    declared = GenerationConfig.from_pretrained(merged).eos_token_id
    ends = sorted(
        {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}
    )
    text, notes = modelfile(tokenizer, ends)
    write_atomic(to / "Modelfile", text)
    for note in notes:
        report.note(note)
    found: dict[str, Any] = {"outtype": outtype, "bytes": target.stat().st_size, "gap": None}
    if check:
        report.note("loading it back")
        found["gap"] = gap = prove(merged, target)
        if gap is None:
            report.note("not proved: transformers cannot read a GGUF file of this kind of model")
            return found
        if not gap["mean"] <= LARGEST_GAP[outtype]:
            raise OpdclError(
                f"the GGUF file is not the same model: log-probabilities are {gap['mean']:.4f} nats per token apart, at most "
                f"{LARGEST_GAP[outtype]} is rounding",
                "another version of llama.cpp may convert it right",
            )
        report.note(
            f"log-probabilities of {gap['tokens']} tokens: {gap['mean']:.2g} nats apart on average, {gap['largest']:.2g} at most"
        )
        if not gap["same_ids"]:
            report.note(
                "the tokenizer in the GGUF file, as transformers reads it, cuts the prompts into other tokens: compare answers before you rely on it"
            )
    return found


def prove(merged: Path, gguf: Path) -> dict[str, Any] | None:
    """Compare a GGUF file with the model that it was made from, both read by transformers and computed in float32.

    The tokens are a few prompts with the merged model's greedy answers to them. Returns the mean and largest absolute
    difference of their log-probabilities in nats, and whether both tokenizers cut the prompts alike; None where
    transformers does not know this kind of GGUF file.
    """
    rows = load_prompts("everyday", "validation")[:PROOF_PROMPTS]
    model, tokenizer = load_base(ModelConfig(id=str(merged), dtype="float32"))
    prompts = [encode_prompt(row, tokenizer, 1 << 20) for row in rows]
    texts = [answer(model, ids, PROOF_TOKENS) for ids in prompts]
    before = [log_probabilities(model, ids) for ids in texts]
    del model  # two of them need not fit
    try:
        model, tokenizer = load_base(ModelConfig(id=str(gguf), dtype="float32"))
    except UsageError as fault:
        if "architecture" in str(fault):
            return None
        raise
    gaps = [
        g
        for ids, known in zip(texts, before, strict=True)
        for g in (log_probabilities(model, ids) - known).abs().tolist()
    ]
    return {
        "mean": math.fsum(gaps) / len(gaps),
        "largest": max(gaps),
        "tokens": len(gaps),
        "same_ids": [encode_prompt(row, tokenizer, 1 << 20) for row in rows] == prompts,
    }


def answer(model: Any, ids: list[int], longest: int) -> list[int]:
    """Return a prompt with the model's greedy answer behind it."""
    import torch

    with torch.no_grad():
        return model.generate(
            torch.tensor([ids], device=model.device), do_sample=False, max_new_tokens=longest, use_cache=True
        )[0].tolist()


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probability of each token after the first, in nats."""
    import torch

    with torch.no_grad():
        logits_TV = model(torch.tensor([ids], device=model.device)).logits[0, :-1].float()
    return (
        logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=model.device)[:, None])[:, 0].cpu()
    )
