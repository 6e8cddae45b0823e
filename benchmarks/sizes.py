"""Estimate memory per GPU and time per step of a recovery for students from 1.7B to 70B; nothing is measured.

    python benchmarks/sizes.py

The model: P parameters in bf16; a rank-32 adapter on all linear layers in fp32 with its gradient and two Adam
moments; a step of 64 rollouts of 128 prompt and 512 new tokens; micro-batches of 8192 tokens, or fewer if an
80 GB card requires it. Activations: 17 values per token, layer and hidden unit (arXiv 2205.05198). Grading
and learning: 2P operations per token for the teacher, 2P forward and 2P backward for the student, whose base
is frozen. Sampling: every decoded token of a batch reads the weights once. `model.shard`: each micro-batch
fetches the layers held by other GPUs three times (teacher, student, backward). `GPU` describes the machine,
with the share of its peak that well-tuned code reaches.
"""

from __future__ import annotations

# Shapes from the models' published configurations.
MODELS = {
    "Qwen3-1.7B": {
        "layers": 28,
        "hidden": 2048,
        "inner": 6144,
        "vocabulary": 151936,
        "kv": 1024,
        "heads": 2048,
        "tied": True,
    },
    "Qwen3-8B": {
        "layers": 36,
        "hidden": 4096,
        "inner": 12288,
        "vocabulary": 151936,
        "kv": 1024,
        "heads": 4096,
        "tied": False,
    },
    "Qwen3-32B": {
        "layers": 64,
        "hidden": 5120,
        "inner": 25600,
        "vocabulary": 151936,
        "kv": 1024,
        "heads": 8192,
        "tied": False,
    },
    "Llama-3.3-70B": {
        "layers": 80,
        "hidden": 8192,
        "inner": 28672,
        "vocabulary": 128256,
        "kv": 1024,
        "heads": 8192,
        "tied": False,
    },
}
# One H100 SXM: bf16 operations per second, bytes per second of memory and of NVLink, each times the share
# that is reached.
GPU = {"rate": 989e12 * 0.4, "memory": 3.35e12 * 0.6, "link": 450e9 * 0.7}
ROLLOUTS, PROMPT, NEW, ROOM = 64, 128, 512, 76
GIB = 2**30


def sizes(shape: dict, gpus: int, shard: bool, served: bool, micro: int) -> tuple[float, float]:
    """Return GiB per GPU and seconds per step, without the time of a server that samples."""
    heads = shape["vocabulary"] * shape["hidden"] * (1 if shape["tied"] else 2)
    layer = shape["hidden"] * (2 * shape["heads"] + 2 * shape["kv"] + 3 * shape["inner"])
    layers = shape["layers"] * layer
    whole = layers + heads
    adapter = shape["layers"] * 32 * (9 * shape["hidden"] + 2 * shape["kv"] + 3 * shape["inner"])
    held = heads + (layers / gpus + 2 * layer if shard else layers)
    training = 2 * micro * 17 * shape["layers"] * shape["hidden"]
    cache = ROLLOUTS / gpus * (PROMPT + NEW) * shape["layers"] * 2 * shape["kv"] * 2
    sampling = (
        0 if served else 2 * layers + cache + (2 * layers * (1 - 1 / gpus) if shard else 0)
    )  # merged copy, cache, the other GPUs' shards
    tokens = ROLLOUTS * (PROMPT + NEW) / gpus
    seconds = 6 * whole * tokens / GPU["rate"]
    if shard:
        seconds += 3 * 2 * layers * (1 - 1 / gpus) * -(-tokens // micro) / GPU["link"]
    if not served:
        seconds += NEW * (2 * whole + cache / 2) / GPU["memory"] + 2 * whole * tokens / GPU["rate"]
    return (2 * held + 20 * adapter + max(training, sampling)) / GIB, seconds


def main() -> None:
    print("| student | GPUs | base | sampling | tokens per micro-batch | GiB per GPU | s/step |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: |")
    for name, shape in MODELS.items():
        for gpus, shard, served in (
            (1, False, False),
            (4, False, False),
            (4, True, False),
            (4, True, True),
            (8, True, True),
        ):
            tried = {micro: sizes(shape, gpus, shard, served, micro) for micro in (8192, 4096, 2048, 1024)}
            micro = next((m for m, (memory, _) in tried.items() if memory < ROOM), 1024)
            memory, seconds = tried[micro]
            note = "" if memory < ROOM else ", too large"
            where = "on a server" if served else "local"
            print(
                f"| {name} | {gpus} | {'sharded' if shard else 'whole'} | {where} | {micro} "
                f"| {memory:.0f}{note} | {seconds:.1f} |"
            )


if __name__ == "__main__":
    main()
