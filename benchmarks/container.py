"""Build the image and use it as users do: sizes, a small run as two users, health check, stop and resume.

    python benchmarks/container.py                                      with docker, the image as it is
    python benchmarks/container.py --engine podman --base bookworm      where Ubuntu's image is not available

`--base` creates a stand-in for the Dockerfile's base with debootstrap, as root; everything after FROM is then
built unchanged. Containers run without a network, which proves that they need none. Takes a quarter of an
hour on one core after the build. If checks fail, it lists them and exits with code 1. `--served` adds the run
of `compose.yaml` against a server that is already running:

    OPDCL_SERVER_KEY=k VLLM_API_KEY=k vllm serve MODEL --served-model-name=teacher --max-model-len=2048
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from opdcl import __version__
from opdcl.rundir.layout import machine

ROOT = Path(__file__).parents[1]
IMAGE = "opdcl"
# The quickstart, shortened to a few steps and answers of each kind.
SMALL = [
    "run",
    "quickstart",
    "--set=finetune.epochs=0.1",
    "--set=finetune.save_steps=1",
    "--set=recover.steps=2",
    "--set=recover.rollouts=4",
    "--set=recover.domain_rollouts=4",
    "--set=recover.lmbda=1",
    "--set=recover.sample_ahead=1",
    "--set=recover.max_new_tokens=16",
    "--set=recover.validation_prompts=2",
    "--set=eval.limit=4",
    "--set=eval.max_new_tokens=16",
]
OTHER_USER = 12345


class Engine:
    """A container engine's command line, and the results of the checks."""

    def __init__(self, program: str, run_with: list[str]):
        self.program, self.run_with = program, run_with
        self.found: list[dict] = []

    def do(self, *words: str, quiet: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run([self.program, *words], capture_output=quiet, text=True)

    def ask(self, *words: str) -> str:
        done = self.do(*words)
        if done.returncode:
            sys.exit(f"{self.program} {shlex.join(words)}\n{done.stderr}")
        return done.stdout.strip()

    def container(
        self, what: str, options: list[str], words: list[str], fails: bool = False, says: str = ""
    ) -> str:
        """Run a command in a new container; record whether its exit code and output are as expected."""
        began = time.monotonic()
        done = self.do(
            "run",
            "--rm",
            *([] if "--network=host" in options else ["--network=none"]),
            *self.run_with,
            *options,
            IMAGE,
            *words,
        )
        said = done.stdout + done.stderr
        self.note(
            what,
            (done.returncode != 0) == fails and says in said,
            exit_code=done.returncode,
            seconds=round(time.monotonic() - began, 1),
            said=said.strip().splitlines()[-3:],
        )
        return said

    def note(self, what: str, ok: bool, **more) -> None:
        self.found.append({"what": what, "ok": ok, **more})
        print("ok " if ok else "BAD", what, more, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="docker", help="docker, or podman")
    parser.add_argument("--base", help="Debian release to stand in for the Dockerfile's base; podman only")
    parser.add_argument("--build", default="", help="more options for `build`, such as --build-arg TORCH=...")
    parser.add_argument("--run", default="", help="more options for `run`")
    parser.add_argument(
        "--served",
        action="store_true",
        help="a vLLM server runs on 127.0.0.1:8000; its key is in OPDCL_SERVER_KEY",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("container.json"))
    options = parser.parse_args()
    engine = Engine(options.engine, shlex.split(options.run))
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the other user must be able to enter every parent of a mounted folder
        seconds = build(engine, options, Path(folder))
        record = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "engine": engine.ask("--version"),
            "base": options.base or "as in the Dockerfile",
            "build_seconds": seconds,
            "layers": layers(engine),
        }
        use(engine, Path(folder))
        if options.served:
            ask_a_teacher(engine)
    record["checks"] = engine.found
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    if bad := [one["what"] for one in engine.found if not one["ok"]]:
        sys.exit("failed checks: " + "; ".join(bad))


def build(engine: Engine, options: argparse.Namespace, folder: Path) -> float:
    """Build the image; return the seconds it took, which are few if the layers are still cached."""
    base = []
    if options.base:
        stand_in, tree = f"localhost/opdcl-base:{options.base}", folder / "base"
        if engine.do("image", "inspect", stand_in).returncode:
            subprocess.run(
                ["debootstrap", "--variant=minbase", options.base, str(tree)], check=True, stdout=sys.stderr
            )
            # Ubuntu's image does not keep downloaded packages either, so layers have the same size as there.
            (tree / "etc/apt/apt.conf.d/clean").write_text(
                'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };\n'
            )
            for archive in (tree / "var/cache/apt/archives").glob("*.deb"):
                archive.unlink()
            subprocess.run(["tar", "-C", str(tree), "-cf", str(folder / "base.tar"), "."], check=True)
            engine.ask("import", str(folder / "base.tar"), stand_in)
        base = [f"--from={stand_in}", "--format=docker"]  # only docker's format keeps SHELL and HEALTHCHECK
    began = time.monotonic()
    if engine.do(
        "build", *base, *shlex.split(options.build), "--tag", IMAGE, str(ROOT), quiet=False
    ).returncode:
        sys.exit("the image does not build")
    return round(time.monotonic() - began, 1)


