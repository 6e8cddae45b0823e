"""Time a step of on-policy distillation part by part: opdcl against TRL's trainers on the same inputs.

Every arm runs in its own process, and arms take turns, round by round. Each figure is the median over all
steps but the first of each process, which is the warm-up. Memory is the peak of the whole process (or of the
GPU, if there is one).

    python benchmarks/throughput.py                        # embedded model, 32 prompts, up to 128 new tokens
    python benchmarks/throughput.py --shape qwen3-0.6b --new-tokens 512 --prompts 64  # random weights
    python benchmarks/throughput.py --agreement            # the loss of each trainer on identical completions
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
from collections import defaultdict
from datetime import date
from pathlib import Path

ARMS = {
    "stock": "TRL DistillationTrainer, its defaults",
    "stock-fp32": "the same in fp32 (no bf16 autocast)",
    "stock-tuned": "the same, no checkpointing, cached generation, fastest precision",
    "gkd": "TRL GKDTrainer, on-policy, reverse KL, fastest precision",
    "opdcl": "opdcl RecoveryTrainer",
}
PARTS = ("sample", "teacher", "student", "backward", "rest")
# Qwen3's real shapes with random weights, for measuring speed only.
SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
VOCABULARY = 151_936


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["stock-fp32", "stock-tuned", "gkd", "opdcl"]
    )
    parser.add_argument("--arm", choices=ARMS, help="run one arm in this process and print its figures")
    parser.add_argument(
        "--shape", choices=SHAPES, help="use random weights of this shape instead of the embedded model"
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts (and completions) per step")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--agreement", action="store_true", help="compare losses instead of times")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("throughput.json"))
    options = parser.parse_args()
    if options.agreement:
        print(json.dumps(agreement(options), indent=2))
    elif options.arm:
        print(json.dumps(measure(options.arm, options)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run the arms in turn, print the table and store it with all individual figures."""
    found: dict[str, list[dict]] = {arm: [] for arm in options.arms}
    failed: dict[str, str] = {}
    for _ in range(options.rounds):
        for arm in options.arms:
            command = [
                sys.executable,
                __file__,
                "--arm",
                arm,
                "--prompts",
                str(options.prompts),
                "--new-tokens",
                str(options.new_tokens),
                "--steps",
                str(options.steps),
            ]
            command += ["--shape", options.shape] if options.shape else []
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:  # out of memory, for example, which is a result too
                failed[arm] = done.stderr[-1500:]
                print(f"{arm}: failed\n{failed[arm]}", flush=True)
                continue
            found[arm].append(json.loads(done.stdout.splitlines()[-1]))
            print(arm, json.dumps(found[arm][-1]["median"]), flush=True)
    rows = {arm: _combine(runs) for arm, runs in found.items() if runs}
    ours = rows.get("opdcl")
    for row in rows.values():
        if ours:
            row["time_ratio"] = ours["step"] / row["step"]
            # Arms sample their own completions, so their steps may have more or fewer tokens than ours.
            row["time_per_token_ratio"] = (
                row["time_ratio"] * row["completion_tokens"] / ours["completion_tokens"]
            )
            row["memory_ratio"] = ours["peak_bytes"] / row["peak_bytes"]
    _print(rows)
    machine = machine_rates(options)
    if ours:
        machine["floor_seconds"] = floor(machine, ours)
        machine["ours_over_floor"] = ours["step"] / machine["floor_seconds"]
        print(f"\nminimum time of our step at the machine's rates: {machine['floor_seconds']:.1f} s")
        print(f"our step takes {machine['ours_over_floor']:.2f} times that")
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/throughput.py", *sys.argv[1:]]),
        "machine": machine,
        "model": options.shape or "smollm2-135m",
        "prompts": options.prompts,
        "new_tokens": options.new_tokens,
        "arms": rows,
        "failed": failed,
        "runs": found,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _combine(runs: list[dict]) -> dict:
    return {key: statistics.median(run["median"][key] for run in runs) for key in runs[0]["median"]}


