"""What a command reads and checks before it trains: rows, suites, their hashes, models, the run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl.config.evaluate import EvalConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.shipped import package_folder, shipped_suites
from opdcl.config.workflow import Workflow
from opdcl.data import scoring
from opdcl.data.rows import Row, check_lines, load_rows, on_hub, pinned, source_files
from opdcl.errors import UsageError
from opdcl.pipeline.plan import STAGE_NUMBERS, Records, StageRecord, Task, make_plan, stage_folder
from opdcl.pipeline.trackers import check_trackers
from opdcl.rundir.files import read_json, write_atomic
from opdcl.rundir.hashes import ADAPTER, file_hash, hash_files
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from opdcl.data.suites import Suite
    from opdcl.distill.prompts import RecoverySource


class Sources:
    """The data of a run, or of all arms of a sweep. Each file is parsed once, and each suite is built once.

    A file that is edited during a run is not read again, so the rows are those that were hashed.
    """

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        """Take `given`, the contents of JSONL files by path, as files that `save` will write."""
        self._given = dict(given or {})
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._suites: dict[tuple[str, str | None, int | None], Suite] = {}
        self._hashes: dict[tuple[Path, ...], str] = {}

    def rows(self, source: str, split: str = "train") -> list[Row]:
        """Return the checked rows of a source; the list is the caller's own."""
        key = pinned(source), split
        if key not in self._rows:
            text = self._given.get(source)
            given = check_lines(text, Path(source).stem) if text else None
            self._rows[key] = given or load_rows(source, split)
        return list(self._rows[key])

    def suite(self, name: str, config: EvalConfig | None = None) -> Suite:
        """Return a loaded suite; `config` names its local data, if it has any."""
        from opdcl.data.suites import load_suite

        path = config.data.get(name) if config else None
        key = name, path, config.max_new_tokens if path else None
        if key not in self._suites:
            self._suites[key] = load_suite(name, config, self.rows)
        return self._suites[key]

    def save(self) -> None:
        """Write the rows that were given in memory, where that has not been done."""
        for path, text in self._given.items():
            if not os.path.isfile(path) or Path(path).read_text(encoding="utf-8") != text:
                write_atomic(Path(path), text)

    def inherit(self, workflow: Workflow) -> Workflow:
        """Make the fine-tune's rows the recovery's domain, if it has none and the rows have prompts."""
        finetune, recover = workflow.finetune, workflow.recover
        # Plain text has no question to sample on.
        if finetune and recover and not recover.domain and all(r.prompt for r in self.rows(finetune.data)):
            domain = recover.model_copy(update={"domain": finetune.data})
            return workflow.model_copy(update={"recover": domain})
        return workflow

    def read(self, workflow: Workflow) -> None:
        """Read and check the rows that lie here, before a library is imported that takes seconds.

        Raises:
            UsageError: A source is missing or malformed, or a row has no answer to learn.
        """
        shipped = package_folder("workflows")
        for key, source in self._fields(workflow).items():
            if source and Path(source).is_relative_to(shipped) and not os.path.exists(source):
                file = Path(source).relative_to(shipped)
                hint = f"opdcl workflows cp {workflow.name} .  # then put {file} beside it"
                raise UsageError(f"recipe {workflow.name} needs data of yours: {key} is {file}", hint)
        for source in self._fields(self.inherit(workflow)).values():
            if source and not on_hub(source):
                self.rows(source)
        if workflow.finetune and not on_hub(workflow.finetune.data):
            self._check_answers(workflow.finetune.data)

    def _check_answers(self, source: str) -> None:
        for row in self.rows(source):
            if row.text is None and row.answer is None:
                hint = "fine-tune rows need completion, answer or text"
                raise UsageError(f"{row.where} has no answer to learn", hint)

    def check(self, workflow: Workflow) -> None:
        """Check that every row can be used where the workflow uses it.

        Raises:
            UsageError: A source is missing or malformed, or a row lacks what its stage needs.
        """
        if workflow.finetune:
            self._check_answers(workflow.finetune.data)
        if workflow.recover:
            self.recovery(workflow.recover)
        for suite, path in (workflow.eval.data if workflow.eval else {}).items():
            if path not in self._given and not os.path.isfile(path):
                raise UsageError(f"eval.data.{suite}: {path} does not exist", f"--data {suite}=PATH")

    def _fields(self, workflow: Workflow) -> dict[str, str | None]:
        """Return the sources of rows by the names of their fields."""
        recover = workflow.recover
        fields = {"finetune.data": workflow.finetune.data} if workflow.finetune else {}
        if recover:
            fields |= {f"recover.{stream}": recover.source(stream) for stream in ("general", "domain")}
            fields |= {f"recover.teachers.{k}.prompts": t.prompts for k, t in recover.teachers.items()}
        return fields

    def recovery(self, config: RecoverConfig) -> RecoverySource:
        """Return the checked prompts of a recovery, and the suite of its reward."""
        from opdcl.distill.prompts import read_recovery_source

        return read_recovery_source(config, self.rows, lambda suite: self.suite(suite).task)

    def hashes(self, workflow: Workflow) -> dict[str, str]:
        """Return the hash of each source's content, by the name of its field."""
        from opdcl.model.adapters import find_adapter

        recover, evaluation = workflow.recover, workflow.eval
        fields = self._fields(workflow)
        if evaluation:
            fields |= {f"eval.data.{suite}": path for suite, path in evaluation.data.items()}
        # A source on the Hub is identified by its pinned id.
        hashes = {k: self._hash(self._files(s)) or pinned(s) for k, s in fields.items() if s}
        for field, place in workflow.adapters().items():
            folder = find_adapter(place)
            hashes[field] = self._hash([folder / ADAPTER, folder / "adapter_config.json"])
        suites = {f"eval.suite.{suite}": suite for suite in evaluation.suites()} if evaluation else {}
        if recover and recover.reward:
            suites["recover.reward.suite"] = recover.reward.suite
        for field, suite in suites.items():
            if shipped := shipped_suites().get(suite):
                files = sorted(p for p in shipped.parent.iterdir() if p.is_file())
                hashes[field] = self._hash([*files, Path(scoring.__file__)])
        return hashes

    def _files(self, source: str) -> list[Path]:
        return [Path(source)] if source in self._given else source_files(source)

    def _hash(self, files: list[Path]) -> str:
        """Return the hash of files' contents, read once; "" for no files."""
        key = tuple(files)
        if files and key not in self._hashes:
            self._hashes[key] = hash_files(files, self._given)
        return self._hashes.get(key, "")

    def plan(self, workflow: Workflow, run: RunDir) -> list[Task]:
        """Return what there is to do in a run directory, as it is now."""
        return make_plan(workflow, self.hashes(workflow), read_records(run))


