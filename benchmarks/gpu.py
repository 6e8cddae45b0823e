"""Measure the table of docs/performance.md on a CUDA device: shapes by batch size, up to 512 new tokens.

python benchmarks/gpu.py                                   # SmolLM2-135M and Qwen3's shapes 0.6B, 1.7B and 8B
python benchmarks/gpu.py --shapes qwen3-1.7b --batches 64  # one cell
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import parser_of, store
from speed import SHAPES

EMBEDDED = "smollm2-135m"


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--shapes", nargs="+", choices=[EMBEDDED, *SHAPES], default=[EMBEDDED, *SHAPES])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--arms", nargs="+", default=["stock", "stock-tuned", "opdcl"])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; benchmarks/speed.py measures on the CPU")
    cells = []
    for shape, batch in itertools.product(options.shapes, options.batches):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "cell.json"
            sizes = {"prompts": batch, "new-tokens": options.new_tokens, "steps": options.steps, "out": out}
            sizes |= {"shape": shape} if shape != EMBEDDED else {}
            command = [sys.executable, str(Path(__file__).with_name("speed.py")), "steps"]
            command += [f"--{name}={value}" for name, value in sizes.items()]
            print(f"== {shape}, {batch} prompts", flush=True)
            # An arm that fails, for want of memory, is left out of the table and told in the record.
            subprocess.run([*command, "--arms", *options.arms])
            if out.exists():
                cells.append(json.loads(out.read_text()))
        # Written after every cell, so that an interrupt loses nothing measured.
        store(options.out, cells)
    print(table(cells))


def table(cells: list[dict]) -> str:
    """Return a Markdown table, one row per cell and arm."""
    lines = [
        "| model | prompts | arm | s/step | sampled tokens/s | peak GB "
        "| time ratio | memory ratio | over the floor |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        for arm, r in cell["arms"].items():
            above = f"{cell['machine']['ours_over_floor']:.1f}" if arm == "opdcl" else ""
            lines.append(
                f"| {cell['model']} | {cell['prompts']} | {arm} | {r['step']:.1f} | "
                f"{r['completion_tokens'] / r['sample']:.0f} | {r['peak_bytes'] / 1e9:.1f} | "
                f"{r.get('time_ratio', 0):.2f} | {r.get('memory_ratio', 0):.2f} | {above} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