def _print(rows: dict[str, dict]) -> None:
    print(
        f"\n{'arm':<12}{'s/step':>8}"
        + "".join(f"{p:>9}" for p in PARTS)
        + f"{'tokens':>8}{'sample/s':>9}{'padding':>8}{'GB':>7}{'time':>6}{'/token':>7}{'memory':>7}"
    )
    for arm, r in rows.items():
        print(
            f"{arm:<12}{r['step']:8.1f}"
            + "".join(f"{r[p]:9.1f}" for p in PARTS)
            + f"{r['completion_tokens']:8.0f}{r['completion_tokens'] / r['sample']:9.0f}{r['padding']:8.0%}"
            f"{r['peak_bytes'] / 1e9:7.2f}{r.get('time_ratio', 0):6.2f}"
            f"{r.get('time_per_token_ratio', 0):7.2f}"
            f"{r.get('memory_ratio', 0):7.2f}"
        )


# -- one arm


class Clock:
    """Adds up the time spent inside wrapped methods, counting nested calls only once."""

    def __init__(self):
        self.spent: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []

    def wrap(self, owner, method: str, part: str) -> None:
        inner = getattr(owner, method)

        def timed(*args, **kwargs):
            _synchronize()
            started, before = time.perf_counter(), sum(self.spent.values())
            try:
                return inner(*args, **kwargs)
            finally:
                _synchronize()
                nested = sum(self.spent.values()) - before
                self.spent[part] += time.perf_counter() - started - nested

        setattr(owner, method, timed)


