"""Bring what a workflow needs from the Hub into the local cache, so that it runs without network.

opdcl fetch mine.yaml
opdcl run mine.yaml --offline
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opdcl.config.model import ModelConfig
from opdcl.config.own_tasks import is_task_file
from opdcl.config.shipped import shipped_suites
from opdcl.config.workflow import Workflow
from opdcl.data.rows import on_hub
from opdcl.errors import UsageError
from opdcl.hub import FETCH_HINT, Repository, files, parse, reachable, snapshot
from opdcl.model.adapters import tuned_model
from opdcl.model.load import EMBEDDED, check_exists, model_source
from opdcl.pipeline.sweep import REFERENCE, expand


@dataclass(frozen=True)
class Fetched:
    """Something that a workflow needs: its kind, name, commit, bytes, and the bytes that were not cached."""

    what: str
    name: str
    commit: str | None
    bytes: int | None
    missing_bytes: int | None
    done: bool

    def row(self) -> list[str]:
        """Return it as a table row."""
        size = "unknown" if self.bytes is None else megabytes(self.bytes)
        if self.missing_bytes is None:
            state = "in the cache" if self.done else "not looked at"
        elif self.missing_bytes:
            state = f"{megabytes(self.missing_bytes)} {'fetched' if self.done else 'to fetch'}"
        else:
            state = "was cached"
        return [self.what, self.name, (self.commit or "")[:12], size, state]


def fetch(workflow: Workflow, dry_run: bool, note: Callable[[str], None]) -> list[Fetched]:
    """Download and list the models, adapters, datasets and suites of a workflow and all its arms.

    A dry run only asks for the sizes; a suite's size is unknown until it is loaded. `note` receives progress.

    Raises:
        UsageError: Something is neither local nor on the Hub, or the Hub is unreachable.
    """
    runs = list(expand(workflow, Path(workflow.name)).values())
    needed = dict.fromkeys(pair for run in runs for pair in repositories(run))
    fetched = [_repository(repository, code, dry_run, note) for repository, code in needed]
    if any(model.id == EMBEDDED for run in runs for model in run.models()):
        source, _ = model_source(ModelConfig(), convert=not dry_run)
        size = sum(f.stat().st_size for f in Path(source).iterdir()) if os.path.isdir(source) else None
        fetched.append(Fetched("model", EMBEDDED, None, size, None, not dry_run))
    return fetched + [_suite_data(run, suite, dry_run, note) for suite, run in suites(runs).items()]


def repositories(workflow: Workflow) -> Iterator[tuple[Repository, bool]]:
    """Yield what a workflow needs from the Hub, and whether its code is needed too."""
    for model in workflow.models():
        if model.id != EMBEDDED and not os.path.exists(os.path.expanduser(model.id)):
            repository = parse("model", model.id)
            if repository is None:
                check_exists(model)  # raises an error that says what is wrong
            else:
                yield Repository("model", repository.id, model.revision), model.trust_remote_code
    for place in workflow.adapters().values():
        local = place.startswith(REFERENCE) or os.path.exists(place)
        if not local and (adapter := parse("adapter", place)):
            whole = tuned_model(place, workflow.model)
            yield (Repository("model", whole.id, whole.revision) if whole else adapter), False
    for source in workflow.data_sources().values():
        if dataset := on_hub(source):
            yield Repository("dataset", dataset.id, dataset.revision), False


def suites(runs: Iterable[Workflow]) -> dict[str, Workflow]:
    """Return the suites whose data is downloaded, each with a workflow that uses it."""
    shipped = shipped_suites()
    users: dict[str, Workflow] = {}
    for run in runs:
        names = [*run.eval.suites()] if run.eval else []
        if run.recover and run.recover.reward:
            names.append(run.recover.reward.suite)
        local = run.eval.data if run.eval else {}
        for suite in names:
            if suite not in shipped and (suite not in local or is_task_file(local[suite])):
                users.setdefault(suite, run)
    return users


def _repository(repository: Repository, code: bool, dry_run: bool, note: Callable[[str], None]) -> Fetched:
    if not reachable():
        hint = "go online, and unset HF_HUB_OFFLINE"
        raise UsageError("the Hub is unreachable, so nothing can be fetched", hint)
    listed = files(repository, code)
    missing = sum(f.file_size for f in listed if f.will_download)
    if not dry_run:
        note(f"{repository.kind} {repository}: {megabytes(missing)} to fetch")
        snapshot(repository, code)
    commit = listed[0].commit_hash if listed else None
    size = sum(f.file_size for f in listed)
    return Fetched(repository.kind, str(repository), commit, size, missing, not dry_run)


def _suite_data(run: Workflow, suite: str, dry_run: bool, note: Callable[[str], None]) -> Fetched:
    """Load a suite with lm-eval, which caches its data; its size is unknown before."""
    if dry_run:
        return Fetched("suite", suite, None, None, None, False)
    from opdcl.data.suites import load_suite

    note(f"suite {suite}")
    try:
        tasks = load_suite(suite, run.eval, trusted=run.model.trust_remote_code).tasks
    except UsageError:
        raise
    except Exception as fault:  # datasets raises a dozen kinds
        message = f"could not load the data of suite {suite!r}: {str(fault)[:200]}"
        raise UsageError(message, FETCH_HINT) from fault
    sizes = []
    for task in tasks:
        infos = [part.info for part in task.dataset.values() if getattr(part, "info", None)]
        sizes.append(max((info.download_size or 0 for info in infos), default=0))
    return Fetched("suite", suite, None, sum(sizes) or None, None, True)


def megabytes(size: int) -> str:
    """Format bytes as `1.3 MB`."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
