"""Faults of disk, memory, clock, files and processes, injected for real."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from attempts import (
    ADAPTER,
    attempt,
    command,
    error_of,
    outcome_of,
    row,
    run,
    said_by,
    start_anew,
    status,
    wait,
    wait_until,
)
from helpers.tiny import make_model
from safetensors.torch import load, load_file, save_file

NOBODY = "model.id=nobody/nothing"


def faults(place: Path, options: argparse.Namespace) -> list[dict]:
    code, said = run(place, *command("good"))
    assert code == 0, said
    expected = outcome_of(place / "good")
    rows = disks(place, expected) if os.geteuid() == 0 else []
    if not rows:
        rows.append(row("disk full, read-only", "needs root to mount", "not injected here"))

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    broken = run(place, *command("quota"), prepare=small_files)
    how = "RLIMIT_FSIZE of 60 kB"
    rows.append(survived(place, expected, "quota on file size", how, broken, "quota is full", "quota"))

    first, lock = attempt(place, *command("shared")), place / "shared" / ".lock"
    until(lambda: lock.exists() and lock.read_text())
    broken = run(place, *command("shared"))
    wait(first)
    how, fault = "the same command twice at the same time", "two processes at once"
    rows.append(survived(place, expected, fault, how, broken, "is in use by process", "shared"))

    dead = {"pid": 2**22 + 5, "host": os.uname().nodename, "since": "yesterday"}
    (place / "good" / ".lock").write_text(json.dumps(dead))
    code, said = run(place, *command("good"))
    ok = code == 0 and "took over the lock" in said
    outcome = "taken over, with a message" if ok else said[-200:]
    how = "a lock file with the pid of a dead process"
    rows += [row("a lock left by a dead process", how, outcome, "nothing", ok), escape(place)]

    rows += truncations(place, expected)
    rows += [wrong_weights(place), *disappearances(place, expected)]
    rows += [clock(place, expected), memory(place)]

    shutil.copytree(place / "good", place / "newer")
    config = json.loads((place / "newer" / "config.json").read_text())
    config["workflow"]["recover"]["a_setting_of_another_version"] = 1
    (place / "newer" / "config.json").write_text(json.dumps(config))
    broken = run(place, "eval", "newer")
    rows.append(refused("a run of another version", "an unknown key in config.json", broken, "unknown key"))
    broken = run(place, *command("hub", [NOBODY]))
    how = "HF_HUB_OFFLINE and a model that is not cached"
    rows += [refused("Hub offline", how, broken, "hub is out of reach"), gated(place)]
    broken = run(place, *command("middle", ["eval.retention=[instructions, ifeval]"]))
    fault, wanted = "a suite whose data cannot be loaded", "could not load the data"
    return [*rows, refused(fault, "ifeval without a network", broken, wanted)]


def survived(
    place: Path,
    expected: dict[str, bytes],
    fault: str,
    how: str,
    broken: tuple[int, str],
    wanted: str,
    name: str,
    settings: list[str] | None = None,
    kept: int | None = None,
    lost: str = "no finished work",
) -> dict:
    """Record a fault that ends with an error, and whether the same command then reaches `expected`."""
    code, said = broken
    again, also = run(place, *command(name, settings))
    same = again == 0 and outcome_of(place / name) == expected
    later = "ends bit-identical" if same else f"exits {again}: {also[-200:]}"
    ok = same and code in (0, 1, 2, 4, 130) and wanted in said and "Traceback" not in said
    ok = ok and kept in (None, 3) and bool(code or not wanted)
    besides = f"; {kept} of 3 results of the other suite are kept" if kept is not None else ""
    error = error_of(said, "no error line" if code else "it finishes anyway")
    return row(
        fault, how, f"exit {code}, {error[:140]}{besides}; afterwards the same command {later}", lost, ok
    )


def refused(fault: str, how: str, broken: tuple[int, str], wanted: str) -> dict:
    code, said = broken
    ok = code in (1, 2, 4) and wanted in said and "Traceback" not in said
    return row(fault, how, f"exit {code}, {error_of(said, said[-200:])[:160]}", "nothing", ok)


def until(happened: Callable[[], object]) -> None:
    while not happened():
        time.sleep(0.002)


@contextlib.contextmanager
def mounted(folder: Path, kilobytes: int) -> Iterator[Callable[[str], None]]:
    """Mount a small file system in the block; yield what mounts it again with other options."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield lambda how: subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def disks(place: Path, expected: dict[str, bytes]) -> list[dict]:
    """Fill up file systems, and make one read-only."""
    rows = []
    for kilobytes in (400, 800, 1200):
        name = f"full{kilobytes}"
        with mounted(place / name, kilobytes) as remount:
            broken = run(place, *command(f"{name}/run"))
            remount("size=300m")
            fault, how = f"disk full at {kilobytes} kB", f"a tmpfs of {kilobytes} kB, enlarged afterwards"
            wanted = "disk or quota is full"
            rows.append(survived(place, expected, fault, how, broken, wanted, f"{name}/run"))
    with mounted(place / "frozen", 300_000) as remount:
        remount("ro")
        broken = run(place, *command("frozen/run"))
        remount("rw")
        fault, how = "read-only file system", "a tmpfs remounted read-only"
        rows.append(survived(place, expected, fault, how, broken, "read-only", "frozen/run"))
    return rows