def measure(arm: str, options: argparse.Namespace) -> dict:
    """Train a few steps in this process and return medians per step."""
    import torch
    from transformers import TrainerCallback

    from opdcl.training import peak_memory

    clock, steps, lengths = Clock(), [], []
    with tempfile.TemporaryDirectory() as folder:
        trainer, prompt_lengths = (ours if arm == "opdcl" else stock)(arm, options, folder, clock, lengths)

        class Steps(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                clock.spent.clear()
                self.started = time.perf_counter()

            def on_step_end(self, *args, **kwargs):
                _synchronize()
                total = time.perf_counter() - self.started
                row = {"step": total, **{p: clock.spent[p] for p in PARTS[:-1]}}
                steps.append({**row, "rest": total - sum(row[p] for p in PARTS[:-1])})

        trainer.add_callback(Steps())
        trainer.train()
    rows = []
    for row, completion in zip(steps, lengths, strict=True):
        real = sum(prompt_lengths) + sum(completion)
        if arm == "opdcl":
            padded = row_padding(trainer, prompt_lengths, completion)
        else:
            padded = len(completion) * (max(prompt_lengths) + max(completion))
        rows.append(
            {
                **row,
                "completions": len(completion),
                "completion_tokens": sum(completion),
                "padding": 1 - real / padded,
                "length_p10": _quantile(completion, 0.1),
                "length_p50": _quantile(completion, 0.5),
                "length_p90": _quantile(completion, 0.9),
                "prompt_tokens": sum(prompt_lengths),
            }
        )
    kept = rows[1:] or rows
    median = {key: statistics.median(r[key] for r in kept) for key in kept[0]} | {"peak_bytes": peak_memory()}
    dtype = str(next(trainer.model.parameters()).dtype)
    return {"arm": arm, "dtype": dtype, "threads": torch.get_num_threads(), "median": median, "steps": rows}


def row_padding(trainer, prompt_lengths: list[int], completion: list[int]) -> int:
    """Return the positions in our micro-batches, counting the shared prefix in every row as other arms do."""
    from opdcl.distill.grading import micro_batches

    lengths = {i: p + c for i, (p, c) in enumerate(zip(prompt_lengths, completion, strict=True))}
    batches = micro_batches(lengths, trainer.grader.micro_batch_tokens)
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


def ours(arm, options, folder, clock, lengths):
    import torch

    from opdcl.config.recover import RecoverConfig
    from opdcl.distill.grading import Grader
    from opdcl.distill.rollout_queue import RolloutQueue, Selection
    from opdcl.distill.schedule import plan_steps
    from opdcl.distill.teachers import Teacher
    from opdcl.distill.trainer import RecoveryTrainer
    from opdcl.model.backbone import Backbone

    model, tokenizer = load_model(options)
    backbone = Backbone(model, tokenizer)
    start_adapter(backbone.new_adapter(lora_section(), 0))
    config = RecoverConfig(
        steps=options.steps,
        lmbda=1.0,
        loss={"kind": "reverse_kl"},
        rollouts=options.prompts,
        max_new_tokens=options.new_tokens,
        micro_batch_tokens=8192 if torch.cuda.is_available() else 2048,
        sample_ahead=1,  # each step samples its own completions, as in the other arms
    )
    prompts = {"general": prompt_ids(options, tokenizer), "domain": []}
    args = recovery_arguments(folder, options, half=model.dtype.itemsize == 2, steps=options.steps)
    teachers = {"general": Teacher(backbone, "base")}
    grader = Grader(backbone, config, teachers)
    steps, student = plan_steps(config, options.prompts, 0), Teacher(backbone, "student")
    queue = RolloutQueue(config, steps, prompts, student, teachers, Selection(config))
    trainer = RecoveryTrainer(queue, grader, args)
    keep_lengths(
        queue, "take", lengths, lambda batch: [len(rollout.completion_ids) for rollout in batch.rollouts]
    )
    clock.wrap(queue, "sample", "sample")
    clock.wrap(teachers["general"], "distribution", "teacher")
    clock.wrap(grader, "learn", "student")
    clock.wrap(torch.Tensor, "backward", "backward")
    return trainer, [len(p) for p in prompts["general"]]


def stock(arm, options, folder, clock, lengths):
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model

    model, tokenizer = load_model(options, half=arm != "stock" and fast_half())
    teacher, _ = load_model(options, half=arm != "stock" and fast_half())
    section = lora_section()
    model = get_peft_model(
        model,
        LoraConfig(
            r=section.r,
            lora_alpha=section.alpha,
            target_modules=section.target_modules,
            task_type="CAUSAL_LM",
        ),
    )
    start_adapter(model)
    autocast = True if arm == "stock" else fast_half()
    tuned = {"gradient_checkpointing": False} if arm in ("stock-tuned", "gkd") else {}
    shared = (
        common(options, autocast)
        | {
            "output_dir": folder,
            "per_device_train_batch_size": options.prompts,
            "max_steps": options.steps,
            "learning_rate": 1e-5,
        }
        | tuned
    )
    if arm == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        rows = [{"messages": [*p, {"role": "assistant", "content": "-"}]} for p in prompts(options)]
        args = GKDConfig(lmbda=1.0, beta=1.0, temperature=1.0, max_new_tokens=options.new_tokens, **shared)
        trainer = GKDTrainer(
            model=model,
            teacher_model=teacher,
            args=args,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
        )
        keep_lengths(
            trainer, "generate_on_policy_outputs", lengths, lambda found: (found[2] != -100).sum(1).tolist()
        )
        clock.wrap(trainer, "generate_on_policy_outputs", "sample")
    else:
        from trl import DistillationConfig, DistillationTrainer

        extra = {"cache_implementation": "dynamic"} if arm == "stock-tuned" else {}
        args = DistillationConfig(
            max_completion_length=options.new_tokens, beta=1.0, shuffle_dataset=False, **shared, **extra
        )
        rows = Dataset.from_list([{"prompt": p} for p in prompts(options)])
        trainer = DistillationTrainer(
            model=model, teacher_model=teacher, args=args, processing_class=tokenizer, train_dataset=rows
        )
        if options.shape:
            trainer.eos_token_ids = stop_ids(tokenizer)
            trainer.generation_config.eos_token_id = trainer.eos_token_ids
        keep_lengths(trainer, "_generate_single_turn", lengths, lambda found: [len(ids) for ids in found])
        clock.wrap(trainer, "_generate_single_turn", "sample")
    clock.wrap(
        trainer.teacher_model.base_model if arm != "gkd" else trainer.teacher_model, "forward", "teacher"
    )
    clock.wrap(trainer, "compute_loss", "student")
    clock.wrap(trainer.accelerator, "backward", "backward")
    return trainer, [len(p) for p in prompt_ids(options, tokenizer)]


def keep_lengths(trainer, method: str, lengths: list, count) -> None:
    inner = getattr(trainer, method)

    def kept(*args, **kwargs):
        found = inner(*args, **kwargs)
        lengths.append(count(found))
        return found

    setattr(trainer, method, kept)


# -- what the arms share


def common(options, half: bool) -> dict:
    import torch

    return {
        "bf16": half,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def recovery_arguments(folder: str, options, half: bool, steps: int):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=steps,
        learning_rate=1e-5,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        **common(options, half),
    )


def fast_half() -> bool:
    """Return whether bf16 is the fastest precision here; a CPU without bf16 units emulates it slowly."""
    from opdcl.model.load import pick_device, pick_dtype

    return pick_dtype("auto", pick_device("auto")) == "bfloat16"


def load_model(options, half: bool | None = None):
    """Return a newly loaded model on the device, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from opdcl.config.model import ModelConfig
    from opdcl.model.load import EMBEDDED, load_base, model_source

    half = fast_half() if half is None else half
    dtype = "bfloat16" if half else "float32"
    if not options.shape:
        return load_base(ModelConfig(id=EMBEDDED, dtype=dtype))
    folder, _ = model_source(ModelConfig(id=EMBEDDED))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **SHAPES[options.shape],
    )
    torch.set_default_dtype(getattr(torch, dtype))
    model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = stop_ids(tokenizer)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def stop_ids(tokenizer, mean_length: int = 256) -> list[int]:
    """Return enough stop ids for near-uniform output to end after `mean_length` tokens on average."""
    return [tokenizer.eos_token_id, *range(VOCABULARY - VOCABULARY // mean_length, VOCABULARY)]


def lora_section():
    from opdcl.config.finetune import LoraSection

    return LoraSection()


def start_adapter(model) -> None:
    """Move the adapter away from zero, so that student and teacher differ as in a recovery."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 2e-3).to(parameter)


def prompts(options) -> list[list[dict]]:
    from opdcl.data.rows import load_prompts

    rows = load_prompts("everyday")
    return [rows[i % len(rows)].prompt for i in range(options.prompts)]


def prompt_ids(options, tokenizer) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False)
        for p in prompts(options)
    ]


