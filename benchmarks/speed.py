"""Time and memory of recovery steps: beside TRL's trainers, by engine, and as steps grow.

    python benchmarks/speed.py steps                     # embedded model, 32 prompts, up to 128 new tokens
    python benchmarks/speed.py steps --shape qwen3-0.6b --new-tokens 512 --prompts 64     # random weights
    python benchmarks/speed.py agreement                 # the loss of each trainer on identical completions
    python benchmarks/speed.py engines --prompts 100     # agreement of greedy answers, and speed
    python benchmarks/speed.py growth                    # time by batch, length and depth; a straggler

`steps`: every arm runs in its own process, one after the other. Each figure is the median over all steps but
the first, which is the warm-up. Memory is the peak of the whole process (or of the GPU, if there is one).

`engines`: where two answers differ, both continuations were nearly equally likely: the gap is the difference
between the two tokens' log-probabilities at the first position where the answers differ, in one plain pass.

`growth`: lengths are forced. The sampler's uniform numbers are chosen so that every completion ends at the
intended length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import head, store

from opdcl.config.model import LoraSection, ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.console import Output
from opdcl.data.chat import render
from opdcl.data.rows import load_prompts
from opdcl.data.suites import load_suite
from opdcl.measure.ask import peak_memory, reset_peak_memory
from opdcl.model.architecture import architecture
from opdcl.model.backbone import Backbone
from opdcl.model.hardware import pick_device, pick_dtype
from opdcl.model.llama import attends_within_rows
from opdcl.model.load import EMBEDDED, load_base, model_source
from opdcl.model.load_backbone import load_backbone
from opdcl.sampling.sample import sample
from opdcl.train.checkpoints import StudentOptimizer
from opdcl.train.learner import Learner, micro_batches
from opdcl.train.recover import ROOM_IN_CHECKPOINTS, Recovery
from opdcl.train.rollouts import RolloutQueue
from opdcl.train.teachers import Provided, Teacher
from opdcl.words import Loss, Prompt

ARMS = {
    "stock": "TRL DistillationTrainer, its defaults",
    "stock-fp32": "the same in fp32 (no bf16 autocast)",
    "stock-tuned": "the same, no checkpointing, cached generation, fastest precision",
    "opdcl": "opdcl",
}
PARTS = ("sample", "teacher", "student", "backward", "rest")
ENGINES = ("slab", "graph", "generate")
# Qwen3's real shapes with random weights, for measuring speed only: hidden, inner, layers, heads, tied head.
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
}
VOCABULARY = 151_936
BATCHES, LENGTHS, LAYERS = (8, 16, 32, 64), (32, 64, 128, 256), (8, 15, 30)
MEAN_LENGTH, STRAGGLERS = 64, 32  # tokens per row; rows of the batch with a straggler
END = 0  # the id that ends a completion of `growth`; the uniform number 0 draws it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="kind", required=True)
    steps, losses, engines, grown = map(commands.add_parser, ("steps", "agreement", "engines", "growth"))
    steps.add_argument("--arms", nargs="+", choices=ARMS, default=["stock-fp32", "stock-tuned", "opdcl"])
    steps.add_argument("--arm", choices=ARMS, help="run one arm in this process and print its figures")
    steps.add_argument("--shape", choices=SHAPES, help="random weights of this shape, not the embedded model")
    steps.add_argument("--prompts", type=int, default=32, help="prompts (and completions) per step")
    steps.add_argument("--steps", type=int, default=2)
    engines.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    engines.add_argument("--prompts", type=int, default=100)
    engines.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    for command in (steps, losses, engines):
        command.add_argument("--new-tokens", type=int, default=128)
    grown.add_argument("--repeats", type=int, default=2)
    for command, record in ((steps, "throughput"), (engines, "engines"), (grown, "scaling")):
        command.add_argument("--out", type=Path, default=Path(__file__).with_name(f"{record}.json"))
    options = parser.parse_args()
    if options.kind == "steps" and options.arm:
        print(json.dumps(measure(options.arm, options)))
    else:
        run = {"steps": compare, "agreement": agreement, "engines": compare_engines, "growth": growth}
        run[options.kind](options)


# -- what the commands share


def fast_half() -> bool:
    """Return whether bf16 is the fastest precision here; a CPU without bf16 units emulates it slowly."""
    return pick_dtype("auto") == "bfloat16"


def load_model(shape: str | None = None, half: bool | None = None) -> tuple[Any, Any]:
    """Return a newly loaded model on the device, and its tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    dtype = "bfloat16" if (fast_half() if half is None else half) else "float32"
    if not shape:
        return load_base(ModelConfig(id=EMBEDDED, dtype=dtype))
    tokenizer = AutoTokenizer.from_pretrained(model_source(ModelConfig(id=EMBEDDED))[0])
    torch.manual_seed(0)
    hidden, inner, layers, heads, tied = SHAPES[shape]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": tied}
    ends = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(pick_device()):  # random numbers for 8B take minutes on a CPU
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **ends))
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = stop_ids(tokenizer)
    return model, tokenizer


