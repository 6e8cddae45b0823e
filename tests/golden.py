"""Make some twenty runs of tiny models, and write a hash of all that they hold besides times.

    make golden                                  golden.txt, in minutes
    .venv/bin/python tests/golden.py A           the same in A
    .venv/bin/python tests/golden.py A ema seeds some runs

Where a change must change no result, write one file at the commit before it and one after it, on the same
machine. `diff` shows what is not the same to the bit. With `--keep FOLDER` there is something to look at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers.cache import private_cache
from helpers.command import ROOT, opdcl, opdcl_process

# Read when torch is imported: fast enough, and the same arithmetic in every process.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "HF_HUB_OFFLINE": "1"}

# Settings hold absolute paths, and are hashed: every checkout works in the same folder.
FOLDER = Path(tempfile.gettempdir()) / "opdcl-golden"

# What is hashed. Pages have the numbers of the JSON files, pickles and seals depend on times.
KINDS = {".safetensors", ".json", ".jsonl", ".yaml"}
SEAL = "seal.json"
SAID = "said"  # what reports and plans print, as JSON
SETS = {"target_modules", "target_parameters"}  # PEFT writes them in any order
TIMES = {"seconds", "parts", "started", "finished", "created", "peak_memory_bytes"}

# The settings in which a whole run differs from the workflow in helpers/tiny.py.
UNWATCHED = "recover.health=false"  # a few large steps on random weights go astray
TRAINED = ["recover.steps=4", "eval=null", UNWATCHED]
TUNED = ["recover=null", "eval=null", "finetune.epochs=1"]
WHOLE = {
    "plain": [],
    "replay": [*TUNED, "finetune.replay.share=0.7"],
    "seeds": ["seeds=[1,2]", "recover.steps=2", UNWATCHED],
    "bfloat16": [*TRAINED, "model.dtype=bfloat16"],
    "gemma": [*TRAINED, "model.id=./models/gemma"],
    "mixture": [*TRAINED, "model.id=./models/mixture"],
    "quantized": [*TRAINED, "model.id=./models/wide", "model.quantization=4bit"],
}

# Likewise of a recovery of `plain`.
BESIDE = ["eval=null", UNWATCHED]
SHOWN = "context: '{prompt} A good answer is: {answer}'"
RECOVERIES = {
    "reverse-kl": ["recover.loss.kind=reverse_kl", "recover.lmbda=1", "recover.weighting=tokens"],
    "reward": [
        "recover.general=everyday",  # the default, as there is none
        "recover.reward={suite: instructions_train}",
        "recover.rollouts=8",
        "recover.lmbda=1",
        "recover.keep=last",
    ],
    "ema": ["recover.domain_teacher=other", f"recover.teachers.other={{kind: ema, {SHOWN}}}"],
    "live": ["recover.domain_teacher=other", f"recover.teachers.other={{kind: live, {SHOWN}}}"],
    "second-model": [
        "recover.general_teacher=other",
        "recover.teachers.other={kind: model, model: {id: ./models/second, dtype: float32}}",
    ],
    "given-answers": ["recover.general=[answered.jsonl]", "recover.given_answers=true"],
    "start-alone": ["recover.steps=0"],
    "imitation": ["recover.loss.kind=cross_entropy", "recover.lmbda=0"],
    "served": [
        "recover.general_teacher=other",
        "recover.teachers.other={kind: remote, server: {url: URL}}",
        "recover.loss={kind: top_k, k: 20}",
    ],
}

# Runs of several commands, and shipped recipes, which are only read; two of them, one with arms, are planned.
PLANNED = {"quickstart": [], "specialists-into-one": ["seeds=[1]"]}
OTHERS = ("resumed", "two-processes", "recipes")
NAMES = (*WHOLE, *RECOVERIES, *OTHERS)


def golden(folder: Path, names: list[str], model: Path | None = None) -> list[str]:
    """Make runs in a folder, whose content goes, and return a line for each of their files: name and hash.

    `model` is the tiny model, which is made if it is not given.
    """
    from helpers.tiny import make_model, make_project

    shutil.rmtree(folder, ignore_errors=True)
    (folder / SAID).mkdir(parents=True)
    model = model or make_model(folder / "models" / "tiny")
    make_project(folder, model)
    # A recovery begins from `plain`.
    wanted = ["plain", *names] if set(names) & {*RECOVERIES} else names
    for name in dict.fromkeys(wanted):
        began = time.monotonic()
        # Each run samples its own texts.
        shutil.rmtree(Path(os.environ["OPDCL_CACHE"]) / "texts", ignore_errors=True)
        make_inputs(folder, model, name)
        make_run(folder, model, name)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return sorted(line for name in names for line in hashes(folder, name))


def make_inputs(folder: Path, model: Path, name: str) -> None:
    """Write what a run needs besides the tiny model, its rows and its prompts."""
    from helpers.tiny import make_mixture, save_model, tune_whole

    models = folder / "models"
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    match name:
        case "gemma":
            save_model(models / "gemma", model, "gemma3_text", head_dim=16, sliding_window=8, **sizes)
        case "mixture":
            make_mixture(models / "mixture", model, "qwen3_moe")
        case "quantized":  # in rows of whole blocks
            save_model(models / "wide", model, "llama", **sizes)
        case "second-model":
            tune_whole(model, models / "second")
        case "given-answers":
            rows = [{"prompt": f"Name {n} trees.", "completion": f"Oak, elm and {n}."} for n in range(8)]
            (folder / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, model: Path, name: str) -> None:
    """Make one run, and keep what its report says."""
    workflow = ["run", "tiny.yaml", "-o", name]
    match name:
        case "recipes":
            read_recipes(folder, model)
            return
        case "resumed":
            make_resumed(folder, workflow)
        case "two-processes":
            words = [*workflow, *settings(TRAINED), "--num-processes", "2"]
            own = {"OPDCL_CACHE": os.environ["OPDCL_CACHE"], "PYTHONPATH": str(ROOT)}
            checked(opdcl_process(*words, cwd=folder, env=ENVIRONMENT | own))
        case "served":
            from helpers.serving import serving_model

            with serving_model(model) as url:
                changes = [change.replace("URL", url) for change in RECOVERIES[name]]
                command(folder, "recover", "plain", "-o", name, *settings([*changes, *BESIDE]))
        case name if name in RECOVERIES:
            command(folder, "recover", "plain", "-o", name, *settings([*RECOVERIES[name], *BESIDE]))
        case _:
            command(folder, *workflow, *settings(WHOLE[name]))
    if name != "seeds":  # which has compare.json
        (folder / SAID / f"{name}.json").write_text(command(folder, "report", name, "--json"))


def make_resumed(folder: Path, workflow: list[str]) -> None:
    """Interrupt a run in each training after its first checkpoint, and in the evaluation; then finish it.

    The first time as if the terminal were lost, then by Ctrl-C. Each command is the one that the last named.
    """
    from helpers.interrupts import interrupted_when

    run, words = folder / "resumed", workflow
    for place, number in (
        (run / "stages/01-finetune/trainer/checkpoint-3", signal.SIGHUP),
        (run / "stages/02-recover/trainer/checkpoint-4", signal.SIGINT),
        (run / "evals/recovered/instructions.json", signal.SIGINT),
    ):
        with interrupted_when(place.exists, number):
            stopped = opdcl(*words, cwd=folder)
        assert stopped.returncode == 130, stopped.stderr
        words = shlex.split(stopped.stderr.rpartition("hint: opdcl ")[2], comments=True)
    command(folder, *words)


def read_recipes(folder: Path, model: Path) -> None:
    """Keep the settings of every shipped recipe, and the plans of some with the tiny model as base."""
    for recipe in json.loads(command(folder, "workflows", "ls", "--json")):
        shown = opdcl("config", "show", recipe["name"], "--json", cwd=folder)
        said = {"code": shown.returncode, "settings": shown.stdout, "error": shown.stderr}
        (folder / SAID / f"{recipe['name']}.recipe.json").write_text(json.dumps(said))
    for recipe, changes in PLANNED.items():
        words = ["run", recipe, "--base", model, "--dry-run", "--json", *settings(changes)]
        (folder / SAID / f"{recipe}.plan.recipe.json").write_text(command(folder, *words))


def command(folder: Path, *words: object) -> str:
    """Run a command in the folder, and return what it prints as its result."""
    return checked(opdcl(*words, cwd=folder))


def checked(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, done.args))}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def settings(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def hashes(folder: Path, name: str) -> Iterator[str]:
    """Return a line for each file of a run, and for what its report says."""
    said = folder.glob(f"{SAID}/{'*.recipe' if name == 'recipes' else name}.json")
    files = [file for file in (folder / name).rglob("*") if file.suffix in KINDS and file.name != SEAL]
    for file in (*files, *said):
        digest = hashlib.sha256(without_times(file)).hexdigest()
        yield f"{file.relative_to(folder)}\t{digest}"


def without_times(file: Path) -> bytes:
    """Return the content of a file, as JSON without times, ports and the folder of this checkout."""
    content = file.read_bytes()
    match file.suffix:
        case ".safetensors":
            return content
        case ".json":
            content = json.dumps(timeless(json.loads(content))).encode()
        case ".jsonl":
            rows = [json.dumps(timeless(json.loads(line))) for line in content.splitlines()]
            content = "\n".join(rows).encode()
    content = content.replace(str(ROOT).encode(), b"CHECKOUT")
    return re.sub(rb"127\.0\.0\.1:[0-9]+", b"HOST", content)


def timeless(value: Any) -> Any:
    """Return JSON without the keys of times, and with sets in one order, at any depth."""
    if isinstance(value, list):
        return [timeless(item) for item in value]
    if isinstance(value, dict):
        kept = {key: timeless(item) for key, item in value.items() if key not in TIMES}
        return {k: sorted(item) if k in SETS and isinstance(item, list) else item for k, item in kept.items()}
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file for names and hashes")
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(NAMES)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs in a new folder")
    options = parser.parse_args()
    if options.keep and options.keep.exists():
        parser.error(f"{options.keep} exists")
    if unknown := set(options.names) - {*NAMES}:
        parser.error(f"no such run: {', '.join(sorted(unknown))}")
    names = options.names or list(NAMES)
    if "quantized" in names and not find_spec("bitsandbytes"):
        print("quantized: left out, bitsandbytes is not installed", file=sys.stderr)
        names.remove("quantized")
    try:
        FOLDER.mkdir()
    except FileExistsError:
        raise SystemExit(
            f"error: {FOLDER} is in use\nhint: if no other golden run works there, remove it"
        ) from None
    try:
        with tempfile.TemporaryDirectory() as cache:
            private_cache(Path(cache))
            lines = golden(FOLDER / "project", names)
        if options.keep:
            shutil.move(FOLDER / "project", options.keep)
    finally:
        shutil.rmtree(FOLDER)
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} files of {len(names)} runs: {options.out}")


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(ROOT))
    main()