# -- the limit


def machine_rates(options, dtype: str = "auto") -> dict:
    """Measure the hardware's rates in a dtype: matrix products of the model's shape, and memory reads."""
    import torch

    from opdcl.model.architecture import architecture

    cpu = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((x.split(":")[1].strip() for x in cpu if x.startswith("model name")), platform.machine())
    model, _ = load_model(options, half=None if dtype == "auto" else dtype == "bfloat16")
    device, dtype_used = model.device, model.dtype
    head = model.get_output_embeddings().weight
    c = model.config
    body = sum(p.numel() for p in model.parameters()) - head.numel() * (1 if c.tie_word_embeddings else 2)
    kv = 2 * c.num_hidden_layers * architecture(c).key_width
    x = torch.randn(1024 if device.type == "cpu" else 16384, c.hidden_size, device=device, dtype=dtype_used)
    w = torch.randn(c.intermediate_size, c.hidden_size, device=device, dtype=dtype_used)
    flops = 2 * x.shape[0] * w.numel() / _best(lambda: torch.nn.functional.linear(x, w))
    block = torch.ones(1 << 26 if device.type == "cpu" else 1 << 28, device=device)
    bandwidth = block.numel() * 4 / _best(lambda: block.sum())
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{name}, {torch.get_num_threads()} cores"
    )
    return {
        "name": name,
        "dtype": str(dtype_used),
        "matrix_gflops": flops / 1e9,
        "memory_gb_per_s": bandwidth / 1e9,
        "body_parameters": body,
        "head_parameters": head.numel(),
        "bytes_per_number": x.element_size(),
        "cache_numbers_per_token": kv,
    }


