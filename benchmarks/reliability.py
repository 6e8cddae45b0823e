"""Break runs in every way at hand, for real, and see what is lost; writes docs/reliability.md.

A two-layer model runs the whole job in seconds. Every attempt is a process of its own, forked from this one so that
the imports are paid once. Mounting small file systems needs root; without it those faults are left out, and said so.

    python benchmarks/reliability.py                   # everything; half an hour on one core
    python benchmarks/reliability.py --only crash      # crash, faults, soak, network or fuzz
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tiny import make_model, make_project  # noqa: E402

# Longer training than the tests', so that crashes fall into it.
LONGER = ["finetune.epochs=20", "finetune.save_steps=4", "recover.steps=24", "recover.save_steps=4"]
KILLS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--soak-steps", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--browser", help="command of a Chromium with its options, for hostile content")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("reliability.json"))
    options = parser.parse_args()
    _import_everything()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "model").mkdir()
        make_model(place / "model")
        make_project(place, place / "model")
        for part in options.only:
            started = time.perf_counter()
            rows = PARTS[part](place, options)
            # Neither folder nor host of this machine belongs into the record.
            text = json.dumps(rows).replace(f"{place}/", "").replace(f" on {os.uname().nodename} ", " on HOST ")
            record[part] = {"date": date.today().isoformat(), "rows": json.loads(text),
                            "seconds": round(time.perf_counter() - started)}  # fmt: skip
            options.out.write_text(json.dumps(record, indent=2) + "\n")
    write_page(record, ROOT / "docs" / "reliability.md")
    if any(row["outcome"].startswith("FAILED") for part in record.values() for row in part["rows"]):
        sys.exit("some fault was not survived: see docs/reliability.md")


def row(fault: str, how: str, outcome: str, lost: str) -> dict[str, str]:
    print(f"{fault}: {outcome} (lost: {lost})", flush=True)
    return {"fault": fault, "how": how, "outcome": outcome, "lost": lost}


# -- attempts


def _import_everything() -> None:
    import lm_eval.evaluator  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch
    import trl  # noqa: F401

    import opdcl.evaluate
    import opdcl.recover
    import opdcl.report
    import opdcl.workflow  # noqa: F401

    torch.set_num_threads(1)


def attempt(place: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> int:
    """Start `opdcl` with these arguments in a forked process; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.chdir(place)
        log = os.open(place / "attempt.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["opdcl", *arguments]
        if prepare:
            prepare()
        from opdcl import cli
        from opdcl.output import Output

        cli.output = Output()  # bound to the new streams
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70  # what must never happen: a traceback
    sys.stdout.flush()
    os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(place: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Run `opdcl` to its end; return exit code and all it printed."""
    code = wait(attempt(place, *arguments, prepare=prepare))
    return code, (place / "attempt.log").read_text(errors="replace")


def command(out: str, settings: list[str] | None = None) -> list[str]:
    words = ["run", "tiny.yaml", "-o", out]
    for setting in settings or []:
        words += ["--set", setting]
    return words


def outcome_of(folder: Path) -> dict[str, bytes]:
    """Return all that a run is worth: adapters, answers, and the metrics without their times."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if (file.suffix == ".safetensors" and "trainer" not in file.parts) or name.endswith(".samples.jsonl"):
            found[name] = file.read_bytes()
        elif file.name == "metrics.jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in rows]).encode()
    return found


# -- crashes


def crash(place: Path, options) -> list[dict]:
    """Kill runs at random instants, again and again, until each ends; every end must equal the uninterrupted one."""
    started = time.perf_counter()
    code, said = run(place, *command("whole", LONGER))
    whole_seconds = time.perf_counter() - started
    assert code == 0, said
    expected = outcome_of(place / "whole")
    chance = random.Random(options.seed)
    where: Counter[str] = Counter()
    kills = runs = wrong = redone = 0
    while kills < options.kills:
        runs += 1
        folder = place / f"crash-{runs}"
        while True:
            done_before = _finished(folder)
            born = time.time_ns()
            pid = attempt(place, *command(folder.name, LONGER))
            # Half of the instants anywhere in what a whole run takes, half soon: between two of them little is done.
            seconds = chance.uniform(0.05, whole_seconds) if chance.random() < 0.5 else chance.uniform(0.05, 3)
            ended = _wait_until(pid, time.monotonic() + seconds)
            if ended is None:
                os.kill(pid, signal.SIGKILL)
                wait(pid)
                kills += 1
                where[_active(folder, born)] += 1
            redone += any(_finished(folder).get(name) != made for name, made in done_before.items())
            if ended is not None:
                assert ended == 0, (place / "attempt.log").read_text()
                break
        differing = [k for k, v in expected.items() if outcome_of(folder).get(k) != v]
        wrong += bool(differing)
        if differing:
            print(f"{folder.name} differs in {differing}", flush=True)
        else:
            shutil.rmtree(folder)
    places = ", ".join(f"{name} {count}" for name, count in sorted(where.items()))
    outcome = f"{runs} runs killed {kills} times ({places}): {runs - wrong} end bit-identical to the uninterrupted run"
    return [row("kill -9 at a random instant", "SIGKILL, again and again until the run ends",
                ("FAILED: " if wrong or redone else "") + outcome,
                f"steps since the last checkpoint; {redone} finished stages or results made again")]  # fmt: skip


def _wait_until(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    return None


def _finished(folder: Path) -> dict[str, int]:
    """Return when each finished part was made: adapters of finished stages, and results."""
    found = {}
    for record in folder.glob("stages/*/stage.json"):
        with contextlib.suppress(ValueError):
            if json.loads(record.read_text()).get("status") == "done":
                found[record.parent.name] = (record.parent / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    return found | {str(p): p.stat().st_mtime_ns for p in folder.glob("evals/*/*.json")}


def _active(folder: Path, born: int) -> str:
    """Say in which part a run was when an attempt, begun at `born`, was killed."""
    for name in ("01-finetune", "02-recover"):
        stage = folder / "stages" / name
        if not (stage / "stage.json").exists():
            return "start" if name == "01-finetune" else "finetune"
        if json.loads((stage / "stage.json").read_text()).get("status") != "done":
            # Written by this attempt, and not sealed yet.
            unsealed = [p for p in (stage / "trainer").glob("checkpoint-*")
                        if p.stat().st_mtime_ns > born and not (p / "seal.json").exists()]  # fmt: skip
            return name[3:] + (", inside a checkpoint" if unsealed else "")
    results = len(list(folder.glob("evals/*/*.json")))
    return "eval" if results < 6 else "report"


# -- faults


def faults(place: Path, options) -> list[dict]:
    code, said = run(place, *command("good"))
    assert code == 0, said
    expected = outcome_of(place / "good")
    rows = []

    def survived(fault: str, how: str, broken: tuple[int, str], wanted: str, again: list[str], folder: Path) -> None:
        """Note a fault that must end with words, and whether the same command then reaches the undisturbed end."""
        code, said = broken
        error = next((line for line in said.splitlines() if line.startswith("error:")), "no error line")
        ok = code in (1, 2, 4, 130) and wanted in said and "Traceback" not in said
        later, also = run(place, *again)
        same = later == 0 and outcome_of(folder) == expected
        text = f"exit {code}, {error[:140]}; afterwards the same command " + ("ends bit-identical" if same else f"exits {later}: {also[-200:]}")
        rows.append(row(fault, how, text if ok and same else f"FAILED: {text}", "nothing finished"))

    for megabytes in (1, 3, 5) if os.geteuid() == 0 else ():
        with mounted(place / f"full{megabytes}", megabytes) as folder:
            broken = run(place, *command(f"{folder.name}/run"))
            subprocess.run(["mount", "-o", "remount,size=300m", str(folder)], check=True)
            survived(f"disk full at {megabytes} MB", f"a tmpfs of {megabytes} MB, enlarged afterwards", broken, "disk or quota is full",
                     command(f"{folder.name}/run"), folder / "run")  # fmt: skip
    if os.geteuid() == 0:
        with mounted(place / "frozen", 300) as folder:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            broken = run(place, *command("frozen/run"))
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
            survived("read-only file system", "a tmpfs remounted read-only", broken, "read-only", command("frozen/run"), folder / "run")
    else:
        rows.append(row("disk full, read-only", "needs root to mount", "not injected here", "-"))

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    survived("quota on file size", "RLIMIT_FSIZE of 60 kB", run(place, *command("quota"), prepare=small_files), "quota is full",
             command("quota"), place / "quota")  # fmt: skip

    first = attempt(place, *command("shared"))
    while not (place / "shared" / ".lock").exists():
        time.sleep(0.01)
    broken = run(place, *command("shared"))
    wait(first)
    survived("two processes at once", "the same command twice at the same time", broken, "is in use by process", command("shared"), place / "shared")

    (place / "good" / ".lock").write_text(json.dumps({"pid": 2**22 + 5, "host": os.uname().nodename, "since": "yesterday"}))
    code, said = run(place, *command("good"))
    rows.append(row("a lock left by a dead process", "a lock file with a pid that is gone", "taken over" if code == 0 else f"FAILED: {said[-200:]}", "nothing"))

    rows += truncations(place, expected)
    rows += wrong_weights(place)
    rows += disappearances(place, expected)
    rows += [clock(place, expected), worker(place, expected), memory(place)]

    shutil.copytree(place / "good", place / "newer")
    config = json.loads((place / "newer" / "config.json").read_text())
    config["workflow"]["recover"]["a_setting_of_another_version"] = 1
    (place / "newer" / "config.json").write_text(json.dumps(config))
    rows.append(refused("a run of another version", "a key in config.json that this version does not know", run(place, "eval", "newer"), "unknown key"))
    rows.append(refused("hub offline", "HF_HUB_OFFLINE and a model that is not cached",
                        run(place, "run", "tiny.yaml", "-o", "hub", "--set", "model.id=nobody/nothing"), "hub is out of reach"))  # fmt: skip

    rows.append(refused("a suite whose data cannot be had", "ifeval without network",
                        run(place, *command("middle", ["eval.retention=[instructions, ifeval]"])), "cannot be had"))  # fmt: skip
    return rows


def disappearances(place: Path, expected: dict[str, bytes]) -> list[dict]:
    """Remove files under a run that is at work, and from one that is done."""
    found = []
    pid = attempt(place, *command("robbed"))
    recovery = place / "robbed" / "stages" / "02-recover" / "trainer"
    while not (recovery / "checkpoint-3" / "seal.json").exists():
        time.sleep(0.002)
    shutil.rmtree(recovery)
    code, said = wait(pid), (place / "attempt.log").read_text()
    again, also = run(place, *command("robbed"))
    same = again == 0 and outcome_of(place / "robbed") == expected
    error = next((line for line in said.splitlines() if line.startswith("error:")), "it ends none the less")
    ok = same and code in (0, 1, 2) and "Traceback" not in said
    found.append(row("checkpoints removed under a running recovery", "rm -r of its trainer folder",
                     f"{'' if ok else 'FAILED: '}exit {code}, {error[:120]}; afterwards the same command " + ("ends bit-identical" if same else also[-200:]),
                     "the recovery so far"))  # fmt: skip

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
    found.append(row("a suite that fails in the middle", "its questions removed while another suite is measured",
                     f"{'' if ok else 'FAILED: '}exit {code}, {error[:120]}; {kept} of 3 results of the other suite stay; afterwards the same command "
                     + ("ends bit-identical" if same else also[-200:]), "nothing finished"))  # fmt: skip
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
    """Let the time of day jump back by hours again and again, in a process of its own."""
    if not (compiler := shutil.which("cc")):
        return row("a clock that goes back", "needs a C compiler", "not injected here", "-")
    (place / "clock.c").write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(place / "clock.so"), str(place / "clock.c"), "-ldl"], check=True)
    code = "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command("clock")], cwd=place, capture_output=True, text=True,
                          env=os.environ | {"LD_PRELOAD": str(place / "clock.so")})  # fmt: skip
    same = done.returncode == 0 and outcome_of(place / "clock") == expected
    return row("a clock that goes back", "clock_gettime preloaded: the time of day jumps back by up to two days",
               ("" if same else "FAILED: ") + f"exit {done.returncode}, {'bit-identical' if same else done.stderr[-300:]}", "nothing")  # fmt: skip


def worker(place: Path, expected: dict[str, bytes]) -> dict:
    """Kill the process that loads the fine-tune's rows."""
    settings = ["finetune.trainer.dataloader_num_workers=1", "finetune.epochs=400"]
    pid = attempt(place, *command("worker", settings))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    ended = None
    # The progress of training shows that the child is the loader, and not something the start-up needed.
    while ended is None and not (list((place / "worker").glob("stages/*/trainer/checkpoint-*/seal.json")) and children.read_text().split()):
        ended = _wait_until(pid, time.monotonic() + 0.002)
    if ended is None:
        for child in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        ended = wait(pid)
    said = (place / "attempt.log").read_text()
    error = next((line for line in said.splitlines() if line.startswith("error:")), "no error line")
    again, also = run(place, *command("worker", settings))
    ok = ended == 1 and again == 0 and "Traceback" not in said and "resuming from step" in also
    return row("a killed worker", "SIGKILL to the data loader's process during the fine-tune",
               f"{'' if ok else 'FAILED: '}exit {ended}, {error[:140]}; afterwards the same command exits {again}, resuming from its checkpoint",
               "steps since the last checkpoint")  # fmt: skip


def memory(place: Path) -> dict:
    """Bound the address space so that a step fits only in smaller micro-batches."""
    settings = ["recover.steps=2", "recover.rollouts=256", "recover.sample_ahead=1", "recover.max_new_tokens=96", "recover.teacher_first=0",
                "recover.general_per_domain=1", "eval=null"]  # fmt: skip
    code, said = run(place, *command("roomy", settings))
    assert code == 0, said

    def bounded():
        size = int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize")).split()[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size + 1_000_000_000, resource.RLIM_INFINITY))

    code, said = run(place, *command("bounded", [*settings, "recover.micro_batch_tokens=1000000"]), prepare=bounded)
    log = "".join(p.read_text() for p in (place / "bounded" / "logs").glob("*.log"))
    halved = log.count("out of memory: going on with micro-batches")
    ours, theirs = (outcome_of(place / name).get("stages/02-recover/adapter/adapter_model.safetensors", b"") for name in ("bounded", "roomy"))
    gap = _largest_gap(ours, theirs) if code == 0 else float("nan")
    ok = code == 0 and halved > 0 and gap < 1e-4
    return row("out of memory", "RLIMIT_AS 1 GB above the start, a million tokens per micro-batch",
               f"{'' if ok else 'FAILED: '}exit {code}; micro-batches halved {halved} times; the adapter differs from the one made in small "
               f"micro-batches by at most {gap:.0e}" + ("" if code == 0 else said[-200:]), "the step is graded anew")  # fmt: skip


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
    """Cut safetensors at every tenth of their size: a finished adapter, the newest checkpoint, the base model."""
    results: Counter[str] = Counter()
    # A run stopped in the middle of recovery, with two checkpoints.
    pid = attempt(place, *command("half"))
    recovery = place / "half" / "stages" / "02-recover" / "trainer"
    while not (recovery / "checkpoint-6" / "seal.json").exists():
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    for tenth in range(10):
        name = f"cut-{tenth}"
        shutil.copytree(place / "half", place / name)
        cut(next((place / name / "stages" / "02-recover" / "trainer" / "checkpoint-6").rglob("adapter_model.safetensors")), tenth)
        code, said = run(place, *command(name))
        fell_back = "checkpoint-6 is damaged" in said
        results["checkpoint"] += code == 0 and fell_back and outcome_of(place / name) == expected

        shutil.copytree(place / "good", place / f"{name}-adapter")
        cut(place / f"{name}-adapter" / "stages" / "01-finetune" / "adapter" / "adapter_model.safetensors", tenth)
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
    how = "cut at every tenth of its length"
    words = {"checkpoint": ("a checkpoint's adapter", "falls back to the checkpoint before, with a word, and ends bit-identical", "three steps"),
             "adapter": ("a finished adapter", "refused by name; verify finds it; --force makes it again, bit-identical", "nothing"),
             "base": ("the base model's weights", "refused with the name of the model and what is wrong", "nothing")}  # fmt: skip
    return [row(fault, how, f"{'' if results[key] == 10 else 'FAILED: '}{results[key]} of 10: {text}", lost) for key, (fault, text, lost) in words.items()]


def cut(file: Path, tenth: int) -> None:
    os.truncate(file, file.stat().st_size * tenth // 10)


def wrong_weights(place: Path) -> list[dict]:
    """Put NaN into the base model: every loss is NaN, which must neither train nor look like a result."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(place / "model", place / "nan-model")
    weights = load_file(place / "nan-model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, place / "nan-model" / "model.safetensors", metadata={"format": "pt"})
    return [refused("NaN in every loss", "a NaN among the base model's weights",
                    run(place, *command("nan"), "--set", f"model.id={place}/nan-model"), "for the second time")]  # fmt: skip


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# -- network, endurance, fuzz


def network(place: Path, options) -> list[dict]:
    """Run the whole job under strace, offline, and count attempts to reach anything but this machine's own sockets."""
    if not shutil.which("strace"):
        return [row("network calls offline", "strace is not installed", "not measured here", "-")]
    trace = place / "trace"
    code = "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"
    done = subprocess.run(["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", str(trace), sys.executable, "-c", code,
                           *command("traced")], cwd=place, capture_output=True, text=True)  # fmt: skip
    calls = [line for line in trace.read_text().splitlines() if "AF_INET" in line]
    ok = done.returncode == 0 and not calls
    return [row("network calls with HF_HUB_OFFLINE=1", "strace of the whole job, all threads and children: connect, sendto",
                f"{'' if ok else 'FAILED: '}exit {done.returncode}, {len(calls)} calls to an internet address", "-")]  # fmt: skip


def soak(place: Path, options) -> list[dict]:
    """Recover for a long time, and see whether memory, file handles or threads grow."""
    steps = options.soak_steps
    settings = [f"recover.steps={steps}", "recover.save_steps=200", "recover.validate_every=200", "recover.learning_rate=1e-5", "eval=null"]
    pid = attempt(place, *command("soak", settings))
    seen: list[tuple[int, int, int, int]] = []
    metrics = place / "soak" / "stages" / "02-recover" / "metrics.jsonl"
    while (ended := _wait_until(pid, time.monotonic() + 1)) is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            step = json.loads(metrics.read_text().splitlines()[-1])["step"]
            status = Path(f"/proc/{pid}/status").read_text()
            memory, threads = (int(next(x for x in status.splitlines() if x.startswith(key)).split()[1]) for key in ("VmRSS", "Threads"))
            seen.append((step, memory, len(os.listdir(f"/proc/{pid}/fd")), threads))
    steady = [s for s in seen if s[0] >= steps // 4]
    early, late = steady[: len(steady) // 4], steady[-len(steady) // 4 :]
    # Handles come and go while a file is written, so their middle counts; of memory the most.
    growth = [pick(s[i] for s in late) - pick(s[i] for s in early) for i, pick in ((1, max), (2, statistics.median), (3, statistics.median))]
    megabytes = growth[0] / 1024
    # Freed memory is not always given back, so a few megabytes are no leak; a leak of 10 kB a step would be 15.
    ok = ended == 0 and megabytes < 15 and growth[1] <= 0 and growth[2] <= 0
    return [row(f"{steps} steps of recovery in one process", "memory, handles and threads, sampled every second",
                f"{'' if ok else 'FAILED: '}exit {ended}; from the second to the last quarter: {megabytes:+.1f} MB, {growth[1]:+.0f} handles, "
                f"{growth[2]:+.0f} threads", "-")]  # fmt: skip


def fuzz(place: Path, options) -> list[dict]:
    """Run the property tests of configuration and data with many more examples than the suite does."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "unit" / "test_fuzz.py")],
                          capture_output=True, text=True, env=os.environ | {"OPDCL_FUZZ_EXAMPLES": str(options.examples)})  # fmt: skip
    last = done.stdout.strip().splitlines()[-1]
    return [row(f"{options.examples:,} random configurations, as many data files, every prefix of a valid one of each",
                "hypothesis, tests/unit/test_fuzz.py", f"{'FAILED: ' if done.returncode else ''}{last}", "-")]  # fmt: skip


# -- hostile content

RUN = "window.hostile=1"
PAYLOADS = [
    f"<script>{RUN}</script>", f"</script><script>{RUN}</script>", f"<img src=x onerror={RUN}>", f"<svg onload={RUN}>", f"<svg><script>{RUN}</script></svg>",
    f"\"><script>{RUN}</script>", f"' autofocus onfocus='{RUN}", f"<iframe src=\"javascript:parent.{RUN}\"></iframe>", f"<a href=\"javascript:{RUN}\">x</a>",
    f"<body onload={RUN}>", f"<details open ontoggle={RUN}>", f"<video><source onerror={RUN}></video>", f"<math><mtext><style></math><img src onerror={RUN}>",
    "<img src=http://127.0.0.1:9/a.png>", "<link rel=stylesheet href=http://127.0.0.1:9/a.css>", "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<style>@import 'http://127.0.0.1:9/a';</style>", "<object data=http://127.0.0.1:9/a></object>", "<form action=http://127.0.0.1:9/><button>go",
    "<base href=http://127.0.0.1:9/>", "![a](http://127.0.0.1:9/a.png)", f"[a](javascript:{RUN})", f"```\n</pre><script>{RUN}</script>",
    f"{{{{ 7*7 }}}}{{% raw %}}<script>{RUN}</script>", f"&lt;script&gt;{RUN}&lt;/script&gt;", f"\\u003cscript\\u003e{RUN}", f"<!--><script>{RUN}</script>-->",
    f"]]><![CDATA[<script>{RUN}</script>]]>", "\x1b[2J\x1b[31mred\x1b]0;title\x07", "\x1b]8;;http://127.0.0.1:9/\x07link\x1b]8;;\x07", "\u202egnp.exe",
    "\u2066\u2069\u200f", "\x01\x07\x08\x7f\x9b31m", "a\rb\x0bc\x85d\u2028e\u2029f", "[bold red]a[/bold red][link=http://127.0.0.1:9/]x[/link]", "%00%0d%0aSet-Cookie:x",
]  # fmt: skip


def hostile(place: Path, options) -> list[dict]:
    """Put payloads into prompts, answers and descriptions, and open every report in a real browser."""
    if not options.browser:
        return [row("hostile content", "needs --browser COMMAND (a Chromium)", "not measured here", "-")]
    from opdcl.report import write
    from opdcl.rundir import RunDir

    code, said = run(place, *command("hosted"))
    assert code == 0, said
    browser = Browser(options.browser)
    control = place / "control.html"
    control.write_text(f"<img src=x onerror={RUN}><img src=http://127.0.0.1:9/>")
    assert browser.visit(control) == (True, 1), "the check itself does not see a script that runs and a request that leaves"
    shown = ran = requests = unsafe = 0
    for payload in PAYLOADS:
        for file in (place / "hosted" / "evals").rglob("*.samples.jsonl"):
            rows = [json.loads(line) for line in file.read_text().split("\n") if line]
            passed = float(file.parent.name == "base")  # what base could do and the others cannot is what a report shows
            for r in rows:
                r |= {"prompt": f"{payload} {r['doc_id']}", "response": payload, "target": payload}
                r["scores"] = {m: [passed] if isinstance(v, list) else passed for m, v in r["scores"].items()}
            file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        config = json.loads((place / "hosted" / "config.json").read_text())
        config["workflow"]["description"] = payload
        (place / "hosted" / "config.json").write_text(json.dumps(config))
        write(RunDir(place / "hosted"))
        page = (place / "hosted" / "report.html").read_text()
        shown += _visible(payload) in page
        found = browser.visit(place / "hosted" / "report.html")
        ran, requests = ran + found[0], requests + found[1]
        for words in (["report", "hosted"], ["chat", "hosted", payload.replace("\0", "")]):
            _, said = run(place, *words)
            unsafe += any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066\u2028\u2029" for c in said)
    browser.close()
    ok = shown == len(PAYLOADS) and not (ran or requests or unsafe)
    return [row(f"{len(PAYLOADS)} payloads: scripts, requests, terminal escapes, bidi marks", "in prompts, answers, targets and the description; each report "
                "opened in headless Chromium, each printed on a terminal", f"{'' if ok else 'FAILED: '}{ran} scripts ran, {requests} requests left, "
                f"{unsafe} terminals got a control character", "-")]  # fmt: skip


def _visible(payload: str) -> str:
    """Return the payload as the page must hold it: escaped, with control characters made visible."""
    from markupsafe import escape

    from opdcl.text import harmless

    return str(escape(harmless(payload))).split("\n")[0]


class Browser:
    """A headless Chromium, driven through a pipe."""

    def __init__(self, words: str):
        to, self._in = os.pipe()
        self._out, back = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = f"exec {words} --remote-debugging-pipe about:blank 3<&{to} 4>&{back}"
        self._process = subprocess.Popen(["sh", "-c", shell], pass_fds=(to, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._last = 0
        self._buffer = b""
        self.events: list[dict] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params) -> dict:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session := getattr(self, "_session", None):
            message["sessionId"] = session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += os.read(self._out, 65536)
            text, self._buffer = self._buffer.split(b"\0", 1)
            found = json.loads(text)
            if found.get("id") == self._last:
                return found.get("result", {})
            self.events.append(found)

    def visit(self, page: Path) -> tuple[bool, int]:
        """Open a page, unfold and click all there is; return whether a payload ran, and how many requests left."""
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        time.sleep(0.5)
        self.send("Runtime.evaluate", expression="document.querySelectorAll('details').forEach(d => d.open = true);"
                  "document.querySelectorAll('a, button, summary').forEach(a => a.click())")  # fmt: skip
        time.sleep(0.3)
        ran = self.send("Runtime.evaluate", expression="window.hostile === 1", returnByValue=True)["result"]["value"]
        urls = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return ran, sum(url.startswith("http") for url in urls)

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(10)


PARTS = {"crash": crash, "faults": faults, "hostile": hostile, "network": network, "soak": soak, "fuzz": fuzz}


def write_page(record: dict, page: Path) -> None:
    lines = ["# What has been broken on purpose", "",
             "Made by `python benchmarks/reliability.py`, on a two-layer model that runs the whole job in seconds; every fault is injected",
             "for real, none is simulated inside the program. *Bit-identical* compares adapters, answers and metrics with a run that",
             "was left alone.", ""]  # fmt: skip
    titles = {"crash": "Crashes", "faults": "Faults", "hostile": "Hostile content", "network": "Network", "soak": "Endurance", "fuzz": "Random input"}
    for part, title in titles.items():
        if part in record:
            lines += [f"## {title}", "", "| fault | how it was injected | what happened | what was lost |", "| --- | --- | --- | --- |"]
            lines += ["| " + " | ".join(str(r[k]).replace("|", "/").replace(str(ROOT), ".") for k in ("fault", "how", "outcome", "lost")) + " |"
                      for r in record[part]["rows"]]  # fmt: skip
            lines += ["", f"{record[part]['date']}, {record[part]['seconds']} s.", ""]
    page.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
