"""Peak memory and step time of recovery, beside TRL's stock DistillationTrainer with a separate teacher.

Same model, prompts, lengths and sampling; one process per arm, arms interleaved, whole-process peak (VmHWM).

    python benchmarks/memory.py            # the embedded model, 32 prompts, up to 128 new tokens, 2 rounds
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ARMS = ("stock", "stock tuned", "opdcl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("memory.json"))
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options)))
        return
    found: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm in ARMS:
            command = [sys.executable, __file__, "--arm", arm, "--prompts", str(options.prompts),
                       "--new-tokens", str(options.new_tokens), "--steps", str(options.steps)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[arm].append(json.loads(done.stdout.splitlines()[-1]))
            print(arm, found[arm][-1], flush=True)
    rows = {
        arm: {k: statistics.median(run[k] for run in runs) for k in ("peak_bytes", "step_seconds")}
        for arm, runs in found.items()
    }
    for row in rows.values():
        row["memory_ratio"] = rows["opdcl"]["peak_bytes"] / row["peak_bytes"]
        row["time_ratio"] = rows["opdcl"]["step_seconds"] / row["step_seconds"]
    print(f"{'arm':<12} {'peak GB':>8} {'s/step':>8} {'our memory':>11} {'our time':>9}")
    for arm, r in rows.items():
        print(f"{arm:<12} {r['peak_bytes'] / 1e9:8.2f} {r['step_seconds']:8.1f} "
              f"{r['memory_ratio']:11.2f} {r['time_ratio']:9.2f}")  # fmt: skip
    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((x.split(":")[1].strip() for x in cpu if x.startswith("model name")), platform.machine())
    command = " ".join(["python", "benchmarks/memory.py", *sys.argv[1:]])
    options.out.write_text(json.dumps({
        "date": date.today().isoformat(), "machine": processor,
        "command": command, "prompts": options.prompts, "new_tokens": options.new_tokens, "arms": rows, "runs": found,
    }, indent=2) + "\n")  # fmt: skip


def measure(arm: str, options: argparse.Namespace) -> dict:
    """Train a few steps in this process; the first step warms up and is left out of the time."""
    from opdcl.config import LoraSection, ModelConfig
    from opdcl.data import load_prompts
    from opdcl.distill.backbone import Backbone
    from opdcl.training import peak_memory

    rows = load_prompts("everyday")[: options.prompts]
    with tempfile.TemporaryDirectory() as folder:
        backbone = Backbone.load(ModelConfig())
        model = backbone.new_adapter(LoraSection(), 0)
        trainer = (ours if arm == "opdcl" else stock)(backbone, model, rows, options, folder, arm == "stock tuned")
        times: list[float] = []
        tokens: list[float] = []
        step = trainer.training_step

        def timed(*args, **kwargs):
            started = time.perf_counter()
            result = step(*args, **kwargs)
            times.append(time.perf_counter() - started)
            return result

        log = trainer.log

        def counted(*args, **kwargs):
            found = trainer._metrics["train"]
            for mean in found.get("mean_length") or found.get("completions/mean_length") or []:
                tokens.append(options.prompts * mean)
            return log(*args, **kwargs)

        # In the stock trainer sampling happens while inputs are prepared, inside training_step as in ours.
        trainer.training_step = timed
        trainer.log = counted
        trainer.train()
    peak = peak_memory()
    return {"peak_bytes": peak, "step_seconds": statistics.median(times[1:] or times),
            "completion_tokens": statistics.mean(tokens) if tokens else None}  # fmt: skip


def ours(backbone, model, rows, options, folder, _):
    from trl import DistillationConfig

    from opdcl.config import RecoverConfig
    from opdcl.data import encode_prompt
    from opdcl.distill.schedule import plan_steps
    from opdcl.distill.trainer import RecoveryTrainer

    config = RecoverConfig(steps=options.steps, rollouts=options.prompts, max_new_tokens=options.new_tokens)
    prompts = {"general": [encode_prompt(r, backbone.tokenizer, 4096) for r in rows], "domain": []}
    args = DistillationConfig(output_dir=folder, per_device_train_batch_size=1, max_steps=options.steps, bf16=False,
                              use_cpu=True, gradient_checkpointing=False, report_to="none", logging_steps=1,
                              save_strategy="no", remove_unused_columns=False, disable_tqdm=True)  # fmt: skip
    return RecoveryTrainer(backbone, config, plan_steps(config, len(rows), 0), prompts, args, [])


def stock(backbone, model, rows, options, folder, tuned):
    """Return TRL's trainer: with its defaults, or with what its options allow to make it fast."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DistillationConfig, DistillationTrainer

    from opdcl.models import _embedded_folder

    dtype = backbone.causal_lm.dtype if tuned else torch.float32
    teacher = AutoModelForCausalLM.from_pretrained(_embedded_folder(), dtype=dtype)
    # bf16 autocast is TRL's default; a processor without bf16 units emulates it, so it gets fp32 there.
    autocast = torch.cpu._is_avx512_bf16_supported()
    extra = {"gradient_checkpointing": False, "cache_implementation": "dynamic"} if tuned else {}
    args = DistillationConfig(output_dir=folder, per_device_train_batch_size=options.prompts, max_steps=options.steps,
                              max_completion_length=options.new_tokens, bf16=autocast, use_cpu=True, report_to="none",
                              save_strategy="no", logging_steps=1, disable_tqdm=True, beta=1.0, **extra)  # fmt: skip
    return DistillationTrainer(model=model, teacher_model=teacher, args=args, processing_class=backbone.tokenizer,
                               train_dataset=Dataset.from_list([{"prompt": r.prompt} for r in rows]))  # fmt: skip


if __name__ == "__main__":
    main()
