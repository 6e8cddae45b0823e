"""Compare a GGUF export, read by transformers and by llama.cpp, with the merged model.

    python benchmarks/exported.py RUN --converter llama.cpp/convert_hf_to_gguf.py --llama PYTHON

RUN is a finished run, PYTHON an interpreter with llama-cpp-python. Reports for every number format on how
many of 20 prompts the greedy text is the same, how much the log-probabilities of the merged model's own
answers differ, and, where a text differs, how close the merged model's two likeliest tokens were. Takes half
an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from datetime import date
from pathlib import Path

import torch

from opdcl.config.model import ModelConfig
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import load_prompts
from opdcl.deploy.export import OUTTYPES, Export, answer, export, log_probabilities
from opdcl.model.architecture import eos_ids
from opdcl.model.load import load_base
from opdcl.rundir.layout import machine, versions

EACH, LONGEST = 10, 64
# Runs in the environment with llama.cpp, which needs no torch: tokens in, log-probabilities and answers out.
READER = """
import json, sys
import llama_cpp, numpy
asked = json.load(sys.stdin)
cache = {} if asked["cache"] is None else {"type_k": asked["cache"], "type_v": asked["cache"]}
sizes = dict(n_ctx=1024, n_batch=1024, n_threads=1, n_threads_batch=1)
model = llama_cpp.Llama(asked["model"], logits_all=True, verbose=False, **sizes, **cache)
told = []
for text in asked["texts"]:
    model.reset()
    model.eval(text)
    logits = model.scores[: len(text) - 1].astype(numpy.float64)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - numpy.log(numpy.exp(logits - top).sum(-1, keepdims=True))
    told.append(log_p[numpy.arange(len(text) - 1), text[1:]].tolist())
answers = []
for prompt in asked["prompts"]:
    model.reset()
    model.eval(prompt)
    found = list(prompt)
    for _ in range(asked["longest"]):
        found.append(int(model.scores[len(found) - 1].argmax()))
        if found[-1] in asked["ends"]:
            break
        model.eval(found[-1:])
    answers.append(found)
cut = [model.tokenize(text.encode(), add_bos=True, special=True) for text in asked["rendered"]]
json.dump({"told": told, "answers": answers, "cut": cut, "version": llama_cpp.__version__}, sys.stdout)
"""


class Quiet:
    """A reporter that discards everything."""

    def note(self, text: str) -> None: ...

    def progress(self, done: int, total: int, **values: float | str) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--converter", required=True)
    parser.add_argument("--llama", required=True, help="a Python interpreter with llama-cpp-python")
    parser.add_argument("--outtypes", nargs="+", default=OUTTYPES)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("exported.json"))
    options = parser.parse_args()
    rows = [*load_prompts("everyday", "validation")[:EACH], *load_prompts("handbook")[: 7 * EACH : 7]]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        export(Export(options.run, folder / "merged", check=False), Quiet())
        model, tokenizer = load_base(ModelConfig(id=str(folder / "merged"), dtype="float32"))
        prompts = [encode_prompt(row, tokenizer, 1024) for row in rows]
        texts = [answer(model, ids, LONGEST) for ids in prompts]
        known = {
            "prompts": prompts,
            "texts": texts,
            "told": [log_probabilities(model, ids) for ids in texts],
            "margins": [margins(model, ids) for ids in texts],
            "ends": eos_ids(model.generation_config, tokenizer),
            "rendered": [tokenizer.decode(ids) for ids in prompts],
        }
        record = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "versions": versions(),
            "prompts": len(rows),
            "longest": LONGEST,
            "found": [],
        }
        for outtype in options.outtypes:
            target = folder / outtype
            written = export(Export(options.run, target, None, "gguf", outtype, options.converter), Quiet())
            file = str(target / "model.gguf")
            found = {
                "outtype": outtype,
                "bytes": written["bytes"],
                "transformers": compare(known, *by_transformers(file, prompts, texts)),
            }
            for name, cache in (
                ("llama.cpp", None),
                *([("llama.cpp, cache in f32", 0)] if outtype == "f32" else []),
            ):
                told = by_llama(options.llama, file, known, cache)
                found[name] = compare(known, told["told"], told["answers"]) | {
                    "same_ids": told["cut"] == prompts
                }
                record["versions"]["llama-cpp-python"] = told["version"]
            record["found"].append(found)
            print(json.dumps(found, indent=2), flush=True)
            options.out.write_text(json.dumps(record, indent=2) + "\n")


def by_transformers(
    file: str, prompts: list[list[int]], texts: list[list[int]]
) -> tuple[list, list[list[int]]]:
    """Return log-probabilities and greedy answers of a GGUF file as read by transformers."""
    model, _ = load_base(ModelConfig(id=file, dtype="float32"))
    return [log_probabilities(model, ids) for ids in texts], [answer(model, ids, LONGEST) for ids in prompts]


def by_llama(python: str, file: str, known: dict, cache: int | None) -> dict:
    """Return the same from llama.cpp, and its tokenization; `cache` is llama.cpp's number of a cache type."""
    asked = {
        "model": file,
        "cache": cache,
        "longest": LONGEST,
        **{name: known[name] for name in ("prompts", "texts", "ends", "rendered")},
    }
    done = subprocess.run(
        [python, "-c", READER], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def compare(known: dict, told: list, answers: list[list[int]]) -> dict:
    """Compare a reader's log-probabilities and greedy answers with the merged model's."""
    pairs = zip(told, known["told"], strict=True)
    gaps = torch.cat([(torch.as_tensor(a, dtype=torch.float64) - b).abs() for a, b in pairs])
    near = []
    for found, text, margin in zip(answers, known["texts"], known["margins"], strict=True):
        if found != text:
            at = next(i for i in range(len(text)) if found[i : i + 1] != text[i : i + 1])
            near.append(round(margin[at - 1], 4))
    return {
        "same_text": len(answers) - len(near),
        "margins_where_it_differs": near,
        "mean_gap": gaps.mean().item(),
        "largest_gap": gaps.max().item(),
        "tokens": len(gaps),
    }


def margins(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Return, after each token, by how many nats the likeliest next token leads the second likeliest."""
    with torch.no_grad():
        top_T2 = model(torch.tensor([ids])).logits[0].float().topk(2).values
    return (top_T2[:, 0] - top_T2[:, 1]).tolist()


if __name__ == "__main__":
    main()