def escape(place: Path) -> dict:
    """Put links and names that lead outside into runs and workflows; nothing may be written there."""
    (place / "outside").mkdir()
    shutil.copytree(place / "good", place / "linked")
    shutil.rmtree(place / "linked" / "evals")
    (place / "linked" / "evals").symlink_to(place / "outside")
    tries = [command("linked"), command("x" * 300)]
    for name in ("../outside", str(place / "outside"), "outside/../x", "a\\0b", "x" * 300):
        text = f'"{name}"'
        settings = {"name": text, "eval.domain": f"[{text}]", "arms": f"{{{text}: {{}}}}"}
        tries += [["run", "tiny.yaml", "--set", f"{key}={value}"] for key, value in settings.items()]
    good = 0
    for words in tries:
        code, said = run(place, *words)
        is_refused = code == 2 and "error:" in said and "Traceback" not in said
        good += is_refused
        if not is_refused:
            print(f"not refused: {words}: {said[-300:]}")
    ok = good == len(tries) and not [*(place / "outside").iterdir()]
    how = "a symbolic link inside a run; names with .., absolute paths, NUL or 300 letters"
    outcome = f"{good} of {len(tries)} refused, nothing written outside"
    return row("names and paths that lead out of the run", how, outcome, "nothing", ok)


def gated(place: Path) -> dict:
    """Serve on a local port the Hub's response for a model whose licence has not been accepted."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = f"http://127.0.0.1:{server.server_port}"
    broken = start_anew(place, command("gated", [NOBODY]), unset="HF_HUB_OFFLINE", HF_ENDPOINT=hub)
    server.shutdown()
    how = "a stand-in for the Hub on 127.0.0.1 that answers 403, GatedRepo"
    return refused("a gated model", how, broken, "accept its licence")


def disappearances(place: Path, expected: dict[str, bytes]) -> list[dict]:
    """Delete files that a run in progress needs: its checkpoints, and the data of a suite."""
    pid = attempt(place, *command("robbed"))
    trainer = place / "robbed" / "stages" / "02-recover" / "trainer"
    until((trainer / "checkpoint-3" / "seal.json").exists)
    shutil.rmtree(trainer)
    broken = wait(pid), said_by(place)
    fault, how = "checkpoints deleted during a recovery", "rm -r of its trainer folder"
    rows = [survived(place, expected, fault, how, broken, "", "robbed", lost="the recovery so far")]

    (place / "early").mkdir()
    data, evals = place / "early" / "questions.jsonl", place / "early" / "run" / "evals"
    shutil.copy(place / "rows.jsonl", data)
    settings = [f"eval.data.questions={data}"]
    pid = attempt(place, *command("early/run", settings))
    until((evals / "base" / "instructions.json").exists)
    gone = data.rename(data.with_suffix(".gone"))
    broken = wait(pid), said_by(place)
    kept = len([*evals.glob("*/instructions.json")])
    gone.rename(data)
    fault, how = "a suite that fails midway", "its questions deleted while another suite is being measured"
    return [*rows, survived(place, expected, fault, how, broken, "", "early/run", settings, kept)]


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static long calls;
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *t) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int found = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec -= 3600 * (__sync_add_and_fetch(&calls, 1) % 50);
    return found;
}
"""


def clock(place: Path, expected: dict[str, bytes]) -> dict:
    """Make the time of day jump back by hours, repeatedly, in a separate process."""
    fault, library = "a clock that jumps back", str(place / "clock.so")
    if not (compiler := shutil.which("cc")):
        return row(fault, "needs a C compiler", "not injected here")
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", library, "-x", "c", "-", "-ldl"]
    subprocess.run(words, input=CLOCK, text=True, check=True)
    code, said = start_anew(place, command("clock"), LD_PRELOAD=library)
    same = code == 0 and outcome_of(place / "clock") == expected
    how = "clock_gettime replaced by LD_PRELOAD: the time of day jumps back by up to two days"
    return row(fault, how, f"exit {code}, {'bit-identical' if same else said[-300:]}", "nothing", same)


