"""Sample two long prompts among 46 short ones: batches split by length against one padded batch.

python benchmarks/long_prompts.py         # the embedded model; a minute on two cores
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch

from opdcl.config.model import ModelConfig
from opdcl.data.rows import load_rows
from opdcl.model.backbone import Backbone
from opdcl.rundir.environment import machine
from opdcl.sampling import decode
from opdcl.sampling.rollout import Request, Rollout
from opdcl.sampling.sample import weights_in_tokens
from opdcl.training import peak_memory, reset_peak_memory

SHORT, LONG, TOKENS = 46, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--words", type=int, default=600, help="words of a long prompt")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("long_prompts.json"))
    options = parser.parse_args()
    backbone = Backbone.load(ModelConfig())
    texts = [row.prompt[-1]["content"] for row in load_rows("everyday")]
    words = " ".join(texts).split()
    texts = texts[:SHORT] + [
        " ".join(words[i * options.words : (i + 1) * options.words]) for i in range(LONG)
    ]
    prompts = [
        backbone.tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False
        )
        for t in texts
    ]
    rows = {}
    # Measure the split batches first: a process may not return memory, and the peak has to be their own.
    for name, weights in (
        ("split by length", weights_in_tokens(backbone.causal_lm)),
        ("one batch", math.inf),
    ):
        times = []
        reset_peak_memory()
        for repeat in range(options.repeats + 1):
            found = [Rollout(list(ids)) for ids in prompts]
            request = Request(TOKENS, [], 1.0, repeat, len(found), None, len(found), weights, 0)
            started = time.perf_counter()
            decode.decode(backbone.causal_lm, found, request)
            times.append(time.perf_counter() - started)
        assert all(len(r.completion_ids) == TOKENS for r in found)
        rows[name] = {"seconds": round(statistics.median(times[1:]), 2), "peak_bytes": peak_memory()}
        print(name, json.dumps(rows[name]), flush=True)
    ratio = {
        key: round(rows["split by length"][key] / rows["one batch"][key], 2)
        for key in ("seconds", "peak_bytes")
    }
    print(
        f"split by length against one batch: {ratio['seconds']} times the time, "
        f"{ratio['peak_bytes']} times the memory"
    )
    options.out.write_text(
        json.dumps(
            {
                "date": date.today().isoformat(),
                "command": " ".join(["python", "benchmarks/long_prompts.py", *sys.argv[1:]]),
                "machine": machine(),
                "threads": torch.get_num_threads(),
                "prompt_tokens": sorted(map(len, prompts)),
                "rows": rows,
                "ratio": ratio,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