def stop_ids(tokenizer: Any, mean_length: int = 256) -> list[int]:
    """Return enough stop ids for near-uniform output to end after `mean_length` tokens on average."""
    return [tokenizer.eos_token_id, *range(VOCABULARY - VOCABULARY // mean_length, VOCABULARY)]


def start_adapter(model: torch.nn.Module) -> None:
    """Move the adapter away from zero, so that student and teacher differ as in a recovery."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 2e-3).to(parameter)


def prompts(count: int) -> list[list[dict]]:
    rows = load_prompts("everyday")
    return [rows[i % len(rows)].prompt for i in range(count)]


def prompt_ids(count: int, tokenizer: Any) -> list[list[int]]:
    encode = tokenizer.apply_chat_template
    return [encode(prompt, add_generation_prompt=True, return_dict=False) for prompt in prompts(count)]


def queue_of(backbone: Backbone, config: RecoverConfig, ids: list[list[int]]) -> tuple[RolloutQueue, Learner]:
    """Return what samples and what grades in a recovery towards base."""
    teachers = {"general": {"": Teacher(backbone, "base")}, "domain": {}}
    tokens, room = config.micro_batch_tokens, ROOM_IN_CHECKPOINTS
    learner = Learner(backbone, teachers, "recover.max_new_tokens", tokens, room)
    given = {"general": [*map(Prompt, ids)], "domain": []}
    student, report = Provided(student=Teacher(backbone, "student")), Output("quiet").stage("recover")
    return RolloutQueue(config, given, teachers, student, report), learner


def machine_rates(shape: str | None = None, dtype: str = "auto") -> dict[str, Any]:
    """Measure the hardware's rates in a dtype: matrix products of the model's shape, and memory reads."""
    model, _ = load_model(shape, half=None if dtype == "auto" else dtype == "bfloat16")
    device, used, c = model.device, model.dtype, model.config
    on_cpu, output = device.type == "cpu", model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.parameters()) - output.numel() * (1 if c.tie_word_embeddings else 2)
    x = torch.randn(1024 if on_cpu else 16384, c.hidden_size, device=device, dtype=used)
    w = torch.randn(c.intermediate_size, c.hidden_size, device=device, dtype=used)
    block = torch.ones(1 << 26 if on_cpu else 1 << 28, device=device)
    cores = f"{head()['machine']['name']}, {torch.get_num_threads()} cores"
    return {
        "name": cores if on_cpu else torch.cuda.get_device_name(),
        "dtype": str(used),
        "matrix_gflops": 2 * x.shape[0] * w.numel() / _best(lambda: torch.nn.functional.linear(x, w)) / 1e9,
        "memory_gb_per_s": block.numel() * 4 / _best(lambda: block.sum()) / 1e9,
        "body_parameters": body,
        "head_parameters": output.numel(),
        "bytes_per_number": x.element_size(),
        "cache_numbers_per_token": 2 * c.num_hidden_layers * architecture(c).key_width,
    }


def _best(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(12):
        _synchronize()
        started = time.perf_counter()
        action()
        _synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- steps: the arms


def compare(options: argparse.Namespace) -> None:
    """Run the arms in turn, and store their figures."""
    runs, failed = {}, {}
    for arm in options.arms:
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # out of memory, for example, which is a result too
            failed[arm] = done.stderr[-1500:]
            print(f"{arm}: failed\n{failed[arm]}", flush=True)
            continue
        runs[arm] = json.loads(done.stdout.splitlines()[-1])
        print(arm, json.dumps(runs[arm]["median"]), flush=True)
    rows = {arm: run["median"] for arm, run in runs.items()}
    machine, ours = machine_rates(options.shape), rows.get("opdcl")
    if ours:
        for row in rows.values():
            time_ratio = ours["step"] / row["step"]
            # Arms sample their own completions, so their steps may have more or fewer tokens than ours.
            per_token = time_ratio * row["completion_tokens"] / ours["completion_tokens"]
            row |= {"time_ratio": time_ratio, "time_per_token_ratio": per_token}
            row["memory_ratio"] = ours["peak_bytes"] / row["peak_bytes"]
        machine["floor_seconds"] = floor(machine, ours)
        machine["ours_over_floor"] = ours["step"] / machine["floor_seconds"]
        print(f"our step takes {machine['ours_over_floor']:.2f} times the machine's minimum for it")
    model = {"model": options.shape or "smollm2-135m", "prompts": options.prompts}
    found = {"new_tokens": options.new_tokens, "arms": rows, "failed": failed, "runs": runs}
    store(options.out, head() | {"machine": machine} | model | found)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


class Clock:
    """Adds up the time spent inside wrapped methods, counting nested calls only once."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, part: str) -> None:
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


def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps in this process and return medians per step."""
    from transformers import TrainerCallback

    clock, times, lengths = Clock(), [], []

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            clock.spent.clear()
            self.started = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            _synchronize()
            total = time.perf_counter() - self.started
            parts = {part: clock.spent[part] for part in PARTS[:-1]}
            times.append({"step": total, **parts, "rest": total - sum(parts.values())})

    with tempfile.TemporaryDirectory() as folder:
        make = our_trainer if arm == "opdcl" else stock_trainer
        trainer, prompt_lengths = make(arm, options, folder, clock, lengths)
        trainer.add_callback(Steps())
        trainer.train()
    rows = []
    for row, completion in zip(times, lengths, strict=True):
        whole = [p + c for p, c in zip(prompt_lengths, completion, strict=True)]
        padded = len(completion) * (max(prompt_lengths) + max(completion))
        if arm == "opdcl":  # a shared prefix is counted in every row, as other arms do
            batches = micro_batches(dict(enumerate(whole)), trainer.learner.micro_batch_tokens)
            padded = sum(len(batch) * max(whole[i] for i in batch) for batch in batches)
            model = trainer.learner.backbone.causal_lm
            padded = sum(whole) if attends_within_rows(model.config, model.device, model.dtype) else padded
        counts = {"completions": len(completion), "completion_tokens": sum(completion)}
        counts |= {"padding": 1 - sum(whole) / padded, "prompt_tokens": sum(prompt_lengths)}
        ordered = sorted(completion)
        rows.append(row | counts | {f"length_p{q}": ordered[q * len(ordered) // 100] for q in (10, 50, 90)})
    kept = rows[1:] or rows
    median = {key: statistics.median(r[key] for r in kept) for key in kept[0]} | {"peak_bytes": peak_memory()}
    dtype = str(next(trainer.model.parameters()).dtype)
    return {"arm": arm, "dtype": dtype, "threads": torch.get_num_threads(), "median": median, "steps": rows}


def training_arguments(folder: str, options: argparse.Namespace, half: bool) -> dict[str, Any]:
    """Return the arguments that all arms share."""
    quiet = {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    place = {"output_dir": folder, "use_cpu": not torch.cuda.is_available(), "dataloader_pin_memory": False}
    return quiet | place | {"bf16": half, "max_steps": options.steps, "learning_rate": 1e-5}


class OwnLoop:
    """The loop of a recovery, with the part of a trainer's interface that `measure` uses."""

    def __init__(self, config: RecoverConfig, backbone: Backbone, queue: RolloutQueue, learner: Learner):
        self.model, self.queue, self.learner = backbone.peft, queue, learner
        self.recovery = Recovery(config, queue, learner, None, None)
        self.optimizer = StudentOptimizer(backbone, config.steps, float(config.learning_rate))

    def add_callback(self, callback: Any) -> None:
        self.callback = callback

    def train(self) -> None:
        for step in range(1, self.queue.config.steps + 1):
            self.callback.on_step_begin()
            self.recovery.take_step(step, self.optimizer)
            self.callback.on_step_end()


def our_trainer(arm, options, folder, clock, lengths):
    model, tokenizer = load_model(options.shape)
    backbone = Backbone(model, tokenizer)
    backbone.merged_weights = [] if model.device.type == "cuda" else None
    start_adapter(backbone.new_adapter(LoraSection(), 0))
    config = RecoverConfig(
        steps=options.steps,
        learning_rate=1e-5,
        lmbda=1.0,
        loss={"kind": "reverse_kl"},
        rollouts=options.prompts,
        max_new_tokens=options.new_tokens,
        micro_batch_tokens=8192 if torch.cuda.is_available() else 2048,
        sample_ahead=1,  # each step samples its own completions, as in the other arms
    )
    ids = prompt_ids(options.prompts, tokenizer)
    queue, learner = queue_of(backbone, config, ids)
    trainer = OwnLoop(config, backbone, queue, learner)
    keep_lengths(queue, "take", lengths, lambda batch: [len(r.completion_ids) for r in batch.rollouts])
    clock.wrap(queue.student, "complete", "sample")
    clock.wrap(learner.teachers["general"][""], "distribution", "teacher")
    clock.wrap(learner, "learn", "student")
    clock.wrap(torch.Tensor, "backward", "backward")
    return trainer, [len(p) for p in ids]


def stock_trainer(arm, options, folder, clock, lengths):
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import DistillationConfig, DistillationTrainer

    half = arm != "stock" and fast_half()
    (model, tokenizer), (teacher, _) = (load_model(options.shape, half) for _ in range(2))
    section = LoraSection()
    lora = {"r": section.r, "lora_alpha": section.alpha}
    lora |= {"target_modules": section.target_modules, "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(**lora))
    start_adapter(model)
    shared = training_arguments(folder, options, half=arm == "stock" or half)
    if arm == "stock-tuned":
        shared |= {"gradient_checkpointing": False, "cache_implementation": "dynamic"}
    shared |= {"per_device_train_batch_size": options.prompts, "max_completion_length": options.new_tokens}
    args = DistillationConfig(beta=1.0, shuffle_dataset=False, **shared)
    rows = Dataset.from_list([{"prompt": p} for p in prompts(options.prompts)])
    given = {"teacher_model": teacher, "processing_class": tokenizer, "train_dataset": rows}
    trainer = DistillationTrainer(model=model, args=args, **given)
    if options.shape:
        trainer.eos_token_ids = trainer.generation_config.eos_token_id = stop_ids(tokenizer)
    keep_lengths(trainer, "_generate_single_turn", lengths, lambda found: [len(ids) for ids in found])
    clock.wrap(trainer, "_generate_single_turn", "sample")
    clock.wrap(trainer.teacher_model.base_model, "forward", "teacher")
    clock.wrap(trainer, "compute_loss", "student")
    clock.wrap(trainer.accelerator, "backward", "backward")
    return trainer, [len(p) for p in prompt_ids(options.prompts, tokenizer)]


def keep_lengths(owner: Any, method: str, lengths: list, count: Callable[[Any], list[int]]) -> None:
    inner = getattr(owner, method)

    def kept(*args, **kwargs):
        found = inner(*args, **kwargs)
        lengths.append(count(found))
        return found

    setattr(owner, method, kept)


def floor(machine: dict[str, Any], step: dict[str, Any]) -> float:
    """Return the minimum time for a step: the work of each part at the machine's full rate.

    Sampling: reading weights and cache once per decoded position, or 2 N D of arithmetic, whichever takes
    longer. Teacher: 2 N D. Student: 4 N D (2 forward, 2 backward; the frozen weights need no gradient). For
    prompt tokens, N excludes the head.
    """
    body, output = machine["body_parameters"], machine["head_parameters"]
    prompt, completion = step["prompt_tokens"], step["completion_tokens"]
    rate, bandwidth = machine["matrix_gflops"] * 1e9, machine["memory_gb_per_s"] * 1e9
    # On average, each decoded token reads its own prompt and half of the final completion.
    positions = prompt + completion / 2
    cache = completion * positions / step["completions"] * machine["cache_numbers_per_token"]
    read = (step["length_p90"] * (body + output) + cache) * machine["bytes_per_number"]
    sampling = 2 * body * prompt / rate + max(2 * (body + output) * completion / rate, read / bandwidth)
    return sampling + 3 * (2 * body * (prompt + completion) + 2 * output * completion) / rate


# -- agreement: the loss


def agreement(options: argparse.Namespace) -> None:
    """Grade the same completions with our loss and both TRL losses, with the same student and teacher."""
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    options.prompts, options.steps, options.shape = 8, 1, None
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = our_trainer("opdcl", options, folder, Clock(), [])
    trainer.model.eval()
    queue, learner = trainer.queue, trainer.learner
    limit = queue.config.limit("general")
    rollouts = queue.student.complete(queue.prompts["general"], max_new_tokens=limit, seed=1)
    graded, model = learner.score(rollouts, Loss(), learner.teachers["general"]), learner.backbone.causal_lm
    ours = learner.measure(graded)["kl"]
    total, jsd, count = 0.0, 0.0, sum(len(r.completion_ids) for r in rollouts)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        for r in rollouts:
            ids = torch.tensor([r.prompt_ids + r.completion_ids], device=model.device)
            part = slice(len(r.prompt_ids) - 1, ids.shape[1] - 1)
            student = model.base_model(ids).last_hidden_state[:, part]
            with learner.backbone.state("base") as base:
                teacher = base.base_model(ids).last_hidden_state[:, part]
            mask = torch.ones(student.shape[:2], dtype=torch.long, device=model.device)
            sides = (student, teacher, weight, weight, mask, 1.0)
            total += float(_chunked_divergence_loss(*sides, num_items_in_batch=count)[0])
            logits = student @ weight.T, teacher @ weight.T
            jsd += float(GKDTrainer.generalized_jsd_loss(*logits, beta=1.0, reduction="sum"))
    losses = {"opdcl": ours / count, "DistillationTrainer": total, "GKDTrainer": jsd / count}
    print(json.dumps({"tokens": count} | losses))


# -- engines


def compare_engines(options: argparse.Namespace) -> None:
    """Let every engine answer the same prompts greedily and compare the answers with the first engine's."""
    backbone = load_backbone(ModelConfig(dtype=options.dtype))
    task, tokenizer = load_suite("instructions").task, backbone.tokenizer
    docs = list(task.test_docs())[: options.prompts]
    messages = [[{"role": "user", "content": task.doc_to_text(doc)}] for doc in docs]
    texts = [render(tokenizer, message, True) for message in messages]
    asked = [Prompt(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    how = {"max_new_tokens": options.new_tokens, "eos_ids": backbone.eos_ids, "temperature": 0}
    first, rows = None, {}
    for engine in options.engines:
        started = time.perf_counter()
        found = sample(backbone.causal_lm, asked, batch_size=len(asked), engine=engine, **how)
        seconds, tokens = time.perf_counter() - started, sum(len(r.completion_ids) for r in found)
        first = first or found
        differ = [(a, b) for a, b in zip(first, found, strict=True) if a.completion_ids != b.completion_ids]
        rows[engine] = {
            "dtype": str(backbone.causal_lm.dtype),
            **{"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds, "of": len(asked)},
            "differing": len(differ),
            "gaps": sorted((gap(backbone.causal_lm, a, b) for a, b in differ), reverse=True),
        }
        print(engine, json.dumps(rows[engine]), flush=True)
    store(options.out, head() | {"machine": machine_rates(dtype=options.dtype), "engines": rows})


@torch.no_grad()
def gap(model: Any, a: Any, b: Any) -> float:
    """Return the gap in nats between the log-probabilities of a's and b's tokens where they first differ."""
    pairs = zip(a.completion_ids, b.completion_ids, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if at is None:
        return float("inf")  # one answer is a prefix of the other
    ids = torch.tensor([a.prompt_ids + a.completion_ids[:at]], device=model.device)
    logprobs = model(ids).logits[0, -1].log_softmax(-1)
    return abs(float(logprobs[a.completion_ids[at]] - logprobs[b.completion_ids[at]]))


# -- growth


def growth(options: argparse.Namespace) -> None:
    """Measure steps of many sizes, and store how time grows with them."""
    rows: dict[str, list[dict]] = {"batch": [], "length": [], "depth": [], "straggler": []}

    def run(kind: str, step: Step, lengths: list[int], steps: int = 1, ahead: int = 1, **labels: Any) -> None:
        rows[kind].append({**labels, **step.measure(lengths, steps, ahead, options.repeats)})
        print(kind, json.dumps(rows[kind][-1]), flush=True)

    step = Step()
    for count in BATCHES:
        run("batch", step, [MEAN_LENGTH] * count, prompts=count)
    for length in LENGTHS:
        run("length", step, [length] * 8, length=length)
    even, short = [MEAN_LENGTH] * STRAGGLERS, MEAN_LENGTH * 9 // 10 + 1
    straggler = [short] * (STRAGGLERS - 1) + [sum(even) - short * (STRAGGLERS - 1)]
    ratios = {}
    # With 3, the completions of three steps are sampled together.
    for ahead in (1, 3):
        for spread, lengths in (("even", even), ("one straggler per step", straggler)):
            run("straggler", step, lengths, 6, ahead, spread=spread, longest=max(lengths), sample_ahead=ahead)
        plain, slowed = rows["straggler"][-2:]
        ratios[f"sample_ahead {ahead}"] = slowed["seconds"] / plain["seconds"]
    for layers in LAYERS:
        run("depth", Step(layers), [MEAN_LENGTH] * 16, layers=layers)
    fits = {kind: linear_fit(rows[kind]) for kind in ("batch", "length")}
    print(json.dumps({"linear": fits, "straggler_ratio": ratios}))
    found = {"rows": rows, "linear": fits, "straggler_ratio": ratios}
    store(options.out, head() | {"machine": machine_rates()} | found)


class Step:
    """Steps that can be measured individually."""

    def __init__(self, layers: int | None = None):
        model, tokenizer = load_model()
        if layers:
            model.model.layers = model.model.layers[:layers]
            model.config.num_hidden_layers = layers
        self.backbone = Backbone(model, tokenizer)
        self.backbone.eos_ids = [END]
        start_adapter(self.backbone.new_adapter(LoraSection(), 0))
        self.prompt = prompt_ids(1, tokenizer)

    def measure(self, lengths: list[int], steps: int, ahead: int, repeats: int) -> dict[str, Any]:
        """Sample, grade and differentiate steps with completions of these lengths; return the median cost."""
        sizes = {"rollouts": len(lengths), "max_new_tokens": max(lengths), "micro_batch_tokens": 2048}
        config = RecoverConfig(steps=steps, sample_ahead=ahead, lmbda=1.0, **sizes)
        # Identical prompts, so that only the completions differ.
        queue, learner = queue_of(self.backbone, config, self.prompt * len(lengths))
        self.backbone.peft.train()
        times, found = [], []
        for _ in range(repeats + 1):
            reset_peak_memory()
            started = time.perf_counter()
            with self.forced(queue, lengths):
                for index in range(steps):
                    batch = queue.take(index)
                    found += [len(r.completion_ids) for r in batch.rollouts]
                    learner.learn(batch)
                    self.backbone.peft.zero_grad()
            times.append((time.perf_counter() - started) / steps)
        assert sorted(found) == sorted(lengths * steps * (repeats + 1))
        seconds = round(statistics.median(times[1:]), 6)
        return {"tokens": sum(lengths), "seconds": seconds, "peak_bytes": peak_memory()}

    @contextlib.contextmanager
    def forced(self, queue: RolloutQueue, lengths: list[int]) -> Iterator[None]:
        """Make every step's completions end at these lengths."""
        plain = queue.student.complete

        def complete(prompts, **options):
            ahead = lengths * (len(prompts) // len(lengths))
            uniform_NT = torch.full((len(ahead), max(lengths)), 0.5)
            for row, length in enumerate(ahead):
                uniform_NT[row, length - 1 :] = 0.0
            with mock.patch("opdcl.sampling.sample.torch.rand", return_value=uniform_NT):
                return plain(prompts, **options)

        with mock.patch.object(queue.student, "complete", complete):
            yield


def linear_fit(rows: list[dict]) -> dict[str, float]:
    """Fit a least-squares line of seconds over completion tokens."""
    tokens, seconds = [r["tokens"] for r in rows], [r["seconds"] for r in rows]
    slope, constant = statistics.linear_regression(tokens, seconds)
    r2 = statistics.correlation(tokens, seconds) ** 2
    return {"seconds_per_token": slope, "constant": constant, "r2": r2}


if __name__ == "__main__":
    main()