def floor(machine: dict, step: dict) -> float:
    """Return the minimum time for a step: the work of each part at the machine's full rate.

    Sampling: reading weights and cache once per decoded position, or 2 N D of arithmetic, whichever takes
    longer. Teacher: 2 N D. Student: 4 N D (2 forward, 2 backward; the frozen weights need no gradient). For
    prompt tokens, N excludes the head.
    """
    body, head = machine["body_parameters"], machine["head_parameters"]
    prompt, completion = step["prompt_tokens"], step["completion_tokens"]
    rate, bandwidth = machine["matrix_gflops"] * 1e9, machine["memory_gb_per_s"] * 1e9
    positions, count = step["length_p90"], step["completions"]
    # On average, each decoded token reads its own prompt and half of the final completion.
    cache = completion * (prompt + completion / 2) / count * machine["cache_numbers_per_token"]
    read = (positions * (body + head) + cache) * machine["bytes_per_number"]
    decode = 2 * (body + head) * completion
    every = 2 * body * (prompt + completion)
    sampling = 2 * body * prompt / rate + max(decode / rate, read / bandwidth)
    teacher = (every + 2 * head * completion) / rate
    student = 2 * (every + 2 * head * completion) / rate
    return sampling + teacher + student


# -- the loss


def agreement(options) -> dict:
    """Grade the same completions with our loss and both TRL losses, with the same student and teacher."""
    import torch
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    with tempfile.TemporaryDirectory() as folder:
        options.prompts, options.steps = 8, 1
        trainer, _ = ours("opdcl", options, folder, Clock(), [])
        trainer.model.eval()
        queue, grader = trainer.queue, trainer.grader
        rollouts = queue.sample(queue.prompts["general"], "general", seed=1)
        sums = grader.measure(rollouts, "general")
        model = grader.backbone.causal_lm
        total, jsd, count = 0.0, 0.0, sum(len(r.completion_ids) for r in rollouts)
        weight = model.get_output_embeddings().weight
        with torch.no_grad():
            for r in rollouts:
                ids = torch.tensor([r.prompt_ids + r.completion_ids], device=model.device)
                part = slice(len(r.prompt_ids) - 1, ids.shape[1] - 1)
                student = model.base_model(ids).last_hidden_state[:, part]
                with grader.backbone.state("base") as base:
                    teacher = base.base_model(ids).last_hidden_state[:, part]
                mask = torch.ones(student.shape[:2], dtype=torch.long, device=model.device)
                loss, *_ = _chunked_divergence_loss(
                    student, teacher, weight, weight, mask, 1.0, num_items_in_batch=count
                )
                total += float(loss)
                logits = student @ weight.T, teacher @ weight.T
                jsd += float(GKDTrainer.generalized_jsd_loss(*logits, beta=1.0, reduction="sum"))
    return {
        "tokens": count,
        "opdcl": sums["kl"] / count,
        "DistillationTrainer": total,
        "GKDTrainer": jsd / count,
    }


def _best(action) -> float:
    times = []
    for _ in range(12):
        _synchronize()
        started = time.perf_counter()
        action()
        _synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _quantile(values: list[int], q: float) -> int:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


if __name__ == "__main__":
    main()