def memory(place: Path) -> dict:
    """Limit the address space to between what small micro-batches and one large one need."""
    (place / "wide-model").mkdir()
    make_model(place / "wide-model", intermediate_size=65_536)  # so that activations take most of the memory
    sizes = {"steps": 2, "rollouts": 48, "sample_ahead": 1, "lmbda": 1}
    settings = [f"model.id={place}/wide-model", "finetune.epochs=1", "eval=null"]
    settings += [f"recover.{key}={value}" for key, value in sizes.items()]
    large, needed = [*settings, "recover.micro_batch_tokens=1000000"], {}
    for name, chosen in (("small", settings), ("large", large)):
        pid, needed[name] = attempt(place, *command(name, chosen)), 0
        while (ended := wait_until(pid, time.monotonic() + 0.02)) is None:
            needed[name] = max(needed[name], status(pid, "VmPeak"))
        assert ended == 0, said_by(place)
    limit = (2 * needed["small"] + needed["large"]) // 3
    bound = (resource.RLIMIT_AS, (limit, limit))
    code, said = run(place, *command("bounded", large), prepare=lambda: resource.setrlimit(*bound))
    log = "".join(p.read_text() for p in (place / "bounded" / "logs").glob("*.log"))
    halved, gap = log.count("out of memory: continuing with micro-batches"), float("nan")
    if code == 0:
        file = f"stages/02-recover/adapter/{ADAPTER}"
        a, b = (load(outcome_of(place / name)[file]) for name in ("bounded", "small"))
        gap = max(float((a[k] - b[k]).abs().max()) for k in a)
    how = f"RLIMIT_AS of {limit / 1e9:.2f} GB; a micro-batch of unlimited size needs "
    how += f"{needed['large'] / 1e9:.2f}"
    outcome = f"exit {code}; micro-batches halved {halved} times; the adapter differs from one trained in "
    outcome += f"small micro-batches by at most {gap:.0e}" + ("" if code == 0 else said[-200:])
    ok = code == 0 and halved > 0 and gap < 1e-4
    return row("out of memory", how, outcome, "nothing: the step is graded again", ok)


def truncations(place: Path, expected: dict[str, bytes]) -> list[dict]:
    """Truncate safetensors at every tenth of their size: finished adapter, newest checkpoint, base model."""
    results: Counter[str] = Counter()
    # A run killed in the middle of its recovery, with two checkpoints.
    pid, newest = attempt(place, *command("half")), Path("stages/02-recover/trainer/checkpoint-6")
    until((place / "half" / newest / "seal.json").exists)
    os.kill(pid, signal.SIGKILL)
    wait(pid)

    def copied(name: str, tenth: int, folder: Path | str, file: str) -> str:
        """Copy a folder, cut one of its files, and return the copy's name."""
        copy = f"cut-{name}-{tenth}"
        shutil.copytree(place / name, place / copy)
        whole = next((place / copy / folder).rglob(file))
        os.truncate(whole, whole.stat().st_size * tenth // 10)
        return copy

    for tenth in range(10):
        name = copied("half", tenth, newest, ADAPTER)
        code, said = run(place, *command(name))
        same = outcome_of(place / name) == expected
        results["checkpoint"] += code == 0 and "checkpoint-6 is damaged" in said and same

        name = copied("good", tenth, "stages/01-finetune/adapter", ADAPTER)
        code, said = run(place, *command(name))
        noticed = code == 2 and f"{ADAPTER} has changed" in said and run(place, "verify", name)[0] == 1
        code, _ = run(place, *command(name), "--force")
        results["adapter"] += noticed and code == 0 and outcome_of(place / name) == expected

        name = copied("model", tenth, "", "model.safetensors")
        code, said = run(place, *command(f"cut-base-{tenth}", [f"model.id={place}/{name}"]))
        results["base"] += (
            code in (1, 2) and "model.safetensors is damaged" in said and "Traceback" not in said
        )
        for left in place.glob("cut-*"):
            shutil.rmtree(left)
    how = "truncated at every tenth of its length"
    falls = "falls back to the previous checkpoint, with a message"
    forced = "refused by name; verify detects it; --force redoes it, bit-identical"
    words = {
        "checkpoint": ("a checkpoint's adapter", f"{falls}, and ends bit-identical", "three steps"),
        "adapter": ("a finished adapter", forced, "nothing"),
        "base": ("the base model's weights", "refused with the file's name and the reason", "nothing"),
    }
    return [
        row(fault, how, f"{results[key]} of 10: {text}", lost, results[key] == 10)
        for key, (fault, text, lost) in words.items()
    ]


def wrong_weights(place: Path) -> dict:
    """Put a NaN into the base model: every loss is NaN, which must neither train nor look like a result."""
    shutil.copytree(place / "model", place / "nan-model")
    file = place / "nan-model" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    broken = run(place, *command("nan", [f"model.id={place}/nan-model"]))
    how = "a NaN in the base model's weights"
    return refused("NaN in the base model", how, broken, "computes NaN or infinity")