def layers(engine: Engine) -> list[dict]:
    """Return the megabytes that each Dockerfile step added, newest first, without empty steps."""
    lines = engine.ask("history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", IMAGE).splitlines()
    found = []
    for size, step in (line.split("\t", 1) for line in lines):
        number, unit = re.fullmatch(r"([\d.e+]+) ?([kMG]?B)", size).groups()
        megabytes = float(number) * {"B": 1e-6, "kB": 1e-3, "MB": 1, "GB": 1e3}[unit]
        if megabytes >= 0.1:
            found.append({"megabytes": megabytes, "step": " ".join(step.split())[:100]})
    return found


def use(engine: Engine, folder: Path) -> None:
    """Do what users do, as the image's own user and as another user who owns a folder on the host."""
    config = json.loads(engine.ask("image", "inspect", IMAGE))[0]
    parts = (config.get("Healthcheck"), config["Config"].get("Healthcheck"))
    health = next(dict(part)["Test"] for part in parts if part)[1:]
    engine.note(
        "its user is numeric and not root",
        config["Config"]["User"].isdigit() and config["Config"]["User"] != "0",
        user=config["Config"]["User"],
    )
    engine.container("prints its version", [], ["--version"], says=__version__)
    engine.container("doctor finds nothing missing", [], ["doctor"], says="embedded model")
    engine.container(
        "plans the quickstart", [], ["run", "quickstart", "--dry-run", "--out=/runs/q"], says="not started"
    )
    engine.container(
        "its user cannot change the program",
        ["--entrypoint=touch"],
        ["/opt/venv/bin/opdcl"],
        fails=True,
        says="ermission denied",
    )
    check = [f"--entrypoint={health[0]}"]
    engine.container("health check: healthy", check, health[1:])
    engine.container(
        "health check: a full disk", [*check, "--tmpfs=/runs:size=1m"], health[1:], fails=True, says="GiB"
    )
    engine.container(
        "health check: a cache that is not writable",
        [*check, "--tmpfs=/cache/opdcl:mode=0555"],
        health[1:],
        fails=True,
        says="OPDCL_CACHE",
    )

    volumes = ["--volume=opdcl-check-cache:/cache", "--volume=opdcl-check-runs:/runs"]
    engine.do("volume", "rm", "opdcl-check-cache", "opdcl-check-runs")
    engine.container("a small run as the image's user, without -o", volumes, SMALL, says="quickstart")
    engine.container(
        "its files belong to its user",
        [*volumes, "--entrypoint=stat"],
        ["--format=owner:%u", "/runs/quickstart/report.html"],
        says="owner:10001",
    )

    runs = folder / "runs"
    runs.mkdir()
    user = OTHER_USER if os.getuid() == 0 else os.getuid()
    if os.getuid() == 0:
        os.chown(runs, user, user)
    engine.do("volume", "rm", "opdcl-check-cache")
    other = [f"--user={user}:{user}", "--volume=opdcl-check-cache:/cache", f"--volume={runs}:/runs"]
    stopped = stop(engine, other, runs / "quickstart")
    engine.note("a stop during the fine-tune saves and ends with 130", stopped == 130, exit_code=stopped)
    engine.container(
        "the same command resumes, as another user with a host folder",
        other,
        SMALL,
        says="resuming from step",
    )
    strangers = [str(path) for path in runs.rglob("*") if path.lstat().st_uid != user]
    engine.note(
        "its files belong to that user",
        (runs / "quickstart" / "report.html").exists() and not strangers,
        strangers=strangers[:3],
    )
    engine.container("the run verifies", other, ["verify", "/runs/quickstart"])
    engine.do("volume", "rm", "opdcl-check-cache", "opdcl-check-runs")


def ask_a_teacher(engine: Engine) -> None:
    """Do what `compose.yaml` does, shortened to a few steps, with the server outside a container."""
    from ruamel.yaml import YAML

    services = YAML(typ="safe").load(ROOT / "compose.yaml")["services"]
    healthy = subprocess.run(services["teacher"]["healthcheck"]["test"][1:], capture_output=True)
    engine.note("the teacher's health check: healthy", healthy.returncode == 0)
    words = [*services["opdcl"]["command"], *SMALL[2:]]
    beside = ["--network=host", "--add-host=teacher:127.0.0.1"]
    engine.container(
        "the composed run without the key is refused", beside, words, fails=True, says="set OPDCL_SERVER_KEY"
    )
    engine.container(
        "the composed run",
        [*beside, "--env=OPDCL_SERVER_KEY", "--env=OPDCL_SERVER_URL=http://teacher:8000"],
        words,
        says="report: /runs/taught/report.html",
    )


def stop(engine: Engine, options: list[str], run: Path) -> int:
    """Start the small run, stop its container after the first step, and return its exit code."""
    engine.do("rm", "--force", "opdcl-check")
    engine.ask(
        "run", "--detach", "--name=opdcl-check", "--network=none", *engine.run_with, *options, IMAGE, *SMALL
    )
    try:
        for _ in range(600):
            if any(metrics.stat().st_size for metrics in run.glob("stages/*/metrics.jsonl")):
                break
            time.sleep(1)
        engine.ask("stop", "-t", "300", "opdcl-check")
        return int(engine.ask("inspect", "--format={{.State.ExitCode}}", "opdcl-check"))
    finally:
        engine.do("rm", "--force", "opdcl-check")


if __name__ == "__main__":
    main()
