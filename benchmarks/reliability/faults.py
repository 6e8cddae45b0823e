"""Faults of disk, memory, clock, files and processes, injected for real."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from attempts import attempt, command, outcome_of, row, run, status, wait, wait_until
from helpers.tiny import make_model


def faults(place: Path, options) -> list[dict]:
    code, said = run(place, *command("good"))
    assert code == 0, said
    expected = outcome_of(place / "good")
    rows = []

    def survived(
        fault: str, how: str, broken: tuple[int, str], wanted: str, again: list[str], folder: Path
    ) -> None:
        """Record a fault that must end with an error, and whether the command then reaches `expected`."""
        code, said = broken
        error = next((line for line in said.splitlines() if line.startswith("error:")), "no error line")
        ok = code in (1, 2, 4, 130) and wanted in said and "Traceback" not in said
        later, also = run(place, *again)
        same = later == 0 and outcome_of(folder) == expected
        text = f"exit {code}, {error[:140]}; afterwards the same command " + (
            "ends bit-identical" if same else f"exits {later}: {also[-200:]}"
        )
        rows.append(row(fault, how, text if ok and same else f"FAILED: {text}", "no finished work"))

    for megabytes in (1, 3, 5) if os.geteuid() == 0 else ():
        with mounted(place / f"full{megabytes}", megabytes) as folder:
            broken = run(place, *command(f"{folder.name}/run"))
            subprocess.run(["mount", "-o", "remount,size=300m", str(folder)], check=True)
            survived(
                f"disk full at {megabytes} MB",
                f"a tmpfs of {megabytes} MB, enlarged afterwards",
                broken,
                "disk or quota is full",
                command(f"{folder.name}/run"),
                folder / "run",
            )
    if os.geteuid() == 0:
        with mounted(place / "frozen", 300) as folder:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            broken = run(place, *command("frozen/run"))
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
            survived(
                "read-only file system",
                "a tmpfs remounted read-only",
                broken,
                "read-only",
                command("frozen/run"),
                folder / "run",
            )
    else:
        rows.append(row("disk full, read-only", "needs root to mount", "not injected here", "-"))

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    survived(
        "quota on file size",
        "RLIMIT_FSIZE of 60 kB",
        run(place, *command("quota"), prepare=small_files),
        "quota is full",
        command("quota"),
        place / "quota",
    )

    first = attempt(place, *command("shared"))
    while not (place / "shared" / ".lock").exists() or not (place / "shared" / ".lock").read_text():
        time.sleep(0.01)
    broken = run(place, *command("shared"))
    wait(first)
    survived(
        "two processes at once",
        "the same command twice at the same time",
        broken,
        "is in use by process",
        command("shared"),
        place / "shared",
    )

    (place / "good" / ".lock").write_text(
        json.dumps({"pid": 2**22 + 5, "host": os.uname().nodename, "since": "yesterday"})
    )
    code, said = run(place, *command("good"))
    rows.append(
        row(
            "a lock left by a dead process",
            "a lock file with the pid of a dead process",
            "taken over, with a message"
            if code == 0 and "is taken over" in said
            else f"FAILED: {said[-200:]}",
            "nothing",
        )
    )
    rows.append(escape(place))

    rows += truncations(place, expected)
    rows += wrong_weights(place)
    rows += disappearances(place, expected)
    rows += [clock(place, expected), worker(place, expected), memory(place)]

    shutil.copytree(place / "good", place / "newer")
    config = json.loads((place / "newer" / "config.json").read_text())
    config["workflow"]["recover"]["a_setting_of_another_version"] = 1
    (place / "newer" / "config.json").write_text(json.dumps(config))
    rows.append(
        refused(
            "a run of another version",
            "an unknown key in config.json",
            run(place, "eval", "newer"),
            "unknown key",
        )
    )
    rows.append(
        refused(
            "Hub offline",
            "HF_HUB_OFFLINE and a model that is not cached",
            run(place, "run", "tiny.yaml", "-o", "hub", "--set", "model.id=nobody/nothing"),
            "hub is out of reach",
        )
    )

    rows.append(gated(place))
    rows.append(
        refused(
            "a suite whose data cannot be loaded",
            "ifeval without a network",
            run(place, *command("middle", ["eval.retention=[instructions, ifeval]"])),
            "could not load the data",
        )
    )
    return rows


def escape(place: Path) -> dict:
    """Put links and names that lead outside into runs and workflows; nothing may be written there."""
    (place / "outside").mkdir()
    shutil.copytree(place / "good", place / "linked")
    shutil.rmtree(place / "linked" / "evals")
    (place / "linked" / "evals").symlink_to(place / "outside")
    tries = [command("linked")]
    for name in ("../outside", str(place / "outside"), "outside/../x", "a\\0b", "x" * 300):
        for key in ("name", "eval.domain", "arms", "finetune.trainer.output_dir"):
            value = {"eval.domain": f'["{name}"]', "arms": f'{{"{name}": {{}}}}'}.get(key, f'"{name}"')
            tries.append(["run", "tiny.yaml", "--set", f"{key}={value}"])
    tries.append(command("x" * 300))
    refusals = [run(place, *words) for words in tries]
    for words, (code, said) in zip(tries, refusals, strict=True):
        if code != 2:
            print(f"not refused: {words}: {said[-300:]}")
    ok = all(
        code == 2 and "error:" in said and "Traceback" not in said for code, said in refusals
    ) and not list((place / "outside").iterdir())
    return row(
        "names and paths that lead out of the run",
        "a symbolic link inside a run; names with .., absolute paths, NUL or 300 letters",
        f"{'' if ok else 'FAILED: '}{sum(code == 2 for code, _ in refusals)} of {len(tries)} refused, "
        "nothing written outside",
        "nothing",
    )


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
    code = "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *command("gated"), "--set", "model.id=nobody/nothing"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    server.shutdown()
    return refused(
        "a gated model",
        "a stand-in for the Hub on 127.0.0.1 that answers 403, GatedRepo",
        (done.returncode, done.stderr),
        "accept its licence",
    )


def disappearances(place: Path, expected: dict[str, bytes]) -> list[dict]:
    """Delete files that a run in progress needs: its checkpoints, and the data of a suite."""
    found = []
    pid = attempt(place, *command("robbed"))
    recovery = place / "robbed" / "stages" / "02-recover" / "trainer"
    while not (recovery / "checkpoint-3" / "seal.json").exists():
        time.sleep(0.002)
    shutil.rmtree(recovery)
    code, said = wait(pid), (place / "attempt.log").read_text()
    again, also = run(place, *command("robbed"))
    same = again == 0 and outcome_of(place / "robbed") == expected
    error = next((line for line in said.splitlines() if line.startswith("error:")), "it finishes anyway")
    ok = same and code in (0, 1, 2) and "Traceback" not in said
    found.append(
        row(
            "checkpoints deleted during a recovery",
            "rm -r of its trainer folder",
            f"{'' if ok else 'FAILED: '}exit {code}, {error[:120]}; afterwards the same command "
            + ("ends bit-identical" if same else also[-200:]),
            "the recovery so far",
        )
    )

    (place / "early").mkdir()
    data = place / "early" / "questions.jsonl"
    shutil.copy(place / "rows.jsonl", data)
    setting = [f"eval.data.questions={data}"]
    pid = attempt(place, *command("early/run", setting))
    while not (place / "early" / "run" / "evals" / "base" / "instructions.json").exists():
        time.sleep(0.002)
    data.rename(data.with_suffix(".gone"))
    code, said = wait(pid), (place / "attempt.log").read_text()
    kept = len(list((place / "early" / "run" / "evals").glob("*/instructions.json")))
    data.with_suffix(".gone").rename(data)
    again, also = run(place, *command("early/run", setting))
    same = again == 0 and outcome_of(place / "early" / "run") == expected
    error = next((line for line in said.splitlines() if line.startswith("error:")), "no error line")
    ok = same and code in (1, 2) and kept == 3 and "Traceback" not in said
    found.append(
        row(
            "a suite that fails midway",
            "its questions deleted while another suite is being measured",
            f"{'' if ok else 'FAILED: '}exit {code}, {error[:120]}; {kept} of 3 results of the other suite "
            "are kept; afterwards the same command " + ("ends bit-identical" if same else also[-200:]),
            "no finished work",
        )
    )
    return found


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
    if not (compiler := shutil.which("cc")):
        return row("a clock that jumps back", "needs a C compiler", "not injected here", "-")
    (place / "clock.c").write_text(CLOCK)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(place / "clock.so"), str(place / "clock.c"), "-ldl"],
        check=True,
    )
    code = "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command("clock")],
        cwd=place,
        capture_output=True,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(place / "clock.so")},
    )
    same = done.returncode == 0 and outcome_of(place / "clock") == expected
    return row(
        "a clock that jumps back",
        "clock_gettime replaced by LD_PRELOAD: the time of day jumps back by up to two days",
        ("" if same else "FAILED: ")
        + f"exit {done.returncode}, {'bit-identical' if same else done.stderr[-300:]}",
        "nothing",
    )


def worker(place: Path, expected: dict[str, bytes]) -> dict:
    """Kill the worker that loads the fine-tune's rows."""
    settings = ["finetune.trainer.dataloader_num_workers=1", "finetune.epochs=400"]
    pid = attempt(place, *command("worker", settings))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    ended = None
    # A checkpoint shows that training runs, so the child is the data loader, not a start-up process.
    while ended is None and not (
        list((place / "worker").glob("stages/*/trainer/checkpoint-*/seal.json"))
        and children.read_text().split()
    ):
        ended = wait_until(pid, time.monotonic() + 0.002)
    if ended is None:
        for child in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        ended = wait(pid)
    said = (place / "attempt.log").read_text()
    error = next((line for line in said.splitlines() if line.startswith("error:")), "no error line")
    again, also = run(place, *command("worker", settings))
    ok = ended == 1 and again == 0 and "Traceback" not in said and "resuming from step" in also
    return row(
        "a killed worker",
        "SIGKILL to the data loader's worker during the fine-tune",
        f"{'' if ok else 'FAILED: '}exit {ended}, {error[:140]}; afterwards the same command exits {again}, "
        "resuming from its checkpoint",
        "steps since the last checkpoint",
    )


