"""A run directory: its paths, its settings and results, what it was made with, and who may write to it.

Opdcl writes to its own directories only, and one process at a time, by a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from filelock import FileLock, Timeout
from pydantic import AfterValidator, Field

from opdcl.errors import UsageError, typed
from opdcl.rundir.files import now, read_json
from opdcl.rundir.hashes import ADAPTER, SEAL, check, read_seal
from opdcl.rundir.stage import Cost, Record, StageDir, read_as, read_rows_as

if TYPE_CHECKING:
    import torch

# The packages whose versions affect results.
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "lm_eval", "accelerate")

# The stage that makes the adapter of each state, and the other way round.
STAGE_OF = {"tuned": "finetune", "recovered": "recover"}
STATE_OF = {stage: state for state, stage in STAGE_OF.items()}

# The file in which transformers and vLLM look for a chat template.
TEMPLATE = "chat_template.jinja"

# Files by which other folders are recognized, so that an error can name them.
OTHER_FOLDERS = {"config.json": "a model folder", "adapter_config.json": "an adapter folder"}


class _Config(Record):
    workflow: dict[str, Any]
    origins: dict[str, str] = Field(default_factory=dict)


class _Weights(Record):
    sha256: str
    path: str = ""


class _Base(Record):
    fingerprint_before: str | None = None
    fingerprint_after: str | None = None
    id: str | None = None
    revision: str | None = None
    parameters: int | None = None


class _Device(Record):
    dtype: str | None = None
    kind: str | None = None
    name: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None


def _is_date(value: str) -> str:
    datetime.fromisoformat(value.replace("Z", "+00:00"))
    return value


class _Manifest(Record):
    base: _Base | None = None
    device: _Device | None = None
    adapters: dict[str, _Weights] | None = None
    commands: list[str] = Field(default_factory=list)
    command: str = ""  # of earlier versions
    seconds: float = 0
    created: Annotated[str, AfterValidator(_is_date)] | None = None
    opdcl: str | None = None
    versions: dict[str, str | None] | None = None


class _Measured(Record):
    adapter_sha256: str | None = None


class _Result(Record):
    metric: str
    n: int
    metrics: dict[str, Any]
    role: str = ""
    fingerprint: str | None = None
    model: _Measured | None = None
    floor: dict[str, dict[str, Any]] | None = None
    cost: Cost = Field(default_factory=dict)


class _Sample(Record):
    doc_id: int | str
    prompt: str
    scores: dict[str, Any]


@dataclass(unsafe_hash=True)
class RunDir:
    """A run directory. Other modules do not join its paths."""

    path: Path

    def __post_init__(self) -> None:
        # In a call from Python, or in quotes, no shell has expanded `~`.
        self.path = Path(os.path.expanduser(self.path))
        self.workflow = self.path / "workflow.yaml"
        self.config = self.path / "config.json"
        self.manifest = self.path / "manifest.json"
        self.seal = self.path / SEAL
        self.evals = self.path / "evals"
        self.data = self.path / "data"  # rows that were given in memory, or split
        # The report as Markdown and as HTML, and the model card.
        self.reports = self.path / "report.md", self.path / "report.html", self.path / "README.md"

    def is_run(self) -> bool:
        """Return whether opdcl made this directory: a model's `config.json` has other keys."""
        if not self.config.is_file():
            return False
        try:
            config = read_json(self.config)
        except UsageError:  # damaged; a run has another file by which to recognize it
            return self.workflow.exists()
        known = isinstance(config, dict) and {"workflow", "origins"} <= config.keys()
        return known or (self.workflow.exists() and self.seal.exists())

    def settings(self) -> dict[str, Any]:
        """Return the workflow of the run as plain data, or an empty dict before the run has started."""
        settings: dict[str, Any] = read_config(self.config)["workflow"] if self.config.exists() else {}
        return settings

    def read_manifest(self) -> dict[str, Any]:
        """Return the content of `manifest.json`, or an empty dict before the run has started."""
        return read_as(self.manifest, _Manifest) if self.manifest.exists() else {}

    def stage(self, index: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{index:02d}-{name}")

    def stages(self) -> list[StageDir]:
        return [StageDir(folder) for folder in sorted((self.path / "stages").glob("[0-9][0-9]-*"))]

    def find_stage(self, name: str) -> StageDir | None:
        """Return the last stage with this name, or None."""
        return next((stage for stage in reversed(self.stages()) if stage.name == name), None)

    def stage_record(self, name: str) -> dict:
        """Return the record of the last stage with this name, or an empty dict before it has started."""
        stage = self.find_stage(name)
        return stage.state() if stage else {}

    def recorded_contents(self) -> dict[str, str]:
        """Return the hashes of what training stages read, by key, such as `finetune.data` or `start`."""
        contents = {}
        for stage in ("finetune", "recover"):
            for name, value in (self.stage_record(stage).get("inputs") or {}).items():
                if name.startswith("content of "):
                    contents[f"{stage}.{name.removeprefix('content of ')}"] = str(value)
                elif name == "start":
                    contents[name] = str(value)
        return contents

    def last_stage(self) -> StageDir | None:
        """Return the last training stage if it is done."""
        return next((stage for stage in self.stages()[-1:] if stage.is_done()), None)

    def adapters(self) -> dict[str, Path]:
        """Return the folders of finished adapters by state, `tuned` before `recovered`."""
        stages = {state: self.find_stage(name) for state, name in STAGE_OF.items()}
        return {state: stage.adapter for state, stage in stages.items() if stage and stage.is_done()}

    def adapter_damage(self) -> dict[str, str]:
        """Return state -> problem for finished adapters that are not those which their stages recorded."""
        problems: dict[str, str] = {}
        for state, folder in self.adapters().items():
            try:
                for file, digest in self._recorded_hashes(folder).items():
                    if problem := check(file, digest):
                        problems.setdefault(state, f"{file} {problem} since its stage recorded it")
            except UsageError as fault:
                problems[state] = fault.message
        return problems

    def _recorded_hashes(self, adapter: Path) -> dict[Path, str]:
        """Return the hashes of an adapter's files: of the weights from its stage, of all from the seal."""
        weights = StageDir(adapter.parent).state().get("adapter_sha256")
        hashes = {adapter / ADAPTER: str(weights)} if weights else {}
        if self.seal.exists():
            for name, digest in read_seal(self.path).items():
                if (self.path / name).parent == adapter:
                    hashes[self.path / name] = digest
        return hashes

    def intact_adapters(self) -> dict[str, Path]:
        """Return `adapters`; raise a UsageError if one, or the run's settings, are not those recorded."""
        problems = list(self.adapter_damage().values())
        if self.seal.exists() and not problems:
            recorded = read_seal(self.path).get(self.config.name)
            if recorded and (problem := check(self.config, recorded)):
                problems.append(f"{self.config} {problem} since opdcl wrote it")
        if problems:
            again = typed("opdcl", "run", self.workflow, "-o", self.path, "--force")
            raise UsageError(problems[0], f"restore the file from a copy, or repeat the stage: {again}")
        return self.adapters()

    def eval_result(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.json"

    def eval_samples(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.samples.jsonl"

    def new_log(self) -> Path:
        """Return the path of the next attempt's log."""
        folder = self.path / "logs"
        return folder / f"attempt_{len(list(folder.glob('attempt_*.log'))) + 1}.log"


def open_run(path: Path) -> RunDir:
    """Return an existing run directory; raise a `UsageError` that names what else the path is."""
    run = RunDir(path)
    if not run.is_run():
        kind = next((kind for file, kind in OTHER_FOLDERS.items() if (path / file).is_file()), None)
        problem = f"{path} is {kind}, not a run directory" if kind else f"{path} is not a run directory"
        hint = "opdcl finetune ROWS -o RUN makes a run directory"
        if inside := next((parent for parent in path.parents if RunDir(parent).is_run()), None):
            hint = f"name the run itself: {inside}"
        if kind:
            tuned = typed(path) + " --base BASE" * (kind == OTHER_FOLDERS["config.json"])
            hint = f"measure it: opdcl eval {tuned}; repair it: opdcl recover {tuned} --domain PROMPTS"
        raise UsageError(problem, hint)
    return run


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`."""
    file = folder / "adapter_config.json"
    hint = "copy it from where the adapter was trained"
    if not file.is_file():
        raise UsageError(f"{file} does not exist", hint)
    config = read_json(file)
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no settings: it is no JSON object", hint)
    return config


def read_config(file: Path) -> dict[str, Any]:
    """Return the content of a run's `config.json`: its `workflow`, and the `origins` of its settings.

    Rows that the run itself holds are named where they lie now: it may have been moved or copied.
    """
    config = read_as(file, _Config)
    texts = [*_texts(config["workflow"])]
    # The places are whole. Rows in memory are written into a file that is named as their setting.
    earlier = {Path(section[name]).parent for section, name, key in texts if _is_own(section[name], key)}
    for section, name, _ in texts:
        place, here = Path(section[name]), file.parent / "data" / Path(section[name]).name
        if place.parent in earlier and here.is_file():
            section[name] = str(here.resolve())
    return config


def _texts(section: dict[str, Any], above: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each text among settings: the section that holds it, its name there, and its whole key."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{above}{name}.")
        elif isinstance(value, str):
            yield section, name, f"{above}{name}"


def _is_own(place: str, key: str) -> bool:
    return Path(place).parts[-2:] == ("data", f"{key}.jsonl")


def read_result(file: Path) -> dict[str, Any]:
    """Return the content of a result: one state measured on one suite."""
    return read_as(file, _Result)


def read_samples(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a result's samples."""
    return read_rows_as(file, _Sample)


def weights_of_base(manifest: Mapping[str, Any]) -> str:
    """Return the hash of the weights of a run's base, by its manifest; "" if it recorded none."""
    base = manifest.get("base") or {}
    # With a whole tuned model the fingerprint covers both models, and `weights` the base alone.
    return str(base.get("weights") or base.get("fingerprint_before") or "")


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect results."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def machine() -> dict[str, Any]:
    """Describe CPU and memory without identifying the host."""
    name, memory = platform.machine(), 0
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"name": name, "cores": os.cpu_count(), "memory_bytes": memory}


def machine_of(device: torch.device) -> dict[str, Any]:
    """Describe the machine that computes on a device: by the name of its GPU, if it is one."""
    import torch

    found = machine()
    if device.type == "cuda":
        found |= {"name": torch.cuda.get_device_name(device), "processor": found["name"]}
    return found


def refuse_foreign(run: RunDir) -> None:
    """Refuse a directory that is not a run's, or that links out of itself, so that nothing is overwritten."""
    hint = "choose another directory with -o"
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file", hint)
    names = {p.name for p in run.path.iterdir()} if run.path.is_dir() else set()
    # A crash can leave the temporary file of config.json, which is the first that a run writes.
    begun = {name for name in names if name.startswith(f".{run.config.name}.")}
    if names - begun - {".lock", "logs"} and not run.is_run():
        raise UsageError(f"{run.path} exists and is not a run directory", hint)
    for folder, folders, files in os.walk(run.path):
        for name in (*folders, *files):
            if os.path.islink(link := os.path.join(folder, name)):
                hint = "replace it by what it points to; the run directory itself may be a link"
                message = f"{link} is a symbolic link: what a run writes stays inside its directory"
                raise UsageError(message, hint)


@contextlib.contextmanager
def locked(run: RunDir) -> Iterator[dict | None]:
    """Lock the run for this process and yield the previous owner if it died without unlocking, else None.

    The lock file stays: deleting it would let two processes lock two files of the same name. Only if nothing
    else was written into a new directory, both go. The file contains the owner, and is empty while nobody
    holds the lock. The system releases the locks of a process that ends; on a shared disk they may not reach
    other machines, so an owner on another one is believed to live.

    Raises:
        UsageError: The directory is foreign, another process holds the lock, or the file system has no locks.
    """
    refuse_foreign(run)
    new = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    run.path.mkdir(parents=True, exist_ok=True)
    file = run.path / ".lock"
    try:
        held = FileLock(file, mode=0o644, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        raise _in_use(run, _owner(file), "wait for it, or stop it") from None
    except OSError as fault:
        problem = f"{run.path}: this file system cannot lock ({fault.strerror})"
        raise UsageError(problem, "choose a local disk with -o") from fault
    host = socket.gethostname()
    with held:
        owner = _owner(file)
        if owner.get("host", host) != host:
            hint = f"if that process has ended, or this machine had that name: {typed('rm', file)}"
            raise _in_use(run, owner, hint)
        file.write_text(json.dumps({"pid": os.getpid(), "host": host, "since": now()}))
        try:
            yield owner or None
        finally:
            if file.exists():
                file.write_text("")
                if new and os.listdir(run.path) == [file.name]:
                    file.unlink()
                    with contextlib.suppress(OSError):  # another command has begun to use one of them
                        for folder in new:
                            folder.rmdir()


def owner_of(run: RunDir) -> dict:
    """Return the process that holds a run's lock; one on another machine is believed to live."""
    file = run.path / ".lock"
    owner = _owner(file)
    if owner.get("host") == socket.gethostname():
        with file.open() as held, contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return {}
    return owner


def _owner(file: Path) -> dict:
    try:
        owner = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(run: RunDir, owner: dict, hint: str) -> UsageError:
    if not owner:  # for an instant after the lock was taken
        return UsageError(f"{run.path} is in use by another process", hint)
    process, host, begin = (owner.get(key) for key in ("pid", "host", "since"))
    return UsageError(f"{run.path} is in use by process {process} on {host} since {begin}", hint)