def read_records(run: RunDir) -> Records:
    """Read what a run directory holds: stage records with the hashes of their adapters, and results."""
    stages = {}
    for name in STAGE_NUMBERS:
        stage = stage_folder(run, name)
        weights = stage.adapter / ADAPTER
        if stage.is_done():
            stages[name] = StageRecord(stage.state(), file_hash(weights) if weights.is_file() else None)
        elif state := stage.state():
            checkpoint = stage.last_checkpoint()
            stages[name] = StageRecord(state, checkpoint=checkpoint.name if checkpoint else None)
    files = run.evals.glob("*/*.json")
    return Records(stages, {(f.parent.name, f.stem): read_json(f).get("fingerprint") for f in files})


def checked_plan(workflow: Workflow, run: RunDir, sources: Sources) -> list[Task]:
    """Check the run directory, the data and what the tasks need; return the tasks. Writes nothing."""
    refuse_foreign(run)
    sources.check(workflow)
    tasks = sources.plan(workflow, run)
    check_tasks(workflow, sources)
    check_servers(workflow, {task.name for task in tasks if task.action != "skip"})
    return tasks


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
        if link := next((p for name in (*folders, *files) if (p := Path(folder, name)).is_symlink()), None):
            hint = "replace it by what it points to; the run directory itself may be a link"
            raise UsageError(f"{link} is a symbolic link: what a run writes stays inside its directory", hint)


def check_tasks(workflow: Workflow, sources: Sources) -> None:
    """Check what needs libraries but no weights: the models' locations, trackers, prompts, suites."""
    from opdcl.model.load import check_exists

    finetune = workflow.finetune
    for model in workflow.models():
        check_exists(model)
    check_trackers(workflow.track)
    if finetune and finetune.method == "self-distill":
        from opdcl.stages.finetune import as_distillation

        sources.recovery(as_distillation(finetune, len(sources.rows(finetune.data))))
    if workflow.eval:
        for suite in workflow.eval.suites():
            sources.suite(suite, workflow.eval)


def check_servers(workflow: Workflow, unfinished: set[str]) -> None:
    """Check that every server that the unfinished stages need grants access."""
    from opdcl.sampling.server import check_access

    servers = [workflow.eval.server] if workflow.eval and "eval" in unfinished else []
    if workflow.recover and "recover" in unfinished:
        servers += [workflow.recover.server, *(t.server for t in workflow.teachers().values())]
    for server in filter(None, servers):
        check_access(server)