def memory(place: Path) -> dict:
    """Limit the address space to between what small micro-batches and one large one need."""
    (place / "wide-model").mkdir()
    make_model(place / "wide-model", intermediate_size=8192)  # so that activations take most of the memory
    settings = [
        f"model.id={place}/wide-model",
        "finetune.epochs=1",
        "recover.steps=2",
        "recover.rollouts=48",
        "recover.sample_ahead=1",
        "recover.lmbda=1",
        "eval=null",
    ]
    large = [*settings, "recover.micro_batch_tokens=1000000"]
    needed = {}
    for name, chosen in (("small", settings), ("large", large)):
        pid = attempt(place, *command(name, chosen))
        needed[name] = 0
        while (ended := wait_until(pid, time.monotonic() + 0.02)) is None:
            needed[name] = max(needed[name], status(pid, "VmPeak"))
        assert ended == 0, (place / "attempt.log").read_text()
    limit = (2 * needed["small"] + needed["large"]) // 3
    code, said = run(
        place,
        *command("bounded", large),
        prepare=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    log = "".join(p.read_text() for p in (place / "bounded" / "logs").glob("*.log"))
    halved = log.count("out of memory: going on with micro-batches")
    adapter = "stages/02-recover/adapter/adapter_model.safetensors"
    gap = (
        _largest_gap(*(outcome_of(place / name)[adapter] for name in ("bounded", "small")))
        if code == 0
        else float("nan")
    )
    ok = code == 0 and halved > 0 and gap < 1e-4
    return row(
        "out of memory",
        f"RLIMIT_AS of {limit / 1e9:.2f} GB; a micro-batch of unlimited size needs "
        f"{needed['large'] / 1e9:.2f}",
        f"{'' if ok else 'FAILED: '}exit {code}; micro-batches halved {halved} times; the adapter differs "
        "from one trained in small "
        f"micro-batches by at most {gap:.0e}" + ("" if code == 0 else said[-200:]),
        "nothing: the step is graded again",
    )


def _largest_gap(one: bytes, other: bytes) -> float:
    from safetensors.torch import load

    a, b = load(one), load(other)
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def refused(fault: str, how: str, broken: tuple[int, str], wanted: str) -> dict:
    code, said = broken
    error = next((line for line in said.splitlines() if line.startswith("error:")), said[-200:])
    ok = code in (1, 2, 4) and wanted in said and "Traceback" not in said
    return row(fault, how, f"{'' if ok else 'FAILED: '}exit {code}, {error[:160]}", "nothing")


def truncations(place: Path, expected: dict[str, bytes]) -> list[dict]:
    """Truncate safetensors at every tenth of their size: finished adapter, newest checkpoint, base model."""
    results: Counter[str] = Counter()
    # A run killed in the middle of its recovery, with two checkpoints.
    pid = attempt(place, *command("half"))
    recovery = place / "half" / "stages" / "02-recover" / "trainer"
    while not (recovery / "checkpoint-6" / "seal.json").exists():
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    for tenth in range(10):
        name = f"cut-{tenth}"
        shutil.copytree(place / "half", place / name)
        cut(
            next(
                (place / name / "stages" / "02-recover" / "trainer" / "checkpoint-6").rglob(
                    "adapter_model.safetensors"
                )
            ),
            tenth,
        )
        code, said = run(place, *command(name))
        fell_back = "checkpoint-6 is damaged" in said
        results["checkpoint"] += code == 0 and fell_back and outcome_of(place / name) == expected

        shutil.copytree(place / "good", place / f"{name}-adapter")
        cut(
            place / f"{name}-adapter" / "stages" / "01-finetune" / "adapter" / "adapter_model.safetensors",
            tenth,
        )
        code, said = run(place, *command(f"{name}-adapter"))
        noticed = code == 2 and "its adapter has changed" in said
        code, _ = run(place, "verify", f"{name}-adapter")
        noticed &= code == 1
        code, _ = run(place, *command(f"{name}-adapter"), "--force")
        results["adapter"] += noticed and code == 0 and outcome_of(place / f"{name}-adapter") == expected

        shutil.copytree(place / "model", place / f"{name}-model")
        cut(place / f"{name}-model" / "model.safetensors", tenth)
        code, said = run(place, *command(f"{name}-base"), "--set", f"model.id={place}/{name}-model")
        results["base"] += code in (1, 2) and "cannot be loaded" in said and "Traceback" not in said
        for left in place.glob(f"{name}*"):
            shutil.rmtree(left)
    how = "truncated at every tenth of its length"
    words = {
        "checkpoint": (
            "a checkpoint's adapter",
            "falls back to the previous checkpoint, with a message, and ends bit-identical",
            "three steps",
        ),
        "adapter": (
            "a finished adapter",
            "refused by name; verify detects it; --force redoes it, bit-identical",
            "nothing",
        ),
        "base": ("the base model's weights", "refused with the model's name and the reason", "nothing"),
    }
    return [
        row(fault, how, f"{'' if results[key] == 10 else 'FAILED: '}{results[key]} of 10: {text}", lost)
        for key, (fault, text, lost) in words.items()
    ]


def cut(file: Path, tenth: int) -> None:
    os.truncate(file, file.stat().st_size * tenth // 10)


def wrong_weights(place: Path) -> list[dict]:
    """Put a NaN into the base model: every loss is NaN, which must neither train nor look like a result."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(place / "model", place / "nan-model")
    weights = load_file(place / "nan-model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, place / "nan-model" / "model.safetensors", metadata={"format": "pt"})
    return [
        refused(
            "NaN in every loss",
            "a NaN in the base model's weights",
            run(place, *command("nan"), "--set", f"model.id={place}/nan-model"),
            "for the second time",
        )
    ]


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
